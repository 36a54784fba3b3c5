//! Choices of a table: an algorithm and the limits of its grid.

use super::thresholds::{GPU_UNPLANNED_BLOCKS, HOST_BLOCK_BYTES, HOST_PIECE_BYTES};
use super::Algorithm;
use crate::abi::FA_MAX_BLOCKS;

const WARP: u32 = 32;
const MAX_THREADS: u32 = 512;

/// No limit: the row is for every size that the rows before it are not for.
pub(super) const MAX: u64 = u64::MAX;

/// Largest block or piece size of a table: so large that no message is cut.
const MAX_PIECE_BYTES: u64 = 1 << 40;

/// Kind of device.
///
/// ```
/// assert_eq!(fast_allreduce::plan::DeviceKind::Host.name(), "host");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// CPU: [`Host`](crate::Host).
    Host,
    /// GPU: `Cuda`, in builds with the feature `cuda`.
    Cuda,
}

impl DeviceKind {
    pub(super) const ALL: [Self; 2] = [Self::Host, Self::Cuda];

    /// Returns the name, equal to [`Device::NAME`](crate::Device::NAME): `"host"` or `"cuda"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// Algorithm and limits of its grid, which grows with the message.
///
/// ```
/// use fast_allreduce::plan::Choice;
/// use fast_allreduce::Algorithm;
///
/// let choice = Choice::cuda(Algorithm::OneShotPush, 64, 512);
/// assert_eq!(choice.to_string(), "one-shot-push, up to 64 blocks of 512 threads");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Choice {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Largest number of blocks of a launch: 1 to 64. A launch has at most as many blocks as the host has worker
    /// threads, or the GPU has multiprocessors.
    pub blocks: u32,
    /// Largest number of threads of a block: on a GPU a multiple of 32 from 32 to 512, on the host 1.
    pub threads: u32,
    /// Host only: bytes per block. A launch has one block for each `block_bytes` of the message, rounded up. 0 on a
    /// GPU.
    pub block_bytes: u64,
    /// Host only: the largest piece has this number of bytes for each block of the launch. 0 on a GPU, where the region
    /// limits the pieces.
    pub piece_bytes: u64,
}

impl Choice {
    /// Creates a choice for the host. The units are bytes.
    pub const fn host(algorithm: Algorithm, blocks: u32, block_bytes: u64, piece_bytes: u64) -> Self {
        Self { algorithm, blocks, threads: 1, block_bytes, piece_bytes }
    }

    /// Creates a choice for the host with the grid of the built-in tables.
    pub(super) const fn of_host(algorithm: Algorithm) -> Self {
        Self::host(algorithm, FA_MAX_BLOCKS, HOST_BLOCK_BYTES, HOST_PIECE_BYTES)
    }

    /// Creates a choice for a GPU.
    pub const fn cuda(algorithm: Algorithm, blocks: u32, threads: u32) -> Self {
        Self { algorithm, blocks, threads, block_bytes: 0, piece_bytes: 0 }
    }

    /// Creates the choice of an algorithm that the table has no row for.
    pub(super) fn forced(device: DeviceKind, algorithm: Algorithm) -> Self {
        match device {
            DeviceKind::Host => Self::of_host(algorithm),
            DeviceKind::Cuda => Self::cuda(algorithm, GPU_UNPLANNED_BLOCKS, MAX_THREADS),
        }
    }

    /// Checks the ranges of the fields, and returns what is out of range.
    pub(super) fn check(&self, device: DeviceKind) -> Result<(), String> {
        let within = |what: &str, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(format!("{what} = {value} is not within {least} to {most}")),
        };
        if self.algorithm.is_nvls() {
            return Err(format!("{} cannot be in a table: Order::Any selects it", self.algorithm));
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

/// Describes the choice: `"one-shot-push, up to 64 blocks of 512 threads"`.
impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.algorithm, self.grid())
    }
}

/// Describes the grid of a [`Choice`] by `Display`.
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
            _ => write!(f, "a block for {}, up to {blocks}", format_size(block_bytes))?,
        }
        write!(f, ", in pieces of {} a block", format_size(piece_bytes))
    }
}

/// Choice up to a message size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    /// Largest message in bytes; `u64::MAX` in the last step.
    pub max_bytes: u64,
    /// Choice for these messages.
    pub choice: Choice,
}

/// Formats a size in the largest unit that is exact.
pub(super) fn format_size(bytes: u64) -> String {
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
