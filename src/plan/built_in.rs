//! The tables that are used unless others are given.

use std::borrow::Cow;

use super::choice::{Choice, DeviceKind, MAX};
use super::cpu::CpuMake;
use super::gpu::GpuGeneration;
use super::links::Links;
use super::table::{Row, Table};
use super::Algorithm::{self, HalvingDoubling, OneShotPull, OneShotPush, Ring, TwoShotPull, TwoShotPush};
use super::Machine;
use crate::catalogue::PlannedCall;

impl Table {
    /// The table that is used unless another is given; of the host that for [`CpuMake::DEFAULT`], of GPUs that for
    /// [`GpuGeneration::Hopper`].
    pub const fn built_in(device: DeviceKind) -> Self {
        match device {
            DeviceKind::Host => Self::of_cpu(CpuMake::DEFAULT),
            DeviceKind::Cuda => Self::of_gpu(GpuGeneration::Hopper),
        }
    }

    /// The built-in table of the host for a kind of CPU.
    pub const fn of_cpu(cpu: CpuMake) -> Self {
        let rows: &'static [Row] = match cpu {
            CpuMake::Amd => &HOST_AMD,
            CpuMake::Intel => &HOST_INTEL,
        };
        Self { device: DeviceKind::Host, rows: Cow::Borrowed(rows) }
    }

    /// The built-in table for a generation of GPUs.
    pub const fn of_gpu(generation: GpuGeneration) -> Self {
        let rows: &'static [Row] = match generation {
            GpuGeneration::Ampere => &AMPERE,
            GpuGeneration::Hopper => &HOPPER,
            GpuGeneration::Blackwell => &BLACKWELL,
        };
        Self { device: DeviceKind::Cuda, rows: Cow::Borrowed(rows) }
    }

    /// The built-in table for a machine, by the names of its CPU or GPUs.
    pub fn built_in_for(machine: &Machine) -> Self {
        match machine.device() {
            DeviceKind::Host => Self::of_cpu(CpuMake::of(machine).unwrap_or(CpuMake::DEFAULT)),
            DeviceKind::Cuda => Self::of_gpu(GpuGeneration::of(machine)),
        }
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The host's, measured on AMD EPYC (Zen 4 and Zen 5). One-shot up to where a second barrier costs less than what a two-shot saves:
/// reading, and staging for 2 ranks. Those stage half of a piece, so that larger ones stay in a cache.
#[rustfmt::skip]
const HOST_AMD: [Row; 9] = [
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
const HOST_INTEL: [Row; 10] = [
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

/// Those of GPUs of which every pair has NVLink. Nobody has measured them: the PTX machine's clock predicts which direct algorithm
/// is the fastest between 2 and 8 ranks, for bf16 in graphs, from 1 KiB to 8 MiB (lab/gpu-model.md has its figures, and what it
/// leaves out). Within some 5 % of the fastest an algorithm is as good, so that there are few rows.
///
/// * They are for sums of f16, bf16 and f32, whose packets have no tags. Others pull from 256 KiB on (`Planner::all_reduce`).
/// * From 8 MiB on nothing is predicted: pulls, of which a launch takes four times as much.
/// * More than 8 ranks, which take the kernels of any world, have one-shots as predicted for 12 (of H100 for 9 and 16 too). That their
///   two-shots push up to 4 MiB is predicted up to 1 MiB, and assumed above.
/// * 36 blocks of 512 threads are those of vLLM's custom allreduce (`csrc/custom_all_reduce.cuh`). To pull, 2 ranks are predicted to
///   be faster with 64.
///
/// `scripts/gpu-model.sh --machine h100 --sizes 1K,8K,16K,32K,64K,128K,256K,512K,1M,2M,4M,8M` for H100.
#[rustfmt::skip]
const NVLINK_OF_HOPPER: [Row; 10] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 2,  2,  Links::NVLINK,            8 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 64, 512),
    cuda( 3,  5,  Links::NVLINK,            128 * KIB, OneShotPush, 64, 512),
    cuda( 6,  7,  Links::NVLINK,            96 * KIB,  OneShotPush, 64, 512),
    cuda( 8,  8,  Links::NVLINK,            64 * KIB,  OneShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            8 * MIB,   TwoShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            256 * KIB, OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            4 * MIB,   TwoShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
];

/// The same with `--machine a100`.
#[rustfmt::skip]
const NVLINK_OF_AMPERE: [Row; 10] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 2,  2,  Links::NVLINK,            8 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 64, 512),
    cuda( 3,  3,  Links::NVLINK,            192 * KIB, OneShotPush, 64, 512),
    cuda( 4,  5,  Links::NVLINK,            96 * KIB,  OneShotPush, 64, 512),
    cuda( 6,  8,  Links::NVLINK,            64 * KIB,  OneShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            8 * MIB,   TwoShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            256 * KIB, OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            4 * MIB,   TwoShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
];

/// The same with `--machine b200`.
#[rustfmt::skip]
const NVLINK_OF_BLACKWELL: [Row; 10] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 2,  2,  Links::NVLINK,            8 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 64, 512),
    cuda( 3,  3,  Links::NVLINK,            512 * KIB, OneShotPush, 64, 512),
    cuda( 4,  7,  Links::NVLINK,            256 * KIB, OneShotPush, 64, 512),
    cuda( 8,  8,  Links::NVLINK,            192 * KIB, OneShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            8 * MIB,   TwoShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            512 * KIB, OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            4 * MIB,   TwoShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
];

/// Those of GPUs with any other link, of every generation.
///
/// * On PCIe a store is posted, while a load waits for its answer: always push. The clock has pulls ahead from 128 KiB (2 ranks) or
///   256 KiB (4 ranks) on where half of each packet is tags; but it knows nothing of how many loads a root complex lets be under way.
/// * Up to where one-shot goes before two-shot is as predicted for PCIe 5 and 4 alike (`--machine pcie5`, `pcie4`). Nothing that
///   is larger has a rank write to all others at once.
/// * Where some pair has no NVLink, large messages go round a ring, as NCCL sends them: each rank has one neighbour to write to
///   at a time, and a bridge between sockets is crossed once in each direction. Halving and doubling, with fewer steps, is between
///   the two for many ranks. These two round at each step, so their bits are not those of the others: they are for `Order::Any`.
///   `Order::Fixed` goes on with the row before them.
/// * On one GPU there is no link to save on, but all blocks of all ranks must be resident: small grids.
#[rustfmt::skip]
const OTHER_LINKS: [Row; 12] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 1,  1,  Links::ALL,               MAX,       OneShotPush, 64, 512),
    cuda( 2,  2,  Links::PCIE,              MAX,       OneShotPush, 16, 512),
    cuda( 3,  3,  Links::PCIE,              32 * KIB,  OneShotPush, 16, 512),
    cuda( 4,  5,  Links::PCIE,              16 * KIB,  OneShotPush, 16, 512),
    cuda( 6,  8,  Links::PCIE,              8 * KIB,   OneShotPush, 16, 512),
    cuda( 3,  8,  Links::PCIE,              MIB,       TwoShotPush, 16, 512),
    cuda( 9, 16,  Links::PCIE,              16 * KIB,  OneShotPush, 16, 512),
    cuda( 9, 16,  Links::PCIE,              256 * KIB, TwoShotPush, 16, 512),
    cuda( 9, 16,  Links::PCIE,              MIB,       HalvingDoubling, 16, 512),
    cuda( 3, 16,  Links::PCIE,              MAX,       Ring,        16, 512),
    cuda( 2, 16,  Links::SAME_DEVICE,       64 * KIB,  OneShotPush, 16, 512),
    cuda( 2, 16,  Links::SAME_DEVICE,       MAX,       TwoShotPull, 16, 512),
];

const AMPERE: [Row; 22] = joined(NVLINK_OF_AMPERE, OTHER_LINKS);
const HOPPER: [Row; 22] = joined(NVLINK_OF_HOPPER, OTHER_LINKS);
const BLACKWELL: [Row; 22] = joined(NVLINK_OF_BLACKWELL, OTHER_LINKS);

const fn joined<const ALL: usize>(first: [Row; 10], rest: [Row; 12]) -> [Row; ALL] {
    let mut all = [first[0]; ALL];
    let mut index = 0;
    while index < ALL {
        all[index] = if index < first.len() { first[index] } else { rest[index - first.len()] };
        index += 1;
    }
    all
}

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
