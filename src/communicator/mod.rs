//! A rank's handle on its world: the collectives.
//!
//! What all devices share is here; the typed calls of each are in a file beside this one.

mod builder;
#[cfg(feature = "cuda")]
mod cuda;
mod failure;
mod fused;
mod host;
mod launch;
mod patience;
mod subset;
mod typed;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use builder::Builder;
#[cfg(feature = "cuda")]
pub use cuda::{Registered, RegisteredMemory};
pub use fused::{Fused, Slices};

use self::patience::Patience;
use crate::abi;
use crate::bootstrap::Family;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::Device;
use crate::element::Element;
use crate::endpoint::{Connection, Endpoint};
use crate::error::{Error, Result};
use crate::exclusive::within_another;
use crate::interruption;
use crate::liveness::{DirectReads, Liveness};
use crate::plan::{Order, Plan, PlanSource, PlannedCall, Planner};
use crate::symmetric::{Buffer, SymmetricMemory};
use crate::thread::{self, DEEP_STACK};

/// One rank of a world.
///
/// Every rank makes the same calls in the same order, with the same count, type and operation. Calls of one communicator
/// run one after the other, whichever threads make them. After a call has failed for another reason than its arguments, the
/// communicator is poisoned: each later call returns the same error at once.
pub struct Communicator<D: Device> {
    // First: its thread marks ranks in the endpoint's region.
    liveness: Liveness,
    /// On the host.
    direct_reads: Option<DirectReads>,
    endpoint: Arc<Endpoint<D>>,
    failed: OnceLock<Error>,
    bytes: AtomicU64,
    checked: bool,
    family: Family,
    settings: Builder,
    rank: usize,
    world_size: usize,
    /// Of one that was split or shrunk: each rank's number in the world that they come from, by rank. Else empty.
    world_ranks: Vec<usize>,
    planner: Planner,
    plan_source: PlanSource,
    order: Order,
    /// Why the switch between devices adds nothing up; `None`: it does.
    nvls_refused: Option<Error>,
    patience: Patience,
    setup_timeout: Duration,
    connection: Arc<Connection<D>>,
}

impl<D: Device> Drop for Communicator<D> {
    fn drop(&mut self) {
        if self.liveness.is_elsewhere() {
            return;
        }
        // Others hear that this rank has gone after all that its calls have sent, and these hear of others until then: on a GPU they
        // may not even have begun. Tried twice, as nobody tries again later.
        let device = &self.endpoint.device;
        match device.wait_for_calls().or_else(|_| device.wait_for_calls()) {
            Ok(()) => {}
            Err(Error::Unavailable { .. }) => self.leave_when_calls_have_ended(),
            // Nothing runs any more, or it cannot be told: whoever waits for this rank hears why.
            Err(error) => drop(self.poison(error)),
        }
    }
}

impl<D: Device> std::fmt::Debug for Communicator<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("device", &D::NAME)
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("failed", &self.failed.get())
            .finish_non_exhaustive()
    }
}

impl Communicator<crate::device::Host> {
    /// Settings to make communicators with, of any device.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<D: Device> Communicator<D> {
    /// This rank, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.endpoint.device
    }

    /// Bytes of shared memory that this rank's region takes.
    pub fn region_bytes(&self) -> usize {
        self.endpoint.region.layout.total_bytes
    }

    /// What an allreduce of `count` elements of `dtype` does, but for integer averages where the algorithm is not a direct one.
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        self.planner.reduction(count, dtype, ReduceOp::Sum)
    }

    /// What another call than an allreduce does, of which a rank's share has so many bytes: its grid, and at most the bytes of a
    /// share that one launch takes, fewer where several are staged at once.
    pub fn plan_of(&self, calls: PlannedCall, share_bytes: usize) -> Plan {
        self.planner.shares(calls, share_bytes, 1)
    }

    /// Where its plans come from: a tuning file, or a built-in table, and why. All ranks have the same.
    pub fn plan_source(&self) -> &PlanSource {
        &self.plan_source
    }

    /// Whether the switch between the GPUs adds up the calls that it is expected to do faster.
    ///
    /// # Errors
    ///
    /// Why it does not: [`Order::Any`](crate::Order::Any) was not asked for, or GPUs, driver or links have no such thing, or ranks
    /// share a GPU.
    pub fn nvls(&self) -> Result<()> {
        self.nvls_refused.clone().map_or(Ok(()), Err)
    }

    /// The order in which the ranks' elements may be added up: what was set, or the environment said.
    pub fn order(&self) -> Order {
        self.order
    }

    /// How large messages in private memory go between processes on the host: which ranks' memory this rank can read directly, and
    /// why not others'. `None` on other devices.
    pub fn direct_reads(&self) -> Option<&DirectReads> {
        self.direct_reads.as_ref()
    }

    /// Allocates a registered buffer of `count` zeros on every rank. Collective, as
    /// [`Communicator::symmetric_memory`].
    ///
    /// # Errors
    ///
    /// As [`Communicator::symmetric_memory`], and [`Error::Unavailable`] if too many are registered.
    pub fn alloc<T: Element>(&self, count: usize) -> Result<Buffer<T, D>> {
        let memory = || SymmetricMemory::allocate(&self.endpoint, "allocate and register", count);
        self.step(|| memory().and_then(SymmetricMemory::enter)).map_err(|error| self.in_world_ranks(error))
    }

    /// Allocates `count` zeros on every rank and maps them on all. Collective: all ranks ask for the same type and
    /// count. Calls from the memory copy their input until it is [registered](SymmetricMemory::register).
    ///
    /// Allocating, registering and freeing are steps that all ranks take in the same order. Those of several threads
    /// come one after the other, in the order in which the threads of this rank begin them: threads must see to it
    /// that it is that of the other ranks, as a first memory is the other ranks' first, whoever asked for it. Ranks at
    /// different steps have an error.
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`], [`Error::Disagreement`] where ranks are not all at this step with this type and count,
    /// and the errors of the bootstrap.
    pub fn symmetric_memory<T: Element>(&self, count: usize) -> Result<SymmetricMemory<T, D>> {
        self.step(|| SymmetricMemory::allocate(&self.endpoint, "allocate", count))
            .map_err(|error| self.in_world_ranks(error))
    }

    /// Limits the waits of calls that begin after this, as [`Builder::timeout`] does from the start, on this rank alone. Steps of
    /// setting up keep their limit. `None`: for ever. A graph that was captured keeps the limit that it was captured with.
    pub fn set_timeout(&self, timeout: impl Into<Option<Duration>>) {
        self.patience.set(timeout.into());
    }

    /// Ranks that have begun fewer calls than this one: those that a call of all ranks waits for.
    pub fn behind(&self) -> Vec<usize> {
        self.liveness.behind()
    }

    /// Makes a call that waits in another thread give up with [`Error::Aborted`], and poisons the communicator. Ranks that
    /// wait for this one have an error at once.
    pub fn abort(&self) {
        if self.liveness.is_elsewhere() {
            return;
        }
        // If a failure is known already, it stands.
        self.poison(Error::Aborted);
        self.endpoint.region.abort();
        self.connection.bootstrap.interrupt();
    }

    /// The failure that poisoned the communicator, or the first that a kernel of this rank has recorded so far. Waits for nothing.
    ///
    /// # Errors
    ///
    /// That failure.
    pub fn check(&self) -> Result<()> {
        self.healthy()
    }

    /// What this rank has done so far.
    pub fn counters(&self) -> Counters {
        let (region, failed) = (&self.endpoint.region, self.failed.get());
        let missing = match failed {
            Some(Error::Timeout { missing, .. }) => missing.as_slice(),
            _ => &[],
        };
        Counters {
            calls: self.liveness.calls(),
            bytes: self.bytes.load(Ordering::Relaxed),
            waits: region.waits()[..self.world_size].iter().copied().map(u64::from).collect(),
            direct_reads: region.read_directly().into(),
            timeouts: (0..self.world_size).map(|rank| u64::from(missing.contains(&rank))).collect(),
        }
    }

    /// Whether this is the process that made it.
    fn not_forked(&self) -> Result<()> {
        match self.liveness.is_elsewhere() {
            true => Err(Error::Forked),
            false => Ok(()),
        }
    }

    /// Whether this thread is in a call of it, in which no other can be made than [`Communicator::abort`] and those that only tell.
    #[doc(hidden)]
    pub fn is_entered_here(&self) -> bool {
        self.endpoint.is_entered_here() || self.connection.is_entered_here()
    }

    /// Before the endpoint is locked. Of a fork first: what it has is a copy of a lock, which another thread of its parent may have
    /// held.
    fn can_lock(&self) -> Result<()> {
        self.not_forked()?;
        match self.is_entered_here() {
            false => Ok(()),
            true => Err(within_another()),
        }
    }

    /// At the beginning of a step of setting up.
    fn can_step(&self) -> Result<()> {
        self.can_lock()?;
        self.healthy()
    }

    /// The failure that poisoned the communicator, or one that a kernel has recorded since.
    fn healthy(&self) -> Result<()> {
        self.not_forked()?;
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        match self.endpoint.region.failure() {
            abi::FA_OK => Ok(()),
            failure => Err(self.poison(self.failure(failure))),
        }
    }

    /// Records a failure, unless there is one, and tells the other ranks. Returns the one that stands.
    #[cold]
    fn poison(&self, error: Error) -> Error {
        // After that, this rank has no communicator of another world either.
        if matches!(error, Error::Driver { .. }) && self.endpoint.device.is_lost() {
            self.liveness.set_absent();
        }
        let error = self.failed.get_or_init(|| {
            tracing::error!(rank = self.rank, %error, "communicator failed");
            error
        });
        self.liveness.fail(error);
        error.clone()
    }

    /// The end of a communicator whose calls cannot be waited for, as during a capture. Who waits for this rank hears of it when
    /// they are known to have ended: at once, or from a thread.
    fn leave_when_calls_have_ended(&self) {
        const LONGEST_INTERVAL: Duration = Duration::from_millis(500);
        let have_ended = self.endpoint.region.ended_probe(&self.endpoint.device);
        if have_ended() {
            return;
        }
        let Some(farewell) = self.liveness.postpone() else { return };
        let body = move || {
            let mut interval = Duration::from_millis(5);
            while !have_ended() {
                thread::pause(interval);
                interval = (2 * interval).min(LONGEST_INTERVAL);
            }
            farewell.say();
        };
        if let Err(error) = thread::spawn("fast-allreduce".into(), DEEP_STACK, body) {
            tracing::warn!(rank = self.rank, %error, "closed during a capture: the other ranks hear of it when this process ends");
        }
    }

    /// After a step of a call that fails on this rank alone, while the others may be in the call: they are told.
    #[cfg(feature = "cuda")]
    fn or_poison<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| self.poison(error))
    }

    /// The result of a step, or the failure that ended it from outside.
    fn unless_failed<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| self.failed.get().cloned().unwrap_or(error))
    }

    /// A step of setting up, which all ranks take. It ends when another rank has failed, as that does not come to it any more.
    fn step<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.can_step()?;
        let _step = self.connection.step()?;
        self.heeded(self.unless_a_peer_fails(body))
    }

    /// See [`Communicator::step`], within one.
    fn unless_a_peer_fails<T>(&self, body: impl FnOnce() -> T) -> T {
        interruption::unless(&|| self.failure_of_a_peer().is_some(), body)
    }

    /// The result of a step. Where it says that a rank is gone which does not come back, kernels give up that wait for the rank, also
    /// those of replays; and where a rank has failed, that is the error.
    fn heeded<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| match error {
            Error::PeerLost { rank, .. } if rank < self.world_size => {
                if !self.liveness.is_left(rank) {
                    self.endpoint.region.set_gone(rank);
                }
                self.liveness.failure_of(rank).unwrap_or(error)
            }
            Error::Timeout { .. } => self.failure_of_a_peer().unwrap_or(error),
            error => error,
        })
    }

    /// What one of the other ranks has failed with, if any.
    fn failure_of_a_peer(&self) -> Option<Error> {
        (0..self.world_size).filter(|&rank| rank != self.rank).find_map(|rank| self.liveness.failure_of(rank))
    }
}

/// What a rank has done so far, as [`Communicator::counters`] tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Collective calls begun.
    pub calls: u64,
    /// Bytes of this rank's messages in calls that have been carried out, or on a GPU enqueued.
    pub bytes: u64,
    /// Waits for each rank that outlasted the first polls, in all blocks.
    pub waits: Vec<u64>,
    /// Messages that this rank has read directly in the memory of another process.
    pub direct_reads: u64,
    /// Waits for each rank that ended in a timeout: at most one, as that poisons the communicator.
    pub timeouts: Vec<u64>,
}
