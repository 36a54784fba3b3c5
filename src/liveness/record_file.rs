//! The file of a rank's page: it has a name if the user wants the flight record to outlive the process.

use std::env;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::page::{Page, EXTENSION, MEMORY};
use crate::device::host::{create, create_named, SharedMemory};
use crate::error::{Error, Result};
use crate::fork::ForkCheck;

const DIRECTORY: &str = "FAST_ALLREDUCE_FLIGHT_DIR";

/// Files of ranks that have ended are removed when they are older.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);

/// The file of a page. It stays open, so that other processes can find it in `/proc`. A named file is removed when
/// this is dropped, unless the rank has failed.
#[derive(Debug)]
pub(super) struct RecordFile {
    descriptor: OwnedFd,
    path: Option<PathBuf>,
    /// A fork has a copy of this, which removes nothing.
    fork_check: ForkCheck,
    is_kept: AtomicBool,
}

/// Returns the name of the file of a rank.
fn file_name(world: u64, rank: usize, process: u32) -> String {
    format!("{}{process}.{EXTENSION}", name_of_rank(world, rank))
}

/// Returns what the names of a rank's files begin with.
pub(super) fn name_of_rank(world: u64, rank: usize) -> String {
    format!("{world:016x}-{rank}-")
}

impl RecordFile {
    /// Allocates the memory of a page.
    pub fn create(world: u64, rank: usize) -> Result<(SharedMemory, Self)> {
        let bytes = size_of::<Page>();
        let process = std::process::id();
        let directory = env::var_os(DIRECTORY).filter(|directory| !directory.is_empty());
        let path =
            directory.as_ref().map(|directory| Path::new(directory).join(file_name(world, rank, process)));
        let file = match &path {
            None => create(bytes, MEMORY).map_err(|reason| Error::Allocation { bytes, reason })?,
            Some(path) => {
                remove_old(directory.unwrap_or_default().as_ref());
                create_named(bytes, path).map_err(|reason| Error::Allocation {
                    bytes,
                    reason: format!("{DIRECTORY}: {}: {reason}", path.display()),
                })?
            }
        };
        // From here on an error removes the file.
        let file = Self { descriptor: file, path, fork_check: ForkCheck::new(), is_kept: false.into() };
        let shared = file.descriptor.try_clone().map_err(Error::io("fcntl(F_DUPFD_CLOEXEC)"))?;
        Ok((SharedMemory::of(shared, bytes)?, file))
    }

    /// Sets whether a named file stays: it does unless the rank has closed its communicator.
    pub fn leave(&self, has_closed: bool) {
        self.is_kept.store(!has_closed, Ordering::Relaxed);
    }
}

impl Drop for RecordFile {
    fn drop(&mut self) {
        if let Some(path) = self.path.as_ref().filter(|_| !self.is_kept.load(Ordering::Relaxed)) {
            if !self.fork_check.in_fork() {
                // The user may have removed it.
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Removes old files of processes that have ended. Errors leave them there.
fn remove_old(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        let process = name.rsplit('-').next().and_then(|process| process.parse::<u32>().ok());
        let age =
            entry.metadata().and_then(|data| data.modified()).map(|at| at.elapsed().unwrap_or_default());
        let is_old = age.is_ok_and(|age| age > KEPT_FOR);
        let is_ours = path.extension().is_some_and(|extension| extension == EXTENSION);
        if let Some(process) = process.filter(|_| is_ours && is_old) {
            if !Path::new(&format!("/proc/{process}")).exists() {
                let _ = fs::remove_file(&path);
            }
        }
    }
}
