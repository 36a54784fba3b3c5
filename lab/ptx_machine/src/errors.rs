//! What can be wrong with a module or a launch, in words that name the place.

use std::fmt;

/// Why a module cannot be loaded. Nothing of it runs then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
pub struct LoadError {
    /// Of the text, from 1.
    pub line: u32,
    /// What is not known, or not right.
    pub what: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

/// Of loading a module.
pub type LoadResult<T> = Result<T, LoadError>;

/// What a GPU would trap on or get wrong, or what makes a launch impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A vector access, or a scalar one, at an address that is no multiple of its size.
    Misaligned = 1,
    /// Outside of the live allocations, or to those of a device without peer access.
    IllegalAddress = 2,
    /// A write to a parameter or a constant.
    ReadOnly = 3,
    /// A register was read before it was written.
    UndefinedRegister = 4,
    /// A word of shared memory was read before it was written.
    UndefinedShared = 5,
    /// Threads wait at a sync that others never reach.
    Sync = 6,
    /// The launch did not end within its limit.
    Limit = 7,
    /// `trap`, or a path that nvcc calls unreachable.
    Trap = 8,
    /// Two threads access a location, at least one writes, and nothing orders them.
    Race = 9,
    /// The launch asks for more than a block or a kernel has.
    Launch = 10,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Misaligned => "misaligned access",
            Self::IllegalAddress => "illegal address",
            Self::ReadOnly => "write to read-only memory",
            Self::UndefinedRegister => "register read before it was written",
            Self::UndefinedShared => "shared memory read before it was written",
            Self::Sync => "a sync that not all threads reach",
            Self::Limit => "the launch did not end within its limit",
            Self::Trap => "trap",
            Self::Race => "data race",
            Self::Launch => "invalid launch",
        })
    }
}

/// A launch that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault} in {kernel}: {what}")]
pub struct LaunchError {
    /// What kind of failure it is.
    pub fault: Fault,
    /// The kernel's name.
    pub kernel: String,
    /// The rest: PTX and source line, block and thread, addresses; where each warp waits.
    pub what: String,
}
