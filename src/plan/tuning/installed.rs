//! Installed tuning files: communicators find them in the user's cache without being given a path.
//!
//! A user who can write such a file controls how fast calls are. So a file is read only if this user owns it and no
//! other user may write it. A file that cannot be used is not an error, because there is a built-in plan.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::super::{DeviceKind, Machine};
use super::{open, read, Tuning};
use crate::error::{Error, Result};

/// Name of the folder in the user's cache.
const FOLDER: &str = "fast-allreduce";

/// Returns the folder of this user's files: in `$XDG_CACHE_HOME`, else in `$HOME/.cache`.
pub(in crate::plan) fn folder() -> Option<PathBuf> {
    folder_of(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
}

/// Returns the folder for these values of the variables. Relative paths are ignored, as XDG's specification demands.
fn folder_of(cache: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let home = || Some(home.and_then(absolute)?.join(".cache"));
    Some(cache.and_then(absolute).or_else(home)?.join(FOLDER))
}

impl Tuning {
    /// Reads the file that is installed for a machine. Returns `None` if there is no usable file.
    ///
    /// # Examples
    ///
    /// ```
    /// use fast_allreduce::plan::{Machine, Tuning};
    ///
    /// match Tuning::installed(&Machine::host()) {
    ///     Some(tuning) => println!("{tuning}"),
    ///     None => println!("run `fast-allreduce tune` to measure a plan"),
    /// }
    /// ```
    pub fn installed(machine: &Machine) -> Option<Self> {
        find(folder().as_deref(), machine.device(), || Ok(machine.clone())).ok()
    }

    /// Installs the tuning for its machine, and returns the path of the file.
    ///
    /// The folder is `fast-allreduce` below `$XDG_CACHE_HOME`, else below `$HOME/.cache`. The file's name contains a
    /// hash of the machine's facts. An older file is replaced atomically.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] if neither variable names a folder.
    /// * [`Error::Tuning`] if the file cannot be written.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fast_allreduce::plan::{Machine, Tuning};
    ///
    /// Tuning::check_install(&Machine::host())?;
    /// let tuning = Tuning::load("plan.toml")?;
    /// println!("installed as {}", tuning.install()?.display());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn install(&self) -> Result<PathBuf> {
        install(self, folder().as_deref())
    }

    /// Checks that [`Tuning::install`] can write a file of this machine, and returns its path. [`Tuning::install`] has
    /// an example. Call it before a long measurement.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] if neither `$XDG_CACHE_HOME` nor `$HOME` names a folder.
    /// * [`Error::Tuning`] if the file cannot be written.
    pub fn check_install(machine: &Machine) -> Result<PathBuf> {
        check(machine, folder().as_deref())
    }
}

/// Returns the file name for a machine.
fn name(machine: &Machine) -> String {
    format!("{}-{:016x}.toml", machine.device().name(), machine.digest())
}

/// Reads the file that is installed for a machine, or returns why there is none. `machine` is called only if the
/// folder has a file for the device.
pub(in crate::plan) fn find(
    folder: Option<&Path>,
    device: DeviceKind,
    machine: impl FnOnce() -> Result<Machine>,
) -> Result<Tuning, String> {
    let folder = folder.ok_or("no tuning file, as neither XDG_CACHE_HOME nor HOME names a folder")?;
    let none = || format!("no tuning file in {}", folder.display());
    // Listing a folder takes less time than querying GPUs.
    let is_of_device = |name: &OsString| name.to_string_lossy().starts_with(device.name());
    let mut names = std::fs::read_dir(folder).map_err(|_| none())?.flatten().map(|entry| entry.file_name());
    if !names.any(|name| is_of_device(&name)) {
        return Err(none());
    }
    let machine = machine().map_err(|error| format!("no tuning file can be selected: {error}"))?;
    let path = folder.join(name(&machine));
    match load(&path, &machine) {
        Ok(Some(tuning)) => Ok(tuning),
        Ok(None) => Err(format!("no tuning file of this machine in {}", folder.display())),
        Err(reason) => {
            let reason = format!("{} is ignored: {reason}", path.display());
            tracing::warn!("{reason}");
            Err(reason)
        }
    }
}

/// Reads a machine's file; `None` if it does not exist.
fn load(path: &Path, machine: &Machine) -> Result<Option<Tuning>, String> {
    let file = match open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| error.to_string())?,
    };
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    check_owner(metadata.uid(), nix::unistd::geteuid().as_raw(), metadata.mode())?;
    let tuning = Tuning::from_text(&read(file)?, path)?;
    match tuning.machine().difference(machine) {
        None => Ok(Some(tuning)),
        Some(difference) => Err(format!("it was measured on another machine: {difference}")),
    }
}

/// Refuses a file that other users may have written.
fn check_owner(owner: u32, user: u32, mode: u32) -> Result<(), String> {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    if owner != user {
        return Err(format!("it belongs to user {owner}, and this is user {user}"));
    }
    match mode & WRITABLE_BY_OTHERS {
        0 => Ok(()),
        _ => Err(format!("other users may write it (mode {:03o}): use chmod go-w", mode & 0o777)),
    }
}

/// Checks that the file of a machine can be written, and returns its path.
fn check(machine: &Machine, folder: Option<&Path>) -> Result<PathBuf> {
    let path = path(machine, folder)?;
    let (temporary, file) = create_temporary(&path).map_err(tuning_error(&path))?;
    drop(file);
    std::fs::remove_file(temporary).map_err(tuning_error(&path))?;
    match path.is_dir() {
        true => Err(tuning_error(&path)(std::io::Error::from_raw_os_error(libc::EISDIR))),
        false => Ok(path),
    }
}

fn path(machine: &Machine, folder: Option<&Path>) -> Result<PathBuf> {
    let folder = folder.ok_or_else(|| Error::Unavailable {
        what: "a folder for the tuning file".into(),
        reason: "neither XDG_CACHE_HOME nor HOME names one".into(),
    })?;
    Ok(folder.join(name(machine)))
}

fn tuning_error(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |error| Error::Tuning { file: path.display().to_string(), reason: error.to_string() }
}

/// Creates a temporary file in the folder of `path`, and the folder if it is missing.
fn create_temporary(path: &Path) -> std::io::Result<(PathBuf, File)> {
    // XDG's specification demands this mode for new folders. `path` has a folder.
    let folder = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}-{}", std::process::id()));
    // An older file of this name belongs to a process that had the same id and has ended.
    let _ = std::fs::remove_file(&temporary);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    Ok((temporary, file))
}

/// Writes the file of the tuning's machine. It replaces an older file atomically.
fn install(tuning: &Tuning, folder: Option<&Path>) -> Result<PathBuf> {
    let path = path(tuning.machine(), folder)?;
    let (temporary, mut file) = create_temporary(&path).map_err(tuning_error(&path))?;
    let mut write = || {
        file.write_all(tuning.to_string().as_bytes())?;
        // Before the rename, so that a crash leaves the old file or the new one.
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    match write() {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = std::fs::remove_file(&temporary);
            Err(tuning_error(&path)(error))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::plan::{Choice, Table};
    use crate::testing::temporary::Folder;
    use crate::Algorithm;

    fn machine(cores: u32) -> Machine {
        Machine::Host { cpu: "A".into(), cores, instruction_set: "avx2".into() }
    }

    fn tuning() -> Tuning {
        let choice = Choice::host(Algorithm::TwoShotPush, 3, 4096, 65536);
        Tuning::new(machine(2), Table::uniform(DeviceKind::Host, choice).unwrap()).unwrap()
    }

    fn found(folder: &Path, machine: &Machine) -> Result<Tuning, String> {
        find(Some(folder), machine.device(), || Ok(machine.clone()))
    }

    #[test]
    fn the_folder_is_in_the_users_cache() {
        let folder = |cache: Option<&str>, home: Option<&str>| {
            folder_of(cache.map(Into::into), home.map(Into::into)).map(|path| path.display().to_string())
        };
        assert_eq!(folder(Some("/c"), Some("/h")).as_deref(), Some("/c/fast-allreduce"));
        assert_eq!(folder(None, Some("/h")).as_deref(), Some("/h/.cache/fast-allreduce"));
        assert_eq!(folder(Some(""), Some("/h")).as_deref(), Some("/h/.cache/fast-allreduce"));
        assert_eq!(folder(Some("relative"), None), None);
        assert_eq!(folder(None, Some("")), None);
    }

    #[test]
    fn an_installed_file_is_found_only_by_its_machine() {
        let home = Folder::new();
        let folder = home.path().join("cache/fast-allreduce");
        let path = install(&tuning(), Some(&folder)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        let found_here = found(&folder, &machine(2)).unwrap();
        assert_eq!((found_here.table(), found_here.machine()), (tuning().table(), &machine(2)));
        assert!(found(&folder, &machine(4)).unwrap_err().contains("no tuning file of this machine"));
        // A second file replaces the first, and nothing else is left.
        install(&tuning(), Some(&folder)).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        // GPUs are not queried if there is no file for them.
        let asked = find(Some(&folder), DeviceKind::Cuda, || panic!("asked"));
        assert!(asked.unwrap_err().contains("no tuning file in"));
    }

    #[test]
    fn a_missing_folder_is_reported() {
        let home = Folder::new();
        let nothing = home.path().join("nothing");
        assert!(found(&nothing, &machine(2)).unwrap_err().contains(nothing.to_str().unwrap()));
        assert!(find(None, DeviceKind::Host, || Ok(machine(2))).unwrap_err().contains("XDG_CACHE_HOME"));
        assert!(install(&tuning(), None).unwrap_err().to_string().contains("XDG_CACHE_HOME"));
        assert!(check(&machine(2), None).unwrap_err().to_string().contains("XDG_CACHE_HOME"));
        let file = home.write("file", "");
        assert!(matches!(install(&tuning(), Some(&file.join("below"))), Err(Error::Tuning { .. })));
        assert!(matches!(check(&machine(2), Some(&file.join("below"))), Err(Error::Tuning { .. })));
    }

    #[test]
    fn installing_can_be_checked_before() {
        let home = Folder::new();
        let folder = home.path().join("cache/fast-allreduce");
        let path = check(&machine(2), Some(&folder)).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left of the check");
        assert_eq!(install(&tuning(), Some(&folder)).unwrap(), path);
        assert_eq!(check(&machine(2), Some(&folder)).unwrap(), path);
        assert!(found(&folder, &machine(2)).is_ok(), "the file is unchanged");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(check(&machine(2), Some(&folder)), Err(Error::Tuning { .. })));
    }

    #[test]
    fn an_unusable_file_is_ignored_with_the_reason() {
        let home = Folder::new();
        let path = install(&tuning(), Some(home.path())).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        let ignored = |fact: &str| {
            let reason = found(home.path(), &machine(2)).expect_err(fact);
            assert!(reason.contains("is ignored") && reason.contains(fact), "{fact}: {reason}");
        };
        for (content, fact) in [
            (String::new(), "no tuning file"),
            (good.replace("blocks = 3", "blocks = 300"), "row 1 (line"),
            (good.replace("version = \"", "version = \"9."), "version \"9."),
            (good.replace("cores = 2", "cores = 3"), "another machine: its cores is \"3\""),
            (good.repeat(1000), "64 KiB"),
        ] {
            std::fs::write(&path, content).unwrap();
            ignored(fact);
        }
        std::fs::write(&path, good).unwrap();
        for mode in [0o620, 0o602, 0o666] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            ignored("other users may write it");
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        ignored("no regular file");
        std::fs::remove_dir(&path).unwrap();
        // Opening a pipe must not block.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        ignored("no regular file");
    }

    #[test]
    fn a_file_of_another_user_is_ignored() {
        assert_eq!(check_owner(7, 7, 0o100_644), Ok(()));
        assert!(check_owner(0, 7, 0o100_600).unwrap_err().contains("belongs to user 0"));
    }
}
