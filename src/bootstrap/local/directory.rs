//! Rendezvous at a socket in a directory, served by rank 0.
//!
//! A program may be started again while ranks of an earlier start are still ending or have left files. So a failed
//! attempt is not an error before the rank's limit: rank 0 serves the rendezvous again, and the other ranks connect
//! again.

use std::ffi::OsStr;
use std::hash::Hasher as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use fnv::FnvHasher;
use nix::errno::Errno;
use nix::sys::socket::SockType;

use super::{check_world, rendezvous, Local, Place, UniqueId};
use crate::bootstrap::socket::Token;
use crate::bootstrap::socket_name::{Listener, SocketNamespace};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// File name of the rendezvous if no generation is set.
const RENDEZVOUS: &str = "fast-allreduce-rendezvous";

/// Environment variable: distinguishes one start of a program from another.
const GENERATION: &str = "FAST_ALLREDUCE_GENERATION";

/// Pause between two attempts to connect to rank 0.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// How long a rank looks that often. A spare that waits for hours then costs little.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// How long a rank that meets the others again may be refused, from the first time on: until the connection of its
/// earlier attempt is closed, its place is taken.
const OWN_ATTEMPT_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two attempts after that, if the rank is taken, or if another process serves the rendezvous.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

impl Local {
    /// Joins the world that meets in `directory`, and returns when all ranks have joined.
    ///
    /// This is for containers on one machine that have separate network namespaces and share a directory, mounted at
    /// any path. No id is needed: rank 0 serves the rendezvous at a socket in the directory until all ranks have
    /// joined.
    ///
    /// All ranks run as one user; both ends of each connection check that. One world at a time forms in a directory.
    /// Files of killed processes are taken over or removed. If a rank ends before all have joined, the others go on
    /// waiting for another in its place, since it may belong to an earlier start of the program. Later sockets of this
    /// world are in the directory as well, while ranks pass descriptors.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`] if `world_size` is 0 or above [`MAX_RANKS`](crate::MAX_RANKS).
    /// * [`Error::RankOutOfRange`] unless `rank` is below `world_size`.
    /// * [`Error::InvalidSetting`] if there is no such directory.
    /// * [`Error::Refused`] at once if a process of another user serves the rendezvous.
    ///
    /// If the world has not formed within `timeout`:
    ///
    /// * [`Error::Timeout`] with the missing ranks; if rank 0 is missing, with what was seen of it.
    /// * [`Error::Rendezvous`] on rank 0 if another world was forming there all the time.
    /// * [`Error::Refused`] if the rank is taken, or the world has another size.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fast_allreduce::bootstrap::{Bootstrap, Local};
    ///
    /// let limit = Duration::from_secs(10);
    /// let directory = &std::env::temp_dir().join(format!("ranks-{}", std::process::id()));
    /// std::fs::create_dir(directory)?;
    /// std::thread::scope(|scope| {
    ///     for rank in 0..2 {
    ///         scope.spawn(move || {
    ///             let local = Local::in_directory(directory, rank, 2, limit).unwrap();
    ///             local.barrier(limit).unwrap();
    ///         });
    ///     }
    /// });
    /// std::fs::remove_dir(directory)?;
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn in_directory(
        directory: impl AsRef<Path>,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        Self::at(directory.as_ref(), RENDEZVOUS.into(), rank, world_size, timeout)
    }

    /// Joins in a directory, with the generation that the environment sets.
    pub(super) fn in_directory_of_env(
        directory: &Path,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let generation = std::env::var_os(GENERATION).filter(|generation| !generation.is_empty());
        Self::at(directory, file_name(generation.as_deref()), rank, world_size, timeout)
    }

    /// Waits until the rendezvous of an id is served, and joins.
    pub(super) fn when_served(
        namespace: &SocketNamespace,
        id: &UniqueId,
        (rank, world_size): (usize, usize),
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        let place = Place { rank, world_size, open: 0, frees_name: false };
        let (name, token, serves) = (id.socket_name(), id.token(), Serves::Never);
        Meeting { namespace, name, token, place, serves, timeout }.form(deadline)
    }

    /// Meets the other ranks of a world, old and new, at a name that the old ones know: the first to come serves it.
    pub(in super::super) fn regroup(
        namespace: &SocketNamespace,
        name: &[u8],
        token: &Token,
        place: Place,
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        let (token, serves) = (token.clone(), Serves::IfNobody);
        Meeting { namespace, name, token, place, serves, timeout }.form(deadline)
    }

    pub(super) fn at(
        directory: &Path,
        name: String,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        check_world(rank, world_size)?;
        let namespace = SocketNamespace::new(Some(directory))?;
        // No secret is needed: the directory's permissions say who may use it, and the kernel checks the users.
        let token = Token::from_bytes([0; Token::LENGTH]);
        let serves = if rank == 0 { Serves::Always } else { Serves::Never };
        let place = Place { rank, world_size, open: 0, frees_name: false };
        Meeting { namespace: &namespace, name: name.as_bytes(), token, place, serves, timeout }
            .form(&Deadline::after(timeout))
    }
}

/// Returns the file name of the rendezvous of a generation.
pub(super) fn file_name(generation: Option<&OsStr>) -> String {
    let Some(generation) = generation else { return RENDEZVOUS.into() };
    // 64-bit FNV-1a, so that the name has a fixed length.
    let mut hasher = FnvHasher::default();
    hasher.write(generation.as_bytes());
    format!("{RENDEZVOUS}-{:016x}", hasher.finish())
}

/// A rank's attempts to form a world.
struct Meeting<'a> {
    namespace: &'a SocketNamespace,
    name: &'a [u8],
    token: Token,
    place: Place,
    serves: Serves,
    timeout: Duration,
}

/// Whether a rank serves the rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serves {
    Always,
    /// If nobody else does.
    IfNobody,
    Never,
}

impl Meeting<'_> {
    fn form(&self, deadline: &Deadline<'_>) -> Result<Local> {
        // The error of the latest attempt, and whether one has failed that was not refused.
        let (mut failure, mut has_failed) = (None, false);
        // When an attempt was refused first.
        let mut refused: Option<Instant> = None;
        loop {
            // The deadline is checked first, so that the last attempt comes after the limit.
            let wait = deadline.next_wait();
            let mut interval = RETRY_INTERVAL;
            match self.attempt(deadline)? {
                Attempt::Formed(local) => return Ok(*local),
                // Only in a directory does another world use the same name. After a failed attempt it may be that one
                // which refuses this rank: it ends when all ranks have left it.
                Attempt::Failed(error @ Error::Refused { .. })
                    if !self.is_in_directory()
                        && !has_failed
                        && (self.serves != Serves::IfNobody
                            || refused.is_some_and(|first| first.elapsed() > OWN_ATTEMPT_LIMIT)) =>
                {
                    return Err(error)
                }
                Attempt::Failed(error) if deadline.has_passed() => return Err(with_earlier(error, failure)),
                Attempt::Failed(error) => {
                    match error {
                        Error::Refused { .. } => _ = refused.get_or_insert_with(Instant::now),
                        _ => has_failed = true,
                    }
                    failure = Some(error);
                }
                Attempt::NoRendezvous if wait.is_zero() => return Err(self.no_rendezvous(failure, deadline)),
                Attempt::NoRendezvous if self.serves != Serves::Always && deadline.waited() < LOOK_LIMIT => {
                    interval = LOOK_INTERVAL
                }
                Attempt::NoRendezvous => {}
            }
            thread::pause(interval.min(wait));
        }
    }

    /// Makes one attempt.
    ///
    /// # Errors
    ///
    /// Those that would occur in another attempt as well.
    fn attempt(&self, deadline: &Deadline<'_>) -> Result<Attempt> {
        let reached = match self.serves {
            Serves::Always => None,
            _ => Local::reach(self.namespace, self.name, &self.token, deadline)?,
        };
        let joined = match reached {
            Some(reached) => reached.join(self.place.rank, self.place.world_size, deadline),
            None if self.serves == Serves::Never => return Ok(Attempt::NoRendezvous),
            None => match self.listen(deadline)? {
                Some(listener) => Local::serve(
                    self.namespace,
                    listener,
                    self.name,
                    &self.token,
                    self.place,
                    deadline,
                    self.timeout,
                ),
                None => return Ok(Attempt::NoRendezvous),
            },
        };
        match joined {
            Ok(local) => Ok(Attempt::Formed(Box::new(local))),
            Err(
                error @ (Error::PeerLost { .. }
                | Error::Timeout { .. }
                | Error::Rendezvous { .. }
                | Error::Refused { .. }),
            ) => Ok(Attempt::Failed(error)),
            Err(error) => Err(error),
        }
    }

    fn is_in_directory(&self) -> bool {
        self.serves == Serves::Always || self.token == Token::from_bytes([0; Token::LENGTH])
    }

    /// Listens on the name. Returns `None` if somebody else does.
    fn listen(&self, deadline: &Deadline<'_>) -> Result<Option<Listener>> {
        match self.namespace {
            SocketNamespace::Directory(directory) => directory.listen_well_known(self.name, deadline),
            SocketNamespace::Abstract => match self.namespace.listen(SockType::Stream, self.name) {
                Err(Error::System { errno: Errno::EADDRINUSE, .. }) => Ok(None),
                listener => listener.map(Some),
            },
        }
    }

    /// Returns the error after the limit if nobody serves the rendezvous or, on rank 0, if another process does.
    fn no_rendezvous(&self, failure: Option<Error>, deadline: &Deadline<'_>) -> Error {
        let path = self.namespace.directory().unwrap_or(Path::new(""));
        match failure {
            _ if self.serves == Serves::Always => {
                let (path, waited) = (path.display(), deadline.waited());
                return rendezvous(format!(
                    "another world was forming in {path} for {waited:?}: give each world its own directory"
                ));
            }
            Some(error @ Error::Refused { .. }) => return error,
            // Another rank and rank 0 have given up, usually because all ranks have the same limit.
            Some(Error::Timeout { operation, epoch, missing, waited, mut last_seen }) => {
                last_seen += if last_seen.is_empty() { "" } else { "; " };
                last_seen += "after that nobody served the rendezvous again";
                return Error::Timeout { operation, epoch, missing, waited, last_seen };
            }
            _ => {}
        }
        if !self.is_in_directory() {
            let timeout = Error::Timeout {
                operation: "rendezvous",
                epoch: 0,
                missing: (0..self.place.world_size).filter(|&rank| rank != self.place.rank).collect(),
                waited: deadline.waited(),
                last_seen: "nobody serves this id: the ranks of its world have not begun to join, have ended, or have \
                            formed another world, which has another id"
                    .into(),
            };
            return with_earlier(timeout, failure);
        }
        let last_seen = match path.join(OsStr::from_bytes(self.name)).exists() {
            true => "nobody answers at its socket there: its process has ended, or is on another machine",
            false => "it has not created its socket in the directory",
        };
        let timeout = Error::Timeout {
            operation: "rendezvous",
            epoch: 0,
            missing: vec![0],
            waited: deadline.waited(),
            last_seen: last_seen.into(),
        };
        with_earlier(timeout, failure)
    }
}

/// Result of one attempt.
enum Attempt {
    Formed(Box<Local>),
    /// The world that this rank joined ended before it formed.
    Failed(Error),
    /// No rendezvous: nobody serves it or, on rank 0, another process already does.
    NoRendezvous,
}

/// Adds the error of an earlier attempt to a timeout.
fn with_earlier(mut error: Error, earlier: Option<Error>) -> Error {
    if let (Error::Timeout { last_seen, .. }, Some(earlier)) = (&mut error, earlier) {
        let separator = if last_seen.is_empty() { "" } else { "; " };
        *last_seen += &format!("{separator}before that: {earlier}");
    }
    error
}
