//! Settings of a communicator, generated from the table in the crate `catalogue/`, and parsers of their values.

/// Implements parsing and formatting of a generated enum of words.
macro_rules! words {
    ($name:ident, $setting:literal, $expected:literal) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self> {
                let found = Self::ALL.into_iter().find(|one| one.name() == name);
                found.ok_or_else(|| invalid($setting, name, $expected))
            }
        }

        impl Text for $name {
            fn text(&self) -> String {
                self.name().into()
            }
        }
    };
}

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

/// Device that buffers are on: `cpu`, `cuda:0`, ...
///
/// ```
/// use fast_allreduce::DeviceId;
///
/// assert_eq!("cuda:1".parse(), Ok(DeviceId::Cuda(1)));
/// assert_eq!(DeviceId::default().to_string(), "cpu");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DeviceId {
    /// CPU: buffers are in host memory.
    #[default]
    Cpu,
    /// GPU with this ordinal. The name `cuda` means `cuda:0`.
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
        let device = match name.split_once(':') {
            None if name == "cpu" => Some(Self::Cpu),
            None if name == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", ordinal)) => ordinal.parse().ok().map(Self::Cuda),
            _ => None,
        };
        device.ok_or_else(|| invalid("device", name, "cpu, cuda or cuda:N"))
    }
}

/// Time limit of a wait; `None` for no limit.
pub(crate) type Limit = Option<Duration>;

/// Returns the value of an environment variable. An empty variable counts as not set.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Parses 0 or 1.
fn switch(name: &'static str, text: &OsStr) -> Result<bool> {
    match text.as_encoded_bytes() {
        b"0" => Ok(false),
        b"1" => Ok(true),
        _ => Err(invalid(name, &text.to_string_lossy(), "0 or 1")),
    }
}

/// Parses seconds; 0 means no limit.
pub(crate) fn seconds(name: &'static str, text: &OsStr) -> Result<Limit> {
    let text = text.to_string_lossy();
    let seconds: Option<f64> = text.parse().ok();
    match seconds.map(|seconds| (seconds, Duration::try_from_secs_f64(seconds))) {
        Some((0.0, _)) => Ok(None),
        // A value that rounds to zero is a very short limit, not "no limit".
        Some((_, Ok(limit))) => Ok(Some(limit.max(Duration::from_nanos(1)))),
        _ => Err(invalid(name, &text, "seconds, such as 2.5, or 0 for no limit")),
    }
}

/// Parses a number of bytes with an optional suffix K, M or G.
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
    number.ok_or_else(|| invalid(name, &text, "a number of bytes, with an optional suffix K, M or G"))
}

/// Parses a number from 1 to `most`.
fn count(name: &'static str, text: &OsStr, most: usize, expected: &'static str) -> Result<usize> {
    let text = text.to_string_lossy();
    let number = text.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| invalid(name, &text, expected))
}

/// Parses a word of a type whose errors list the words.
fn word<T: FromStr<Err = Error>>(name: &'static str, text: &OsStr) -> Result<T> {
    text.to_string_lossy().parse().map_err(|error| match error {
        Error::InvalidSetting { value, expected, .. } => Error::InvalidSetting { name, value, expected },
        error => error,
    })
}

/// Text of a value, which its parser accepts.
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

/// Refuses a setting that the device does not have, unless it has its default.
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

/// Facts about a setting for tests.
#[cfg(test)]
pub(crate) struct Row {
    pub name: &'static str,
    pub variable: Option<&'static str>,
    /// Whether every communicator reads the variable.
    pub is_read: bool,
    /// A value other than the default.
    pub other: &'static str,
    /// Whether some texts are not values.
    pub refuses: bool,
    /// A device that does not have the setting.
    pub lacks: Option<DeviceId>,
}

#[cfg(test)]
mod tests;
