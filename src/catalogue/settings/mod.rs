//! The settings of a communicator, generated from the table in the crate `catalogue/`, and how their values are read from text.

#[rustfmt::skip]
mod generated;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

#[cfg(feature = "cuda")]
pub use generated::Sharing;
#[cfg(test)]
pub(crate) use generated::ROWS;
pub use generated::{Bind, Order, Wait};
pub(crate) use generated::{Values, JOIN_TIMEOUT_VARIABLE, TUNING_VARIABLE};

use super::{invalid, Algorithm};
use crate::error::{Error, Result};

/// Where buffers are: `cpu`, `cuda:0`, ...
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DeviceId {
    /// In memory of the process.
    #[default]
    Cpu,
    /// In memory of the GPU with this ordinal. `cuda` is the first.
    Cuda(usize),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let place = match name.split_once(':') {
            None if name == "cpu" => Some(Self::Cpu),
            None if name == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", ordinal)) => ordinal.parse().ok().map(Self::Cuda),
            _ => None,
        };
        place.ok_or_else(|| invalid("device", name, "cpu, cuda or cuda:N"))
    }
}

/// The longest wait; `None` is no limit.
pub(crate) type Limit = Option<Duration>;

/// The value of an environment variable. An empty one counts as not set.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// 0 or 1.
fn switch(name: &'static str, text: &OsStr) -> Result<bool> {
    match text.as_encoded_bytes() {
        b"0" => Ok(false),
        b"1" => Ok(true),
        _ => Err(invalid(name, &text.to_string_lossy(), "0 or 1")),
    }
}

/// Seconds, of which 0 are no limit.
pub(crate) fn seconds(name: &'static str, text: &OsStr) -> Result<Limit> {
    let text = text.to_string_lossy();
    let seconds: Option<f64> = text.parse().ok();
    // A number that is too small for a float is parsed as 0. It is refused, because 0 would remove the limit.
    let digits = text.split(['e', 'E']).next().unwrap_or_default();
    let is_zero = !digits.contains(|digit| matches!(digit, '1'..='9'));
    match seconds.map(|seconds| (seconds, Duration::try_from_secs_f64(seconds))) {
        Some((0.0, _)) if is_zero => Ok(None),
        // Rounding must not make a limit 0, which is none.
        Some((seconds, Ok(limit))) if seconds != 0.0 => Ok(Some(limit.max(Duration::from_nanos(1)))),
        _ => Err(invalid(name, &text, "seconds, such as 2.5, or 0 for no limit")),
    }
}

/// A number of bytes, which a power of 1024 may follow.
fn bytes(name: &'static str, text: &OsStr) -> Result<usize> {
    let text = text.to_string_lossy();
    let shift = match text.chars().next_back() {
        Some('k' | 'K') => 10,
        Some('m' | 'M') => 20,
        Some('g' | 'G') => 30,
        _ => 0,
    };
    let digits = if shift == 0 { &text } else { &text[..text.len() - 1] };
    let number = digits.parse().ok().and_then(|number: usize| number.checked_mul(1 << shift));
    number.ok_or_else(|| invalid(name, &text, "a number of bytes, which K, M or G may follow"))
}

/// A number from 1 on.
fn count(name: &'static str, text: &OsStr, most: usize, expected: &'static str) -> Result<usize> {
    let text = text.to_string_lossy();
    let number = text.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| invalid(name, &text, expected))
}

/// A word of a type that names what it takes.
fn word<T: FromStr<Err = Error>>(name: &'static str, text: &OsStr) -> Result<T> {
    text.to_string_lossy().parse().map_err(|error| match error {
        Error::InvalidSetting { value, expected, .. } => Error::InvalidSetting { name, value, expected },
        error => error,
    })
}

/// Values as settings write them.
trait Text {
    fn text(&self) -> String;
}

impl Text for bool {
    fn text(&self) -> String {
        u8::from(*self).to_string()
    }
}

impl Text for Limit {
    fn text(&self) -> String {
        self.unwrap_or_default().as_secs_f64().to_string()
    }
}

impl Text for usize {
    fn text(&self) -> String {
        self.to_string()
    }
}

impl Text for Algorithm {
    fn text(&self) -> String {
        self.name().into()
    }
}

impl Text for PathBuf {
    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl Text for DeviceId {
    fn text(&self) -> String {
        self.to_string()
    }
}

/// Refuses a value of a setting that the device does not have, except its default.
fn of_device(is_cuda: bool, name: &'static str, value: Option<String>, default: &str) -> Result<()> {
    match value {
        Some(text) if text != default => Err(invalid(
            name,
            &text,
            match is_cuda {
                true => "it is a setting of GPUs, and the device is cpu",
                false => "it is a setting of CPUs, and the device is cuda",
            },
        )),
        _ => Ok(()),
    }
}

/// What tests know of a setting.
#[cfg(test)]
pub(crate) struct Row {
    pub name: &'static str,
    pub variable: Option<&'static str>,
    /// Whether every communicator reads the variable.
    pub is_read: bool,
    /// A value other than the default.
    pub other: &'static str,
    /// Whether there is text that is no value.
    pub refuses: bool,
    /// A device that does not have it.
    pub lacks: Option<DeviceId>,
}

#[cfg(test)]
mod tests;
