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

/// Defines the values of the settings: `name: type = parser;` for each.
macro_rules! settings {
    ($($setting:ident: $kind:ty = $parse:expr;)*) => {
        /// Values that the program or the environment has set.
        #[derive(Debug, Clone, Default)]
        pub(crate) struct Values {
            $(pub $setting: Option<$kind>,)*
        }

        impl Values {
            pub const NAMES: &'static [&'static str] = &[$(stringify!($setting)),*];

            /// Parses a value. `name` is its name in errors: that of the setting or of a variable.
            pub(super) fn parse(&mut self, setting: &str, name: &'static str, text: &std::ffi::OsStr) -> Result<()> {
                $(if setting == stringify!($setting) {
                    let parse: fn(&'static str, &std::ffi::OsStr) -> Result<$kind> = $parse;
                    self.$setting = Some(parse(name, text)?);
                })*
                Ok(())
            }

            /// Returns the value of a setting, if it is set.
            pub fn get(&self, setting: &str) -> Option<String> {
                $(if setting == stringify!($setting) {
                    return self.$setting.as_ref().map(Text::text);
                })*
                None
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
pub use generated::{Bind, Flight, Order, Wait};
pub(crate) use generated::{Values, JOIN_TIMEOUT_VARIABLE, ROWS, TUNING_VARIABLE};

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
    // A number that is too small for a float is parsed as 0. It is refused, because 0 would remove the limit.
    let digits = text.split(['e', 'E']).next().unwrap_or_default();
    let is_zero = !digits.contains(|digit| matches!(digit, '1'..='9'));
    match seconds.map(|seconds| (seconds, Duration::try_from_secs_f64(seconds))) {
        Some((0.0, _)) if is_zero => Ok(None),
        // A duration that rounds to 0 is a very short limit, not "no limit".
        Some((seconds, Ok(limit))) if seconds != 0.0 => Ok(Some(limit.max(Duration::from_nanos(1)))),
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

/// Accepts any path.
fn path(_name: &'static str, text: &OsStr) -> Result<PathBuf> {
    Ok(PathBuf::from(text))
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

/// Facts about a setting.
pub(crate) struct Row {
    pub name: &'static str,
    /// Environment variable, if there is one.
    pub variable: Option<&'static str>,
    /// Whether every communicator reads the variable.
    pub is_read: bool,
    /// Some(true): only GPUs have it. Some(false): only CPUs have it.
    pub is_cuda: Option<bool>,
    /// Whether ranks compare it; settings of one device are compared by the device.
    pub is_compared: bool,
    /// Text of the default value; empty if the default is not a fixed value.
    pub default: &'static str,
    /// A value other than the default.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    pub other: &'static str,
    /// Whether the parser refuses some texts.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    pub refuses: bool,
}

impl Values {
    /// Sets a setting by its name.
    pub fn set(&mut self, name: &str, text: &OsStr) -> Result<()> {
        let row = ROWS.iter().find(|row| row.name == name);
        let row = row.ok_or_else(|| invalid("setting", name, generated::NAMES))?;
        self.parse(row.name, row.name, text)
    }

    /// Fills in settings that are not set from the environment.
    pub fn or_environment(mut self) -> Result<Self> {
        for Row { name, variable: known, .. } in ROWS.iter().filter(|row| row.is_read) {
            let set = known.and_then(|known| Some((known, variable(known)?)));
            if let (None, Some((known, text))) = (self.get(name), set) {
                self.parse(name, known, &text)?;
            }
        }
        Ok(self)
    }

    /// Refuses settings that the device does not have, unless they have their defaults.
    pub fn check_device(&self, is_cuda: bool) -> Result<()> {
        for row in ROWS.iter().filter(|row| row.is_cuda == Some(!is_cuda)) {
            if let Some(text) = self.get(row.name).filter(|text| text != row.default) {
                let reason = match is_cuda {
                    true => "it is a setting of CPUs, and the device is cuda",
                    false => "it is a setting of GPUs, and the device is cpu",
                };
                return Err(invalid(row.name, &text, reason));
            }
        }
        Ok(())
    }

    /// Returns the names and values of the settings that ranks compare.
    pub fn compared(&self) -> Vec<(&'static str, String)> {
        let value = |row: &Row| self.get(row.name).unwrap_or_else(|| "automatic".into());
        ROWS.iter().filter(|row| row.is_compared).map(|row| (row.name, value(row))).collect()
    }
}

#[cfg(test)]
mod tests;
