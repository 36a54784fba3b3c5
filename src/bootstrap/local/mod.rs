//! Bootstrap of processes (or threads) on one machine that meet at a Unix socket: one that an id names, or one in a
//! directory.

mod directory;
pub(super) mod hub;
pub(super) mod link;
pub(super) mod message;
pub(super) mod unique_id;

#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{shutdown, Shutdown, SockType};

pub use unique_id::UniqueId;

use self::link::Link;
use self::message::{reply_limit, Reply, Request, ANY_RANK, MAX_CONTRIBUTION};
use super::join;
use super::socket::{self, poll_until, Token};
use super::socket_name::{socket_directory, Listener, SocketNamespace};
use super::world_state::Event;
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::descriptor::moved;
use crate::error::{Error, Result};
use crate::fork::ForkCheck;
use crate::thread;

const UNIQUE_ID: &str = "FAST_ALLREDUCE_UNIQUE_ID";
const RANK: &str = "FAST_ALLREDUCE_RANK";
const WORLD_SIZE: &str = "FAST_ALLREDUCE_WORLD_SIZE";

/// How long a rank waits, after its timeout, for the rendezvous to report the missing ranks.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// Pause between two attempts to connect while the queue of the rendezvous is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A rank that meets the others at the rendezvous of a [`UniqueId`] or in a directory. All ranks are processes of one
/// user on one machine.
///
/// Dropping a rank, or ending its process, ends the world: the other ranks get [`Error::PeerLost`]. The rendezvous ends
/// with the process that created the id, so keep that process alive while the bootstrap is in use. An id is for one
/// world: ranks that start again need a new one.
///
/// A rank contributes at most 1 MiB to one gather.
///
/// A timeout of one rank ends the waits of all: use the same limit on all ranks. A call may take up to two seconds
/// longer than its limit if the rendezvous does not report the missing ranks at once.
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
    connection: SharedConnection,
    /// Where the names of this world's sockets are.
    namespace: SocketNamespace,
}

impl Local {
    /// Joins the world of `id` as `rank`, and returns when all ranks have joined.
    ///
    /// With the id that [`Communicator::join_id`](crate::Communicator::join_id) returned, it waits until the ranks of
    /// that world call [`Communicator::join`](crate::Communicator::join) or
    /// [`Communicator::resume`](crate::Communicator::resume), and takes the place of a rank that has gone or moved; or
    /// until they call [`Communicator::grow`](crate::Communicator::grow), and comes in addition.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`] if `world_size` is 0 or above [`MAX_RANKS`](crate::MAX_RANKS).
    /// * [`Error::RankOutOfRange`] unless `rank` is below `world_size`.
    /// * [`Error::Rendezvous`] if the process that created the id has ended.
    /// * [`Error::Refused`] if the rank is taken, the world has another size, or the id is of another user.
    /// * [`Error::Timeout`] with the ranks that did not join within `timeout`; also for the join id of a world that has
    ///   ended or gone on.
    /// * [`Error::PeerLost`] if a rank joined and ended.
    /// * [`Error::InvalidSetting`] if the socket directory cannot be used.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fast_allreduce::bootstrap::{Bootstrap, Local, UniqueId};
    ///
    /// // A world of one rank: nobody to wait for.
    /// let local = Local::connect(&UniqueId::new()?, 0, 1, Duration::from_secs(10))?;
    /// assert_eq!(local.world_size(), 1);
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn connect(id: &UniqueId, rank: usize, world_size: usize, timeout: Duration) -> Result<Self> {
        check_world(rank, world_size)?;
        let deadline = Deadline::after(timeout);
        let namespace = id.namespace()?;
        if id.is_served_later() {
            return Self::when_served(&namespace, id, (rank, world_size), &deadline, timeout);
        }
        let Some(reached) = Self::reach(&namespace, id.socket_name(), &id.token(), &deadline)? else {
            return Err(rendezvous(match namespace.directory() {
                Some(directory) => format!(
                    "nobody listens: the process that created the id, or its world, has ended, or uses another \
                     directory than {}",
                    directory.display()
                ),
                None => "nobody listens: the process that created the id, or its world, has ended, \
                         or is in another network namespace; in that case let the ranks meet in a directory \
                         (FAST_ALLREDUCE_SOCKET_DIR, Local::in_directory)"
                    .into(),
            }));
        };
        reached.join(rank, world_size, &deadline)
    }

    /// Waits as a spare until the ranks of a world call for new processes, and takes any place for one: the rank and
    /// the number of ranks are known afterwards. The others then wait in
    /// [`Builder::build`](crate::Builder::build), so call it at once.
    ///
    /// `id` is that of [`Communicator::join_id`](crate::Communicator::join_id), which may be called for as soon as the
    /// world exists. It is for the next world alone: a spare that gets no place in that one needs the next id. The wait
    /// takes no core: the spare looks 50 times a second. Places are those of ranks that are no survivors of a
    /// [`Communicator::join`](crate::Communicator::join), and the additional ones of a
    /// [`Communicator::grow`](crate::Communicator::grow); the first spare gets the lowest.
    ///
    /// # Errors
    ///
    /// * [`Error::Refused`] if it finds the world forming without a place for it: other processes have taken all, or
    ///   all ranks resume.
    /// * [`Error::Timeout`] if nobody has called within `timeout`, or the world had formed before the spare found it.
    /// * [`Error::InvalidSetting`] if the id is not from a communicator.
    pub fn spare(id: &UniqueId, timeout: Duration) -> Result<Self> {
        if !id.is_served_later() {
            return Err(Error::InvalidSetting {
                name: "unique id of a spare",
                value: "an id of a new world".into(),
                expected: "that of Communicator::join_id",
            });
        }
        let namespace = id.namespace()?;
        Self::when_served(&namespace, id, (ANY_RANK, 0), &Deadline::after(timeout), timeout)
    }

    /// Joins the world that the environment describes. Returns `None` if the environment has neither an id nor a
    /// directory with a rank.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `FAST_ALLREDUCE_UNIQUE_ID` | the id as text, as for [`Local::connect`] |
    /// | `FAST_ALLREDUCE_SOCKET_DIR` | without an id: a directory, as for [`Local::in_directory`] |
    /// | `FAST_ALLREDUCE_RANK`, `FAST_ALLREDUCE_WORLD_SIZE` | numbers |
    /// | `FAST_ALLREDUCE_GENERATION` | without an id: ranks with different values do not meet |
    /// | `FAST_ALLREDUCE_JOIN_TIMEOUT` | limit on the wait for all ranks in seconds, default 120; 0: no limit |
    ///
    /// Set the generation to a different word, such as a number, in each start of the program if ranks of an earlier
    /// start may still run. The limit of calls is another setting: [`Builder::timeout`](crate::Builder::timeout).
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] with the variable that is missing or malformed.
    /// * Those of [`Local::connect`] and [`Local::in_directory`]: [`Error::WorldSize`], [`Error::RankOutOfRange`],
    ///   [`Error::Rendezvous`], [`Error::Refused`], [`Error::Timeout`] and [`Error::PeerLost`].
    ///
    /// ```
    /// use fast_allreduce::bootstrap::Local;
    ///
    /// // The launcher has set no variables.
    /// assert!(Local::from_env()?.is_none());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn from_env() -> Result<Option<Self>> {
        Self::of_env(join::limit)
    }

    /// Joins the world that the environment describes, with the limit `timeout` instead of
    /// `FAST_ALLREDUCE_JOIN_TIMEOUT`.
    ///
    /// # Errors
    ///
    /// Those of [`Local::from_env`]: [`Error::InvalidSetting`], and the errors of joining.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fast_allreduce::bootstrap::Local;
    ///
    /// assert!(Local::from_env_within(Duration::from_secs(5))?.is_none());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn from_env_within(timeout: Duration) -> Result<Option<Self>> {
        Self::of_env(|| Ok(timeout))
    }

    fn of_env(timeout: impl FnOnce() -> Result<Duration>) -> Result<Option<Self>> {
        let Some(id) = std::env::var_os(UNIQUE_ID) else {
            // Without a rank, the directory is set for the process that launches the ranks.
            let directory = socket_directory().filter(|_| std::env::var_os(RANK).is_some());
            let Some(directory) = directory else { return Ok(None) };
            let (rank, world_size) = (number(RANK)?, number(WORLD_SIZE)?);
            return Self::in_directory_of_env(&directory, rank, world_size, timeout()?).map(Some);
        };
        // Text that is not UTF-8 is not hexadecimal either: parsing it fails.
        let id: UniqueId = id.to_string_lossy().parse().map_err(|error| match error {
            Error::InvalidSetting { value, expected, .. } => {
                Error::InvalidSetting { name: UNIQUE_ID, value, expected }
            }
            error => error,
        })?;
        Self::connect(&id, number(RANK)?, number(WORLD_SIZE)?, timeout()?).map(Some)
    }

    /// Serves a rendezvous behind `listener` and joins it as `rank`. All ranks know its name and token.
    pub(super) fn serve(
        namespace: &SocketNamespace,
        listener: Listener,
        name: &[u8],
        token: &Token,
        place: Place,
        deadline: &Deadline<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        let name_guard = listener.name();
        // The hub's limit is longer than this rank's wait for it.
        let ended = hub::spawn(
            listener,
            Box::new(hub::SameUser),
            token.clone(),
            Some(place),
            timeout.saturating_add(GRACE),
        )?;
        let joined = Self::reach(namespace, name, token, deadline).and_then(|reached| match reached {
            Some(reached) => reached.join(place.rank, place.world_size, deadline),
            None => Err(rendezvous("this rank's own rendezvous has ended")),
        });
        joined.map_err(|error| {
            // The hub removes the name as well, but this process may end before that.
            name_guard.hide();
            ended.get().cloned().unwrap_or(error)
        })
    }

    /// Connects to a rendezvous. Returns `None` if nobody serves it.
    pub(super) fn reach(
        namespace: &SocketNamespace,
        name: &[u8],
        token: &Token,
        deadline: &Deadline<'_>,
    ) -> Result<Option<Reached>> {
        let link = connect(namespace, name, deadline)?;
        Ok(link.map(|link| Reached { link, token: token.clone(), namespace: namespace.clone() }))
    }
}

/// A rank's place in a world that forms.
#[derive(Debug, Clone, Copy)]
pub(in crate::bootstrap) struct Place {
    pub rank: usize,
    pub world_size: usize,
    /// Mask of the places that spares may take, if this rank serves the rendezvous.
    pub open: u32,
    /// If this rank serves the rendezvous: it gives up its name when the world has formed or failed, since ranks may
    /// meet at that name again while this world exists.
    pub frees_name: bool,
}

/// A rendezvous to which this process has a connection.
pub(in crate::bootstrap) struct Reached {
    link: Link,
    token: Token,
    namespace: SocketNamespace,
}

impl Reached {
    /// Joins, and returns when all ranks have joined.
    pub(in crate::bootstrap) fn join(
        self,
        rank: usize,
        world_size: usize,
        deadline: &Deadline<'_>,
    ) -> Result<Local> {
        let Self { link, token, namespace } = self;
        let server = "its server".into();
        let connection = SharedConnection::join(link, server, token, rank, world_size, deadline)?;
        // A spare has got them.
        let (rank, world_size) = connection.place();
        Ok(Local { rank, world_size, connection, namespace })
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
        self.connection.all_gather(bytes, &Deadline::after(timeout))
    }

    fn interrupt(&self) {
        self.connection.interrupt();
    }

    fn socket_directory(&self) -> Option<&Path> {
        self.namespace.directory()
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut local = f.debug_struct("Local");
        local.field("rank", &self.rank).field("world_size", &self.world_size).finish_non_exhaustive()
    }
}

/// A rank's connection, for several threads. In a fork of the rank's process it does nothing: the other ranks would
/// take that for an action of the rank.
pub(super) struct SharedConnection {
    connection: Mutex<Connection>,
    /// A duplicate of its socket, to interrupt a thread that holds the lock.
    socket: OwnedFd,
    fork_check: ForkCheck,
}

impl SharedConnection {
    /// Joins the world, and returns when all ranks have joined.
    pub(super) fn join(
        link: Link,
        server: String,
        token: Token,
        rank: usize,
        world_size: usize,
        deadline: &Deadline<'_>,
    ) -> Result<Self> {
        let call = "dup of the rendezvous' socket";
        let socket = link.as_fd().try_clone_to_owned().map_err(Error::io(call))?;
        let socket = moved(socket).map_err(Error::system(call))?;
        let mut connection = Connection { link, server, rank, world_size, sequence: 0, failure: None };
        match connection.ask(&Request::Hello { token, rank, world_size }, deadline)? {
            Event::Formed => {
                Ok(Self { connection: Mutex::new(connection), socket, fork_check: ForkCheck::new() })
            }
            event => Err(connection.unexpected(&event)),
        }
    }

    /// Returns this rank and the number of ranks.
    fn place(&self) -> (usize, usize) {
        let connection = self.lock();
        (connection.rank, connection.world_size)
    }

    pub(super) fn all_gather(&self, bytes: &[u8], deadline: &Deadline<'_>) -> Result<Vec<Vec<u8>>> {
        // Before the lock, which another thread may have held during the fork.
        match self.fork_check.in_fork() {
            true => Err(Error::Forked),
            false => self.lock().all_gather(bytes, deadline),
        }
    }

    /// Ends the connection.
    pub(super) fn interrupt(&self) {
        if !self.fork_check.in_fork() {
            // An error means that the connection has ended already.
            let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Ignores poisoning: a panic leaves the connection in the same state as an error.
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank's connection to the rendezvous.
struct Connection {
    link: Link,
    /// Who serves the rendezvous, for errors.
    server: String,
    rank: usize,
    world_size: usize,
    /// Number of the latest gather; 0 while the world forms.
    sequence: u64,
    /// The error of the first failed call, which all later calls return.
    failure: Option<Error>,
}

impl Connection {
    fn all_gather(&mut self, bytes: &[u8], deadline: &Deadline<'_>) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_CONTRIBUTION {
            let value = bytes.len().to_string();
            let expected = "at most 1 MiB from each rank";
            return Err(Error::InvalidSetting { name: "bytes of all_gather", value, expected });
        }
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
            event => Err(self.unexpected(&event)),
        });
        answer.inspect_err(|error| self.failure = Some(error.clone()))
    }

    /// Sends a request and waits for its event.
    ///
    /// After the deadline this rank notifies the hub, which answers with the missing ranks, since only the hub knows
    /// them. If the awaited event is on its way at that moment, it arrives instead of that answer.
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
            Some(Reply::Placed { .. }) => Err(rendezvous(format!("{} moved this rank", self.server))),
            None => Err(rendezvous(format!("{} does not answer, but its socket is open", self.server))),
        }
    }

    /// Waits for the next reply. Returns `None` if the deadline passes first.
    fn reply(&mut self, deadline: &Deadline<'_>) -> Result<Option<Reply>> {
        loop {
            self.link.flush();
            let server = &self.server;
            let malformed = |malformed| rendezvous(format!("{server} sent an invalid message: {malformed}"));
            if let Some(body) = self.link.next(reply_limit(self.world_size)).map_err(malformed)? {
                match Reply::decode(&body).map_err(malformed)? {
                    Reply::Placed { rank, world_size } if self.rank == ANY_RANK => {
                        check_world(rank, world_size)?;
                        (self.rank, self.world_size) = (rank, world_size);
                    }
                    reply => return Ok(Some(reply)),
                }
                continue;
            }
            let mut polled = vec![self.link.poll_fd()];
            polled.extend(self.link.process_fd());
            if !poll_until(&mut polled, deadline)? {
                return Ok(None);
            }
            self.link.fill().map_err(|closed| {
                rendezvous(format!(
                    "{} has ended: the process that created the id, or the rank that serves it ({closed})",
                    self.server
                ))
            })?;
        }
    }

    fn unexpected(&self, event: &Event) -> Error {
        let what = match event {
            Event::Formed => "the formation of the world",
            Event::Gathered { .. } => "another gather",
            Event::Failed(_) => "a failure",
        };
        rendezvous(format!("{} answered unexpectedly with {what}", self.server))
    }
}

/// Connects to the rendezvous with this name, and checks that this user serves it. Returns `None` if nobody listens.
fn connect(namespace: &SocketNamespace, name: &[u8], deadline: &Deadline<'_>) -> Result<Option<Link>> {
    loop {
        let wait = deadline.next_wait();
        match namespace.connect(SockType::Stream, name) {
            Ok(stream) => {
                let user = socket::same_user(stream.as_fd()).map_err(|reason| Error::Refused { reason })?;
                return Ok(Some(Link::new(stream).of_process(user.pid())));
            }
            Err(Errno::EAGAIN) if wait.is_zero() => {
                return Err(rendezvous("its queue is full and its server does not accept connections"));
            }
            Err(Errno::EAGAIN) => thread::pause(RETRY_INTERVAL.min(wait)),
            Err(Errno::ECONNREFUSED) => return Ok(None),
            Err(errno) => return Err(Error::System { call: "connect to the rendezvous", errno }),
        }
    }
}

fn check_world(rank: usize, world_size: usize) -> Result<()> {
    check_ranks(rank, world_size, crate::abi::MAX_RANKS)
}

pub(super) fn check_ranks(rank: usize, world_size: usize, max_ranks: usize) -> Result<()> {
    if !(1..=max_ranks).contains(&world_size) {
        return Err(Error::WorldSize { world_size });
    }
    match rank < world_size {
        true => Ok(()),
        false => Err(Error::RankOutOfRange { rank, world_size }),
    }
}

pub(super) fn rendezvous(reason: impl Into<String>) -> Error {
    Error::Rendezvous { reason: reason.into() }
}

/// Reads a number from the environment.
fn number(name: &'static str) -> Result<usize> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value.as_deref().and_then(|value| value.parse().ok()).ok_or_else(|| Error::InvalidSetting {
        name,
        value: value.unwrap_or_else(|| "(unset)".into()),
        expected: "a number, set together with FAST_ALLREDUCE_UNIQUE_ID or FAST_ALLREDUCE_SOCKET_DIR",
    })
}
