//! The grid of a call.
//!
//! Every rank plans alone and must come to the same answer, so a plan is made from facts that all ranks share. Whether
//! an input is registered, and whether a call is in place, are each rank's own affair: a rank publishes with its start
//! signal where its input is, so one rank's may be staged and another's not within the same launch. They are no inputs here.

#[cfg(test)]
mod tests;

use super::choice::Choice;
use crate::abi::FA_CUDA_PACK_BYTES;
use crate::catalogue::Work;

pub(super) const WARP: usize = 32;

/// Of a block.
pub(super) const MOST_THREADS: usize = 512;
/// Of a block, where there is work for another.
pub(super) const FEWEST_THREADS: usize = 64;

/// The blocks of a call on the host, where each rank has `workers` threads, and the bytes of a piece.
#[inline(always)]
pub(super) fn host(choice: &Choice, bytes: usize, workers: usize) -> (usize, usize) {
    let most = workers.min(choice.blocks as usize);
    let blocks = (bytes as u64).div_ceil(choice.block_bytes).clamp(1, most as u64) as usize;
    (blocks, (choice.piece_bytes as usize).saturating_mul(blocks))
}

/// The blocks of a call on GPUs of which each rank has so many multiprocessors to itself, the least of all ranks, and the threads
/// of a block. A grid is no larger than what is resident at once, because blocks wait for those of other ranks.
pub(super) fn cuda(
    choice: &Choice,
    bytes: usize,
    world_size: usize,
    multiprocessors: usize,
) -> (usize, usize) {
    let (most_blocks, most_threads) = (choice.blocks as usize, choice.threads as usize);
    let packs = bytes.div_ceil(FA_CUDA_PACK_BYTES as usize);
    let work = match choice.algorithm.work() {
        Work::Message => packs,
        Work::Slice => packs.div_ceil(world_size.max(1)),
    };
    // A block of 512 threads with 128 registers each fills a multiprocessor.
    let most_blocks = most_blocks.min(multiprocessors.max(1));
    // A multiprocessor sends a fraction of what a link takes, so a message is spread over as many as there are.
    let blocks = work.div_ceil(FEWEST_THREADS.min(most_threads)).clamp(1, most_blocks);
    (blocks, work.div_ceil(blocks).next_multiple_of(WARP).clamp(WARP, most_threads))
}
