//! Where sockets have their names: abstract ones, which each network namespace has for itself, or files of a directory.
//!
//! Abstract names go with their sockets, however a process ends. Containers with networks of their own cannot reach each other's;
//! they may share a directory. There a socket's file is removed as soon as nobody needs it. What a process left that was killed
//! before is found by its age, and by nobody listening.

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

/// Names a directory to meet in.
pub(super) const SOCKET_DIRECTORY: &str = "FAST_ALLREDUCE_SOCKET_DIR";

/// The directory that the environment names.
pub(super) fn socket_directory() -> Option<PathBuf> {
    std::env::var_os(SOCKET_DIRECTORY).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The longest path of a socket, but for the zero at its end.
const MAX_PATH: usize = 107;

/// What is as old and answers nobody was left behind. A socket is listened at within microseconds of its making.
const STALE: Duration = Duration::from_secs(60);

/// Between two attempts to lock a directory.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Where the sockets of a world have their names.
#[derive(Debug, Clone, Default)]
pub(super) enum Place {
    #[default]
    Abstract,
    Directory(Arc<Directory>),
}

/// A directory that processes share, each by a path of its own.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    descriptor: OwnedFd,
}

/// A socket that listens, and its name, which goes with it.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    name: Shown,
}

/// A name for as long as it is shown: shared, so that others than who listens can take it away.
#[derive(Debug, Clone, Default)]
pub(super) struct Shown(Arc<Mutex<Option<Name>>>);

/// A socket's file.
#[derive(Debug)]
struct Name {
    directory: Arc<Directory>,
    name: Vec<u8>,
    /// Device and number, to tell it from another's of the same name.
    identity: (u64, u64),
    /// Others may have it after this.
    is_known: bool,
}

impl Place {
    /// A directory that exists, or abstract names.
    pub fn new(directory: Option<&Path>) -> Result<Self> {
        directory.map_or(Ok(Self::Abstract), |path| Ok(Self::Directory(Arc::new(Directory::open(path)?))))
    }

    /// The directory's path.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Abstract => None,
            Self::Directory(directory) => Some(&directory.path),
        }
    }

    /// A socket that listens on a name that nobody else has.
    pub fn listen(&self, kind: SockType, name: &[u8]) -> Result<Listener> {
        use Errno::{EACCES, ENOENT, ENOSPC, EPERM, EROFS};
        let address = self.address(name).map_err(Error::system("address of a Unix socket"))?;
        let socket = socket::listen(kind, &address);
        let Self::Directory(directory) = self else {
            return Ok(Listener { socket: socket?, name: Shown::default() });
        };
        let is_taken = |error: &Error| matches!(error, Error::System { errno: Errno::EADDRINUSE, .. });
        if socket.as_ref().is_err_and(|error| !is_taken(error)) {
            // It may have been bound, and not listen. An error: there is no file.
            let _ = directory.remove(name);
        }
        let socket = socket.map_err(|error| match error {
            Error::System { errno: errno @ (EACCES | ENOENT | ENOSPC | EPERM | EROFS), .. } => {
                Directory::unusable(&directory.path, errno)
            }
            error => error,
        })?;
        Ok(Listener { socket, name: Shown::new(Name::of(directory, name, false)?) })
    }

    /// Connects to a name without waiting.
    ///
    /// `EAGAIN` says that the listener's queue is full for now, `ECONNREFUSED` that nobody listens.
    pub fn connect(&self, kind: SockType, name: &[u8]) -> nix::Result<OwnedFd> {
        let stream = socket::new_socket(kind)?;
        self.connect_to(stream.as_fd(), name)?;
        Ok(stream)
    }

    /// As [`Place::connect`], of a socket that was made before.
    pub fn connect_to(&self, stream: BorrowedFd<'_>, name: &[u8]) -> nix::Result<()> {
        match socket::connect_to(stream, &self.address(name)?) {
            // A file goes when its socket does.
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
        // A later change of the working directory is not to move it.
        let path = &std::path::absolute(path).map_err(|_| invalid(Errno::ENOENT))?;
        let descriptor = open_directory(path).map_err(invalid)?;
        Ok(Self { path: path.clone(), descriptor })
    }

    fn unusable(path: &Path, errno: Errno) -> Error {
        Error::InvalidSetting {
            name: "socket directory",
            value: format!("{} ({})", path.display(), errno.desc()),
            expected: "a directory that exists, which all ranks share and may write",
        }
    }

    /// A peer may have sent the name: it leads to no other directory.
    fn address(&self, name: &[u8]) -> nix::Result<UnixAddr> {
        if name.contains(&b'/') || name.contains(&0) || !name.starts_with(PREFIX.as_bytes()) {
            return Err(Errno::EINVAL);
        }
        let name = OsStr::from_bytes(name);
        let path = self.path.join(name);
        match path.as_os_str().len() <= MAX_PATH {
            true => UnixAddr::new(&path),
            // By the descriptor, a path is short, however long that of the directory is.
            false => {
                let short = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
                match Path::new(&short).is_dir() {
                    true => UnixAddr::new(&Path::new(&short).join(name)),
                    // Without /proc.
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
            // A call that was interrupted may have removed it.
            Err(Errno::ENOENT) => Ok(()),
            removed => removed,
        }
    }

    /// Locks it against others who give and take names that are known beforehand.
    fn lock(&self, deadline: &Deadline<'_>) -> Result<Lock> {
        // A description of its own: locks of one do not exclude each other.
        let own = open_directory(&self.path).map_err(Error::system("open of the socket directory"))?;
        loop {
            let turn = deadline.turn();
            match flock(&own, libc::LOCK_EX | libc::LOCK_NB) {
                Ok(()) => return Ok(Lock(own)),
                Err(Errno::EAGAIN | Errno::EINTR) if !turn.is_zero() => {
                    thread::pause(RETRY_INTERVAL.min(turn));
                }
                Err(errno) => return Err(Error::System { call: "flock of the socket directory", errno }),
            }
        }
    }

    fn is_socket(&self, name: &[u8]) -> bool {
        let kind = |stat: FileStat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
        self.stat(name).is_ok_and(|stat| kind(stat) == SFlag::S_IFSOCK)
    }

    /// Whether a file is a socket of this user that nobody listens at.
    fn is_abandoned(self: &Arc<Self>, name: &[u8]) -> bool {
        let is_own = self.stat(name).is_ok_and(|stat| stat.st_uid == geteuid().as_raw());
        // A listener of another kind says EPROTOTYPE.
        let connected = Place::Directory(Arc::clone(self)).connect(SockType::Stream, name);
        is_own && self.is_socket(name) && matches!(connected, Err(Errno::ECONNREFUSED))
    }

    /// A socket that listens on a name that is known beforehand, in place of one that was left behind. `None` if somebody listens
    /// there.
    pub fn listen_known(self: &Arc<Self>, name: &[u8], deadline: &Deadline<'_>) -> Result<Option<Listener>> {
        const KIND: SockType = SockType::Stream;
        let lock = self.lock(deadline)?;
        self.sweep(name);
        // It listens before it has the name, so that nobody takes it for abandoned.
        let random = socket::random_name()?;
        let listener = Place::Directory(Arc::clone(self)).listen(KIND, &random)?;
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
                let reason = format!("{} is no socket, and is in its place: remove it", path.display());
                return Err(Error::Rendezvous { reason });
            }
            Err(errno) => return Err(Error::System { call: "link of a Unix socket", errno }),
        }
        // Removes the random name.
        listener.name.set(Some(Name::of(self, name, true)?));
        drop(lock);
        Ok(Some(listener))
    }

    /// Removes what processes that were killed have left, but for `known`.
    fn sweep(self: &Arc<Self>, known: &[u8]) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let age = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old =
                age.is_ok_and(|time| SystemTime::now().duration_since(time).is_ok_and(|age| age > STALE));
            let bytes = name.as_bytes();
            let is_ours = bytes.starts_with(PREFIX.as_bytes()) && bytes != known;
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

/// A directory that is locked. Not nix's, which panics where the lock cannot be given back.
struct Lock(OwnedFd);

impl Drop for Lock {
    fn drop(&mut self) {
        // A fork of this process may hold the description. An error: then the lock goes with the last that does.
        let _ = uninterrupted(|| flock(&self.0, libc::LOCK_UN));
    }
}

fn flock(descriptor: &OwnedFd, operation: libc::c_int) -> nix::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed; nothing else is passed but a number.
    Errno::result(unsafe { libc::flock(descriptor.as_raw_fd(), operation) }).map(drop)
}

impl Name {
    fn of(directory: &Arc<Directory>, name: &[u8], is_known: bool) -> Result<Self> {
        let stat = directory.stat(name).map_err(Error::system("stat of a Unix socket"))?;
        let identity = (stat.st_dev, stat.st_ino);
        Ok(Self { directory: Arc::clone(directory), name: name.to_vec(), identity, is_known })
    }
}

impl Drop for Name {
    /// Nobody comes any more.
    fn drop(&mut self) {
        // Another may have a known name by now, who found it abandoned. Whoever gives such names holds the lock.
        let limit = Deadline::after(Duration::from_millis(100));
        let lock = self.is_known.then(|| self.directory.lock(&limit));
        let is_own =
            self.directory.stat(&self.name).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity);
        if is_own {
            let _ = self.directory.remove(&self.name);
        }
        drop(lock);
    }
}

impl Shown {
    fn new(name: Name) -> Self {
        Self(Arc::new(Mutex::new(Some(name))))
    }

    fn set(&self, name: Option<Name>) {
        // Dropped after the mutex is free, as that may wait for the directory's lock.
        let before = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), name);
        drop(before);
    }

    /// Gives the name up: who is connected stays so, and nobody else comes.
    pub fn hide(&self) {
        self.set(None);
    }
}

impl Listener {
    /// Its name, if it has one that must be taken away.
    pub fn name(&self) -> Shown {
        self.name.clone()
    }

    /// As [`Shown::hide`].
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
