//! A rank's handle on its world: the collectives.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::abi;
use crate::abi::FaLaunch;
use crate::bootstrap::Bootstrap;
use crate::device::host::Host;
use crate::device::{sealed, Device};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::plan::{Algorithm, Call, Plan};
use crate::region::{Layout, Region};
use crate::registry::{self, Buffer, Registry};
use crate::MAX_RANKS;

/// How a [`Communicator`] is made. All ranks must use the same settings.
#[derive(Debug, Clone)]
pub struct Builder {
    max_bytes: Option<usize>,
    timeout: Option<Duration>,
    algorithm: Option<Algorithm>,
    first_epoch: u32,
}

impl Builder {
    /// Bytes that one launch can take through the region (default 1 MiB on the host). Larger messages pass in pieces.
    /// A region takes at most 4 x max_bytes + 1 MiB on each rank.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// The longest that a call, or a step of making the communicator, waits for other ranks (default 30 s). `None`: for
    /// ever, in calls; making the communicator is always bounded.
    #[must_use]
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.timeout = timeout.into();
        self
    }

    /// Uses one algorithm for all calls, instead of the best for each.
    #[must_use]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.algorithm = algorithm.into();
        self
    }

    /// Starts the epochs elsewhere than at 0, so that a test can pass their wrap-around.
    #[doc(hidden)]
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// Makes this rank's communicator. Collective: every rank of the bootstrap calls it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for settings out of range, [`Error::Disagreement`] where ranks have different ones,
    /// [`Error::Allocation`] if the region cannot be allocated, and the errors of the bootstrap.
    pub fn build<D: Device>(
        self,
        mut device: D,
        bootstrap: impl Bootstrap + 'static,
    ) -> Result<Communicator<D>> {
        const SETUP_TIMEOUT: Duration = Duration::from_secs(30);
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let setup_timeout = self.timeout.unwrap_or(SETUP_TIMEOUT);
        let max_bytes = self.max_bytes.unwrap_or(D::DEFAULT_MAX_BYTES);
        let layout = Layout::new(max_bytes, D::PACKING.slot_bytes)?;
        let facts = [
            ("the crate's version", env!("CARGO_PKG_VERSION").to_owned()),
            ("the device", D::NAME.to_owned()),
            ("the device's workers", device.shared_facts().to_string()),
            ("max_bytes", max_bytes.to_string()),
            (
                "the algorithm",
                self.algorithm.map_or("automatic".to_owned(), |algorithm| algorithm.to_string()),
            ),
        ];
        agree(&bootstrap, &facts, setup_timeout)?;

        device.set_world(world_size);
        let region = Region::new(&device, layout, &bootstrap, setup_timeout)?;
        region.set_epoch(self.first_epoch);
        // No launch writes to a peer that has not set its epoch.
        bootstrap.barrier(setup_timeout)?;
        Ok(Communicator {
            device,
            region,
            registry: Arc::new(Mutex::new(Registry::new(rank))),
            failed: OnceLock::new(),
            rank,
            world_size,
            algorithm: self.algorithm,
            timeout: self.timeout,
            setup_timeout,
            bootstrap: Box::new(bootstrap),
        })
    }
}

/// Compares facts that every rank must share.
fn agree(bootstrap: &dyn Bootstrap, facts: &[(&'static str, String)], timeout: Duration) -> Result<()> {
    let own_rank = bootstrap.rank();
    let mine = facts.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("\n");
    for (rank, theirs) in bootstrap.all_gather(mine.as_bytes(), timeout)?.into_iter().enumerate() {
        let theirs = String::from_utf8_lossy(&theirs).into_owned();
        let mut values = theirs.split('\n');
        for (what, ours) in facts {
            let value = values.next().unwrap_or("nothing");
            if value != ours {
                let (theirs, ours) = (value.to_owned(), ours.clone());
                return Err(Error::Disagreement { what, rank, theirs, own_rank, ours });
            }
        }
    }
    Ok(())
}

/// One rank of a world.
///
/// Every rank makes the same calls in the same order, with the same count, type and operation. Calls of one communicator
/// run one after the other, whichever threads make them. After a call has failed for another reason than its arguments, the
/// communicator is poisoned: each later call returns the same error at once.
pub struct Communicator<D: Device> {
    device: D,
    region: Region<D>,
    /// Locked for the whole of a call: calls are ordered, and no buffer goes while a kernel reads the table.
    registry: Arc<Mutex<Registry>>,
    failed: OnceLock<Error>,
    rank: usize,
    world_size: usize,
    algorithm: Option<Algorithm>,
    timeout: Option<Duration>,
    setup_timeout: Duration,
    bootstrap: Box<dyn Bootstrap>,
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

impl Communicator<Host> {
    /// Settings to make communicators with, of any device.
    pub fn builder() -> Builder {
        Builder { max_bytes: None, timeout: Some(Duration::from_secs(30)), algorithm: None, first_epoch: 0 }
    }

    /// Reduces the ranks' `input`s element by element into every rank's `output`.
    ///
    /// Nothing is allocated. An input that lies in a [`Buffer`] is read by the peers where it is, any other is copied once.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::Timeout`] naming ranks that did not come; see [`Communicator`] on what follows.
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        // SAFETY: both slices hold that many elements of T for the length of the call, which the host runs to its end;
        // an exclusive borrow overlaps with no other.
        unsafe {
            self.reduce_pieces(input.as_ptr() as u64, output.as_mut_ptr() as u64, input.len(), T::DTYPE, op)
        }
    }

    /// Reduces the ranks' `data` element by element, in place.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let address = data.as_mut_ptr() as u64;
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.reduce_pieces(address, address, data.len(), T::DTYPE, op) }
    }

    /// [`Communicator::all_reduce`] on raw pointers, for callers that know the type only at run time.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], [`Error::InvalidPointer`] for null or misaligned pointers, and
    /// [`Error::Overlap`] unless the buffers are disjoint or the same.
    ///
    /// # Safety
    ///
    /// `input` is valid for reads, and `output` for writes, of `count` elements of `dtype`, and no other thread writes the one
    /// or accesses the other during the call.
    pub unsafe fn all_reduce_raw(
        &self,
        input: *const libc::c_void,
        output: *mut libc::c_void,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        check_pointers(input as usize, output as usize, count, dtype)?;
        // SAFETY: the caller's.
        unsafe { self.reduce_pieces(input as u64, output as u64, count, dtype, op) }
    }

    /// Allocates a registered buffer of `count` zeros on every rank. Collective: all ranks ask for the same count.
    ///
    /// # Errors
    ///
    /// [`Error::Allocation`], [`Error::Disagreement`] on the size, and the errors of the bootstrap.
    pub fn alloc<T: Element>(&self, count: usize) -> Result<Buffer<T>> {
        use sealed::Device as _;
        self.healthy()?;
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes
            .ok_or_else(|| Error::Allocation { bytes: usize::MAX, reason: "the size overflows".into() })?;
        let bootstrap = &*self.bootstrap;
        agree(bootstrap, &[("the bytes of a registered buffer", bytes.to_string())], self.setup_timeout)?;
        let allocated = self.device.allocate(bytes.max(1));
        let mine = allocated.as_ref().err().map(Error::to_string).unwrap_or_default();
        let reports = bootstrap.all_gather(mine.as_bytes(), self.setup_timeout)?;
        let mut memory = allocated?;
        if let Some((rank, report)) = reports.iter().enumerate().find(|(_, report)| !report.is_empty()) {
            let reason = format!("rank {rank}: {}", String::from_utf8_lossy(report));
            return Err(Error::Allocation { bytes, reason });
        }
        self.device.map_peers(&mut memory, bootstrap, self.setup_timeout)?;
        let dropped = registry::lock(&self.registry).dropped();
        let dropped = bootstrap.all_gather(&dropped, self.setup_timeout)?;
        let id = registry::lock(&self.registry).next_id(&dropped)?;
        Ok(Buffer::new(memory, count, &self.registry, id))
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
        &self.device
    }

    /// Bytes of shared memory that this rank's region takes.
    pub fn region_bytes(&self) -> usize {
        self.region.layout.total_bytes
    }

    /// What a call of `count` elements of `dtype` does.
    pub fn plan(&self, count: usize, dtype: DType) -> Plan {
        let bytes = count.saturating_mul(dtype.size());
        let call = Call { bytes, world_size: self.world_size, forced: self.algorithm };
        let mut plan = self.device.plan(&call);
        let capacity = plan.algorithm.capacity(
            self.region.layout.mailbox_bytes,
            D::PACKING,
            dtype.size(),
            self.world_size,
        );
        // Whole packs, so that every piece is aligned as the message is.
        let piece = plan.piece_bytes / D::PACKING.pack_bytes * D::PACKING.pack_bytes;
        plan.piece_bytes = piece.clamp(D::PACKING.pack_bytes, capacity * dtype.size());
        plan
    }

    /// Returns when every rank has called it, through the bootstrap.
    ///
    /// # Errors
    ///
    /// Those of the bootstrap; and the error that poisoned the communicator.
    pub fn barrier(&self) -> Result<()> {
        self.healthy()?;
        self.bootstrap.barrier(self.setup_timeout)
    }

    /// Makes a call that waits in another thread give up with [`Error::Aborted`], and poisons the communicator. The other
    /// ranks run into their timeouts.
    pub fn abort(&self) {
        // If a failure is recorded already, it stands.
        let _ = self.failed.set(Error::Aborted);
        self.region.abort();
    }

    fn healthy(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Runs one launch for each piece of the message.
    ///
    /// # Safety
    ///
    /// As [`Communicator::all_reduce_raw`], with pointers that are aligned and do not overlap partly.
    unsafe fn reduce_pieces(
        &self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let registry = registry::lock(&self.registry);
        self.healthy()?;
        if count == 0 {
            return Ok(());
        }
        let plan = self.plan(count, dtype);
        let size = dtype.size();
        // In place, a one-shot writes where peers still read: it must stage.
        let in_place = input == output && plan.algorithm == Algorithm::OneShotPull;
        let source = if in_place { 0 } else { registry.source(input, count * size) };
        let (buffers, buffer_count) = registry.table();
        let layout = &self.region.layout;
        let mut launch = FaLaunch {
            regions: std::array::from_fn(|rank| self.region.address(rank)),
            input,
            output,
            count: 0,
            source,
            buffers,
            buffer_count,
            status: self.region.status_address(),
            mailbox_offset: layout.mailbox_offset as u64,
            mailbox_bytes: layout.mailbox_bytes as u64,
            staging_offset: layout.staging_offset as u64,
            staging_bytes: layout.staging_bytes as u64,
            timeout_ns: self
                .timeout
                .map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1)),
            rank: self.rank as u32,
            world: self.world_size as u32,
            blocks: plan.blocks as u32,
            dtype: dtype as u32,
            op: op as u32,
            algorithm: plan.algorithm as u32,
            spin: 0,
            reserved: 0,
        };
        let piece = plan.piece_bytes / size;
        let mut left = count;
        while left > 0 {
            let now = left.min(piece);
            launch.count = now as u64;
            // SAFETY: input and output are the caller's, within their counts; regions and the table are this
            // communicator's, and the registry's lock keeps the table as it is.
            let failure = unsafe { self.device.launch(&mut launch) }?;
            if failure != abi::FA_OK {
                return Err(self.poison(failure));
            }
            let bytes = (now * size) as u64;
            launch.input += bytes;
            launch.output += bytes;
            if launch.source != 0 {
                launch.source += bytes;
            }
            left -= now;
        }
        Ok(())
    }

    #[cold]
    fn poison(&self, failure: u32) -> Error {
        let (missing, epoch) = self.region.failure();
        let error = match failure {
            abi::FA_TIMED_OUT => {
                let waited = self.timeout.unwrap_or_default();
                Error::Timeout { operation: "all_reduce", epoch, missing, waited }
            }
            abi::FA_ABORTED => Error::Aborted,
            abi::FA_UNKNOWN_BUFFER => Error::Unavailable {
                what: "a peer's registered buffer".into(),
                reason: "this rank has dropped its part of it; drop a buffer only after the last call that uses it on any rank".into(),
            },
            _ => Error::Unavailable {
                what: "this kernel".into(),
                reason: format!("the device does not know the type, operation or algorithm (failure {failure})"),
            },
        };
        // An abort may have come first; then that is the answer from now on.
        self.failed.get_or_init(|| error).clone()
    }
}

fn check_pointers(input: usize, output: usize, count: usize, dtype: DType) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let element_size = dtype.size();
    let bytes = count.checked_mul(element_size).filter(|&bytes| bytes <= isize::MAX as usize);
    let bytes = bytes.ok_or(Error::InvalidSetting {
        name: "count",
        value: count.to_string(),
        expected: "a size that fits memory",
    })?;
    for (which, address) in [("input", input), ("output", output)] {
        let problem = match address {
            0 => "null",
            _ if address % element_size != 0 => "not aligned to its element",
            _ if address.checked_add(bytes).is_none() => {
                "beyond the end of the address space with its length"
            }
            _ => continue,
        };
        return Err(Error::InvalidPointer { which, address, problem, element_size });
    }
    if input != output && input < output + bytes && output < input + bytes {
        return Err(Error::Overlap { input, output, bytes });
    }
    Ok(())
}
