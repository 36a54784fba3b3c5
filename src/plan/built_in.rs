//! Built-in plan tables.

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
    /// Returns the default table of a device: that of [`CpuMake::DEFAULT`] or [`GpuGeneration::Hopper`].
    pub const fn built_in(device: DeviceKind) -> Self {
        match device {
            DeviceKind::Host => Self::for_cpu(CpuMake::DEFAULT),
            DeviceKind::Cuda => Self::for_gpu(GpuGeneration::Hopper),
        }
    }

    /// Returns the built-in table of the host for a make of CPU.
    pub const fn for_cpu(cpu: CpuMake) -> Self {
        let rows: &'static [Row] = match cpu {
            CpuMake::Amd => &HOST_AMD,
            CpuMake::Intel => &HOST_INTEL,
        };
        Self { device: DeviceKind::Host, rows: Cow::Borrowed(rows) }
    }

    /// Returns the built-in table for a generation of GPUs.
    pub const fn for_gpu(generation: GpuGeneration) -> Self {
        let rows: &'static [Row] = match generation {
            GpuGeneration::Ampere => &AMPERE,
            GpuGeneration::Hopper => &HOPPER,
            GpuGeneration::Blackwell => &BLACKWELL,
        };
        Self { device: DeviceKind::Cuda, rows: Cow::Borrowed(rows) }
    }

    /// Returns the built-in table for a machine, by the names of its CPU or GPUs.
    pub fn built_in_for(machine: &Machine) -> Self {
        match machine.device() {
            DeviceKind::Host => Self::for_cpu(CpuMake::of(machine).unwrap_or(CpuMake::DEFAULT)),
            DeviceKind::Cuda => Self::for_gpu(GpuGeneration::of(machine)),
        }
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Rows for AMD CPUs: those for 2 ranks are measured on AMD EPYC (Zen 4 and Zen 5).
///
/// A two-shot costs a second barrier, and saves reads; between 2 ranks it also saves staging. One-shots are used up to
/// the size where the savings exceed the barrier. Each rank of a one-shot reads `ranks - 1` messages, and each rank of
/// a two-shot less than two: the more ranks, the smaller is that size. In a two-shot 2 ranks stage half of each piece,
/// so that larger pieces stay in a cache.
///
/// Nothing is measured between more ranks that each have a core. Their rows are assumed: those of Intel, and for 3
/// ranks a size between those for 2 and 4.
#[rustfmt::skip]
const HOST_AMD: [Row; 8] = [
    //    ranks   up to     algorithm
    host( 1,  1,  MAX,      OneShotPull),
    host( 2,  2,  8 * KIB,  OneShotPull),
    pieces(2, 2,  MAX,      TwoShotPull, MIB),
    host( 3,  3,  4 * KIB,  OneShotPull),
    HOST_INTEL[5],
    HOST_INTEL[6],
    HOST_INTEL[7],
    HOST_INTEL[8],
];

/// Rows for Intel CPUs, measured on Intel Xeons with AMX: 2 ranks on 2 and on 16 cores, 4, 8 and 16 ranks on 16 cores.
///
/// * Cache lines cross a mesh, so that between 2 ranks a second barrier costs more than on AMD. A core's second-level
///   cache is larger.
/// * 2 ranks: at 64 KiB a one-shot takes 0.79 to 0.98 of a two-shot's time for f32, and 1.28 for bf16, whose sums take
///   more instructions. A row is for all types: it ends at 32 KiB.
/// * 4 ranks: a one-shot is faster at 1 KiB, and a two-shot 1.4 times as fast at 8 KiB. Lines through the two times
///   meet between 1.5 and 1.8 KiB.
/// * 8 and 16 ranks: a two-shot is 1.1 to 1.5 times as fast at 1 KiB, and 2.6 to 4.5 times at 8 KiB. The lines meet
///   between 0.5 and 0.8 KiB; no smaller size is measured.
/// * 3 and 5 to 7 ranks are not measured: their sizes are assumed to lie between those of the others. So are 9 to 15.
#[rustfmt::skip]
const HOST_INTEL: [Row; 9] = [
    //    ranks   up to     algorithm
    host( 1,  1,  MAX,      OneShotPull),
    host( 2,  2,  32 * KIB, OneShotPull),
    pieces(2, 2,  MIB,      TwoShotPull, MIB),
    host( 2,  2,  MAX,      TwoShotPull),
    host( 3,  3,  8 * KIB,  OneShotPull),
    host( 4,  4,  2 * KIB,  OneShotPull),
    host( 5,  7,  KIB,      OneShotPull),
    host( 8, 16,  512,      OneShotPull),
    host( 3, 16,  MAX,      TwoShotPull),
];

/// Rows for Hopper GPUs that are all connected by NVLink.
///
/// No GPU has measured them. The PTX machine's clock predicts the fastest direct algorithm for bf16 in graphs, between
/// 2 and 8 ranks and from 1 KiB to 8 MiB (`lab/gpu-model.md` has the numbers and what the model leaves out). An
/// algorithm within about 5 % of the fastest counts as equal, so that few rows suffice.
///
/// * The rows hold for sums of f16, bf16 and f32, whose packets have no tags. Between 2 ranks other calls pull above
///   [`TAGGED_PUSH_MOST_BYTES`](super::thresholds::TAGGED_PUSH_MOST_BYTES) (`Planner::all_reduce`).
/// * Above 8 MiB nothing is predicted. These rows pull, because a launch of a pull takes four times as many bytes.
/// * More than 8 ranks use the kernels of any world size. The limits of their one-shots are those predicted for 12
///   ranks (on H100 also for 9 and 16). Two-shot pushes are predicted up to 1 MiB, and assumed up to 4 MiB.
/// * vLLM's custom allreduce has 36 blocks of 512 threads (`csrc/custom_all_reduce.cuh`). Pulls between 2 ranks are
///   predicted to be faster with 64 blocks.
///
/// The command for H100: `scripts/gpu-model.sh --machine h100 --sizes 1K,8K,16K,32K,64K,128K,256K,512K,1M,2M,4M,8M`.
#[rustfmt::skip]
const NVLINK_OF_HOPPER: [Row; 10] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 2,  2,  Links::NVLINK,            8 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 64, 512),
    cuda( 3,  4,  Links::NVLINK,            128 * KIB, OneShotPush, 64, 512),
    cuda( 5,  5,  Links::NVLINK,            96 * KIB,  OneShotPush, 64, 512),
    cuda( 6,  8,  Links::NVLINK,            32 * KIB,  OneShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            8 * MIB,   TwoShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            256 * KIB, OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            4 * MIB,   TwoShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
];

/// Rows for Ampere GPUs that are all connected by NVLink: predicted like those for Hopper, with `--machine a100`.
#[rustfmt::skip]
const NVLINK_OF_AMPERE: [Row; 10] = [
    //    ranks   links                     up to      algorithm    blocks threads
    cuda( 2,  2,  Links::NVLINK,            8 * MIB,   OneShotPush, 64, 512),
    cuda( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 64, 512),
    cuda( 3,  3,  Links::NVLINK,            128 * KIB, OneShotPush, 64, 512),
    cuda( 4,  5,  Links::NVLINK,            96 * KIB,  OneShotPush, 64, 512),
    cuda( 6,  8,  Links::NVLINK,            32 * KIB,  OneShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            8 * MIB,   TwoShotPush, 64, 512),
    cuda( 3,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    cuda( 9, 16,  Links::NVLINK,            256 * KIB, OneShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            4 * MIB,   TwoShotPush, 64, 512),
    cuda( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
];

/// Rows for Blackwell GPUs that are all connected by NVLink: predicted like those for Hopper, with `--machine b200`.
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

/// Rows for all other links, for GPUs of every generation.
///
/// * On PCIe stores are posted, while loads wait for their answers: always push. The clock predicts that pulls win
///   from 128 KiB (2 ranks) or 256 KiB (4 ranks) on, where half of each packet is tags. But it does not model how many
///   loads a root complex can have in flight.
/// * The limits of one-shots are those predicted for PCIe 5 and for PCIe 4, which agree (`--machine pcie5`, `pcie4`).
///   Above them no rank writes to all others at once.
/// * If some pair has no NVLink, large messages go around a ring, as in NCCL. Each rank writes to one neighbour, and a
///   bridge between sockets is crossed once in each direction. For many ranks halving-doubling, which has fewer steps,
///   is used for the sizes between two-shot and ring. Ring and halving-doubling round in each step, so that their
///   results differ from those of direct algorithms: only `Order::Any` selects them. `Order::Fixed` uses the row
///   before them.
/// * Through pinned host memory, polls and packets compete for the bus. Measured on an H100 whose 2 or 8 ranks share
///   its PCIe 5 link (`gpu-check`, step `link`): two-shot push is fastest up to 64 KiB, where two-shot pull begins to
///   win; at 512 KiB pushes take 2.6 and 6.5 ms (2 ranks), and two-shot pull 0.5 ms.
/// * Ranks on one GPU save no link traffic, but all blocks of all ranks must be resident: the grids are small.
///   The rows for 2 ranks follow an H100 (step `latency`).
#[rustfmt::skip]
const OTHER_LINKS: [Row; 17] = [
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
    cuda( 2, 16,  Links::THROUGH_HOST,      64 * KIB,  TwoShotPush, 16, 512),
    cuda( 2, 16,  Links::THROUGH_HOST,      MAX,       TwoShotPull, 16, 512),
    cuda( 2,  2,  Links::SAME_DEVICE,       256 * KIB, OneShotPush, 16, 512),
    cuda( 2,  2,  Links::SAME_DEVICE,       MIB,       TwoShotPush, 16, 512),
    cuda( 2,  2,  Links::SAME_DEVICE,       MAX,       OneShotPull, 16, 512),
    cuda( 3, 16,  Links::SAME_DEVICE,       64 * KIB,  OneShotPush, 16, 512),
    cuda( 3, 16,  Links::SAME_DEVICE,       MAX,       TwoShotPull, 16, 512),
];

const AMPERE: [Row; 27] = joined(NVLINK_OF_AMPERE, OTHER_LINKS);
const HOPPER: [Row; 27] = joined(NVLINK_OF_HOPPER, OTHER_LINKS);
const BLACKWELL: [Row; 27] = joined(NVLINK_OF_BLACKWELL, OTHER_LINKS);

const fn joined<const ALL: usize>(first: [Row; 10], rest: [Row; 17]) -> [Row; ALL] {
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
