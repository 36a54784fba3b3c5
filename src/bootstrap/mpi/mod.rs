//! Bootstrap of ranks that an MPI launcher started, over an MPI communicator.

mod channel;
mod gather;
mod library;
mod peers;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ::mpi::environment::library_version;
use ::mpi::ffi;
use ::mpi::traits::Communicator;

use self::channel::Channel;
use self::gather::{gather, MAX_CONTRIBUTION};
pub(crate) use self::peers::{Exchanges, Parts, Peers, Started};
use super::join;
use super::location::{RankLocation, RankLocations};
use super::socket_name::socket_directory;
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// A rank of an MPI communicator whose ranks are all on this node.
///
/// Needs the feature `mpi` and an MPI library of the standard 3.1 or newer. The build uses `mpicc`, or the compiler
/// that the environment variable `MPICC` names.
///
/// ```no_run
/// use fast_allreduce::{bootstrap::Mpi, Communicator, Host, ReduceOp};
///
/// let communicator = Communicator::builder().build(Host::new(), Mpi::init()?)?;
/// let mut data = vec![communicator.rank() as f32; 1000];
/// communicator.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
///
/// All messages use a duplicate of the communicator, so that they never mix with the caller's messages. Unlike MPI's
/// collectives, all waits have a time limit. A rank contributes at most 1 MiB to one gather. A timeout of one rank ends
/// the waits of all: use the same limit on all ranks. A rank that comes later may still complete a gather whose
/// messages had been sent; its next call then fails.
///
/// # Threads
///
/// If MPI was initialised with `Threading::Serialized` or `Threading::Multiple`, as [`Mpi::init`] does, any thread may
/// use this. Below that, only the main thread may; other threads get an error. This crate makes one MPI call at a time,
/// and none that blocks. Below `Threading::Multiple`, the program must not call MPI at the same time as this crate.
///
/// Several threads may create worlds at the same time if each uses a different communicator: MPI requires the ranks of
/// one communicator to start its collectives in the same order.
///
/// # Nodes
///
/// Ranks are on one node if they can share memory: they have the same kernel (by its boot id) and the same network
/// namespace. If a rank cannot read its boot id, host names are compared instead. Containers with separate network
/// namespaces can share a directory instead; `FAST_ALLREDUCE_SOCKET_DIR` then names it on every rank. Ranks with
/// different values of `FAST_ALLREDUCE_NODE` always count as different nodes, which simulates several nodes on one
/// machine.
///
/// # Finalisation
///
/// If [`Mpi::init`] has initialised MPI, the exit of the process finalises it, not the drop of the last `Mpi`: another
/// one may be created later. If a process ends while it has a message under way that nobody receives, MPI is not
/// finalised, and launchers then end the other ranks as well. A program that initialises MPI itself chooses when to
/// finalise it.
pub struct Mpi {
    rank: usize,
    world_size: usize,
    /// By rank.
    nodes: Vec<usize>,
    socket_directory: Option<PathBuf>,
    state: Mutex<State>,
}

struct State {
    channel: Channel,
    /// Number of the latest gather.
    sequence: u64,
    /// The error of the first failed call, which all later calls return.
    failure: Option<Error>,
}

impl Mpi {
    /// Joins the world that the launcher started. Initialises MPI if it is not initialised. Collective over
    /// `MPI_COMM_WORLD`.
    ///
    /// # Errors
    ///
    /// Those of [`Mpi::from_communicator`]. If MPI itself cannot start, MPI ends the process.
    ///
    /// ```no_run
    /// use fast_allreduce::bootstrap::{Bootstrap, Mpi};
    ///
    /// let mpi = Mpi::init()?;
    /// println!("rank {} of {}", mpi.rank(), mpi.world_size());
    /// # Ok::<(), fast_allreduce::Error>(())
    /// ```
    pub fn init() -> Result<Self> {
        library::start()?;
        // SAFETY: MPI_COMM_WORLD is valid while MPI runs, which `Channel::duplicate` checks.
        unsafe { Self::new(ffi::RSMPI_COMM_WORLD, Ranks::All) }
    }

    /// Forms a world of the ranks of `communicator`. The world uses a duplicate; the caller keeps `communicator`.
    /// Collective over it.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`] if the ranks are on several nodes, or if MPI does not allow this thread to call it.
    /// * [`Error::WorldSize`] if there are more ranks than this crate supports.
    /// * [`Error::Timeout`] if ranks do not come within `FAST_ALLREDUCE_JOIN_TIMEOUT` seconds (default 120).
    /// * [`Error::PeerLost`] if a rank gave up.
    /// * [`Error::InvalidSetting`] if `communicator` is an intercommunicator, `FAST_ALLREDUCE_SOCKET_DIR` is not a
    ///   directory, or `FAST_ALLREDUCE_JOIN_TIMEOUT` is not a number.
    /// * [`Error::Mpi`] if an MPI call fails.
    ///
    /// ```no_run
    /// use fast_allreduce::bootstrap::Mpi;
    ///
    /// let universe = mpi::initialize().ok_or("MPI is already initialised")?;
    /// let world = Mpi::from_communicator(&universe.world())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_communicator(communicator: &impl Communicator) -> Result<Self> {
        // SAFETY: the borrow keeps the communicator alive.
        unsafe { Self::new(communicator.as_raw(), Ranks::All) }
    }

    /// Forms a world for each node, of the ranks of `communicator` on that node, in their order. Collective over
    /// `communicator`.
    ///
    /// # Errors
    ///
    /// Those of [`Mpi::from_communicator`], except that the ranks may be on several nodes.
    ///
    /// ```no_run
    /// use fast_allreduce::bootstrap::{Bootstrap, Mpi};
    ///
    /// let universe = mpi::initialize().ok_or("MPI is already initialised")?;
    /// let node = Mpi::of_node(&universe.world())?;
    /// println!("local rank {} of {}", node.rank(), node.world_size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_node(communicator: &impl Communicator) -> Result<Self> {
        // SAFETY: the borrow keeps the communicator alive.
        unsafe { Self::new(communicator.as_raw(), Ranks::OfThisNode) }
    }

    /// Forms a world of the ranks of `communicator`, which may be on several nodes. Only GPUs of one NVLink domain can
    /// share memory across nodes: `Sharing::Fabric` of the CUDA device. Collective over `communicator`.
    ///
    /// # Errors
    ///
    /// Those of [`Mpi::from_communicator`], except that the ranks may be on several nodes.
    ///
    /// ```no_run
    /// use fast_allreduce::bootstrap::{Bootstrap, Mpi};
    ///
    /// let universe = mpi::initialize().ok_or("MPI is already initialised")?;
    /// let mpi = Mpi::of_all_nodes(&universe.world())?;
    /// println!("rank {} is on node {}", mpi.rank(), mpi.nodes()[mpi.rank()]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_all_nodes(communicator: &impl Communicator) -> Result<Self> {
        // SAFETY: the borrow keeps the communicator alive.
        unsafe { Self::new(communicator.as_raw(), Ranks::OfAllNodes) }
    }

    /// # Safety
    ///
    /// If MPI runs, `original` is a valid communicator.
    unsafe fn new(original: ffi::MPI_Comm, ranks: Ranks) -> Result<Self> {
        let deadline = Deadline::after(join::limit()?);
        // SAFETY: the caller guarantees that `original` is valid if MPI runs, which `duplicate` checks.
        let all = unsafe { Channel::duplicate(original, &deadline) }?;
        let sequence = 1;
        let socket_directory = socket_directory();
        let own = RankLocation::own(socket_directory.as_deref())?;
        let locations = gather(&all, sequence, &own.to_bytes(), &deadline)?;
        let decode = |(rank, bytes): (usize, &Vec<u8>)| RankLocation::from_bytes(rank, bytes);
        let locations = RankLocations::new(locations.iter().enumerate().map(decode).collect::<Result<_>>()?);
        let members = locations.on_node_of(all.rank());
        let members = match ranks {
            Ranks::All if members.len() != all.size() => return Err(locations.refusal()),
            Ranks::OfAllNodes => (0..all.size()).collect(),
            Ranks::All | Ranks::OfThisNode => members,
        };
        let all_nodes = locations.nodes();
        let nodes = members.iter().map(|&rank| all_nodes[rank]).collect();
        let node = all.subset(members);
        let (rank, world_size) = (node.rank(), node.size());
        if world_size > crate::abi::MAX_RANKS {
            return Err(Error::WorldSize { world_size });
        }
        Ok(Self {
            rank,
            world_size,
            nodes,
            socket_directory,
            state: Mutex::new(State { channel: node, sequence, failure: None }),
        })
    }

    /// Returns the name and version of the MPI library that this program is linked to.
    ///
    /// ```no_run
    /// println!("{}", fast_allreduce::bootstrap::Mpi::library()); // Open MPI v4.1.6
    /// ```
    pub fn library() -> String {
        let described = library_version().unwrap_or_default();
        // The rest says where and when it was built.
        let name = described.split(['\n', ',']).next().unwrap_or_default();
        name.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Ends all processes that the launcher started together, by `MPI_Abort`, with this exit status.
    ///
    /// This is the last resort of a program if other ranks would wait for one that cannot go on. This crate never calls
    /// it.
    ///
    /// ```no_run
    /// use fast_allreduce::bootstrap::Mpi;
    ///
    /// let mpi = Mpi::init().unwrap_or_else(|error| {
    ///     eprintln!("{error}");
    ///     Mpi::abort(1)
    /// });
    /// ```
    pub fn abort(status: i32) -> ! {
        library::abort(status)
    }
}

/// Which ranks of a communicator form a world.
enum Ranks {
    All,
    OfThisNode,
    OfAllNodes,
}

impl Bootstrap for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_CONTRIBUTION {
            let value = bytes.len().to_string();
            let expected = "at most 1 MiB from each rank";
            return Err(Error::InvalidSetting { name: "bytes of all_gather", value, expected });
        }
        // Poisoning is ignored: the number of a gather is taken before it starts, so that a panic leaves a valid state.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        state.sequence += 1;
        let gathered = gather(&state.channel, state.sequence, bytes, &Deadline::after(timeout));
        gathered.inspect_err(|error| {
            state.failure = Some(error.clone());
            state.channel.abandon();
        })
    }

    fn socket_directory(&self) -> Option<&Path> {
        self.socket_directory.as_deref()
    }

    fn nodes(&self) -> Vec<usize> {
        self.nodes.clone()
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut mpi = f.debug_struct("Mpi");
        mpi.field("rank", &self.rank).field("world_size", &self.world_size).finish_non_exhaustive()
    }
}
