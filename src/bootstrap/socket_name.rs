//! Names of Unix sockets: abstract names, which belong to a network namespace, or files in a directory.
//!
//! The kernel removes an abstract name with its socket, however the process ends. Containers with separate network
//! namespaces cannot reach each other's abstract names, but can share a directory. In a directory, each socket's file
//! is removed as soon as it is not needed any more. If a process is killed before that, other processes recognise its
//! file by its age and because nobody listens there, and remove it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{open, AtFlags, OFlag};
use nix::sys::socket::{SockType, UnixAddr};
use nix::sys::stat::{fstatat, FileStat, Mode, SFlag};
use nix::unistd::{geteuid, linkat, unlinkat, UnlinkatFlags};

use super::socket::{self, uninterrupted, PREFIX};
use crate::deadline::Deadline;
use crate::descriptor::above_streams;
use crate::error::{Error, Result};
use crate::thread;

/// Environment variable: the directory of the sockets.
pub(super) const SOCKET_DIRECTORY: &str = "FAST_ALLREDUCE_SOCKET_DIR";

/// Returns the directory that the environment variable names, if it is set.
pub(super) fn socket_directory() -> Option<PathBuf> {
    std::env::var_os(SOCKET_DIRECTORY).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Maximum length of a socket's path, without the terminating zero.
const MAX_PATH: usize = 107;

/// Age from which a socket's file at which nobody listens is considered abandoned. A live process listens within
/// microseconds after it has created the file.
const STALE: Duration = Duration::from_secs(60);

/// Pause between two attempts to lock a directory.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Where the names of a world's sockets are.
#[derive(Debug, Clone, Default)]
pub(super) enum SocketNamespace {
    #[default]
    Abstract,
    Directory(Arc<Directory>),
}

/// A directory that processes share; the path may differ by process.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    descriptor: OwnedFd,
}

/// A listening socket. Dropping it removes its name.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    name: SharedName,
}

/// The file of a listening socket until it is removed. Shared, so that not only the owner of the listener can remove
/// it.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedName(Arc<Mutex<Option<SocketFile>>>);

/// The file of a socket. Dropping it removes the file.
#[derive(Debug)]
struct SocketFile {
    directory: Arc<Directory>,
    name: Vec<u8>,
    /// Device and inode, to distinguish it from another socket that takes over the name.
    identity: (u64, u64),
    /// The name is well known: another process may take it over.
    is_well_known: bool,
}

impl SocketNamespace {
    /// Opens the directory, or chooses abstract names if there is none.
    pub fn new(directory: Option<&Path>) -> Result<Self> {
        directory.map_or(Ok(Self::Abstract), |path| Ok(Self::Directory(Arc::new(Directory::open(path)?))))
    }

    /// Returns the directory's path, or `None` for abstract names.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Abstract => None,
            Self::Directory(directory) => Some(&directory.path),
        }
    }

    /// Creates a socket that listens on a name that nobody else uses.
    pub fn listen(&self, kind: SockType, name: &[u8]) -> Result<Listener> {
        use Errno::{EACCES, ENOENT, ENOSPC, EPERM, EROFS};
        let address = self.address(name).map_err(Error::system("address of a Unix socket"))?;
        let socket = socket::listen(kind, &address);
        let Self::Directory(directory) = self else {
            return Ok(Listener { socket: socket?, name: SharedName::default() });
        };
        let is_taken = |error: &Error| matches!(error, Error::System { errno: Errno::EADDRINUSE, .. });
        if socket.as_ref().is_err_and(|error| !is_taken(error)) {
            // `bind` may have created the file before `listen` failed. An error here means that there is no file.
            let _ = directory.remove(name);
        }
        let socket = socket.map_err(|error| match error {
            Error::System { errno: errno @ (EACCES | ENOENT | ENOSPC | EPERM | EROFS), .. } => {
                Directory::unusable(&directory.path, errno)
            }
            error => error,
        })?;
        Ok(Listener { socket, name: SharedName::new(SocketFile::new(directory, name, false)?) })
    }

    /// Connects to a name, without waiting.
    ///
    /// `EAGAIN` means that the listener's queue is full, `ECONNREFUSED` that nobody listens.
    pub fn connect(&self, kind: SockType, name: &[u8]) -> nix::Result<OwnedFd> {
        let stream = socket::new_socket(kind)?;
        self.connect_to(stream.as_fd(), name)?;
        Ok(stream)
    }

    /// Connects an existing socket to a name, with the errors of [`SocketNamespace::connect`].
    pub fn connect_to(&self, stream: BorrowedFd<'_>, name: &[u8]) -> nix::Result<()> {
        match socket::connect_to(stream, &self.address(name)?) {
            // The file was removed together with its socket.
            Err(Errno::ENOENT) => Err(Errno::ECONNREFUSED),
            result => result,
        }
    }

    fn address(&self, name: &[u8]) -> nix::Result<UnixAddr> {
        match self {
            Self::Abstract => UnixAddr::new_abstract(name),
            Self::Directory(directory) => directory.address(name),
        }
    }
}

impl Directory {
    fn open(path: &Path) -> Result<Self> {
        let invalid = |errno: Errno| Self::unusable(path, errno);
        // Absolute, so that later changes of the working directory do not matter.
        let path = &std::path::absolute(path).map_err(|_| invalid(Errno::ENOENT))?;
        let descriptor = open_directory(path).map_err(invalid)?;
        Ok(Self { path: path.clone(), descriptor })
    }

    fn unusable(path: &Path, errno: Errno) -> Error {
        Error::InvalidSetting {
            name: "socket directory",
            value: format!("{} ({})", path.display(), errno.desc()),
            expected: "an existing directory that all ranks share and may write to",
        }
    }

    /// Returns the address of a name. A peer may have sent the name: one that leads to another directory is an error.
    fn address(&self, name: &[u8]) -> nix::Result<UnixAddr> {
        if name.contains(&b'/') || name.contains(&0) || !name.starts_with(PREFIX.as_bytes()) {
            return Err(Errno::EINVAL);
        }
        let name = OsStr::from_bytes(name);
        let path = self.path.join(name);
        match path.as_os_str().len() <= MAX_PATH {
            true => UnixAddr::new(&path),
            // The path through the directory's descriptor is short, even if the directory's own path is long.
            false => {
                let short = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
                match Path::new(&short).is_dir() {
                    true => UnixAddr::new(&Path::new(&short).join(name)),
                    // /proc is not mounted.
                    false => Err(Errno::ENAMETOOLONG),
                }
            }
        }
    }

    fn stat(&self, name: &[u8]) -> nix::Result<FileStat> {
        let name = OsStr::from_bytes(name);
        uninterrupted(|| fstatat(&self.descriptor, name, AtFlags::AT_SYMLINK_NOFOLLOW))
    }

    fn remove(&self, name: &[u8]) -> nix::Result<()> {
        let name = OsStr::from_bytes(name);
        match uninterrupted(|| unlinkat(&self.descriptor, name, UnlinkatFlags::NoRemoveDir)) {
            // A previous call that was interrupted may have removed it.
            Err(Errno::ENOENT) => Ok(()),
            removed => removed,
        }
    }

    /// Locks the directory against other processes that create or remove well-known names.
    fn lock(&self, deadline: &Deadline<'_>) -> Result<Lock> {
        // A separate open file description: locks of the same one do not exclude each other.
        let own = open_directory(&self.path).map_err(Error::system("open of the socket directory"))?;
        let before = deadline.waited();
        loop {
            let wait = deadline.next_wait();
            match flock(&own, libc::LOCK_EX | libc::LOCK_NB) {
                Ok(()) => return Ok(Lock(own)),
                Err(Errno::EAGAIN | Errno::EINTR) if !wait.is_zero() => {
                    thread::pause(RETRY_INTERVAL.min(wait));
                }
                Err(Errno::EAGAIN) => {
                    let (directory, waited) = (self.path.display(), deadline.waited() - before);
                    return Err(Error::Rendezvous {
                        reason: format!(
                            "another process holds the lock of {directory}, after {waited:?}: it may be stopped"
                        ),
                    });
                }
                Err(errno) => return Err(Error::System { call: "flock of the socket directory", errno }),
            }
        }
    }

    fn is_socket(&self, name: &[u8]) -> bool {
        let kind = |stat: FileStat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
        self.stat(name).is_ok_and(|stat| kind(stat) == SFlag::S_IFSOCK)
    }

    /// Returns whether a file is a socket of this user at which nobody listens.
    fn is_abandoned(self: &Arc<Self>, name: &[u8]) -> bool {
        let is_own = self.stat(name).is_ok_and(|stat| stat.st_uid == geteuid().as_raw());
        // A listener of another socket type refuses with EPROTOTYPE instead.
        let connected = SocketNamespace::Directory(Arc::clone(self)).connect(SockType::Stream, name);
        is_own && self.is_socket(name) && matches!(connected, Err(Errno::ECONNREFUSED))
    }

    /// Creates a socket that listens on a well-known name, and replaces an abandoned one. Returns `None` if another
    /// process listens there.
    pub fn listen_well_known(
        self: &Arc<Self>,
        name: &[u8],
        deadline: &Deadline<'_>,
    ) -> Result<Option<Listener>> {
        const KIND: SockType = SockType::Stream;
        let lock = self.lock(deadline)?;
        self.sweep(name);
        // The socket listens before it gets the name, so that nobody considers it abandoned.
        let random = socket::random_name()?;
        let listener = SocketNamespace::Directory(Arc::clone(self)).listen(KIND, &random)?;
        let link = || {
            let (from, to) = (OsStr::from_bytes(&random), OsStr::from_bytes(name));
            linkat(&self.descriptor, from, &self.descriptor, to, AtFlags::empty())
        };
        let linked = match link() {
            Err(Errno::EEXIST) if self.is_abandoned(name) => self.remove(name).and_then(|()| link()),
            linked => linked,
        };
        match linked {
            Ok(()) => {}
            Err(Errno::EEXIST) if self.is_socket(name) => return Ok(None),
            Err(Errno::EEXIST) => {
                let path = self.path.join(OsStr::from_bytes(name));
                let reason = format!(
                    "{} is not a socket, but has the name of the rendezvous: remove it",
                    path.display()
                );
                return Err(Error::Rendezvous { reason });
            }
            Err(errno) => return Err(Error::System { call: "link of a Unix socket", errno }),
        }
        // This also removes the random name.
        listener.name.set(Some(SocketFile::new(self, name, true)?));
        drop(lock);
        Ok(Some(listener))
    }

    /// Removes abandoned files of killed processes, except `kept`.
    fn sweep(self: &Arc<Self>, kept: &[u8]) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let age = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old =
                age.is_ok_and(|time| SystemTime::now().duration_since(time).is_ok_and(|age| age > STALE));
            let bytes = name.as_bytes();
            let is_ours = bytes.starts_with(PREFIX.as_bytes()) && bytes != kept;
            if is_ours && is_old && self.is_abandoned(bytes) {
                let _ = self.remove(bytes);
            }
        }
    }
}

fn open_directory(path: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    above_streams(|| uninterrupted(|| open(path, flags, Mode::empty())))
}

/// A lock on a directory. Not the type of nix, which panics if unlocking fails.
struct Lock(OwnedFd);

impl Drop for Lock {
    fn drop(&mut self) {
        // Explicit, since a fork of this process may hold the description. On error, the lock ends with its last
        // holder.
        let _ = uninterrupted(|| flock(&self.0, libc::LOCK_UN));
    }
}

fn flock(descriptor: &OwnedFd, operation: libc::c_int) -> nix::Result<()> {
    // SAFETY: the borrowed descriptor is open during the call; the other argument is a number.
    Errno::result(unsafe { libc::flock(descriptor.as_raw_fd(), operation) }).map(drop)
}

impl SocketFile {
    fn new(directory: &Arc<Directory>, name: &[u8], is_well_known: bool) -> Result<Self> {
        let stat = directory.stat(name).map_err(Error::system("stat of a Unix socket"))?;
        let identity = (stat.st_dev, stat.st_ino);
        Ok(Self { directory: Arc::clone(directory), name: name.to_vec(), identity, is_well_known })
    }
}

impl Drop for SocketFile {
    /// Removes the file, if it still is this socket's.
    fn drop(&mut self) {
        // Another process may have found a well-known name abandoned and taken it over; it does so under the lock.
        let limit = Deadline::after(Duration::from_millis(100));
        let lock = self.is_well_known.then(|| self.directory.lock(&limit));
        let is_own =
            self.directory.stat(&self.name).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity);
        if is_own {
            let _ = self.directory.remove(&self.name);
        }
        drop(lock);
    }
}

impl SharedName {
    fn new(name: SocketFile) -> Self {
        Self(Arc::new(Mutex::new(Some(name))))
    }

    fn set(&self, name: Option<SocketFile>) {
        // Dropped after the mutex is released, since dropping may wait for the directory's lock.
        let before = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), name);
        drop(before);
    }

    /// Removes the file, if there is one: existing connections stay, and no new ones are possible. An abstract name
    /// lasts as long as the socket.
    pub fn hide(&self) {
        self.set(None);
    }
}

impl Listener {
    /// Wraps a listening socket that has no name to be removed.
    #[cfg(feature = "tcp")]
    pub fn nameless(socket: OwnedFd) -> Self {
        Self { socket, name: SharedName::default() }
    }

    /// Returns a handle that can remove the name; abstract names have nothing to remove.
    pub fn name(&self) -> SharedName {
        self.name.clone()
    }

    /// Removes the file, if there is one: see [`SharedName::hide`].
    pub fn hide(&self) {
        self.name.hide();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.hide();
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests;
