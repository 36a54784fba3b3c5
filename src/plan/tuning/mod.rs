//! Tuning files: a measured table and the facts of the machine that it was measured on.
//!
//! `text` has the format, `installed` the files in the user's cache.

pub(super) mod installed;
pub(super) mod text;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use self::text::{parse, write, TUNE_AGAIN};
use super::{Machine, Table};
use crate::catalogue::settings::{variable, TUNING_VARIABLE};
use crate::error::{Error, Result};

/// Value that can be set instead of a file's path: the built-in plan, without files or a measurement.
pub(crate) const BUILT_IN: &str = "built-in";

const MAX_FILE_BYTES: u64 = 64 << 10;

/// Content of a tuning file: a [`Table`] and the [`Machine`] that it was measured on. `Display` writes the file's
/// text.
///
/// A file is TOML. `device` is `"host"` or `"cuda"`. A row is for allreduces unless it names other `calls`, and then
/// it has no `algorithm`. `ranks` are the first and the last world size of the row. `up_to` is its largest message in
/// bytes; a row without `up_to` is for all larger messages. Rows of the host have `block_bytes` and `piece_bytes`,
/// rows of CUDA `links` and `threads`. Every world size and link must have rows of allreduces, with increasing sizes.
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
///
/// Example:
///
/// ```
/// use fast_allreduce::plan::{Machine, Table, Tuning};
///
/// let machine = Machine::host();
/// let table = Table::built_in_for(&machine);
/// let tuning = Tuning::new(machine, table)?;
/// assert!(tuning.to_string().contains("device = \"host\""));
/// tuning.check(&Machine::host())?;
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// Path of the file that it was read from.
    file: Option<String>,
    machine: Machine,
    table: Table,
}

impl Tuning {
    /// Creates a tuning of a table that was measured on `machine`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the machine and the table are for different devices.
    pub fn new(machine: Machine, table: Table) -> Result<Self> {
        if machine.device() != table.device() {
            let (theirs, ours) = (table.device().name(), machine.device().name());
            return Err(Error::InvalidSetting {
                name: "plan table",
                value: format!("a table of the device {theirs} for a machine described for {ours}"),
                expected: "a table and a machine of one device",
            });
        }
        Ok(Self { file: None, machine, table })
    }

    /// Reads a file. This does not check that the file was measured on this machine: [`Tuning::check`] and the builder
    /// of a communicator do.
    ///
    /// # Errors
    ///
    /// [`Error::Tuning`] with the reason, and with the line if there is one:
    ///
    /// * the path is not a regular file, or the file has more than 64 KiB;
    /// * the text is not TOML, or has another format or version;
    /// * a key is unknown or missing, or a value is out of range;
    /// * some allreduce matches no row, or the sizes of rows do not increase.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::{Machine, Table, Tuning};
    ///
    /// let machine = Machine::host();
    /// let tuning = Tuning::new(machine.clone(), Table::built_in_for(&machine))?;
    /// let path = std::env::temp_dir().join(format!("tuning-{}.toml", std::process::id()));
    /// std::fs::write(&path, tuning.to_string())?;
    /// assert_eq!(Tuning::load(&path)?.table(), tuning.table());
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = open(path).map_err(|error| error.to_string());
        file.and_then(read)
            .and_then(|text| Self::from_text(&text, path))
            .map_err(|reason| Error::Tuning { file: path.display().to_string(), reason })
    }

    /// Parses a file's text, or describes what is wrong with it.
    fn from_text(text: &str, path: &Path) -> Result<Self, String> {
        let (machine, table) = parse(text)?;
        Ok(Self { file: Some(path.display().to_string()), machine, table })
    }

    /// Reads the file that the environment variable `FAST_ALLREDUCE_TUNING` names. Returns `None` if the variable is
    /// not set, is empty, or is `built-in`.
    ///
    /// # Errors
    ///
    /// [`Error::Tuning`] if the file cannot be read or parsed, as in [`Tuning::load`].
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::Tuning;
    ///
    /// if let Some(tuning) = Tuning::from_env()? {
    ///     println!("measured on {:?}", tuning.machine());
    /// }
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn from_env() -> Result<Option<Self>> {
        let path = variable(TUNING_VARIABLE).filter(|path| path != BUILT_IN);
        path.map(Self::load).transpose()
    }

    /// Returns the path of the file that the tuning was read from.
    pub(super) fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Checks that the tuning was measured on a machine like `here`.
    ///
    /// # Errors
    ///
    /// [`Error::Tuning`] with the first fact that differs.
    pub fn check(&self, here: &Machine) -> Result<()> {
        let Some(difference) = self.machine.difference(here) else {
            return Ok(());
        };
        let file = self.file.clone().unwrap_or_else(|| "(none)".to_owned());
        let reason = format!("it was measured on another machine: {difference}; {TUNE_AGAIN}");
        Err(Error::Tuning { file, reason })
    }

    /// Returns the machine that the table was measured on.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the measured table.
    pub fn table(&self) -> &Table {
        &self.table
    }
}

/// Writes the text of a tuning file.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&write(&self.machine, &self.table).map_err(|_| fmt::Error)?)
    }
}

/// Opens a file without blocking, even if it is a pipe.
fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Reads the text of a regular file of at most 64 KiB.
fn read(file: File) -> Result<String, String> {
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
