//! Ranks that an MPI launcher started: they meet over a communicator of MPI.

mod channel;
mod gather;
mod library;
mod node;
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
use self::node::{Place, Places};
pub(crate) use self::peers::{Exchanges, Parts, Peers};
use super::join;
use super::place::socket_directory;
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// A rank of an MPI communicator whose ranks are all on this node.
///
/// Needs the feature `mpi`, which builds against the MPI of `mpicc`, or of the compiler that the variable `MPICC` names, and
/// the MPI standard 3.1 or newer.
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
/// What is sent goes over a duplicate of the communicator, never mixes with the caller's messages, and is bounded in time,
/// unlike MPI's collectives. A rank gives at most 1 MiB to one gather. A rank whose time is up ends the waiting of all, so give
/// all ranks the same limits; one that comes later may still gather what had been sent, and then hears of it in its next call.
///
/// # Threads
///
/// It may be used from any thread if MPI was initialised with `Threading::Serialized` or `Multiple`, as [`Mpi::init`] does;
/// below that, from the main thread only, and an error elsewhere. This crate makes one call to MPI at a time, none that blocks;
/// with less than `Multiple` the program must see to it that its own calls do not come at the same time as this crate's.
///
/// Several threads may make worlds at the same time, each of a communicator of its own: MPI has the ranks of one communicator
/// begin what is collective over it in the same order.
///
/// # Nodes
///
/// Ranks are on one node if they have the same kernel, by its boot id, and the same network namespace, as two containers
/// may not have: then they can share memory. Where a rank cannot read its boot id, host names are compared instead. Containers with networks of their own may share a directory instead, which the
/// variable `FAST_ALLREDUCE_SOCKET_DIR` names on every rank. Those whose variable `FAST_ALLREDUCE_NODE` differs are taken to be on different
/// nodes in any case, as if to try out several nodes on one.
///
/// # The end
///
/// If [`Mpi::init`] has initialised MPI, it is finalised when the process exits, not when the last `Mpi` is dropped, so one may
/// be made again. A process that ends while a message is under way that nobody will take is not finalised; launchers then end
/// the other ranks too. To choose the moment yourself, initialise MPI yourself.
pub struct Mpi {
    rank: usize,
    world_size: usize,
    socket_directory: Option<PathBuf>,
    state: Mutex<State>,
}

struct State {
    channel: Channel,
    /// Number of the latest gather.
    sequence: u64,
    /// What every call answers once one has failed.
    failure: Option<Error>,
}

impl Mpi {
    /// The world that the launcher started. Initialises MPI if nobody has. Collective over `MPI_COMM_WORLD`.
    ///
    /// # Errors
    ///
    /// As [`Mpi::from_communicator`]. Where MPI itself cannot start, it ends the process.
    pub fn init() -> Result<Self> {
        library::start()?;
        // SAFETY: MPI_COMM_WORLD lives for as long as MPI runs, which `Channel::duplicate` checks.
        unsafe { Self::new(ffi::RSMPI_COMM_WORLD, Ranks::All) }
    }

    /// The ranks of `communicator`, which stays the caller's: this uses a duplicate. Collective over it.
    ///
    /// # Errors
    ///
    /// * [`Error::Unavailable`]: the ranks are on several nodes; or this thread may not call MPI.
    /// * [`Error::WorldSize`]: there are more ranks than this crate supports.
    /// * [`Error::Timeout`] if ranks do not come within the seconds that `FAST_ALLREDUCE_JOIN_TIMEOUT` says, 120 by default.
    /// * [`Error::InvalidSetting`]: it is an intercommunicator; `FAST_ALLREDUCE_SOCKET_DIR` names no directory; or
    ///   `FAST_ALLREDUCE_JOIN_TIMEOUT` no number.
    /// * [`Error::Mpi`]: MPI refused a call.
    pub fn from_communicator(communicator: &impl Communicator) -> Result<Self> {
        // SAFETY: the borrow keeps the communicator.
        unsafe { Self::new(communicator.as_raw(), Ranks::All) }
    }

    /// The ranks of `communicator` that are on this node, in its order: a world for each node. Collective over it.
    ///
    /// # Errors
    ///
    /// As [`Mpi::from_communicator`], but ranks may be on several nodes.
    pub fn of_node(communicator: &impl Communicator) -> Result<Self> {
        // SAFETY: the borrow keeps the communicator.
        unsafe { Self::new(communicator.as_raw(), Ranks::OfThisNode) }
    }

    /// # Safety
    ///
    /// If MPI runs, `original` is a communicator that lives.
    unsafe fn new(original: ffi::MPI_Comm, ranks: Ranks) -> Result<Self> {
        let deadline = Deadline::after(join::limit()?);
        // SAFETY: the caller's.
        let all = unsafe { Channel::duplicate(original, &deadline) }?;
        let sequence = 1;
        let socket_directory = socket_directory();
        let own = Place::own(socket_directory.as_deref())?;
        let places = gather(&all, sequence, &own.to_bytes(), &deadline)?;
        let decode = |(rank, bytes): (usize, &Vec<u8>)| Place::from_bytes(rank, bytes);
        let places = Places::new(places.iter().enumerate().map(decode).collect::<Result<_>>()?);
        let members = places.beside(all.rank());
        if matches!(ranks, Ranks::All) && members.len() != all.size() {
            return Err(places.refusal());
        }
        let node = all.part(members);
        let (rank, world_size) = (node.rank(), node.size());
        if world_size > crate::abi::MAX_RANKS {
            return Err(Error::WorldSize { world_size });
        }
        Ok(Self {
            rank,
            world_size,
            socket_directory,
            state: Mutex::new(State { channel: node, sequence, failure: None }),
        })
    }

    /// Name and version of the MPI library that this program is linked to.
    pub fn library() -> String {
        let described = library_version().unwrap_or_default();
        // What follows is where and when it was built.
        let name = described.split(['\n', ',']).next().unwrap_or_default();
        name.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Ends all processes that the launcher started at once, by `MPI_Abort`, with this exit status.
    ///
    /// The last resort of a program whose ranks would wait for one that cannot go on. This crate never does so by itself.
    pub fn abort(status: i32) -> ! {
        library::abort(status)
    }
}

/// Which ranks of a communicator a world is of.
enum Ranks {
    All,
    OfThisNode,
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
            let expected = "a rank gives at most 1 MiB to one gather";
            return Err(Error::InvalidSetting { name: "bytes of all_gather", value, expected });
        }
        // What a panic leaves behind is whole: a gather's number is taken before it begins.
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
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut mpi = f.debug_struct("Mpi");
        mpi.field("rank", &self.rank).field("world_size", &self.world_size).finish_non_exhaustive()
    }
}
