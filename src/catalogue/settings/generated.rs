//! Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::{bytes, count, of_device, seconds, switch, variable, word, DeviceId, Limit, Text};
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

/// What a rank does while it waits for another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wait {
    /// [`Wait::Spin`] if each rank can have its own core, else [`Wait::Yield`].
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
    /// Each thread to its own core.
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
    /// Plain pointers: the ranks are threads of one process.
    Pointers,
    /// Virtual memory management: a POSIX file descriptor, passed over a Unix socket.
    Descriptor,
    /// CUDA IPC: `cuIpcGetMemHandle`, with an offset from the base of the allocation.
    Ipc,
}

impl Sharing {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Pointers, Self::Descriptor, Self::Ipc];

    /// Returns the name in settings.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pointers => "pointers",
            Self::Descriptor => "descriptor",
            Self::Ipc => "ipc",
        }
    }
}

words!(Sharing, "sharing", "one of pointers, descriptor, ipc");

/// Environment variable of `join_timeout`.
pub(crate) const JOIN_TIMEOUT_VARIABLE: &str = "FAST_ALLREDUCE_JOIN_TIMEOUT";

/// Environment variable of `tuning`.
pub(crate) const TUNING_VARIABLE: &str = "FAST_ALLREDUCE_TUNING";

/// Values that the program or the environment has set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Values {
    pub device: Option<DeviceId>,
    pub timeout: Option<Limit>,
    pub first_call_timeout: Option<Limit>,
    pub join_timeout: Option<Limit>,
    pub max_bytes: Option<usize>,
    pub algorithm: Option<Algorithm>,
    pub order: Option<Order>,
    pub check: Option<bool>,
    pub calibrate: Option<bool>,
    pub direct_reads: Option<bool>,
    pub tuning: Option<PathBuf>,
    pub workers: Option<usize>,
    pub wait: Option<Wait>,
    pub bind: Option<Bind>,
    pub max_blocks: Option<usize>,
    pub one_at_a_time: Option<bool>,
    pub programmatic_launch: Option<bool>,
    pub sharing: Option<Sharing>,
}

impl Values {
    pub const NAMES: &'static [&'static str] = &["device", "timeout", "first_call_timeout", "join_timeout",
        "max_bytes", "algorithm", "order", "check", "calibrate", "direct_reads", "tuning", "workers", "wait", "bind",
        "max_blocks", "one_at_a_time", "programmatic_launch", "sharing"];

    /// Sets a setting by its name.
    pub fn set(&mut self, name: &str, text: &OsStr) -> Result<()> {
        match name {
            "device" => self.device = Some(word::<DeviceId>("device", text)?),
            "timeout" => self.timeout = Some(seconds("timeout", text)?),
            "first_call_timeout" => self.first_call_timeout = Some(seconds("first_call_timeout", text)?),
            "join_timeout" => self.join_timeout = Some(seconds("join_timeout", text)?),
            "max_bytes" => self.max_bytes = Some(bytes("max_bytes", text)?),
            "algorithm" => self.algorithm = Some(word::<Algorithm>("algorithm", text)?),
            "order" => self.order = Some(word::<Order>("order", text)?),
            "check" => self.check = Some(switch("check", text)?),
            "calibrate" => self.calibrate = Some(switch("calibrate", text)?),
            "direct_reads" => self.direct_reads = Some(switch("direct_reads", text)?),
            "tuning" => self.tuning = Some(Ok::<_, Error>(PathBuf::from(text))?),
            "workers" => self.workers = Some(count("workers", text, 64, "a number from 1 to 64")?),
            "wait" => self.wait = Some(word::<Wait>("wait", text)?),
            "bind" => self.bind = Some(word::<Bind>("bind", text)?),
            "max_blocks" => self.max_blocks = Some(count("max_blocks", text, usize::MAX, "a positive number")?),
            "one_at_a_time" => self.one_at_a_time = Some(switch("one_at_a_time", text)?),
            "programmatic_launch" => self.programmatic_launch = Some(switch("programmatic_launch", text)?),
            "sharing" => self.sharing = Some(word::<Sharing>("sharing", text)?),
            _ => return Err(invalid("setting", name,
                "one of device, timeout, first_call_timeout, join_timeout, max_bytes, algorithm, order, check, \
                calibrate, direct_reads, tuning, workers, wait, bind, max_blocks, one_at_a_time, programmatic_launch, \
                sharing")),
        }
        Ok(())
    }

    /// Returns the value of a setting, if it is set.
    pub fn get(&self, name: &str) -> Option<String> {
        match name {
            "device" => self.device.as_ref().map(Text::text),
            "timeout" => self.timeout.as_ref().map(Text::text),
            "first_call_timeout" => self.first_call_timeout.as_ref().map(Text::text),
            "join_timeout" => self.join_timeout.as_ref().map(Text::text),
            "max_bytes" => self.max_bytes.as_ref().map(Text::text),
            "algorithm" => self.algorithm.as_ref().map(Text::text),
            "order" => self.order.as_ref().map(Text::text),
            "check" => self.check.as_ref().map(Text::text),
            "calibrate" => self.calibrate.as_ref().map(Text::text),
            "direct_reads" => self.direct_reads.as_ref().map(Text::text),
            "tuning" => self.tuning.as_ref().map(Text::text),
            "workers" => self.workers.as_ref().map(Text::text),
            "wait" => self.wait.as_ref().map(Text::text),
            "bind" => self.bind.as_ref().map(Text::text),
            "max_blocks" => self.max_blocks.as_ref().map(Text::text),
            "one_at_a_time" => self.one_at_a_time.as_ref().map(Text::text),
            "programmatic_launch" => self.programmatic_launch.as_ref().map(Text::text),
            "sharing" => self.sharing.as_ref().map(Text::text),
            _ => None,
        }
    }

    /// Fills in settings that are not set from the environment.
    pub fn or_environment(mut self) -> Result<Self> {
        if let (None, Some(text)) = (&self.timeout, variable("FAST_ALLREDUCE_TIMEOUT")) {
            self.timeout = Some(seconds("FAST_ALLREDUCE_TIMEOUT", &text)?);
        }
        if let (None, Some(text)) = (&self.algorithm, variable("FAST_ALLREDUCE_ALGO")) {
            self.algorithm = Some(word::<Algorithm>("FAST_ALLREDUCE_ALGO", &text)?);
        }
        if let (None, Some(text)) = (&self.order, variable("FAST_ALLREDUCE_ORDER")) {
            self.order = Some(word::<Order>("FAST_ALLREDUCE_ORDER", &text)?);
        }
        if let (None, Some(text)) = (&self.check, variable("FAST_ALLREDUCE_CHECK")) {
            self.check = Some(switch("FAST_ALLREDUCE_CHECK", &text)?);
        }
        if let (None, Some(text)) = (&self.calibrate, variable("FAST_ALLREDUCE_CALIBRATE")) {
            self.calibrate = Some(switch("FAST_ALLREDUCE_CALIBRATE", &text)?);
        }
        if let (None, Some(text)) = (&self.direct_reads, variable("FAST_ALLREDUCE_DIRECT_READS")) {
            self.direct_reads = Some(switch("FAST_ALLREDUCE_DIRECT_READS", &text)?);
        }
        Ok(self)
    }

    /// Refuses settings that the device does not have, unless they have their defaults.
    pub fn check_device(&self, is_cuda: bool) -> Result<()> {
        match is_cuda {
            true => {
                of_device(false, "workers", self.get("workers"), "1")?;
                of_device(false, "wait", self.get("wait"), "auto")?;
                of_device(false, "bind", self.get("bind"), "none")?;
            }
            false => {
                of_device(true, "max_blocks", self.get("max_blocks"), "")?;
                of_device(true, "one_at_a_time", self.get("one_at_a_time"), "0")?;
                of_device(true, "programmatic_launch", self.get("programmatic_launch"), "0")?;
                of_device(true, "sharing", self.get("sharing"), "")?;
            }
        }
        Ok(())
    }

    /// Returns the names and values of the settings that ranks compare.
    pub fn compared(&self) -> Vec<(&'static str, String)> {
        vec![
            ("max_bytes", self.get("max_bytes").unwrap_or_else(|| "automatic".into())),
            ("algorithm", self.get("algorithm").unwrap_or_else(|| "automatic".into())),
            ("order", self.get("order").unwrap_or_else(|| "automatic".into())),
            ("check", self.get("check").unwrap_or_else(|| "automatic".into())),
        ]
    }
}

/// All settings, for tests.
#[cfg(test)]
pub(crate) const ROWS: [super::Row; 18] = [
    super::Row { name: "device", variable: None, is_read: false, other: "cuda:1", refuses: true, lacks: None },
    super::Row { name: "timeout", variable: Some("FAST_ALLREDUCE_TIMEOUT"), is_read: true, other: "2.5",
        refuses: true, lacks: None },
    super::Row { name: "first_call_timeout", variable: None, is_read: false, other: "2.5", refuses: true, lacks: None },
    super::Row { name: "join_timeout", variable: Some("FAST_ALLREDUCE_JOIN_TIMEOUT"), is_read: false, other: "2.5",
        refuses: true, lacks: None },
    super::Row { name: "max_bytes", variable: None, is_read: false, other: "65536", refuses: true, lacks: None },
    super::Row { name: "algorithm", variable: Some("FAST_ALLREDUCE_ALGO"), is_read: true, other: "one-shot-pull",
        refuses: true, lacks: None },
    super::Row { name: "order", variable: Some("FAST_ALLREDUCE_ORDER"), is_read: true, other: "any", refuses: true,
        lacks: None },
    super::Row { name: "check", variable: Some("FAST_ALLREDUCE_CHECK"), is_read: true, other: "1", refuses: true,
        lacks: None },
    super::Row { name: "calibrate", variable: Some("FAST_ALLREDUCE_CALIBRATE"), is_read: true, other: "0",
        refuses: true, lacks: None },
    super::Row { name: "direct_reads", variable: Some("FAST_ALLREDUCE_DIRECT_READS"), is_read: true, other: "1",
        refuses: true, lacks: None },
    super::Row { name: "tuning", variable: Some("FAST_ALLREDUCE_TUNING"), is_read: false, other: "built-in",
        refuses: false, lacks: None },
    super::Row { name: "workers", variable: None, is_read: false, other: "2", refuses: true,
        lacks: Some(DeviceId::Cuda(0)) },
    super::Row { name: "wait", variable: None, is_read: false, other: "yield", refuses: true,
        lacks: Some(DeviceId::Cuda(0)) },
    super::Row { name: "bind", variable: None, is_read: false, other: "numa", refuses: true,
        lacks: Some(DeviceId::Cuda(0)) },
    super::Row { name: "max_blocks", variable: None, is_read: false, other: "2", refuses: true,
        lacks: Some(DeviceId::Cpu) },
    super::Row { name: "one_at_a_time", variable: None, is_read: false, other: "1", refuses: true,
        lacks: Some(DeviceId::Cpu) },
    super::Row { name: "programmatic_launch", variable: None, is_read: false, other: "1", refuses: true,
        lacks: Some(DeviceId::Cpu) },
    super::Row { name: "sharing", variable: None, is_read: false, other: "ipc", refuses: true,
        lacks: Some(DeviceId::Cpu) },
];
