//! Settings of the communicators that a command makes.

use std::time::Duration;

use clap::Args;
use fast_allreduce::{Settings, Wait};

use super::{values, DeviceName, Placement};
use crate::failure::Failure;

/// Settings that have an option of their own.
const OPTIONS: [(&str, &str); 5] = [
    ("device", "--device"),
    ("timeout", "--timeout"),
    ("join_timeout", "--join-timeout"),
    ("algorithm", "--algo"),
    ("bind", "--bind"),
];

/// Options of commands that make communicators.
#[derive(Args, Debug)]
pub struct Given {
    /// A setting of the communicators, such as workers=2 or order=any; may be given several times. docs/tuning.md has the table
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    pub settings: Vec<(String, String)>,
    /// Longest wait for another rank
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds)]
    pub timeout: Duration,
}

impl Given {
    /// All settings, checked.
    pub fn settings(&self, device: DeviceName, placement: &Placement) -> Result<Settings, Failure> {
        let mut settings = Settings::new();
        settings.set("timeout", self.timeout.as_secs_f64().to_string())?;
        match device {
            DeviceName::Host => settings.set("bind", placement.bind.name())?,
            DeviceName::Cuda => settings.set("device", "cuda")?,
        }
        for (name, value) in &self.settings {
            settings.set(name, value)?;
        }
        settings.check()?;
        Ok(settings)
    }

    /// What a waiting rank is to do with its core.
    pub fn wait(&self) -> Wait {
        self.last("wait").unwrap_or_default()
    }

    /// Threads of each rank on the host.
    pub fn workers(&self) -> usize {
        self.last("workers").unwrap_or(1)
    }

    /// What `--set` says of a setting.
    fn last<T: std::str::FromStr>(&self, wanted: &str) -> Option<T> {
        self.settings.iter().rev().find(|(name, _)| name == wanted)?.1.parse().ok()
    }
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("a name, = and a value")?;
    if let Some((_, option)) = OPTIONS.iter().find(|(own, _)| *own == name) {
        return Err(format!("{name} has an option of its own, {option}"));
    }
    Settings::new().set(name, value).map_err(|error| error.to_string())?;
    Ok((name.into(), value.into()))
}
