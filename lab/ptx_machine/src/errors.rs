//! Errors of modules and launches, with their place.

use std::fmt;

/// Why a module cannot be loaded. None of it runs then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
pub struct LoadError {
    /// Line of the text, from 1.
    pub line: u32,
    /// What is unknown or wrong.
    pub what: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, what: impl Into<String>) -> Self {
        Self { line, what: what.into() }
    }
}

/// Result of loading a module.
pub type LoadResult<T> = Result<T, LoadError>;

/// An error that a GPU would trap on or compute wrongly, or that makes a launch impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// An access (vector or scalar) at an address that is not a multiple of its size.
    Misaligned = 1,
    /// An access outside of live allocations, or to memory of a device without peer access.
    IllegalAddress = 2,
    /// A write to a parameter or a constant.
    ReadOnly = 3,
    /// A register was read before it was written.
    UndefinedRegister = 4,
    /// A word of shared memory was read before it was written.
    UndefinedShared = 5,
    /// Threads wait at a sync that other threads never reach.
    Sync = 6,
    /// The launch did not end within its time limit.
    Limit = 7,
    /// `trap`, or a path that nvcc considers unreachable.
    Trap = 8,
    /// Two threads access a location, at least one access is a write, and nothing orders them.
    Race = 9,
    /// The launch exceeds a limit of the kernel, or does not match its parameters.
    Launch = 10,
    /// An access to the shared memory of a block of the cluster that has ended.
    EndedBlock = 11,
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
            Self::EndedBlock => "access to shared memory of a block that has ended",
        })
    }
}

/// A failed launch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{fault} in {kernel}: {what}")]
pub struct LaunchError {
    /// Kind of failure.
    pub fault: Fault,
    /// Name of the kernel.
    pub kernel: String,
    /// Details: PTX and source line, block and thread, addresses; or where each warp waits.
    pub what: String,
}
