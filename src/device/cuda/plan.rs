//! Which algorithm and grid for which call on GPUs, as one table.
//!
//! Every rank plans alone and must come to the same answer, so a plan is made from `Facts` that all ranks share. Whether
//! an input is registered, and whether a call is in place, are each rank's own affair: a rank publishes with its start
//! signal where its input is, so one rank's may be staged and another's not within the same launch. They are no inputs here.

#[cfg(test)]
mod tests;
mod text;

use std::borrow::Cow;

use crate::abi::FA_CUDA_PACK_BYTES;
use crate::plan::{Algorithm, Plan};
use crate::topology::LinkClass;
use crate::MAX_RANKS;
use Algorithm::{OneShotPull, OneShotPush, TwoShotPull, TwoShotPush};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// No limit: the row takes every size that the rows before it do not.
const MAX: u64 = u64::MAX;

const MAX_THREADS: u32 = 512;
const WARP: u32 = 32;

/// The table that is used unless another is given: published crossovers, which are where to start tuning from.
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
/// * On one GPU there is no link to save on, but all blocks of all ranks must be resident: small grids.
#[rustfmt::skip]
const PUBLISHED: [Row; 20] = [
    //   ranks   links                     up to      algorithm    blocks threads
    row( 1,  1,  Links::ALL,               MAX,       OneShotPush, 64, 512),
    row( 2,  2,  Links::NVLINK,            2 * MIB,   OneShotPush, 64, 512),
    row( 2,  2,  Links::NVLINK,            MAX,       OneShotPull, 36, 512),
    row( 3,  3,  Links::NVLINK,            512 * KIB, OneShotPush, 64, 512),
    row( 3,  3,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    row( 4,  4,  Links::NVLINK,            384 * KIB, OneShotPush, 64, 512),
    row( 4,  4,  Links::NVLINK,            512 * KIB, OneShotPull, 36, 512),
    row( 4,  4,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    row( 5,  5,  Links::NVLINK,            192 * KIB, OneShotPush, 64, 512),
    row( 5,  5,  Links::NVLINK,            256 * KIB, OneShotPull, 36, 512),
    row( 5,  5,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    row( 6,  8,  Links::NVLINK,            128 * KIB, OneShotPush, 64, 512),
    row( 6,  8,  Links::NVLINK,            256 * KIB, OneShotPull, 36, 512),
    row( 6,  8,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    row( 9, 16,  Links::NVLINK,            64 * KIB,  OneShotPush, 64, 512),
    row( 9, 16,  Links::NVLINK,            MAX,       TwoShotPull, 36, 512),
    row( 2,  2,  Links::PCIE,              MAX,       OneShotPush, 16, 512),
    row( 3, 16,  Links::PCIE,              MAX,       TwoShotPush, 16, 512),
    row( 2, 16,  Links::SAME_DEVICE,       64 * KIB,  OneShotPush, 16, 512),
    row( 2, 16,  Links::SAME_DEVICE,       MAX,       TwoShotPull, 16, 512),
];

/// What a plan is made from: facts that all ranks share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub world_size: usize,
    pub bytes: usize,
    /// The worst link between any two ranks, as all ranks have agreed on it.
    pub link: LinkClass,
    pub forced: Option<Algorithm>,
    /// Multiprocessors that each rank has to itself, the least of all ranks. A grid is no larger than what is resident at
    /// once, because blocks wait for those of other ranks.
    pub multiprocessors: usize,
}

/// An algorithm and its largest grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    algorithm: Algorithm,
    /// 1 to `FA_MAX_BLOCKS`.
    blocks: u32,
    /// 32 to 512, a multiple of 32.
    threads: u32,
}

/// A set of [`LinkClass`]es.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Links(u8);

impl Links {
    const ALL: Self = Self((1 << LinkClass::ALL.len()) - 1);
    const NVLINK: Self = Self(1 << LinkClass::NvSwitch as u8 | 1 << LinkClass::NvLinkMesh as u8);
    /// A world with an unreachable pair is refused when it is made, but a plan is there for every input.
    const PCIE: Self = Self(1 << LinkClass::Pcie as u8 | 1 << LinkClass::Unreachable as u8);
    const SAME_DEVICE: Self = Self(1 << LinkClass::SameDevice as u8);

    fn contains(self, link: LinkClass) -> bool {
        self.0 & 1 << link as u8 != 0
    }
}

/// One row of a [`Table`]: what is done for these ranks and links up to that size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    /// First and last world size.
    ranks: (usize, usize),
    links: Links,
    max_bytes: u64,
    choice: Choice,
}

const fn row(
    first: usize,
    last: usize,
    links: Links,
    max_bytes: u64,
    algorithm: Algorithm,
    blocks: u32,
    threads: u32,
) -> Row {
    Row { ranks: (first, last), links, max_bytes, choice: Choice { algorithm, blocks, threads } }
}

impl Row {
    fn is_for(&self, world_size: usize, link: LinkClass) -> bool {
        (self.ranks.0..=self.ranks.1).contains(&world_size) && self.links.contains(link)
    }
}

/// The plan for every call on GPUs: rows of world sizes, links and message sizes, each with an algorithm and its largest
/// grid. The first row that a call fits decides; every call fits one.
///
/// It is printed and read as text, a row to a line, so that it can be tuned without a build. All ranks must have the same.
///
/// ```text
/// fast-allreduce plan 1
/// # ranks  links                 up to   algorithm      blocks  threads
/// 2        nvswitch,nvlink-mesh  2MiB    one-shot-push  64      512
/// 2        nvswitch,nvlink-mesh  max     one-shot-pull  36      512
/// 3-16     pcie                  max     two-shot-push  16      512
/// ...
/// ```
///
/// Sizes are bytes, or have the unit KiB or MiB, or are `max`. Lines that begin with `#` and empty ones are passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Every world size and link class has rows, with increasing sizes up to `MAX`.
    rows: Cow<'static, [Row]>,
}

impl Default for Table {
    fn default() -> Self {
        Self::PUBLISHED
    }
}

impl Table {
    const PUBLISHED: Self = Self { rows: Cow::Borrowed(&PUBLISHED) };

    /// The plan for a call. Total: world sizes are taken as 1 to 16, and no fact is too large or too small. Pieces are
    /// as large as the region takes.
    pub(crate) fn plan(&self, facts: &Facts) -> Plan {
        let world_size = facts.world_size.clamp(1, MAX_RANKS);
        let Choice { algorithm, blocks, threads } = self.choice(world_size, facts);
        let (most_blocks, most_threads) = (blocks as usize, threads as usize);
        let packs = facts.bytes.div_ceil(FA_CUDA_PACK_BYTES as usize);
        // The loops of a two-shot run over slices.
        let work = match algorithm {
            OneShotPull | OneShotPush => packs,
            TwoShotPull | TwoShotPush => packs.div_ceil(world_size),
        };
        // A block of 512 threads with 128 registers each fills a multiprocessor.
        let most_blocks = most_blocks.min(facts.multiprocessors.max(1));
        let blocks = work.div_ceil(most_threads).clamp(1, most_blocks);
        let threads =
            work.div_ceil(blocks).next_multiple_of(WARP as usize).clamp(WARP as usize, most_threads);
        Plan { algorithm, blocks, threads, piece_bytes: usize::MAX }
    }

    fn choice(&self, world_size: usize, facts: &Facts) -> Choice {
        let fits = |row: &&Row| facts.bytes as u64 <= row.max_bytes;
        let Some(forced) = facts.forced else {
            let row = self.rows_for(world_size, facts.link).find(fits);
            return row
                .expect("rows go up to u64::MAX for every world and link: the invariant of a table")
                .choice;
        };
        let mut rows = self.rows_for(world_size, facts.link).filter(|row| row.choice.algorithm == forced);
        // The row for the nearest size at which the table itself takes this algorithm.
        let last = rows.clone().last();
        let default = Choice { algorithm: forced, blocks: 36, threads: MAX_THREADS };
        rows.find(fits).or(last).map_or(default, |row| row.choice)
    }

    fn rows_for(&self, world_size: usize, link: LinkClass) -> impl Iterator<Item = &Row> + Clone {
        self.rows.iter().filter(move |row| row.is_for(world_size, link))
    }

    /// The plan in words, a line for each range of sizes: `"up to 512 KiB: one-shot-push, up to 64 blocks of 512"`.
    pub fn describe(&self, world_size: usize, link: LinkClass) -> String {
        let world_size = world_size.clamp(1, MAX_RANKS);
        let lines = self.rows_for(world_size, link).map(|row| {
            let range = match row.max_bytes {
                MAX => "any larger size".to_owned(),
                bytes => format!("up to {}", text::size(bytes, " ")),
            };
            let Choice { algorithm, blocks, threads } = row.choice;
            format!("{range}: {algorithm}, up to {blocks} blocks of {threads}\n")
        });
        lines.collect()
    }

    /// A number that differs between tables that differ, for ranks to compare.
    pub fn digest(&self) -> u64 {
        // FNV-1a.
        self.to_string()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }
}
