//! Tuning files: a table with the facts of the machine that it was measured on.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::text::{parse, write, AGAIN};
use super::{Machine, Table};
use crate::catalogue::settings::{variable, TUNING_VARIABLE};
use crate::error::{Error, Result};

/// Stands for the built-in plan instead of a file's path: without a look at files or a measurement.
pub(crate) const BUILT_IN: &str = "built-in";

const MAX_FILE_BYTES: u64 = 64 << 10;

/// A [`Table`] and the [`Machine`] that it was measured on: what a tuning file holds. `Display` writes one.
///
/// A file is TOML. `device` is `"host"` or `"cuda"`; on the host, rows have no `links` and no `threads`, on CUDA no
/// `block_bytes` and no `piece_bytes`. A row is for allreduces, or for the `calls` that it names, and then has no `algorithm`; `ranks` are the first and the last world size of a row, `up_to` is its largest message in
/// bytes; a row without it takes every larger one. Every world size and link must have rows
/// of allreduces, with increasing sizes.
///
/// ```toml
/// format = 1
/// version = "0.1.0"
/// device = "cuda"
///
/// [machine]
/// gpu = "NVIDIA H100 80GB HBM3"
/// gpus = 8
/// link = "nvswitch"
/// driver = "12.8"
///
/// [[row]]
/// ranks = [2, 2]
/// links = ["nvswitch", "nvlink-mesh"]
/// up_to = 2097152
/// algorithm = "one-shot-push"
/// blocks = 64
/// threads = 512
/// # ...
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// Where it was read.
    file: Option<String>,
    machine: Machine,
    table: Table,
}

impl Tuning {
    /// A table that was measured on this machine.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the two are of different devices.
    pub fn new(machine: Machine, table: Table) -> Result<Self> {
        if machine.device() != table.device() {
            let (theirs, ours) = (table.device().name(), machine.device().name());
            return Err(Error::InvalidSetting {
                name: "plan table",
                value: format!("a table of the device {theirs} for a machine described for {ours}"),
                expected: "both of one device",
            });
        }
        Ok(Self { file: None, machine, table })
    }

    /// Reads a file. Whether it is of this machine is seen when a communicator is made, or by [`Tuning::check`].
    ///
    /// # Errors
    ///
    /// [`Error::Tuning`] with the reason, and the line where there is one: no regular file, more than 64 KiB, no TOML, another
    /// format or version, a key that is unknown or missing, a value out of its range, a call that no row or more than one is
    /// for.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = open(path).map_err(|error| error.to_string());
        file.and_then(read)
            .and_then(|text| Self::from_text(&text, path))
            .map_err(|reason| Error::Tuning { file: path.display().to_string(), reason })
    }

    /// A file's text, or what is wrong with it.
    pub(super) fn from_text(text: &str, path: &Path) -> Result<Self, String> {
        let (machine, table) = parse(text)?;
        Ok(Self { file: Some(path.display().to_string()), machine, table })
    }

    /// Reads the file that the environment variable `FAST_ALLREDUCE_TUNING` names, if it is set and not empty. The value `built-in`
    /// is no file: it stands for the built-in plan, without a look at installed files and without a measurement.
    ///
    /// # Errors
    ///
    /// Those of [`Tuning::load`].
    pub fn from_env() -> Result<Option<Self>> {
        let path = variable(TUNING_VARIABLE).filter(|path| path != BUILT_IN);
        path.map(Self::load).transpose()
    }

    /// The path that it was read from.
    pub(super) fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Refuses to be used on another machine.
    ///
    /// # Errors
    ///
    /// [`Error::Tuning`] with the first fact that differs.
    pub fn check(&self, here: &Machine) -> Result<()> {
        let Some(difference) = self.machine.difference(here) else {
            return Ok(());
        };
        let file = self.file.clone().unwrap_or_else(|| "(none)".to_owned());
        let reason = format!("it was measured on another machine: {difference}; {AGAIN}");
        Err(Error::Tuning { file, reason })
    }

    /// The machine that it was measured on.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// What was found to be best.
    pub fn table(&self) -> &Table {
        &self.table
    }
}

/// As a file holds it.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&write(&self.machine, &self.table).map_err(|_| fmt::Error)?)
    }
}

/// Opens a file, and does not wait where it is a pipe.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// The text of a file that is one, and not too large.
pub(super) fn read(file: File) -> Result<String, String> {
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err("it has more than 64 KiB".to_owned());
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}
