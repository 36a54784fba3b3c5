//! A rank's handle on its world: the collectives.
//!
//! What all devices share is here; the typed calls of each are in a file beside this one.

mod builder;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod subset;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use builder::Builder;
#[cfg(feature = "cuda")]
pub use cuda::Registered;

use crate::abi::{self, FaCall, FaFailure, FaLaunch};
use crate::bootstrap::{Bootstrap, Family};
use crate::call::{CallId, Collective};
use crate::device::sealed::Exports as _;
use crate::device::{all_succeeded, Device};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::op::ReduceOp;
use crate::plan::{Algorithm, Call, Plan, Steps};
use crate::presence::Presence;
use crate::region::TABLE_ROWS;
use crate::registry::{Buffer, Endpoint, Registration, Registry};
use crate::trace::Span;

/// One rank of a world.
///
/// Every rank makes the same calls in the same order, with the same count, type and operation. Calls of one communicator
/// run one after the other, whichever threads make them. After a call has failed for another reason than its arguments, the
/// communicator is poisoned: each later call returns the same error at once.
pub struct Communicator<D: Device> {
    // First: its thread marks ranks in the endpoint's region.
    presence: Presence,
    endpoint: Arc<Endpoint<D>>,
    failed: OnceLock<Error>,
    bytes: AtomicU64,
    checked: bool,
    family: Family,
    settings: Builder,
    rank: usize,
    world_size: usize,
    algorithm: Option<Algorithm>,
    steps: Steps,
    timeout: Option<Duration>,
    setup_timeout: Duration,
    closing: Arc<Closing<D>>,
}

/// The connection to the other ranks, and what must outlive their mappings of it: kept by the communicator and, after its own
/// mappings, by the endpoint, so that the last of communicator and buffers ends it.
pub(crate) struct Closing<D: Device> {
    exports: D::Exports,
    bootstrap: Box<dyn Bootstrap>,
    origin: Origin,
}

impl<D: Device> Drop for Closing<D> {
    fn drop(&mut self) {
        const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
        if !self.exports.is_empty() {
            // All ranks have closed what this one frees next. A rank that does not come may still use it, and a longer wait
            // could be a hang: then it stays until the process ends. In a fork it is the parent's.
            if self.origin.is_elsewhere() || self.bootstrap.barrier(CLOSE_TIMEOUT).is_err() {
                self.exports.leave();
            }
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

/// One call: addresses on the device, elements, and what to do with them.
#[derive(Debug, Clone, Copy)]
struct Message {
    input: u64,
    output: u64,
    count: usize,
    dtype: DType,
    op: ReduceOp,
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

    /// What a call of `count` elements of `dtype` does.
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        let bytes = count.saturating_mul(dtype.size());
        let choice = self.steps.choice(bytes, self.algorithm);
        let call = Call { bytes, world_size: self.world_size, choice };
        let mut plan = self.endpoint.device.plan(&call);
        let generation = self.endpoint.region.layout.mailbox_bytes;
        let capacity = plan.algorithm.capacity(generation, D::PACKING, dtype.size(), self.world_size);
        // Whole packs, so that every piece is aligned as the message is.
        let piece = plan.piece_bytes / D::PACKING.pack_bytes * D::PACKING.pack_bytes;
        plan.piece_bytes = piece.clamp(D::PACKING.pack_bytes, capacity * dtype.size());
        plan
    }

    /// Allocates a registered buffer of `count` zeros on every rank. Collective: all ranks ask for the same count.
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`], [`Error::Disagreement`] on the size, and the errors of the bootstrap.
    pub fn alloc<T: Element>(&self, count: usize) -> Result<Buffer<T, D>> {
        self.healthy()?;
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::Allocation {
            bytes: usize::MAX,
            reason: format!("{count} elements of {} exceed the address space", T::DTYPE),
        })?;
        let (bootstrap, timeout) = (&*self.closing.bootstrap, self.setup_timeout);
        builder::agree(bootstrap, &[("the bytes of a registered buffer", bytes.to_string())], timeout)?;
        let memory = self.endpoint.device.share(bytes.max(1), bootstrap, timeout)?;
        Ok(Buffer::new(self.register_shared(memory, bytes)?, count))
    }

    /// Enters memory that every rank has mapped into every rank's table. Collective.
    fn register_shared(&self, memory: D::Shared, bytes: usize) -> Result<Registration<D>> {
        let free_rows = self.endpoint.lock().free_rows();
        let free_rows = self.closing.bootstrap.all_gather(&free_rows, self.setup_timeout)?;
        let row = self.endpoint.lock().next_row(&free_rows)?;
        let endpoint = Arc::clone(&self.endpoint);
        let registration = Registration::new(endpoint, memory, row, self.rank, bytes);
        // No rank pulls from the buffer before all have it in their tables.
        all_succeeded(registration, &*self.closing.bootstrap, self.setup_timeout)
    }

    /// Returns when every rank has called it, through the bootstrap.
    ///
    /// # Errors
    ///
    /// Those of the bootstrap; and the error that poisoned the communicator.
    pub fn barrier(&self) -> Result<()> {
        self.healthy()?;
        self.unless_failed(self.closing.bootstrap.barrier(self.setup_timeout))
    }

    /// Makes a call that waits in another thread give up with [`Error::Aborted`], and poisons the communicator. Ranks that
    /// wait for this one have an error at once.
    pub fn abort(&self) {
        if self.presence.is_elsewhere() {
            return;
        }
        // If a failure is known already, it stands.
        self.poison(Error::Aborted);
        self.endpoint.region.abort();
        self.closing.bootstrap.interrupt();
    }

    /// What this rank has done so far.
    pub fn counters(&self) -> Counters {
        let (region, failed) = (&self.endpoint.region, self.failed.get());
        let missing = match failed {
            Some(Error::Timeout { missing, .. }) => missing.as_slice(),
            _ => &[],
        };
        Counters {
            calls: self.presence.calls(),
            bytes: self.bytes.load(Ordering::Relaxed),
            waits: region.waits()[..self.world_size].iter().copied().map(u64::from).collect(),
            timeouts: (0..self.world_size).map(|rank| u64::from(missing.contains(&rank))).collect(),
        }
    }

    /// The failure that poisoned the communicator, or one that a kernel has recorded since.
    fn healthy(&self) -> Result<()> {
        if self.presence.is_elsewhere() {
            return Err(Error::Forked);
        }
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
        let error = self.failed.get_or_init(|| {
            tracing::error!(rank = self.rank, %error, "communicator failed");
            error
        });
        self.presence.fail(error);
        error.clone()
    }

    /// The result of a step, or the failure that ended it from outside.
    fn unless_failed<T>(&self, step: Result<T>) -> Result<T> {
        step.map_err(|error| self.failed.get().cloned().unwrap_or(error))
    }

    /// Starts a launch for each piece of the message. `source` says where peers find the input if it is in no registered
    /// buffer: 0 for staging.
    ///
    /// # Safety
    ///
    /// Until the launches have ended, `input` is valid for reads and `output` for writes of `count` elements of `dtype`, and
    /// nothing else writes the one or accesses the other. They are aligned for `dtype`, and disjoint or equal.
    unsafe fn start(
        &self,
        message: Message,
        stream: D::Stream<'_>,
        source: impl FnOnce(&mut Registry, &Plan) -> Result<u64>,
    ) -> Result<()> {
        let mut registry = self.endpoint.lock();
        self.healthy()?;
        let plan = self.plan(message.count, message.dtype);
        let Message { dtype, op, count, .. } = message;
        let call = CallId { collective: Collective::AllReduce, dtype, op, algorithm: plan.algorithm, count };
        let number = self.presence.begin(call.encode());
        let _span = Span::enter(self.rank, number, &call, &plan);
        registry.planned(&plan);
        let size = message.dtype.size();
        let bytes = (message.count * size) as u64;
        // In place, a one-shot writes where peers still read: it must stage. A push has no peers that read.
        let source = match plan.algorithm {
            Algorithm::OneShotPull if message.input == message.output => 0,
            Algorithm::OneShotPull | Algorithm::TwoShotPull => match registry.source(message.input, bytes) {
                0 => source(&mut registry, &plan)?,
                registered => registered,
            },
            Algorithm::OneShotPush | Algorithm::TwoShotPush => 0,
        };
        let mut launch = self.launch(&message, &plan, source, call.encode());
        let piece = plan.piece_bytes / size;
        // One limit for all pieces; on a device that runs them later, for each.
        let deadline = match self.timeout {
            Some(limit) if D::SYNCHRONOUS && message.count > piece => Instant::now().checked_add(limit),
            _ => None,
        };
        let mut left = message.count;
        while left > 0 {
            if let Some(deadline) = deadline {
                launch.timeout_ns = nanoseconds(deadline.saturating_duration_since(Instant::now()));
            }
            let now = left.min(piece);
            launch.count = now as u64;
            // SAFETY: input and output are the caller's, within their counts; regions and the table are this
            // endpoint's, and the registry's lock keeps the table as it is.
            unsafe { self.endpoint.device.launch(&mut launch, &plan, stream) }?;
            if self.endpoint.region.failure() != abi::FA_OK {
                break;
            }
            let bytes = (now * size) as u64;
            launch.input += bytes;
            launch.output += bytes;
            if launch.source != 0 {
                launch.source += bytes;
            }
            left -= now;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.presence.end();
        Ok(())
    }

    /// The launch of a message's first piece, all but its count.
    fn launch(&self, message: &Message, plan: &Plan, source: u64, call: FaCall) -> FaLaunch {
        let region = &self.endpoint.region;
        FaLaunch {
            regions: std::array::from_fn(|rank| region.address(rank)),
            input: message.input,
            output: message.output,
            count: 0,
            source,
            buffers: region.table_address(),
            buffer_count: TABLE_ROWS as u64,
            status: region.status_address(),
            mailbox_offset: region.layout.mailbox_offset as u64,
            mailbox_bytes: region.layout.mailbox_bytes as u64,
            staging_offset: region.layout.staging_offset as u64,
            staging_bytes: region.layout.staging_bytes as u64,
            timeout_ns: self.timeout.map_or(0, nanoseconds),
            rank: self.rank as u32,
            world: self.world_size as u32,
            blocks: plan.blocks as u32,
            dtype: message.dtype as u32,
            op: message.op as u32,
            algorithm: plan.algorithm as u32,
            spin: 0,
            checked: u32::from(self.checked),
            call,
        }
    }

    #[cold]
    fn failure(&self, failure: FaFailure) -> Error {
        let (missing, epoch) = self.endpoint.region.missing();
        let waited = self.timeout.unwrap_or_default();
        let operation = Collective::AllReduce.name();
        match (failure, missing.first()) {
            (abi::FA_TIMED_OUT, _) => self.presence.timed_out(missing, operation, epoch, waited),
            (abi::FA_PEER_GONE, Some(&rank)) => self.presence.lost(rank, operation, epoch, waited),
            _ => self.other_failure(failure),
        }
    }

    /// A failure that is not about who was missing.
    fn other_failure(&self, failure: FaFailure) -> Error {
        match failure {
            abi::FA_ABORTED => Error::Aborted,
            abi::FA_MISMATCH => {
                let Some((rank, theirs)) = self.endpoint.region.others().into_iter().next() else {
                    return Error::Unavailable {
                        what: "the call that differs".into(),
                        reason: "the kernel did not say which".into(),
                    };
                };
                Error::Disagreement {
                    what: "the call",
                    rank,
                    theirs: CallId::describe(theirs),
                    own_rank: self.rank,
                    ours: self.presence.call(),
                }
            }
            abi::FA_UNKNOWN_BUFFER => Error::Unavailable {
                what: "a peer's registered buffer".into(),
                reason:
                    "this rank has dropped its part, or the call is in a graph that was replayed before \
                         register_graph_buffers(); drop a buffer after the last call that uses it on any rank"
                        .into(),
            },
            _ => Error::Unavailable {
                what: "this kernel".into(),
                reason: format!("the device knows no such type, operation or algorithm (failure {failure})"),
            },
        }
    }
}

/// A limit as kernels take it: at least 1, as 0 is none, and at most half the range, as a kernel adds the time of its clock.
fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).clamp(1, u64::MAX / 2)
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
    /// Waits for each rank that ended in a timeout: at most one, as that poisons the communicator.
    pub timeouts: Vec<u64>,
}

/// Refuses what no kernel could work on.
fn check_pointers(message: &Message) -> Result<()> {
    let Message { input, output, count, dtype, .. } = *message;
    if count == 0 {
        return Ok(());
    }
    let element_size = dtype.size();
    let bytes = count.checked_mul(element_size).filter(|&bytes| bytes <= isize::MAX as usize);
    let bytes = bytes.ok_or_else(|| Error::InvalidSetting {
        name: "count",
        value: count.to_string(),
        expected: "a number of elements that fits the address space",
    })?;
    for (which, address) in [("input", input), ("output", output)] {
        let problem = match address {
            0 => "null",
            _ if address % element_size as u64 != 0 => "not aligned to its element",
            _ if address.checked_add(bytes as u64).is_none() => "too near the end of the address space",
            _ => continue,
        };
        return Err(Error::InvalidPointer { which, address: address as usize, problem, element_size });
    }
    if input != output && input < output + bytes as u64 && output < input + bytes as u64 {
        return Err(Error::Overlap { input: input as usize, output: output as usize, bytes });
    }
    Ok(())
}
