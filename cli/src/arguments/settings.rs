//! Settings of the communicators that a command makes.

use std::time::Duration;

use clap::Args;
use fast_allreduce::{Settings, Wait};

use super::{values, DeviceName, LaunchOptions};
use crate::failure::Failure;

/// Options of commands that make communicators.
#[derive(Args, Debug)]
pub struct CommunicatorOptions {
    /// A setting of the communicators, such as workers=2 or order=any; may be given several times. docs/tuning.md
    /// lists all settings
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    pub settings: Vec<Setting>,
    /// Longest wait for another rank
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds)]
    pub timeout: Duration,
}

impl CommunicatorOptions {
    /// Returns all settings, checked.
    pub fn settings(&self, device: DeviceName, launch: &LaunchOptions) -> Result<Settings, Failure> {
        let mut settings = Settings::new();
        settings.set("timeout", self.timeout.as_secs_f64().to_string())?;
        match device {
            DeviceName::Host => settings.set("bind", launch.bind.name())?,
            DeviceName::Cuda => settings.set("device", "cuda")?,
        }
        for (name, value) in &self.settings {
            settings.set(name, value)?;
        }
        settings.check()?;
        Ok(settings)
    }

    /// Returns how a waiting rank uses its core.
    pub fn wait(&self) -> Wait {
        self.last("wait").unwrap_or_default()
    }

    /// Returns the threads of each rank on the host.
    pub fn workers(&self) -> usize {
        self.last("workers").unwrap_or(1)
    }

    /// Returns the last value that `--set` gives to a setting.
    fn last<T: std::str::FromStr>(&self, wanted: &str) -> Option<T> {
        self.settings.iter().rev().find(|(name, _)| name == wanted)?.1.parse().ok()
    }
}

/// A name and a value of `--set`.
pub type Setting = (String, String);

/// Reads a setting of `bench`, `compare` or `tune`.
fn setting(text: &str) -> Result<Setting, String> {
    const OPTIONS: [(&str, &str); 5] = [
        ("device", "has an option of its own, --device"),
        ("timeout", "has an option of its own, --timeout"),
        ("join_timeout", "has an option of its own, --join-timeout"),
        ("algorithm", "has an option of its own, --algo"),
        ("bind", "has an option of its own, --bind"),
    ];
    parse(text, &OPTIONS)
}

/// Reads a setting of `soak`.
pub(super) fn soak_setting(text: &str) -> Result<Setting, String> {
    parse(text, &[("device", "is always that of CPUs"), ("timeout", "has an option of its own, --timeout")])
}

/// Reads a setting of `gpu-check`.
pub(super) fn gpu_check_setting(text: &str) -> Result<Setting, String> {
    const CHOSEN: &str = "is chosen by the steps";
    parse(text, &[("device", CHOSEN), ("algorithm", CHOSEN), ("sharing", CHOSEN), ("max_bytes", CHOSEN)])
}

fn parse(text: &str, refused: &[(&str, &str)]) -> Result<Setting, String> {
    let (name, value) = text.split_once('=').ok_or("a name, = and a value")?;
    if let Some((_, reason)) = refused.iter().find(|(refused, _)| *refused == name) {
        return Err(format!("{name} {reason}"));
    }
    Settings::new().set(name, value).map_err(|error| error.to_string())?;
    Ok((name.into(), value.into()))
}
