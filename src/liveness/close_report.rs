//! Which ranks have closed their mappings of the others' memory, for those to free it: told in shared memory, which works
//! whatever has become of the bootstrap.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use super::page::{own_page, page};
use crate::device::host::SharedMemory;

/// What a rank says of its mappings at the end of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CloseReport {
    /// It has closed them.
    Closed = 1,
    /// Its kernels may still run, and use them.
    Kept = 2,
    /// Nothing runs on its device any more, which cannot close what is of other processes.
    Lost = 3,
}

const CLOSED: u32 = CloseReport::Closed as u32;
const KEPT: u32 = CloseReport::Kept as u32;
const LOST: u32 = CloseReport::Lost as u32;

/// What has become of the peers' mappings of this rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerMappings {
    /// No peer has any.
    Closed,
    /// Some peer has not said.
    Open,
    /// Some peer keeps its own until its process ends.
    Kept,
}

/// This rank's word on its mappings, and those of its peers.
pub(crate) struct CloseReports {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    /// Ranks that are threads of this process, a bit for each: they share its mappings, and the last that has one
    /// closes it.
    threads: u32,
    /// Tell when the processes of peers end, which closes their mappings.
    processes: Vec<(usize, Arc<OwnedFd>)>,
}

impl CloseReports {
    pub(super) fn new(
        pages: Arc<SharedMemory>,
        rank: usize,
        world_size: usize,
        threads: u32,
        processes: Vec<(usize, Arc<OwnedFd>)>,
    ) -> Self {
        Self { pages, rank, world_size, threads, processes }
    }

    /// Tells the peers what has become of this rank's mappings of their memory.
    pub fn publish(&self, word: CloseReport) {
        // Release: after the mappings were closed. It pairs with the load in `mappings`.
        own_page(&self.pages).closing.store(word as u32, Ordering::Release);
    }

    /// Waits for nothing.
    pub fn mappings(&self) -> PeerMappings {
        let of_peer = |peer: usize| {
            // Acquire: what is freed next is freed after the peer has closed it.
            let word = page(&self.pages, peer).map_or(0, |page| page.closing.load(Ordering::Acquire));
            match word {
                CLOSED => PeerMappings::Closed,
                LOST if self.threads >> peer & 1 == 1 => PeerMappings::Closed,
                _ if self.has_ended(peer) => PeerMappings::Closed,
                KEPT | LOST => PeerMappings::Kept,
                // It has not said, or a peer that writes anything.
                _ => PeerMappings::Open,
            }
        };
        let all: Vec<_> = (0..self.world_size).filter(|&peer| peer != self.rank).map(of_peer).collect();
        let any = |which| all.contains(&which).then_some(which);
        any(PeerMappings::Kept).or_else(|| any(PeerMappings::Open)).unwrap_or(PeerMappings::Closed)
    }

    /// Whether a peer's process has ended; `false` where the peer has no descriptor that tells.
    fn has_ended(&self, peer: usize) -> bool {
        let process = self.processes.iter().find(|(rank, _)| *rank == peer);
        process.is_some_and(|(_, process)| {
            let mut asked = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            poll(&mut asked, PollTimeout::ZERO) == Ok(1)
        })
    }
}
