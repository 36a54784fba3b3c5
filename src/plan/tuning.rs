//! Tuning files: a table with the facts of the machine that it was measured on.

use std::fmt;
use std::io::Read as _;
use std::path::Path;

use super::text::{parse, write, AGAIN};
use super::{Machine, Table};
use crate::error::{Error, Result};

/// Names a tuning file where the program does not.
const VARIABLE: &str = "FAST_ALLREDUCE_TUNING";

const MAX_FILE_BYTES: u64 = 64 << 10;

/// A [`Table`] and the [`Machine`] that it was measured on: what a tuning file holds. `Display` writes one.
///
/// A file is TOML. `device` is `"host"` or `"cuda"`; on the host, rows have no `links` and no `threads`, on CUDA no
/// `block_bytes` and no `piece_bytes`. `ranks` are the first and the last world size of a row, `up_to` is its largest message in
/// bytes; a row without it takes every larger one. Every world size and link must have rows, with increasing sizes.
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
        let file = path.display().to_string();
        match read(path).and_then(|text| parse(&text)) {
            Ok((machine, table)) => Ok(Self { file: Some(file), machine, table }),
            Err(reason) => Err(Error::Tuning { file, reason }),
        }
    }

    /// Reads the file that the environment variable `FAST_ALLREDUCE_TUNING` names, if it is set and not empty.
    ///
    /// # Errors
    ///
    /// Those of [`Tuning::load`].
    pub fn from_env() -> Result<Option<Self>> {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
        path.map(Self::load).transpose()
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

/// The text of a file that is one, and not too large.
fn read(path: &Path) -> Result<String, String> {
    // A pipe would be waited for.
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err("it has more than 64 KiB".to_owned());
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}
