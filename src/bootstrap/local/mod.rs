//! Processes (or threads) of one machine that meet at a Unix socket: one that an id names, or one in a directory.

mod directory;
mod hub;
mod link;
mod message;
mod unique_id;

#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{shutdown, Shutdown, SockType};

pub use unique_id::UniqueId;

use self::link::Link;
use self::message::{reply_limit, Reply, Request, MAX_CONTRIBUTION};
use super::join;
use super::place::{socket_directory, Listener, Place};
use super::socket::{self, poll_until, Token};
use super::world::Event;
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::descriptor::moved;
use crate::error::{Error, Result};
use crate::thread;

const UNIQUE_ID: &str = "FAST_ALLREDUCE_UNIQUE_ID";
const RANK: &str = "FAST_ALLREDUCE_RANK";
const WORLD_SIZE: &str = "FAST_ALLREDUCE_WORLD_SIZE";

/// How long the rendezvous may take to say who is missing, once a rank's time is up.
const GRACE: Duration = Duration::from_secs(2);

/// Between two attempts to connect while the rendezvous' queue is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A rank that meets the others, processes of one user on one machine, at the rendezvous of a [`UniqueId`].
///
/// A rank gives at most 1 MiB to one gather. Dropping a rank, or ending its process, ends the world: the
/// other ranks get [`Error::PeerLost`]. When the process that made the id ends, so does the rendezvous: keep
/// it for as long as the ranks meet.
///
/// An id is for one world: ranks that start again need a new one.
///
/// A rank whose time is up ends the waiting of all, so give all ranks the same limits. A call may take two
/// seconds more than its limit where the rendezvous does not say at once who is missing.
///
/// ```
/// use std::time::Duration;
/// use fast_allreduce::bootstrap::{Bootstrap, Local, UniqueId};
///
/// let limit = Duration::from_secs(10);
/// let id = UniqueId::new()?;
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let id = &id;
///         scope.spawn(move || {
///             let local = Local::connect(id, rank, 2, limit).unwrap();
///             let all = local.all_gather(&[rank as u8], limit).unwrap();
///             assert_eq!(all, [[0], [1]]);
///         });
///     }
/// });
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub struct Local {
    rank: usize,
    world_size: usize,
    connection: Mutex<Connection>,
    /// The connection's socket, for whoever does not hold the connection.
    socket: OwnedFd,
    /// Where this world's sockets have their names.
    place: Place,
}

impl Local {
    /// Joins the world of `id` as `rank`, and returns when all ranks have joined.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`], [`Error::RankOutOfRange`]: the arguments cannot be.
    /// * [`Error::Rendezvous`]: the process that made the id, or the world that it was for, has ended.
    /// * [`Error::Refused`]: the rank is taken, the world has another size, or the id is of another user.
    /// * [`Error::Timeout`] naming the ranks that did not come within `timeout`.
    /// * [`Error::PeerLost`] if one came and ended.
    pub fn connect(id: &UniqueId, rank: usize, world_size: usize, timeout: Duration) -> Result<Self> {
        check_world(rank, world_size)?;
        let deadline = Deadline::after(timeout);
        let place = id.place()?;
        let Some(reached) = Self::reach(&place, id.socket_name(), &id.token(), &deadline)? else {
            return Err(rendezvous(match place.directory() {
                Some(directory) => format!(
                    "nobody is there: the process that made the id, or its world, has ended, or meets in another directory than {}",
                    directory.display()
                ),
                None => "nobody is there: the process that made the id, or its world, has ended, \
                         or is in another network namespace: then have the ranks meet in a directory \
                         (FAST_ALLREDUCE_SOCKET_DIR, Local::in_directory)"
                    .into(),
            }));
        };
        reached.join(rank, world_size, &deadline)
    }

    /// Joins the world that the environment names, as [`Local::connect`].
    ///
    /// `FAST_ALLREDUCE_UNIQUE_ID` is the id as text, `FAST_ALLREDUCE_RANK` and `FAST_ALLREDUCE_WORLD_SIZE`
    /// are numbers. Without an id, `FAST_ALLREDUCE_SOCKET_DIR` may name a directory to meet in, as [`Local::in_directory`] has it.
    /// Ranks whose `FAST_ALLREDUCE_GENERATION` differs do not meet there: whoever starts a program again while ranks of the earlier
    /// start may still be there gives each start a word of its own, such as a number.
    ///
    /// Ranks wait for each other for as many seconds as `FAST_ALLREDUCE_JOIN_TIMEOUT` says, 0 for no limit; 120 by default. The limit
    /// of calls is another: [`Builder::timeout`](crate::Builder::timeout).
    ///
    /// `None` where there is neither an id nor a directory with a rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] naming the variable that is missing or malformed; else as
    /// [`Local::connect`] and [`Local::in_directory`].
    pub fn from_env() -> Result<Option<Self>> {
        Self::of_env(join::limit)
    }

    /// As [`Local::from_env`], with a limit of the program's own.
    ///
    /// # Errors
    ///
    /// As [`Local::from_env`].
    pub fn from_env_within(timeout: Duration) -> Result<Option<Self>> {
        Self::of_env(|| Ok(timeout))
    }

    fn of_env(timeout: impl FnOnce() -> Result<Duration>) -> Result<Option<Self>> {
        let Some(id) = std::env::var_os(UNIQUE_ID) else {
            // A directory alone is for whoever launches ranks.
            let directory = socket_directory().filter(|_| std::env::var_os(RANK).is_some());
            let Some(directory) = directory else { return Ok(None) };
            let (rank, world_size) = (number(RANK)?, number(WORLD_SIZE)?);
            return Self::in_directory_of_env(&directory, rank, world_size, timeout()?).map(Some);
        };
        // What is not UTF-8 is not hexadecimal either, and is refused as that.
        let id: UniqueId = id.to_string_lossy().parse().map_err(|error| match error {
            Error::InvalidSetting { value, expected, .. } => {
                Error::InvalidSetting { name: UNIQUE_ID, value, expected }
            }
            error => error,
        })?;
        Self::connect(&id, number(RANK)?, number(WORLD_SIZE)?, timeout()?).map(Some)
    }

    /// Serves a rendezvous behind `listener`, at a name and with a secret that all ranks know beforehand, and joins it as rank 0.
    pub(super) fn serve(
        place: &Place,
        listener: Listener,
        name: &[u8],
        token: &Token,
        world_size: usize,
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        let shown = listener.name();
        // Longer than this rank takes to come to it.
        let ended = hub::spawn(listener, token.clone(), Some(world_size), timeout.saturating_add(GRACE))?;
        let joined = Self::reach(place, name, token, deadline).and_then(|reached| match reached {
            Some(reached) => reached.join(0, world_size, deadline),
            None => Err(rendezvous("this rank's own rendezvous has ended")),
        });
        joined.map_err(|error| {
            // The hub would do so, unless this process ends before.
            shown.hide();
            ended.get().cloned().unwrap_or(error)
        })
    }

    /// Connects to a rendezvous of that kind. `None` if nobody serves it.
    pub(super) fn reach(
        place: &Place,
        name: &[u8],
        token: &Token,
        deadline: &Deadline<'_>,
    ) -> Result<Option<Reached>> {
        let link = connect(place, name, deadline)?;
        Ok(link.map(|link| Reached { link, token: token.clone(), place: place.clone() }))
    }
}

/// A rendezvous that this process has a connection to.
pub(super) struct Reached {
    link: Link,
    token: Token,
    place: Place,
}

impl Reached {
    /// Joins, and returns when all ranks have joined.
    pub(super) fn join(self, rank: usize, world_size: usize, deadline: &Deadline<'_>) -> Result<Local> {
        let Self { link, token, place } = self;
        let call = "dup of the rendezvous' socket";
        let socket = link.as_fd().try_clone_to_owned().map_err(Error::io(call))?;
        let socket = moved(socket).map_err(Error::system(call))?;
        let mut connection = Connection { link, rank, world_size, sequence: 0, failure: None };
        match connection.ask(&Request::Hello { token, rank, world_size }, deadline)? {
            Event::Formed => {
                Ok(Local { rank, world_size, connection: Mutex::new(connection), socket, place })
            }
            event => Err(unexpected(&event)),
        }
    }
}

impl Bootstrap for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_CONTRIBUTION {
            let value = bytes.len().to_string();
            let expected = "a rank gives at most 1 MiB to one gather";
            return Err(Error::InvalidSetting { name: "bytes of all_gather", value, expected });
        }
        // A panic elsewhere leaves the connection as whole as an error does.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.all_gather(bytes, &Deadline::after(timeout))
    }

    fn interrupt(&self) {
        // An error means that it has ended already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    fn socket_directory(&self) -> Option<&Path> {
        self.place.directory()
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut local = f.debug_struct("Local");
        local.field("rank", &self.rank).field("world_size", &self.world_size).finish_non_exhaustive()
    }
}

struct Connection {
    link: Link,
    rank: usize,
    world_size: usize,
    /// Number of the latest gather; 0 while the world forms.
    sequence: u64,
    /// What every call answers once one has failed.
    failure: Option<Error>,
}

impl Connection {
    fn all_gather(&mut self, bytes: &[u8], deadline: &Deadline<'_>) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        self.sequence += 1;
        let request = Request::Gather { sequence: self.sequence, bytes: bytes.to_vec() };
        let answer = self.ask(&request, deadline).and_then(|event| match event {
            Event::Gathered { sequence, parts }
                if sequence == self.sequence && parts.len() == self.world_size =>
            {
                Ok(parts)
            }
            event => Err(unexpected(&event)),
        });
        answer.inspect_err(|error| self.failure = Some(error.clone()))
    }

    /// Sends a request and waits for the event that answers it.
    ///
    /// When the time is up it says so, and the hub then answers who is missing: the hub alone knows. If the
    /// awaited event is on the way at that moment, it arrives in place of that answer.
    fn ask(&mut self, request: &Request, deadline: &Deadline<'_>) -> Result<Event> {
        self.link.send(request.frame().into());
        let mut reply = self.reply(deadline)?;
        if reply.is_none() {
            self.link.send(Request::GiveUp { sequence: self.sequence }.frame().into());
            reply = self.reply(&Deadline::after(GRACE))?;
        }
        match reply {
            Some(Reply::Event(Event::Failed(failure))) => Err(failure.to_error(self.rank, deadline.waited())),
            Some(Reply::Event(event)) => Ok(event),
            Some(Reply::Refused { reason }) => Err(Error::Refused { reason }),
            None => Err(rendezvous("its server does not answer, though its socket is open")),
        }
    }

    /// The next reply; `None` if it does not come before the deadline.
    fn reply(&mut self, deadline: &Deadline<'_>) -> Result<Option<Reply>> {
        loop {
            self.link.flush();
            let malformed = |malformed| rendezvous(format!("its server speaks nonsense: {malformed}"));
            if let Some(body) = self.link.next(reply_limit(self.world_size)).map_err(malformed)? {
                return Reply::decode(&body).map(Some).map_err(malformed);
            }
            if !poll_until(&mut [self.link.poll_fd()], deadline)? {
                return Ok(None);
            }
            self.link.fill().map_err(|closed| {
                rendezvous(format!(
                    "its server has ended: the process that made the id, or rank 0 of a directory ({closed})"
                ))
            })?;
        }
    }
}

/// Connects to the rendezvous of that name, and checks that it is run by this user. `None` if nobody listens.
fn connect(place: &Place, name: &[u8], deadline: &Deadline<'_>) -> Result<Option<Link>> {
    loop {
        let turn = deadline.turn();
        match place.connect(SockType::Stream, name) {
            Ok(stream) => {
                socket::same_user(stream.as_fd()).map_err(|reason| Error::Refused { reason })?;
                return Ok(Some(Link::new(stream)));
            }
            Err(Errno::EAGAIN) if turn.is_zero() => {
                return Err(rendezvous("its queue is full and its server takes nobody in"));
            }
            Err(Errno::EAGAIN) => thread::pause(RETRY_INTERVAL.min(turn)),
            Err(Errno::ECONNREFUSED) => return Ok(None),
            Err(errno) => return Err(Error::System { call: "connect to the rendezvous", errno }),
        }
    }
}

fn check_world(rank: usize, world_size: usize) -> Result<()> {
    if !(1..=crate::abi::MAX_RANKS).contains(&world_size) {
        return Err(Error::WorldSize { world_size });
    }
    match rank < world_size {
        true => Ok(()),
        false => Err(Error::RankOutOfRange { rank, world_size }),
    }
}

fn rendezvous(reason: impl Into<String>) -> Error {
    Error::Rendezvous { reason: reason.into() }
}

fn unexpected(event: &Event) -> Error {
    let what = match event {
        Event::Formed => "that the world has formed",
        Event::Gathered { .. } => "another gather",
        Event::Failed(_) => "a failure",
    };
    rendezvous(format!("its server answered with {what}, out of turn"))
}

/// A number in the environment.
fn number(name: &'static str) -> Result<usize> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value.as_deref().and_then(|value| value.parse().ok()).ok_or_else(|| Error::InvalidSetting {
        name,
        value: value.unwrap_or_else(|| "(unset)".into()),
        expected: "a number, set together with FAST_ALLREDUCE_UNIQUE_ID or FAST_ALLREDUCE_SOCKET_DIR",
    })
}
