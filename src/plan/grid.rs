//! Computes the grid of a call.
//!
//! Each rank plans by itself, and all must get the same result. So a plan depends only on facts that all ranks share.
//! It does not depend on whether an input is registered or a call is in place: these may differ among ranks. A rank
//! publishes the address of its input with its start signal, so within one launch some inputs may be staged and others
//! not.

#[cfg(test)]
mod tests;

use super::choice::Choice;
use crate::abi::FA_CUDA_PACK_BYTES;
use crate::catalogue::{Algorithm, Work};

pub(super) const WARP: usize = 32;

/// Largest number of threads of a block.
pub(super) const MOST_THREADS: usize = 512;
/// Work is spread over more blocks as long as each has at least this number of threads.
pub(super) const FEWEST_THREADS: usize = 64;
/// That number for pushes without teams, which is smaller: a multiprocessor needs longer to send than to load.
const FEWEST_THREADS_OF_PUSHES: usize = WARP;

/// Returns the number of threads of a block that works on rows of `row_bytes` bytes. All its threads work on one row.
pub(super) fn threads_of_row(threads: usize, row_bytes: usize, pack_bytes: usize) -> usize {
    let packs = row_bytes.div_ceil(pack_bytes).next_multiple_of(WARP);
    threads.max(packs.min(MOST_THREADS))
}

/// Returns the number of blocks of a call on the host, where each rank has `workers` threads, and the bytes of a piece.
#[inline(always)]
pub(super) fn host(choice: &Choice, bytes: usize, workers: usize) -> (usize, usize) {
    let most = workers.min(choice.blocks as usize);
    let blocks = (bytes as u64).div_ceil(choice.block_bytes).clamp(1, most as u64) as usize;
    (blocks, (choice.piece_bytes as usize).saturating_mul(blocks))
}

/// Returns the number of blocks of a call on GPUs, and the number of threads of a block.
///
/// `multiprocessors` is the number that each rank has for itself, the minimum over all ranks. All blocks of a grid
/// must be resident at once, because they wait for blocks of other ranks.
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
    // One multiprocessor cannot saturate a link, so a message is spread over all of them.
    let fewest = match choice.algorithm {
        Algorithm::OneShotPush | Algorithm::TwoShotPush => FEWEST_THREADS_OF_PUSHES,
        _ => FEWEST_THREADS,
    };
    let blocks = work.div_ceil(fewest.min(most_threads)).clamp(1, most_blocks);
    (blocks, work.div_ceil(blocks).next_multiple_of(WARP).clamp(WARP, most_threads))
}
