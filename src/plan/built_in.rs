//! The tables that are used unless others are given.

use super::calls::PlannedCall;
use super::choice::Choice;
use super::links::Links;
use super::table::{Row, MAX};
use super::Algorithm::{self, HalvingDoubling, OneShotPull, OneShotPush, Ring, TwoShotPull, TwoShotPush};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The host's, measured on AMD EPYC (Zen 4 and Zen 5). One-shot up to where a second barrier costs less than what a two-shot saves:
/// reading, and staging for 2 ranks. Those stage half of a piece, so that larger ones stay in a cache.
#[rustfmt::skip]
pub(super) const HOST_AMD: [Row; 9] = [
    //    ranks   up to     algorithm
    host( 1,  1,  MAX,      OneShotPull),
    host( 2,  2,  8 * KIB,  OneShotPull),
    pieces(2, 2,  MAX,      TwoShotPull, MIB),
    host( 3,  3,  32 * KIB, OneShotPull),
    host( 3,  3,  MAX,      TwoShotPull),
    host( 4,  4,  16 * KIB, OneShotPull),
    host( 4,  4,  MAX,      TwoShotPull),
    host( 5, 16,  8 * KIB,  OneShotPull),
    host( 5, 16,  MAX,      TwoShotPull),
];

/// The host's, as measured for 2 ranks on an Intel Xeon with AMX. Lines cross a mesh there, so that a second barrier costs more, and
/// a core's second-level cache holds more. Of more ranks nothing was measured: they have AMD's rows.
#[rustfmt::skip]
pub(super) const HOST_INTEL: [Row; 10] = [
    //    ranks   up to     algorithm
    HOST_AMD[0],
    host( 2,  2,  64 * KIB, OneShotPull),
    pieces(2, 2,  MIB,      TwoShotPull, MIB),
    host( 2,  2,  MAX,      TwoShotPull),
    HOST_AMD[3],
    HOST_AMD[4],
    HOST_AMD[5],
    HOST_AMD[6],
    HOST_AMD[7],
    HOST_AMD[8],
];

/// CUDA's: published crossovers, which are where to start tuning from.
///
/// * vLLM's custom allreduce (`csrc/custom_all_reduce.cuh`) pulls one-shot below 512 KiB for up to 4 ranks and below 256 KiB
///   for up to 8 on NVLink, always for 2 ranks, and pulls two-shot above, with 36 blocks of 512 threads. It has nothing for
///   more than 2 ranks on PCIe.
/// * SGLang's custom allreduce v2 pushes one-shot on H200 up to 2 MiB / 512 / 384 / 256 / 192 / 192 / 160 KiB for 2 to 8
///   ranks (on B200 up to 4 / 4 / 2 / 2 MiB / 1 MiB / 896 / 720 KiB), pulls one-shot above for 2 ranks, and two-shot for
///   more. Its packets carry no tags (a zero is what has not come), while half of each packet here is tags: for 5 ranks and
///   more the limits are lower.
/// * Neither has a figure for more than 8 ranks: the limit of 8 is halved, as each rank sends twice as much.
/// * On PCIe a store is posted, while a load waits for its answer: always push. For more than 2 ranks two-shot, in which a
///   rank writes to one peer at a time.
/// * Where some pair has no NVLink, large messages go round a ring, as NCCL sends them: each rank has one neighbour to write to
///   at a time, and a bridge between sockets is crossed once in each direction. Halving and doubling, with fewer steps, is between
///   the two for many ranks. These two round as they go, so their bits are not those of the others.
/// * On one GPU there is no link to save on, but all blocks of all ranks must be resident: small grids.
#[rustfmt::skip]
pub(super) const CUDA: [Row; 23] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 1,  1,  Links::ALL,               MAX,       OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            2 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 36, 512),
    cuda( 3,  3,  Links::NVLINK,            512 * KIB, OneShotPush, 64, 512),
    cuda( 3,  3,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 4,  4,  Links::NVLINK,            384 * KIB, OneShotPush, 64, 512),
    cuda( 4,  4,  Links::NVLINK,            512 * KIB, OneShotPull, 36, 512),
    cuda( 4,  4,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 5,  5,  Links::NVLINK,            192 * KIB, OneShotPush, 64, 512),
    cuda( 5,  5,  Links::NVLINK,            256 * KIB, OneShotPull, 36, 512),
    cuda( 5,  5,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 6,  8,  Links::NVLINK,            128 * KIB, OneShotPush, 64, 512),
    cuda( 6,  8,  Links::NVLINK,            256 * KIB, OneShotPull, 36, 512),
    cuda( 6,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            64 * KIB,  OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 2,  2,  Links::PCIE,              MAX,       OneShotPush, 16, 512),
    cuda( 3,  8,  Links::PCIE,              MIB,       TwoShotPush, 16, 512),
    cuda( 9, 16,  Links::PCIE,              256 * KIB, TwoShotPush, 16, 512),
    cuda( 9, 16,  Links::PCIE,              MIB,       HalvingDoubling, 16, 512),
    cuda( 3, 16,  Links::PCIE,              MAX,       Ring,        16, 512),
    cuda( 2, 16,  Links::SAME_DEVICE,       64 * KIB,  OneShotPush, 16, 512),
    cuda( 2, 16,  Links::SAME_DEVICE,       MAX,       TwoShotPull, 16, 512),
];

const fn host(first: usize, last: usize, max_bytes: u64, algorithm: Algorithm) -> Row {
    Row {
        calls: PlannedCall::AllReduce,
        ranks: (first, last),
        links: Links::ALL,
        max_bytes,
        choice: Choice::of_host(algorithm),
    }
}

const fn pieces(first: usize, last: usize, max_bytes: u64, algorithm: Algorithm, piece_bytes: u64) -> Row {
    let mut row = host(first, last, max_bytes, algorithm);
    row.choice.piece_bytes = piece_bytes;
    row
}

const fn cuda(
    first: usize,
    last: usize,
    links: Links,
    max_bytes: u64,
    algorithm: Algorithm,
    blocks: u32,
    threads: u32,
) -> Row {
    Row {
        calls: PlannedCall::AllReduce,
        ranks: (first, last),
        links,
        max_bytes,
        choice: Choice::cuda(algorithm, blocks, threads),
    }
}
