//! The threads of a block between their turns, and its shared memory.

use crate::context::Request;
use crate::launch::cluster::Arrivals;
use crate::launch::together::Barriers;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    AtBarrier,
    InCluster,
    InWarp,
    Ended,
}

/// Frames are aligned to this, which is the largest alignment of local variables.
const FRAME_ALIGN: usize = 16;

pub(crate) struct Block {
    /// Index of the block's launch among those that run together.
    pub launch: usize,
    pub index: [u32; 3],
    /// Index of its cluster among all.
    pub cluster: usize,
    /// Each thread's use of the cluster's barrier.
    pub arrivals: Vec<Arrivals>,
    /// Number of its first thread, counted over all blocks.
    pub first_thread: u32,
    frames: Vec<u128>,
    frame_words: usize,
    pub states: Vec<State>,
    pub requests: Vec<Request>,
    pub results: Vec<[u64; 2]>,
    pub barriers: Barriers,
    shared: Vec<u128>,
    /// For each byte of `shared`: whether it has been written.
    pub written: Vec<bool>,
    /// Number of threads that have not ended.
    pub left: u32,
}

impl Block {
    pub fn new(
        launch: usize,
        index: [u32; 3],
        first_thread: u32,
        threads: u32,
        frame: u32,
        shared: u32,
    ) -> Self {
        let count = threads as usize;
        let frame_words = (frame as usize).div_ceil(FRAME_ALIGN);
        let shared = (shared as usize).div_ceil(16);
        Self {
            launch,
            index,
            cluster: 0,
            arrivals: vec![Arrivals::default(); count],
            first_thread,
            frames: vec![0; frame_words * count],
            frame_words,
            states: vec![State::Ready; count],
            requests: vec![Request::default(); count],
            results: vec![[0; 2]; count],
            barriers: Barriers::default(),
            shared: vec![u128::from_le_bytes([0xA5; 16]); shared],
            written: vec![false; shared * 16],
            left: threads,
        }
    }

    /// Returns a thread's frame, which is zero at first.
    pub fn frame(&mut self, thread: u32) -> *mut u8 {
        self.frames[thread as usize * self.frame_words..].as_mut_ptr().cast()
    }

    pub fn shared(&mut self) -> u64 {
        self.shared.as_mut_ptr() as u64
    }

    /// Returns the numbers, counted over all blocks, of a warp's or a barrier's threads.
    pub fn numbers(&self, threads: &[usize]) -> Vec<u32> {
        threads.iter().map(|&thread| self.first_thread + thread as u32).collect()
    }
}
