//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use std::path::PathBuf;

use super::{bytes, count, path, seconds, switch, word, DeviceId, Limit, Row, Text};
use crate::catalogue::{invalid, Algorithm};
use crate::error::{Error, Result};

/// Order in which the elements of the ranks are added: [`Builder::order`](crate::Builder::order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Order {
    /// Rank order, by direct algorithms: the same bits on every rank, in every run and on every device. The plan uses
    /// only direct [`Algorithm`](crate::Algorithm)s. [`Builder::algorithm`](crate::Builder::algorithm) can still
    /// force another one.
    #[default]
    Fixed,
    /// Any order: the plan may also use ring, halving-doubling and in-switch reductions (NVLS), where they are
    /// expected to be faster. All ranks still get the same bits. Sums of floats may have other bits than those of
    /// direct algorithms; those of in-switch reductions may also differ from run to run.
    Any,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Fixed, Self::Any];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Any => "any",
        }
    }
}

words!(Order, "order", "one of fixed, any");

/// Calls whose times a rank records: [`Builder::flight`](crate::Builder::flight).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Flight {
    /// Every 127th call, and each that waits for more than some tens of microseconds.
    #[default]
    Sampled,
    /// All calls: it reads a clock twice in each.
    All,
    /// None.
    Off,
}

impl Flight {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sampled, Self::All, Self::Off];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sampled => "sampled",
            Self::All => "all",
            Self::Off => "off",
        }
    }
}

words!(Flight, "flight", "one of sampled, all, off");

/// What a rank does while it waits for another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wait {
    /// [`Wait::Yield`] if this rank's threads have to share cores with other ranks, else [`Wait::Spin`].
    #[default]
    Auto,
    /// Polls for some tens of microseconds before it yields its core.
    Spin,
    /// Polls a few times, then yields its core to other threads.
    Yield,
}

impl Wait {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Spin, Self::Yield];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Spin => "spin",
            Self::Yield => "yield",
        }
    }
}

words!(Wait, "wait", "one of auto, spin, yield");

/// Binding of each rank's threads to cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Bind {
    /// No binding: threads run wherever the process may.
    #[default]
    None,
    /// Each thread to a core; they share cores if there are too few.
    Core,
    /// Each rank to the cores of a NUMA node.
    Numa,
}

impl Bind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Core, Self::Numa];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Core => "core",
            Self::Numa => "numa",
        }
    }
}

words!(Bind, "bind", "one of none, core, numa");

/// Kind of GPU memory. It decides how other processes map an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sharing {
    /// Addresses: the ranks are threads of one process. Virtual memory management where the device has it.
    Pointers,
    /// Virtual memory management: a POSIX file descriptor, passed over a Unix socket.
    Descriptor,
    /// Virtual memory management: a fabric handle, for ranks on several machines of one NVLink domain.
    Fabric,
    /// Pinned host memory, for GPUs that cannot access each other's memory.
    Host,
    /// CUDA IPC: `cuIpcGetMemHandle`, with an offset from the base of the allocation.
    Ipc,
}

impl Sharing {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Pointers, Self::Descriptor, Self::Fabric, Self::Host, Self::Ipc];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pointers => "pointers",
            Self::Descriptor => "descriptor",
            Self::Fabric => "fabric",
            Self::Host => "host",
            Self::Ipc => "ipc",
        }
    }
}

words!(Sharing, "sharing", "one of pointers, descriptor, fabric, host, ipc");

/// Environment variable of `join_timeout`.
pub(crate) const JOIN_TIMEOUT_VARIABLE: &str = "FAST_ALLREDUCE_JOIN_TIMEOUT";

/// Environment variable of `tuning`.
pub(crate) const TUNING_VARIABLE: &str = "FAST_ALLREDUCE_TUNING";

settings! {
    device: DeviceId = word;
    timeout: Limit = seconds;
    first_call_timeout: Limit = seconds;
    join_timeout: Limit = seconds;
    max_bytes: usize = bytes;
    algorithm: Algorithm = word;
    order: Order = word;
    check: bool = switch;
    calibrate: bool = switch;
    direct_reads: bool = switch;
    flight: Flight = word;
    tuning: PathBuf = path;
    workers: usize = |name, text| count(name, text, 64, "a number from 1 to 64");
    wait: Wait = word;
    stream_from: usize = bytes;
    bind: Bind = word;
    max_blocks: usize = |name, text| count(name, text, usize::MAX, "a positive number");
    one_at_a_time: bool = switch;
    programmatic_launch: bool = switch;
    sharing: Sharing = word;
}

pub(super) const NAMES: &str = "one of device, timeout, first_call_timeout, join_timeout, max_bytes, algorithm, order, \
    check, calibrate, direct_reads, flight, tuning, workers, wait, stream_from, bind, max_blocks, one_at_a_time, \
    programmatic_launch, sharing";

/// Facts about all settings.
pub(crate) const ROWS: [Row; 20] = [
    Row { name: "device", variable: None, is_read: false, is_cuda: None, is_compared: false, default: "cpu",
        other: "cuda:1", refuses: true },
    Row { name: "timeout", variable: Some("FAST_ALLREDUCE_TIMEOUT"), is_read: true, is_cuda: None, is_compared: false,
        default: "", other: "2.5", refuses: true },
    Row { name: "first_call_timeout", variable: None, is_read: false, is_cuda: None, is_compared: false, default: "",
        other: "2.5", refuses: true },
    Row { name: "join_timeout", variable: Some("FAST_ALLREDUCE_JOIN_TIMEOUT"), is_read: false, is_cuda: None,
        is_compared: false, default: "", other: "2.5", refuses: true },
    Row { name: "max_bytes", variable: None, is_read: false, is_cuda: None, is_compared: true, default: "",
        other: "65536", refuses: true },
    Row { name: "algorithm", variable: Some("FAST_ALLREDUCE_ALGO"), is_read: true, is_cuda: None, is_compared: true,
        default: "", other: "one-shot-pull", refuses: true },
    Row { name: "order", variable: Some("FAST_ALLREDUCE_ORDER"), is_read: true, is_cuda: None, is_compared: true,
        default: "fixed", other: "any", refuses: true },
    Row { name: "check", variable: Some("FAST_ALLREDUCE_CHECK"), is_read: true, is_cuda: None, is_compared: true,
        default: "", other: "1", refuses: true },
    Row { name: "calibrate", variable: Some("FAST_ALLREDUCE_CALIBRATE"), is_read: true, is_cuda: None,
        is_compared: false, default: "1", other: "0", refuses: true },
    Row { name: "direct_reads", variable: Some("FAST_ALLREDUCE_DIRECT_READS"), is_read: true, is_cuda: None,
        is_compared: false, default: "", other: "1", refuses: true },
    Row { name: "flight", variable: Some("FAST_ALLREDUCE_FLIGHT"), is_read: true, is_cuda: None, is_compared: false,
        default: "sampled", other: "off", refuses: true },
    Row { name: "tuning", variable: Some("FAST_ALLREDUCE_TUNING"), is_read: false, is_cuda: None, is_compared: false,
        default: "", other: "built-in", refuses: false },
    Row { name: "workers", variable: None, is_read: false, is_cuda: Some(false), is_compared: false, default: "1",
        other: "2", refuses: true },
    Row { name: "wait", variable: None, is_read: false, is_cuda: Some(false), is_compared: false, default: "auto",
        other: "yield", refuses: true },
    Row { name: "stream_from", variable: Some("FAST_ALLREDUCE_STREAM_FROM"), is_read: true, is_cuda: Some(false),
        is_compared: false, default: "", other: "65536", refuses: true },
    Row { name: "bind", variable: None, is_read: false, is_cuda: Some(false), is_compared: false, default: "none",
        other: "numa", refuses: true },
    Row { name: "max_blocks", variable: None, is_read: false, is_cuda: Some(true), is_compared: false, default: "",
        other: "2", refuses: true },
    Row { name: "one_at_a_time", variable: None, is_read: false, is_cuda: Some(true), is_compared: false,
        default: "0", other: "1", refuses: true },
    Row { name: "programmatic_launch", variable: None, is_read: false, is_cuda: Some(true), is_compared: false,
        default: "0", other: "1", refuses: true },
    Row { name: "sharing", variable: None, is_read: false, is_cuda: Some(true), is_compared: false, default: "",
        other: "ipc", refuses: true },
];
