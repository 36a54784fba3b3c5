//! Ranks that meet at a socket in a directory, which rank 0 serves.
//!
//! A program may be started again while ranks of its earlier start are about to end, or have left files. So an attempt that comes to
//! nothing is no failure before the rank's limit: rank 0 serves again, and the others look again.

use std::ffi::OsStr;
use std::hash::Hasher as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use fnv::FnvHasher;

use super::{check_world, rendezvous, Local};
use crate::bootstrap::place::Place;
use crate::bootstrap::socket::Token;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// The file of a rendezvous, of the ranks that name no generation.
const RENDEZVOUS: &str = "fast-allreduce-rendezvous";

/// Tells starts of a program apart.
const GENERATION: &str = "FAST_ALLREDUCE_GENERATION";

/// Between two looks for rank 0.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Between two attempts where somebody else has a place, or serves.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

impl Local {
    /// Joins the world that meets in `directory`, and returns when all ranks have joined: for containers with networks of their
    /// own, on one machine, that mount a directory they share, at any path. No id is needed, as rank 0 serves the rendezvous, at a
    /// socket in the directory, which is there until all ranks have come.
    ///
    /// Ranks run as one user, which both sides of each connection check. One world at a time forms in a directory. What processes
    /// that were killed have left there is taken over or removed. A rank that goes before all have come does not end the meeting,
    /// as it may be of an earlier start of the program: the others wait on for one in its place. Later sockets of this world are in
    /// the directory as well, each for as long as ranks pass descriptors.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`], [`Error::RankOutOfRange`]: the arguments cannot be.
    /// * [`Error::InvalidSetting`]: there is no such directory.
    ///
    /// Where the world has not formed within `timeout`:
    ///
    /// * [`Error::Timeout`] naming the ranks that were missing, or rank 0, and what was seen of it.
    /// * [`Error::Rendezvous`] on rank 0: another world forms there all the time.
    /// * [`Error::Refused`]: the rank is taken, or the world has another size; at once where a process of another user serves it.
    pub fn in_directory(
        directory: impl AsRef<Path>,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        Self::at(directory.as_ref(), RENDEZVOUS.into(), rank, world_size, timeout)
    }

    /// The same, with the generation that the environment names.
    pub(super) fn in_directory_of_env(
        directory: &Path,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let generation = std::env::var_os(GENERATION).filter(|generation| !generation.is_empty());
        Self::at(directory, file_name(generation.as_deref()), rank, world_size, timeout)
    }

    pub(super) fn at(
        directory: &Path,
        name: String,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        check_world(rank, world_size)?;
        let place = Place::new(Some(directory))?;
        Meeting { place: &place, name: name.as_bytes(), rank, world_size, timeout }.form()
    }
}

/// Starts of different generations have files of their own.
pub(super) fn file_name(generation: Option<&OsStr>) -> String {
    let Some(generation) = generation else { return RENDEZVOUS.into() };
    // 64-bit FNV-1a: any word has a name of that length.
    let mut hasher = FnvHasher::default();
    hasher.write(generation.as_bytes());
    format!("{RENDEZVOUS}-{:016x}", hasher.finish())
}

/// A rank's attempts to form a world.
struct Meeting<'a> {
    place: &'a Place,
    name: &'a [u8],
    rank: usize,
    world_size: usize,
    timeout: Duration,
}

impl Meeting<'_> {
    fn form(&self) -> Result<Local> {
        let deadline = Deadline::after(self.timeout);
        // Why the latest world did not form.
        let mut failure = None;
        loop {
            // Asked before looking, so that the last look comes after the limit.
            let turn = deadline.turn();
            let mut interval = RETRY_INTERVAL;
            match self.attempt(&deadline)? {
                Attempt::Formed(local) => return Ok(local),
                Attempt::Failed(error) if deadline.has_passed() => return Err(with_earlier(error, failure)),
                Attempt::Failed(error) => failure = Some(error),
                Attempt::Nobody if turn.is_zero() => return Err(self.nobody(failure, &deadline)),
                Attempt::Nobody if self.rank > 0 => interval = LOOK_INTERVAL,
                Attempt::Nobody => {}
            }
            thread::pause(interval.min(turn));
        }
    }

    /// # Errors
    ///
    /// Those that another attempt would have as well.
    fn attempt(&self, deadline: &Deadline<'_>) -> Result<Attempt> {
        // Who may use the directory is told by its permissions, and who is there by the kernel: no secret is to be handed on.
        let token = Token::from_bytes([0; Token::LENGTH]);
        let joined = match self.place {
            Place::Directory(directory) if self.rank == 0 => {
                let Some(listener) = directory.listen_known(self.name, deadline)? else {
                    return Ok(Attempt::Nobody);
                };
                Local::serve(self.place, listener, self.name, &token, self.world_size, deadline, self.timeout)
            }
            _ => match Local::reach(self.place, self.name, &token, deadline)? {
                Some(reached) => reached.join(self.rank, self.world_size, deadline),
                None => return Ok(Attempt::Nobody),
            },
        };
        match joined {
            Ok(local) => Ok(Attempt::Formed(local)),
            Err(
                error @ (Error::PeerLost { .. }
                | Error::Timeout { .. }
                | Error::Rendezvous { .. }
                | Error::Refused { .. }),
            ) => Ok(Attempt::Failed(error)),
            Err(error) => Err(error),
        }
    }

    /// Nobody serves whom this rank could join; or on rank 0 somebody else does.
    fn nobody(&self, failure: Option<Error>, deadline: &Deadline<'_>) -> Error {
        let path = self.place.directory().unwrap_or(Path::new(""));
        match failure {
            _ if self.rank == 0 => {
                let (path, waited) = (path.display(), deadline.waited());
                return rendezvous(format!(
                    "another world forms in {path}, and has not ended within {waited:?}: give each a directory of its own"
                ));
            }
            Some(error @ Error::Refused { .. }) => return error,
            // A rank gave up, and rank 0 with it: mostly since all have the same limit.
            Some(Error::Timeout { operation, epoch, missing, waited, .. }) => {
                let last_seen = "after that nobody served the meeting again".into();
                return Error::Timeout { operation, epoch, missing, waited, last_seen };
            }
            _ => {}
        }
        let last_seen = match path.join(OsStr::from_bytes(self.name)).exists() {
            true => "nobody answers at its socket there: its process has ended, or is on another machine",
            false => "it has not come to the directory",
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

/// What came of one look.
enum Attempt {
    Formed(Local),
    /// The world that this rank had joined ended before it formed.
    Failed(Error),
    Nobody,
}

/// A timeout that also tells how an earlier attempt ended.
fn with_earlier(mut error: Error, earlier: Option<Error>) -> Error {
    if let (Error::Timeout { last_seen, .. }, Some(earlier)) = (&mut error, earlier) {
        let separator = if last_seen.is_empty() { "" } else { "; " };
        *last_seen += &format!("{separator}before that: {earlier}");
    }
    error
}
