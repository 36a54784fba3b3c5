//! Bootstrap of processes on several machines, which meet at an address.

mod address;
mod seal;
mod secret;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::SockType;

pub use self::secret::Secret;

use self::address::Address;
use self::seal::{Seal, Sealed};
use super::local::link::{Closed, Link};
use super::local::message::MAX_WORLD;
use super::local::unique_id::{FORMATION_LIMIT, INTERNET, MAX_NAME};
use super::local::{check_ranks, hub, rendezvous, Place, SharedConnection, GRACE};
use super::location::{RankLocation, RankLocations};
use super::socket::{poll_until, random_name, Token};
use super::socket_name::{socket_directory, Listener, SocketNamespace};
use super::{in_old_ranks, join, Bootstrap, Local, UniqueId};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::thread;

/// Pause between two attempts to reach the rendezvous.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Limit on finding the address of a new id's host.
const RESOLUTION_LIMIT: Duration = Duration::from_secs(30);

/// The token of a rank that joins: its connection has proven the secret, which is not sent.
const PROVEN: Token = Token::from_bytes([0; Token::LENGTH]);

/// Names of environment variables: the address and the secret; the rank and the size of the world, as this crate,
/// torchrun and Slurm's srun call them.
const ADDRESS: &str = "FAST_ALLREDUCE_ADDRESS";
const SECRET: &str = "FAST_ALLREDUCE_SECRET";
const RANKS: [(&str, &str); 3] = [
    ("FAST_ALLREDUCE_RANK", "FAST_ALLREDUCE_WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
];

/// A rank that meets ranks of other machines at an address, over TCP.
///
/// The ranks must know a common [`Secret`]; the connections are encrypted. Only what a bootstrap exchanges passes
/// through them, never the data of calls: [`Tcp::of_node`] makes the world of the ranks of one machine, and
/// [`Hierarchical`](crate::Hierarchical) joins such worlds by another library. SECURITY.md says what an attacker on the
/// network can do.
///
/// Dropping a rank, or ending its process, ends the world: the other ranks get [`Error::PeerLost`], also if its machine
/// stops answering (after 20 s at most, or at the limit of a gather). The rendezvous ends with the process that serves
/// it: end a program with a [barrier](Bootstrap::barrier), so that no rank still waits for it.
///
/// A rank contributes at most 1 MiB to one gather.
///
/// ```
/// use std::time::Duration;
/// use fast_allreduce::bootstrap::{Bootstrap, Tcp, UniqueId};
///
/// let limit = Duration::from_secs(10);
/// let id = UniqueId::over_tcp("127.0.0.1:0")?; // Any free port.
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let id = &id;
///         scope.spawn(move || {
///             let tcp = Tcp::join(id, rank, 2, limit).unwrap();
///             assert_eq!(tcp.all_gather(&[rank as u8], limit).unwrap(), [[0], [1]]);
///             // All ranks are on one machine here.
///             let local = tcp.of_node(limit).unwrap();
///             assert_eq!(local.world_size(), 2);
///         });
///     }
/// });
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub struct Tcp {
    rank: usize,
    world_size: usize,
    connection: SharedConnection,
    /// By rank: the first rank on its node.
    nodes: Vec<usize>,
    socket_directory: Option<PathBuf>,
}

impl Tcp {
    /// Maximum number of ranks.
    pub const MAX_RANKS: usize = MAX_WORLD;

    /// Joins the world that meets at `address`, a host and a port such as `node0:29600` or `[fd00::1]:29600`, and
    /// returns when all ranks have joined. Rank 0 serves the rendezvous there, so the address is one of its machine.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`] if `world_size` is 0 or above [`Tcp::MAX_RANKS`].
    /// * [`Error::RankOutOfRange`] unless `rank` is below `world_size`.
    /// * [`Error::InvalidSetting`] if `address` is not one.
    /// * [`Error::Rendezvous`] on rank 0 if the port is in use, or the address is not one of its machine.
    /// * [`Error::Refused`] if the secrets differ, the rank is taken, the world has another size, the versions of this
    ///   crate do not fit, or another program serves the port.
    /// * [`Error::Timeout`] with the ranks that did not join within `timeout`; with rank 0 if it cannot be reached, and
    ///   why.
    /// * [`Error::PeerLost`] if a rank joined and ended.
    pub fn connect(
        address: &str,
        secret: &Secret,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self> {
        check_ranks(rank, world_size, MAX_WORLD)?;
        let address = Address::parse(address)?;
        let deadline = Deadline::after(timeout);
        let token = &secret.0;
        if rank > 0 {
            let missing = |last_seen| Error::Timeout {
                operation: "rendezvous",
                epoch: 0,
                missing: vec![0],
                waited: deadline.waited(),
                last_seen,
            };
            return Self::meet(&address, token, rank, world_size, &deadline, &missing);
        }
        let (listener, bound) = address.listen(&deadline)?;
        let address = Address { port: bound.port(), ..address };
        let limit = timeout.saturating_add(GRACE);
        let admission = Box::new(Sealed(token.clone()));
        let place = Place { rank, world_size, open: 0, frees_name: false };
        let ended = hub::spawn(Listener::nameless(listener), admission, PROVEN, Some(place), limit)?;
        let joined = Self::meet(&address, token, rank, world_size, &deadline, &rendezvous);
        joined.map_err(|error| ended.get().cloned().unwrap_or(error))
    }

    /// Joins the world of an id that [`UniqueId::over_tcp`] returned, and returns when all ranks have joined.
    ///
    /// # Errors
    ///
    /// Those of [`Tcp::connect`], and [`Error::Rendezvous`] if the process that created the id cannot be reached, or
    /// the id is for ranks of one machine.
    pub fn join(id: &UniqueId, rank: usize, world_size: usize, timeout: Duration) -> Result<Self> {
        check_ranks(rank, world_size, MAX_WORLD)?;
        if id.kind() != INTERNET {
            return Err(rendezvous("the id is for ranks of one machine, which join it by bootstrap::Local"));
        }
        let address = Address::parse(&String::from_utf8_lossy(id.socket_name()))?;
        Self::meet(&address, &id.token(), rank, world_size, &Deadline::after(timeout), &rendezvous)
    }

    /// Joins the world that the environment describes. Returns `None` if the environment has no address.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `FAST_ALLREDUCE_ADDRESS` | where to meet, as for [`Tcp::connect`] |
    /// | `FAST_ALLREDUCE_SECRET` | the [`Secret`] |
    /// | `FAST_ALLREDUCE_RANK`, `FAST_ALLREDUCE_WORLD_SIZE` | numbers |
    /// | `RANK`, `WORLD_SIZE` | the same, as torchrun calls them; without those above |
    /// | `SLURM_PROCID`, `SLURM_NTASKS` | the same, as srun calls them; without all of those above |
    /// | `FAST_ALLREDUCE_JOIN_TIMEOUT` | limit on the wait for all ranks in seconds, default 120; 0: no limit |
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] with the variable that is missing or malformed.
    /// * Those of [`Tcp::connect`].
    ///
    /// ```
    /// // Nothing has set the variables.
    /// assert!(fast_allreduce::bootstrap::Tcp::from_env()?.is_none());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn from_env() -> Result<Option<Self>> {
        let Some(address) = text(ADDRESS) else { return Ok(None) };
        let secret = text(SECRET).ok_or_else(|| unset(SECRET, "32 random hexadecimal digits"))?;
        let both = RANKS.iter().find(|(rank, _)| std::env::var_os(rank).is_some());
        let (rank, world_size) = both.copied().unwrap_or(RANKS[0]);
        Self::connect(&address, &secret.parse()?, number(rank)?, number(world_size)?, join::limit()?)
            .map(Some)
    }

    /// Connects to the rendezvous, proves the secret and joins. `unreachable` makes the error at the deadline.
    fn meet(
        address: &Address,
        token: &Token,
        rank: usize,
        world_size: usize,
        deadline: &Deadline<'_>,
        unreachable: &dyn Fn(String) -> Error,
    ) -> Result<Self> {
        let socket_directory = socket_directory();
        let location = RankLocation::own(socket_directory.as_deref())?;
        let mut earlier = None;
        let (link, server) = loop {
            // The deadline is checked first, so that the last attempt comes after the limit.
            let wait = deadline.next_wait();
            match reach(address, token, deadline)? {
                Ok(reached) => break reached,
                // The last attempt has no time for a name or an answer: the one before it says more.
                Err(reason) if wait.is_zero() => return Err(unreachable(earlier.unwrap_or(reason))),
                Err(reason) => {
                    earlier = Some(reason);
                    thread::pause(RETRY_INTERVAL.min(wait));
                }
            }
        };
        let connection = SharedConnection::join(link, server, PROVEN, rank, world_size, deadline)?;
        let locations = connection.all_gather(&location.to_bytes(), deadline)?;
        let decode = |(rank, bytes): (usize, &Vec<u8>)| RankLocation::from_bytes(rank, bytes);
        let locations = locations.iter().enumerate().map(decode).collect::<Result<_>>()?;
        let nodes = RankLocations::new(locations).nodes();
        Ok(Self { rank, world_size, connection, nodes, socket_directory })
    }

    /// Forms the world of the ranks of this machine, in their order. Collective over all ranks.
    ///
    /// Ranks are on one machine if they can share memory: they have the same kernel (by its boot id) and the same
    /// network namespace or socket directory, as for the MPI bootstrap. `FAST_ALLREDUCE_NODE` simulates several.
    ///
    /// # Errors
    ///
    /// * [`Error::WorldSize`] on all ranks if a machine has more than [`MAX_RANKS`](crate::MAX_RANKS) of them.
    /// * Those of [`Local::connect`] and of [`Bootstrap::all_gather`], with the ranks of this world.
    pub fn of_node(&self, timeout: Duration) -> Result<Local> {
        let on_node = |node: usize| self.nodes.iter().filter(|&&other| other == node).count();
        let largest = self.nodes.iter().map(|&node| on_node(node)).max().unwrap_or_default();
        if largest > crate::abi::MAX_RANKS {
            return Err(Error::WorldSize { world_size: largest });
        }
        let deadline = Deadline::after(timeout);
        let node = self.node();
        let namespace = SocketNamespace::new(self.socket_directory.as_deref());
        let serve = || -> Result<_> {
            let (name, token) = (random_name()?, Token::random()?);
            let listener = namespace.as_ref().map_err(Clone::clone)?.listen(SockType::Stream, &name)?;
            Ok((listener, name, token))
        };
        // A failure is an empty contribution, so that the other ranks do not wait.
        let (served, contribution) = match node == self.rank {
            false => (None, Vec::new()),
            true => {
                let served = serve();
                let bytes = served.as_ref().map(|(_, name, token)| [&token.as_bytes()[..], name].concat());
                let bytes = bytes.unwrap_or_default();
                (Some(served), bytes)
            }
        };
        let all = self.all_gather(&contribution, timeout)?;
        let members: Vec<_> = (0..self.world_size).filter(|&rank| self.nodes[rank] == node).collect();
        let joined = match (served, all[node].split_first_chunk()) {
            (Some(served), _) => {
                let (listener, name, token) = served?;
                let (rank, world_size) = (self.local_rank(), members.len());
                let place = Place { rank, world_size, open: 0, frees_name: false };
                Local::serve(&namespace?, listener, &name, &token, place, &deadline, timeout)
            }
            (None, Some((token, name))) => {
                let token = Token::from_bytes(*token);
                match Local::reach(&namespace?, name, &token, &deadline)? {
                    Some(reached) => reached.join(self.local_rank(), members.len(), &deadline),
                    None => Err(Error::PeerLost { rank: 0, reason: "its rendezvous has ended".into() }),
                }
            }
            (None, None) => {
                let reason = "it could not serve the rendezvous of its machine".into();
                Err(Error::PeerFailed { rank: 0, reason })
            }
        };
        joined.map_err(|error| in_old_ranks(error, &members))
    }

    /// Returns the first rank on this rank's machine, by which the machine is named in [`Bootstrap::nodes`].
    pub fn node(&self) -> usize {
        self.nodes[self.rank]
    }

    /// Returns this rank among the ranks of its machine: the number of those before it.
    pub fn local_rank(&self) -> usize {
        self.nodes[..self.rank].iter().filter(|&&node| node == self.node()).count()
    }
}

impl UniqueId {
    /// Creates a rendezvous for one world of ranks on several machines, which [join](Tcp::join) it. The calling process
    /// serves it at `address`, a host (or its address) and a port; port 0 chooses a free one. Ranks use the host as it
    /// is given here, so it must name this machine on all machines. The process need not be one of the ranks.
    ///
    /// The id contains the secret of its world, like any other.
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] if `address` is not one, or has more than 64 bytes.
    /// * [`Error::Rendezvous`] if the port is in use, or the address is not one of this machine.
    /// * [`Error::System`] if random bytes, a socket or a thread cannot be created.
    pub fn over_tcp(address: &str) -> Result<Self> {
        let parsed = Address::parse(address)?;
        let (listener, bound) = parsed.listen(&Deadline::after(RESOLUTION_LIMIT))?;
        let name = Address { port: bound.port(), ..parsed }.to_string();
        if name.len() > MAX_NAME {
            let expected = "at most 64 bytes: use the host's address";
            return Err(Error::InvalidSetting { name: "address", value: name, expected });
        }
        let token = Token::random()?;
        let admission = Box::new(Sealed(token.clone()));
        hub::spawn(Listener::nameless(listener), admission, PROVEN, None, FORMATION_LIMIT)?;
        Ok(Self::encode(name.as_bytes(), &token, INTERNET))
    }
}

impl Bootstrap for Tcp {
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
        self.socket_directory.as_deref()
    }

    fn nodes(&self) -> Vec<usize> {
        self.nodes.clone()
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tcp = f.debug_struct("Tcp");
        tcp.field("rank", &self.rank).field("world_size", &self.world_size).finish_non_exhaustive()
    }
}

/// Makes one attempt to reach the rendezvous at each address of its host. Returns a connection that has proven the
/// secret with the server's description, or why another attempt may succeed.
///
/// # Errors
///
/// Those that would occur in another attempt as well.
fn reach(
    address: &Address,
    token: &Token,
    deadline: &Deadline<'_>,
) -> Result<Result<(Link, String), String>> {
    let resolved = match address.resolve(deadline) {
        Ok(resolved) => resolved,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut reasons = Vec::new();
    for socket_address in resolved {
        let server = match address.host.parse::<std::net::IpAddr>() {
            Ok(_) => address.to_string(),
            Err(_) => format!("{address} ({})", socket_address.ip()),
        };
        let stream = match address::connect(socket_address, deadline)? {
            Ok(stream) => stream,
            Err(Errno::ECONNREFUSED) => {
                reasons.push(format!("nobody listens at {server}"));
                continue;
            }
            Err(errno) => {
                reasons.push(format!("{server} cannot be reached: {}", errno.desc()));
                continue;
            }
        };
        let link = Seal::of_rank(Link::new(stream), token).map_err(rendezvous)?;
        match prove(link, deadline)? {
            Ok(link) => return Ok(Ok((link, server))),
            Err(None) => reasons.push(format!("{server} does not answer")),
            Err(Some(Closed::Refused(reason))) => {
                let reason = format!("{server} is not the rendezvous of this job: {reason}");
                return Err(Error::Refused { reason });
            }
            // It may have too many unknown connections, or be the listener of a job that has just ended.
            Err(Some(closed)) => reasons.push(format!("{server}: {closed}")),
        }
    }
    Ok(Err(reasons.join("; ")))
}

/// Waits until the other end has proven the secret. Returns `None` in place of the connection's end if the deadline
/// passes first.
fn prove(mut link: Link, deadline: &Deadline<'_>) -> Result<Result<Link, Option<Closed>>> {
    while !link.is_ready() {
        if !poll_until(&mut [link.poll_fd()], deadline)? {
            return Ok(Err(None));
        }
        link.flush();
        if let Err(closed) = link.fill() {
            return Ok(Err(Some(closed)));
        }
    }
    Ok(Ok(link))
}

fn text(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn unset(name: &'static str, expected: &'static str) -> Error {
    Error::InvalidSetting { name, value: "(unset)".into(), expected }
}

fn number(name: &'static str) -> Result<usize> {
    let expected = "a number, set together with FAST_ALLREDUCE_ADDRESS";
    let value = text(name).ok_or_else(|| unset(name, expected))?;
    value.parse().map_err(|_| Error::InvalidSetting { name, value, expected })
}
