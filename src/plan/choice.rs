//! What is done with a call: an algorithm, and how far its grid grows with the message.

use super::thresholds::{GPU_UNPLANNED_BLOCKS, HOST_BLOCK_BYTES, HOST_PIECE_BYTES};
use super::Algorithm;
use crate::abi::FA_MAX_BLOCKS;

const WARP: u32 = 32;
const MAX_THREADS: u32 = 512;

/// No limit: the row takes every size that the rows before it do not.
pub(super) const MAX: u64 = u64::MAX;

/// Far above any cache: a piece of a message that is not cut.
const MAX_PIECE_BYTES: u64 = 1 << 40;

/// A kind of device, whose plans have the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// [`Host`](crate::Host).
    Host,
    /// `Cuda`, in builds that have it.
    Cuda,
}

impl DeviceKind {
    pub(super) const ALL: [Self; 2] = [Self::Host, Self::Cuda];

    /// [`Device::NAME`](crate::Device::NAME): `"host"`, `"cuda"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// An algorithm, and how far its grid grows with the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The most blocks of a launch: 1 to 64. No device uses more than it has: worker threads on the host, multiprocessors on a
    /// GPU.
    pub blocks: u32,
    /// The most threads of a block: 32 to 512 on a GPU, a multiple of 32; 1 on the host.
    pub threads: u32,
    /// On the host, a block is used for every so many bytes, or part of them. A GPU uses one for every 16 x `threads` bytes,
    /// and this is 0.
    pub block_bytes: u64,
    /// On the host, a launch takes at most so many bytes for each of its blocks. On a GPU it takes what the region does, and
    /// this is 0.
    pub piece_bytes: u64,
}

impl Choice {
    /// On the host.
    pub const fn host(algorithm: Algorithm, blocks: u32, block_bytes: u64, piece_bytes: u64) -> Self {
        Self { algorithm, blocks, threads: 1, block_bytes, piece_bytes }
    }

    /// On the host, with the built-in table's grid.
    pub(super) const fn of_host(algorithm: Algorithm) -> Self {
        Self::host(algorithm, FA_MAX_BLOCKS, HOST_BLOCK_BYTES, HOST_PIECE_BYTES)
    }

    /// On a GPU.
    pub const fn cuda(algorithm: Algorithm, blocks: u32, threads: u32) -> Self {
        Self { algorithm, blocks, threads, block_bytes: 0, piece_bytes: 0 }
    }

    /// Of an algorithm that a table has no row of.
    pub(super) fn forced(device: DeviceKind, algorithm: Algorithm) -> Self {
        match device {
            DeviceKind::Host => Self::of_host(algorithm),
            DeviceKind::Cuda => Self::cuda(algorithm, GPU_UNPLANNED_BLOCKS, MAX_THREADS),
        }
    }

    /// Says what is out of range.
    pub(super) fn check(&self, device: DeviceKind) -> Result<(), String> {
        let within = |what: &str, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(format!("{what} = {value} is not within {least} to {most}")),
        };
        if self.algorithm.is_nvls() {
            return Err(format!("{} is for Order::Any, and in no table", self.algorithm));
        }
        within("blocks", self.blocks.into(), 1, FA_MAX_BLOCKS.into())?;
        match device {
            DeviceKind::Host => {
                within("threads", self.threads.into(), 1, 1)?;
                within("block_bytes", self.block_bytes, 64, MAX_PIECE_BYTES)?;
                within("piece_bytes", self.piece_bytes, 64, MAX_PIECE_BYTES)
            }
            DeviceKind::Cuda => {
                within("threads", self.threads.into(), WARP.into(), MAX_THREADS.into())?;
                within("block_bytes", self.block_bytes, 0, 0)?;
                within("piece_bytes", self.piece_bytes, 0, 0)?;
                match self.threads % WARP {
                    0 => Ok(()),
                    _ => Err(format!("threads = {} is not a multiple of 32", self.threads)),
                }
            }
        }
    }
}

/// In words: `"one-shot-push, up to 64 blocks of 512 threads"`.
impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.algorithm, self.grid())
    }
}

/// The grid of a [`Choice`], in words.
pub(super) struct Grid(Choice);

impl Choice {
    pub(super) fn grid(self) -> Grid {
        Grid(self)
    }
}

impl std::fmt::Display for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Choice { blocks, threads, block_bytes, piece_bytes, .. } = self.0;
        let plural = if blocks == 1 { "" } else { "s" };
        if threads > 1 {
            return write!(f, "up to {blocks} block{plural} of {threads} threads");
        }
        match blocks {
            1 => f.write_str("1 block")?,
            _ => write!(f, "a block for {}, up to {blocks}", size(block_bytes))?,
        }
        write!(f, ", in pieces of {} a block", size(piece_bytes))
    }
}

/// What is done up to a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    /// The largest message, in bytes; `u64::MAX` in the last step.
    pub max_bytes: u64,
    /// What is done with it.
    pub choice: Choice,
}

/// A size in the largest unit that is exact.
pub(super) fn size(bytes: u64) -> String {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    match bytes {
        MAX => "any size".to_owned(),
        0 => "0".to_owned(),
        _ if bytes % MIB == 0 => format!("{} MiB", bytes / MIB),
        _ if bytes % KIB == 0 => format!("{} KiB", bytes / KIB),
        _ => format!("{bytes} bytes"),
    }
}
