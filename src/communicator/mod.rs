//! A rank's handle to its world: [`Communicator`], its builder and its calls.
//!
//! This file has the code that all devices share. `typed.rs` declares the collectives; `host.rs` and `cuda/` carry
//! them out.

mod builder;
mod enter;
mod experts;
mod failure;
mod flight;
mod fused;
mod fused_host;
mod gathered;
mod host;
mod launch;
mod place;
mod record;
mod returning;
mod sharded;
mod slices;
mod subset;
mod typed;
mod wait_limits;

// Last, so that rustdoc lists the calls of the host first.
#[cfg(feature = "cuda")]
mod cuda;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

pub use builder::Builder;
#[cfg(feature = "cuda")]
pub use cuda::{Registered, RegisteredMemory};
pub use enter::Progress;
pub use experts::Experts;
pub use fused::Fused;
pub use gathered::GatheredRows;
pub use place::{Inherited, Suspended};
pub use record::Difference;
pub use sharded::ShardedColumns;
pub use slices::Slices;

use self::enter::Terms;
use self::place::Returning;
use self::wait_limits::WaitLimits;
use crate::abi;
use crate::catalogue::DType;
use crate::catalogue::ReduceOp;
use crate::device::Device;
use crate::element::Element;
use crate::endpoint::{Endpoint, Membership};
use crate::error::{Error, Result};
use crate::exclusive::within_another;
use crate::interruption;
use crate::liveness::DirectReads;
use crate::plan::{Order, Plan, PlanSource, PlannedCall, Planner};
use crate::symmetric::{Buffer, SymmetricMemory};
use crate::thread::{self, DEEP_STACK};

/// One rank's handle to its world: collectives, messages between pairs, and memory that peers can read.
///
/// [`Communicator::builder`] creates one. Every rank makes the same calls in the same order, with the same count, type
/// and operation. The calls of one communicator run one after another, whichever threads make them.
///
/// # Errors of every call
///
/// A call checks its arguments before it launches anything. If it refuses one of them, nothing has changed, and the
/// next call may succeed. It may also return:
///
/// * [`Error::Timeout`], which names the ranks that did not come within the limit: see [`Builder::timeout`].
/// * [`Error::PeerLost`], if the process of a rank ended or the rank dropped its communicator.
/// * [`Error::PeerFailed`], if the communicator of another rank failed.
/// * [`Error::Disagreement`], if the ranks made different calls. GPUs compare calls only if [`Builder::check`] is on.
/// * [`Error::Aborted`], after [`Communicator::abort`].
/// * [`Error::Driver`], if the CUDA driver refused something.
/// * [`Error::Unavailable`], if the host's thread pool failed, or a peer no longer has a registered buffer.
///
/// Any of these *poisons* the communicator: each later call returns the same error at once. Two errors do not:
/// [`Error::Forked`] in a fork of the process that made the communicator, and [`Error::Unavailable`] in a thread that
/// is already inside another call of it (for example in a thread pool's job).
///
/// On a GPU a call returns when its kernels have been launched. The next call, `synchronize` or [`Communicator::check`]
/// returns what went wrong in them.
///
/// # Errors of every step
///
/// Allocating, registering, freeing, `split` and the like are *steps*: all ranks take them together, through the
/// bootstrap. Besides the error that poisoned the communicator, [`Error::Forked`] and [`Error::Aborted`], a step may
/// return:
///
/// * [`Error::Disagreement`], if the ranks are at different steps, or gave different arguments.
/// * [`Error::PeerFailed`], if the step failed on another rank.
/// * [`Error::Timeout`], [`Error::PeerLost`], [`Error::Rendezvous`], [`Error::Malformed`], [`Error::System`] or
///   [`Error::Mpi`] from the bootstrap.
/// * [`Error::Unavailable`], in a thread that is already inside another call or step.
///
/// # Example
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(4, |communicator| {
/// let rank = communicator.rank();
/// let mut data = [rank as f32, 1.0];
/// communicator.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
/// assert_eq!(data, [0.0 + 1.0 + 2.0 + 3.0, 4.0]); // On every rank.
///
/// communicator.broadcast(&mut data, 2)?; // The data of rank 2.
/// communicator.barrier()?;
/// assert_eq!((communicator.world_size(), communicator.counters().calls), (4, 3));
///
/// let plan = communicator.plan(1 << 20, DType::F32);
/// println!("it reduces 4 MiB by {}, as {} says", plan.algorithm, communicator.plan_source());
/// println!("the order of additions is {}", communicator.order());
/// println!("the region has {} bytes", communicator.region_bytes());
/// println!("{:?}, {:?}", communicator.device(), communicator.direct_reads());
/// if let Err(error) = communicator.nvls() {
///     println!("no in-switch reductions: {error}");
/// }
/// # Ok(()) });
/// ```
pub struct Communicator<D: Device> {
    // Dropped before the endpoint: inherited memory may be in it.
    returning: Returning<D>,
    endpoint: Arc<Endpoint<D>>,
    terms: Terms,
    /// Number of aborts: each ends the children that are being made, and the wait of a rank that comes back.
    aborts: AtomicU32,
    bytes: AtomicU64,
    checked: bool,
    settings: Builder,
    rank: usize,
    world_size: usize,
    /// After a split or a shrink: the number of each rank in the original world. Otherwise empty.
    world_ranks: Vec<usize>,
    planner: Planner,
    plan_source: PlanSource,
    order: Order,
    /// Why there are no in-switch reductions; `None` if there are.
    nvls_refused: Option<Error>,
    wait_limits: WaitLimits,
    setup_timeout: Duration,
}

impl<D: Device> Drop for Communicator<D> {
    fn drop(&mut self) {
        if self.endpoint.in_fork() {
            return;
        }
        // The peers must learn that this rank has left only after everything that its calls send has arrived. On a GPU
        // its calls may not even have begun, and until they end they must learn of peers that leave. So wait for them
        // first. Try twice: there is no later attempt.
        let device = &self.endpoint.device;
        let ended = device.wait_for_calls().or_else(|_| device.wait_for_calls());
        let have_ended = ended.is_ok();
        if let Ok(membership) = self.endpoint.membership() {
            match ended {
                Ok(()) => {}
                Err(Error::Unavailable { .. }) => self.leave_when_calls_have_ended(&membership),
                // Either nothing runs any more, or that cannot be known: the ranks that wait for this one get the
                // reason.
                Err(error) => drop(self.poison_in(&membership, error)),
            }
            membership.liveness.close();
        }
        // Buffers may live on, and with them the endpoint, but not the streams.
        device.forget_streams(have_ended);
    }
}

impl<D: Device> std::fmt::Debug for Communicator<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("device", &D::NAME)
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("failed", &self.failed())
            .finish_non_exhaustive()
    }
}

impl Communicator<crate::device::Host> {
    /// Returns a builder with the default settings, for a communicator on any device.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<D: Device> Communicator<D> {
    /// Returns this rank's number, in `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        &self.endpoint.device
    }

    /// Returns the size of this rank's region in bytes of shared memory.
    pub fn region_bytes(&self) -> usize {
        self.endpoint.with_membership(|membership| membership.region.layout.total_bytes).unwrap_or_default()
    }

    /// Returns the plan of an allreduce of `count` elements of `dtype`: algorithm, blocks and bytes of a launch.
    ///
    /// An average of integers always takes a direct algorithm, so its plan may differ.
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        self.planner.reduction(count, dtype, ReduceOp::Sum)
    }

    /// Returns the plan of a call other than an allreduce, where each rank's share has `share_bytes` bytes.
    ///
    /// [`Plan::piece_bytes`] is the maximum size of a share in one launch. A call that stages several shares at once
    /// takes fewer.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let plan = communicator.plan_of(plan::PlannedCall::AllGather, 64 << 10);
    /// println!("an all_gather of 64 KiB from each rank: {plan:?}");
    /// # Ok(()) });
    /// ```
    pub fn plan_of(&self, calls: PlannedCall, share_bytes: usize) -> Plan {
        self.planner.shares(calls, share_bytes, 1)
    }

    /// Returns where the plans come from (a tuning file or a built-in table) and why. It is the same on all ranks.
    pub fn plan_source(&self) -> &PlanSource {
        &self.plan_source
    }

    /// Returns `Ok` if in-switch reductions (NVLS) are used for the calls that are expected to be faster with them.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] or [`Error::Driver`] with the reason why not: [`Order::Any`](crate::Order::Any) is not
    /// set, the GPUs, the driver or the links do not support it, or ranks share a GPU.
    pub fn nvls(&self) -> Result<()> {
        self.nvls_refused.clone().map_or(Ok(()), Err)
    }

    /// Returns the order in which the ranks' elements may be added up, from the program or the environment.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Returns the number of ranks of each CPU socket, if large allreduces have two levels: within a socket and between
    /// sockets. It needs [`Order::Any`](crate::Order::Any), and ranks that are bound to cores of several sockets.
    pub fn ranks_of_socket(&self) -> Option<usize> {
        Some(self.planner.limits.levels.socket_ranks).filter(|&count| count > 0)
    }

    /// Returns which ranks' private memory this rank can read directly, and why it cannot read that of the others.
    /// `None` on GPUs.
    ///
    /// Messages from those ranks, if they are large, need no copy through shared memory: see [`Builder::direct_reads`].
    pub fn direct_reads(&self) -> Option<Arc<DirectReads>> {
        self.endpoint.with_membership(|membership| membership.direct_reads.clone()).ok().flatten()
    }

    /// Allocates a registered [`Buffer`] of `count` zeros on every rank. Collective.
    ///
    /// [`Communicator::symmetric_memory`] says how such steps are ordered.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let mut data = communicator.alloc::<f32>(1000)?; // On the host it derefs to a slice.
    /// data.fill(1.0);
    /// communicator.all_reduce_in_place(&mut data, ReduceOp::Sum)?; // Peers read it where it is.
    /// assert_eq!(data[999], 2.0);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`]; [`Error::Disagreement`], if ranks asked for another type or count;
    /// [`Error::Unavailable`], if too many buffers are registered; [errors of every
    /// step](Communicator#errors-of-every-step).
    pub fn alloc<T: Element>(&self, count: usize) -> Result<Buffer<T, D>> {
        let memory = || SymmetricMemory::allocate(&self.endpoint, "allocate and register", count);
        self.step(|| memory().and_then(SymmetricMemory::enter)).map_err(|error| self.in_world_ranks(error))
    }

    /// Allocates memory for `count` elements, filled with zeros, on every rank, and maps it on all ranks. Collective.
    ///
    /// All ranks ask for the same type and count. Calls copy their input from this memory until it is
    /// [registered](SymmetricMemory::register).
    ///
    /// Allocating, registering and freeing are steps that all ranks take in the same order. Steps of several threads
    /// run one after another, in the order in which the threads of a rank begin them. The program must make that order
    /// the same on all ranks: the first memory of one rank is matched with the first of the others, whichever thread
    /// allocated it. Ranks at different steps get an error. [`SymmetricMemory`] has an example.
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`]; [`Error::Disagreement`], if ranks asked for another type or count;
    /// [errors of every step](Communicator#errors-of-every-step).
    pub fn symmetric_memory<T: Element>(&self, count: usize) -> Result<SymmetricMemory<T, D>> {
        self.step(|| SymmetricMemory::allocate(&self.endpoint, "allocate", count))
            .map_err(|error| self.in_world_ranks(error))
    }

    /// Sets the limit on waits of later calls, on this rank alone. `None` means no limit.
    ///
    /// [`Builder::timeout`] sets it from the start. Steps keep their limit. A captured graph keeps the limit that was
    /// set at its capture.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// use std::time::Duration;
    ///
    /// communicator.set_timeout(Duration::from_secs(5)); // A rank that is later is an error.
    /// communicator.barrier()?;
    /// communicator.set_timeout(None); // Waits for as long as it takes.
    /// # Ok(()) });
    /// ```
    pub fn set_timeout(&self, timeout: impl Into<Option<Duration>>) {
        self.wait_limits.set(timeout.into());
    }

    /// Returns the ranks that have begun fewer calls than this one: a call of all ranks waits for them.
    pub fn behind(&self) -> Vec<usize> {
        self.endpoint.with_membership(|membership| membership.liveness.behind()).unwrap_or_default()
    }

    /// Ends a call that waits in another thread with [`Error::Aborted`], and poisons the communicator.
    ///
    /// Ranks that wait for this one get an error at once. A [`split`](Self::split), [`shrink`](Self::shrink) or
    /// [`grow`](Self::grow) that another thread is in ends with [`Error::Aborted`] as well. Communicators that such
    /// calls have made before are not aborted: they share nothing with this one, so to end them all, abort each.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let peer = 1 - communicator.rank();
    /// std::thread::scope(|scope| {
    ///     // Nobody sends: both ranks wait until rank 0 aborts.
    ///     let waiting = scope.spawn(|| communicator.recv(&mut [0.0_f32], peer, 0));
    ///     if peer == 1 {
    ///         communicator.abort();
    ///     }
    ///     let error = waiting.join().unwrap().unwrap_err();
    ///     assert!(error == Error::Aborted || peer == 0);
    ///     assert_eq!(communicator.check(), Err(error)); // The communicator is poisoned.
    /// });
    /// # Ok(()) });
    /// ```
    pub fn abort(&self) {
        if self.endpoint.in_fork() {
            return;
        }
        // Before the failure: a child in the making looks only at this.
        self.aborts.fetch_add(1, Ordering::Relaxed);
        self.endpoint.place.set(None);
        self.returning.abort();
        let Ok(membership) = self.endpoint.membership() else { return };
        // An earlier failure is kept.
        self.poison_in(&membership, Error::Aborted);
        membership.region.abort();
        membership.connection.bootstrap.interrupt();
    }

    /// Aborts like [`Self::abort`]. Ranks that wait for this one get `reason` as the text of their error.
    pub(crate) fn abort_because(&self, reason: String) {
        if !self.endpoint.in_fork() {
            if let Ok(membership) = self.endpoint.membership() {
                // Only the first exit record counts, so this one has to be before that of the abort.
                membership.liveness.fail(&Error::PeerFailed { rank: self.rank, reason });
            }
        }
        self.abort();
    }

    /// Returns `Ok` if nothing has failed so far, as far as this rank knows without waiting.
    ///
    /// # Errors
    ///
    /// The error that poisoned the communicator, or else the first that a kernel of this rank has recorded, which
    /// poisons it; [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.healthy()
    }

    /// Returns counts of what this rank has done so far.
    pub fn counters(&self) -> Counters {
        let missing = match self.failed() {
            Some(Error::Timeout { missing, .. }) => missing,
            _ => Vec::new(),
        };
        let of_membership = |membership: &Arc<Membership<D>>| {
            let region = &membership.region;
            (membership.liveness.calls(), region.waits(), region.read_directly())
        };
        let (calls, waits, direct_reads) = self.endpoint.with_membership(of_membership).unwrap_or_default();
        Counters {
            calls: self.returning.calls() + calls,
            bytes: self.bytes.load(Ordering::Relaxed),
            waits: waits.counts[..self.world_size].to_vec(),
            direct_reads: direct_reads.into(),
            timeouts: (0..self.world_size).map(|rank| u64::from(missing.contains(&rank))).collect(),
        }
    }

    /// Refuses a fork of the process that made the communicator.
    fn not_forked(&self) -> Result<()> {
        match self.endpoint.in_fork() {
            true => Err(Error::Forked),
            false => Ok(()),
        }
    }

    /// Returns whether this thread is inside a call. There it can only call [`Communicator::abort`] and getters.
    #[doc(hidden)]
    pub fn is_in_call(&self) -> bool {
        self.endpoint.is_in_call() || self.endpoint.is_in_step()
    }

    /// Refuses to lock the endpoint where that cannot succeed.
    fn can_lock(&self) -> Result<()> {
        // First: a fork has a copy of the lock, which a thread of its parent may have held.
        self.not_forked()?;
        match self.is_in_call() {
            false => Ok(()),
            true => Err(within_another()),
        }
    }

    /// Refuses to begin a step where that cannot succeed.
    fn can_step(&self) -> Result<()> {
        self.can_lock()?;
        self.healthy()
    }

    /// Returns the failure that poisoned the communicator.
    fn failed(&self) -> Option<Error> {
        self.endpoint.with_membership(|membership| membership.failed.get().cloned()).ok().flatten()
    }

    /// Returns the failure that poisoned the communicator, or one that a kernel has recorded since.
    fn healthy(&self) -> Result<()> {
        self.not_forked()?;
        let is_healthy = |membership: &Arc<Membership<D>>| {
            membership.failed.get().is_none() && membership.region.failure() == abi::FA_OK
        };
        match self.endpoint.with_membership(is_healthy)? {
            true => Ok(()),
            // It may wait for the reasons of other ranks.
            false => self.healthy_in(&*self.endpoint.membership()?),
        }
    }

    /// [`Communicator::healthy`] of a membership, whose process this is.
    #[inline]
    fn healthy_in(&self, membership: &Membership<D>) -> Result<()> {
        if let Some(error) = membership.failed.get() {
            return Err(error.clone());
        }
        match membership.region.failure() {
            abi::FA_OK => Ok(()),
            failure => Err(self.poison_in(membership, self.failure(membership, failure))),
        }
    }

    /// [`Communicator::poison_in`] of the current membership.
    #[cold]
    fn poison(&self, error: Error) -> Error {
        match self.endpoint.membership() {
            Ok(membership) => self.poison_in(&membership, error),
            Err(_) => error,
        }
    }

    /// Records a failure and notifies the other ranks. Returns the failure that counts: the first.
    #[cold]
    fn poison_in(&self, membership: &Membership<D>, error: Error) -> Error {
        // Without its context this rank cannot join another world either.
        if matches!(error, Error::Driver { .. }) && self.endpoint.device.is_lost() {
            membership.liveness.set_absent();
        }
        let error = membership.failed.get_or_init(|| {
            tracing::error!(rank = self.rank, %error, "communicator failed");
            error
        });
        membership.liveness.fail(error);
        error.clone()
    }

    /// Ends a communicator whose calls cannot be waited for, as during a capture. The peers are notified when the calls
    /// are known to have ended: now, or later by a thread.
    fn leave_when_calls_have_ended(&self, membership: &Membership<D>) {
        const LONGEST_INTERVAL: Duration = Duration::from_millis(500);
        let have_ended = membership.region.ended_probe(&self.endpoint.device);
        if have_ended() {
            return;
        }
        let Some(exit) = membership.liveness.defer_exit() else { return };
        let body = move || {
            let mut interval = Duration::from_millis(5);
            while !have_ended() {
                thread::pause(interval);
                interval = (2 * interval).min(LONGEST_INTERVAL);
            }
            exit.publish();
        };
        if let Err(error) = thread::spawn("fast-allreduce".into(), DEEP_STACK, body) {
            tracing::warn!(
                rank = self.rank,
                %error,
                "closed during a capture: the other ranks are notified when this process ends"
            );
        }
    }

    /// Poisons the communicator if a part of a call failed on this rank alone: the others may wait for it in the call.
    #[cfg(feature = "cuda")]
    fn or_poison<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| self.poison(error))
    }

    /// Replaces the error of a step by the failure that ended it from outside, such as an abort.
    fn unless_failed<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| self.failed().unwrap_or(error))
    }

    /// Carries out a step, which all ranks take. It ends early when a peer has failed, since that peer will not come.
    fn step<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.can_step()?;
        let _step = self.endpoint.step()?;
        self.after_step(self.unless_a_peer_fails(body))
    }

    /// Carries out a part of a step. Its waits end when a peer has failed.
    fn unless_a_peer_fails<T>(&self, body: impl FnOnce() -> T) -> T {
        interruption::unless(&|| self.failure_of_a_peer().is_some(), body)
    }

    /// Acts on the error of a step. If a rank is gone for good, kernels that wait for it give up, including those of
    /// replays. If a peer has failed, its failure becomes the error.
    fn after_step<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| match error {
            Error::PeerLost { rank, .. } if rank < self.world_size => {
                let Ok(membership) = self.endpoint.membership() else { return error };
                let own_failure = membership.liveness.failure_of(rank);
                if !membership.liveness.is_present(rank) {
                    membership.region.set_gone(rank);
                    return own_failure.unwrap_or(error);
                }
                // A rank that is present has given up, maybe because of a third one.
                own_failure.or_else(|| self.failure_of_a_peer()).unwrap_or(error)
            }
            Error::Timeout { .. } => self.failure_of_a_peer().unwrap_or(error),
            error => error,
        })
    }

    /// Returns the failure of a peer, if one has failed.
    fn failure_of_a_peer(&self) -> Option<Error> {
        let membership = self.endpoint.membership().ok()?;
        let mut peers = (0..self.world_size).filter(|&rank| rank != self.rank);
        peers.find_map(|rank| membership.liveness.failure_of(rank))
    }
}

/// Counts of what a rank has done so far: see [`Communicator::counters`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Calls begun.
    pub calls: u64,
    /// Bytes of this rank's messages in calls that have been carried out, or on a GPU enqueued.
    pub bytes: u64,
    /// Number of waits for each rank that outlasted the first polls, summed over all blocks.
    pub waits: Vec<u64>,
    /// Number of messages that this rank has read directly from the memory of another process.
    pub direct_reads: u64,
    /// Number of waits for each rank that timed out: at most one, because that poisons the communicator.
    pub timeouts: Vec<u64>,
}
