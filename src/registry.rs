//! Registered buffers: memory whose addresses all ranks know, pulled from with no copy.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::abi::{FaLaunch, FA_SOURCE_ID_SHIFT};
use crate::call::CallId;
use crate::communicator::Closing;
use crate::device::sealed::{self, Shared as _};
use crate::device::{Device, Host};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::region::{Region, TABLE_ROWS};
use crate::symmetric::{self, SymmetricMemory};

/// What a rank needs to launch kernels: kept by its communicator and by every registered buffer.
pub(crate) struct Endpoint<D: Device> {
    // What kernels use goes when they have ended, and never if that cannot be found out.
    pub device: ManuallyDrop<D>,
    pub region: ManuallyDrop<Region<D>>,
    registry: Mutex<Registry>,
    /// The memory of registrations, with its row.
    registered: Mutex<Vec<(usize, Weak<D::Shared>)>>,
    /// What was dropped while its kernels could not be waited for: memory, with its row where it was registered.
    retired: ManuallyDrop<Mutex<Retired<D>>>,
    /// Symmetric memories that ranks have agreed to allocate: equal on all.
    numbered: AtomicU64,
    // Last: what the peers have mapped goes after this rank's own mappings.
    pub closing: Arc<Closing<D>>,
}

type Retired<D> = Vec<(Option<usize>, <D as sealed::Device>::Shared)>;

impl<D: Device> Endpoint<D> {
    pub fn new(device: D, region: Region<D>, closing: Arc<Closing<D>>) -> Self {
        let (device, region) = (ManuallyDrop::new(device), ManuallyDrop::new(region));
        let (registry, registered, retired, numbered) = Default::default();
        Self { device, region, registry, registered, retired, numbered, closing }
    }

    /// The number of the next symmetric memory. Within a step, which orders it with [`Self::take_number`].
    pub fn next_number(&self) -> u64 {
        self.numbered.load(Ordering::Relaxed)
    }

    /// Goes on to the next number, when all ranks do. Within a step.
    pub fn take_number(&self) {
        self.numbered.fetch_add(1, Ordering::Relaxed);
    }

    /// Enters memory that every rank has mapped into every rank's table. Collective, within a step.
    pub fn register(self: &Arc<Self>, memory: D::Shared, bytes: usize) -> Result<Registration<D>> {
        let Closing { bootstrap, timeout, .. } = &*self.closing;
        let free_rows = self.lock().free_rows();
        let free_rows = bootstrap.all_gather(&free_rows, *timeout)?;
        let row = self.lock().next_row(&free_rows);
        let registration =
            row.and_then(|row| Registration::new(Arc::clone(self), memory, row, bootstrap.rank(), bytes));
        // No rank pulls from the memory before all have it in their tables; where one has not, it goes from all.
        self.closing.all_succeeded(registration)
    }

    /// Lets memory that is not registered go, when no kernel can be using it.
    pub fn retire(&self, memory: D::Shared) {
        // No call comes in between.
        let _registry = self.lock();
        if self.device.wait_for_calls().is_err() {
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).push((None, memory));
        }
    }

    /// After a launch that failed, and before its call returns: peers that go on with the call may still read the registered
    /// buffer that `source` names, which is the caller's again. They read no other: a call that succeeds ends when all have read.
    /// The lock of the registry is held, and nobody writes the buffer, which the call borrows.
    pub fn make_private(&self, source: u64) {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_source = |(row, _): &&(usize, Weak<_>)| {
            source_word(*row, 0) >> FA_SOURCE_ID_SHIFT == source >> FA_SOURCE_ID_SHIFT
        };
        if let Some(memory) = registered.iter().find(is_source).and_then(|(_, memory)| memory.upgrade()) {
            memory.make_private();
        }
    }

    /// Takes a row out of the table, if no kernel can be reading it. The lock of the registry is held.
    fn clear_row(&self, registry: &mut Registry, row: usize) -> Result<()> {
        self.region.write_row(&self.device, row, &Default::default())?;
        registry.set(row, Row::Free);
        Ok(())
    }

    /// Notes the memory of a registration, in place of one that has gone.
    fn track(&self, row: usize, memory: &Arc<D::Shared>) {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.retain(|(other, memory)| *other != row && memory.strong_count() > 0);
        registered.push((row, Arc::downgrade(memory)));
    }

    /// Tries again for what is retired, and returns the memory that may go.
    fn clear_retired(&self, registry: &mut Registry) -> Vec<D::Shared> {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let (cleared, left) = std::mem::take(&mut *retired).into_iter().partition(|(row, _)| match *row {
            Some(row) => self.clear_row(registry, row).is_ok(),
            None => self.device.wait_for_calls().is_ok(),
        });
        *retired = left;
        let cleared: Vec<_> = cleared;
        cleared.into_iter().map(|(_, memory)| memory).collect()
    }

    /// Held for the whole of a call: calls are ordered, and no buffer goes while a kernel reads the table.
    pub fn lock(&self) -> MutexGuard<'_, Registry> {
        // No change of a registry can panic midway, so a panic elsewhere has left it whole.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Drop for Endpoint<D> {
    fn drop(&mut self) {
        // Tried twice, as nobody tries again later.
        let ended = self.device.wait_for_calls().or_else(|_| self.device.wait_for_calls());
        if let Err(error) = ended {
            // Kernels may still run, from the module, in the region and in what is retired.
            self.closing.leave_open();
            if self.closing.here().is_ok() {
                let rank = self.closing.bootstrap.rank();
                tracing::warn!(rank, %error, "closed while calls may still run: what they use stays until the process ends");
            }
            return;
        }
        // SAFETY: each goes once, here, and nothing uses them any more. The kernels have ended.
        unsafe {
            ManuallyDrop::drop(&mut self.device);
            ManuallyDrop::drop(&mut self.region);
            ManuallyDrop::drop(&mut self.retired);
        }
    }
}

/// This rank's side of the table of registered buffers; row i has id i + 1.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// Rows 0..[`FIRST_GRAPH_ROW`], equal on all ranks.
    rows: Vec<Row>,
    /// Of the call before.
    plan: Option<Plan>,
    /// The call before, if it was an allreduce: the next is often the same.
    pub last: Option<Prepared>,
    /// The launch before: most of it is the same in all, and all but the piece in those of equal calls. Small calls feel what they
    /// copy.
    pub launch: Option<Box<FaLaunch>>,
}

/// What is worked out for a call before its launches, wherever its buffers are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prepared {
    pub id: CallId,
    pub plan: Plan,
    /// Elements of a launch, of the message or of each share.
    pub piece: usize,
}

#[derive(Debug, Clone, Copy)]
enum Row {
    Free,
    /// Of a registered buffer.
    Used(Range),
    /// Of one that is gone, while kernels may still read the row.
    Retired,
}

/// Rows from here on are for the inputs of captured calls, which each rank numbers for itself: a rank's id is looked up in that
/// rank's column only.
pub(crate) const FIRST_GRAPH_ROW: usize = TABLE_ROWS / 2;

/// The source word for an offset into the buffer of a row.
pub(crate) fn source_word(row: usize, offset: u64) -> u64 {
    ((row as u64 + 1) << FA_SOURCE_ID_SHIFT) + offset
}

/// This rank's memory of one registered buffer.
#[derive(Debug, Clone, Copy)]
struct Range {
    base: u64,
    bytes: u64,
}

impl Range {
    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.base
            && address - self.base <= self.bytes
            && bytes <= self.bytes - (address - self.base)
    }
}

impl Registry {
    /// Tells of a plan that differs from that of the call before.
    pub fn planned(&mut self, plan: &Plan) {
        if self.plan != Some(*plan) {
            self.plan = Some(*plan);
            let Plan { algorithm, blocks, threads, piece_bytes } = *plan;
            tracing::debug!(algorithm = algorithm.name(), blocks, threads, piece_bytes, "plan");
        }
    }

    /// The source word for `bytes` bytes at `address`, or 0 if they are not all in one registered buffer.
    pub fn source(&self, address: u64, bytes: u64) -> u64 {
        let holding = self.rows.iter().enumerate().find_map(|(row, entry)| match entry {
            Row::Used(range) if range.holds(address, bytes) => Some(source_word(row, address - range.base)),
            _ => None,
        });
        holding.unwrap_or(0)
    }

    /// Rows that this rank has free among those ever used, as bytes for the other ranks.
    pub fn free_rows(&self) -> Vec<u8> {
        let free = self.rows.iter().zip(0u16..).filter(|(row, _)| matches!(row, Row::Free));
        free.flat_map(|(_, row)| row.to_le_bytes()).collect()
    }

    /// The row that all ranks use next: the lowest that is free on all, else a new one.
    pub fn next_row(&self, free_rows: &[Vec<u8>]) -> Result<usize> {
        let mut free_on = vec![0; self.rows.len()];
        for (rank, bytes) in free_rows.iter().enumerate() {
            let mut last = None;
            for row in bytes.chunks(2) {
                // In order, so that no rank counts twice.
                let row = row.try_into().map(u16::from_le_bytes).ok().filter(|&row| Some(row) > last);
                last = row;
                let count = row.and_then(|row| free_on.get_mut(usize::from(row)));
                *count.ok_or_else(|| Error::Malformed {
                    rank,
                    reason: "its list of free registrations names one that never was, or one twice".into(),
                })? += 1;
            }
        }
        let row = free_on.iter().position(|&count| count == free_rows.len()).unwrap_or(self.rows.len());
        if row >= FIRST_GRAPH_ROW {
            let reason = format!("{FIRST_GRAPH_ROW} are registered");
            return Err(Error::Unavailable { what: "another registered buffer".into(), reason });
        }
        Ok(row)
    }

    fn set(&mut self, row: usize, entry: Row) {
        if row == self.rows.len() {
            self.rows.push(entry);
        } else {
            self.rows[row] = entry;
        }
    }
}

/// A row of the table, and the memory that it is of; until it is dropped, calls from this memory pull without a copy.
pub(crate) struct Registration<D: Device> {
    endpoint: Arc<Endpoint<D>>,
    /// `None` when it has ended.
    memory: Option<Arc<D::Shared>>,
    row: usize,
    /// This rank's.
    address: u64,
}

impl<D: Device> Registration<D> {
    /// Registers `bytes` bytes of `memory` at the row that all ranks agreed on.
    pub fn new(
        endpoint: Arc<Endpoint<D>>,
        memory: D::Shared,
        row: usize,
        rank: usize,
        bytes: usize,
    ) -> Result<Self> {
        let bases = std::array::from_fn(|rank| memory.address(rank));
        let mut registry = endpoint.lock();
        let written = endpoint.region.write_row(&endpoint.device, row, &bases);
        // A row that could not be written is free as on the other ranks, which give theirs up: rows stay equal on all.
        registry.set(
            row,
            match written {
                Ok(()) => Row::Used(Range { base: bases[rank], bytes: bytes as u64 }),
                Err(_) => Row::Free,
            },
        );
        written?;
        let memory = Arc::new(memory);
        endpoint.track(row, &memory);
        let gone = endpoint.clear_retired(&mut registry);
        drop(registry);
        drop(gone);
        Ok(Self { endpoint, memory: Some(memory), row, address: bases[rank] })
    }

    /// This rank's address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Address of a rank's memory in this process; 0 beyond the world.
    pub fn address_of(&self, rank: usize) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address(rank))
    }

    /// What it is registered with.
    pub fn endpoint(&self) -> &Arc<Endpoint<D>> {
        &self.endpoint
    }

    /// Takes the memory out of this rank's table. Waits for calls that are under way; an error leaves the registration as it was.
    pub fn end(&mut self) -> Result<Option<D::Shared>> {
        let mut registry = self.endpoint.lock();
        if self.memory.as_ref().is_some_and(|memory| memory.is_private()) {
            return Err(Error::Unavailable {
                what: "symmetric memory".into(),
                reason: "a call of its communicator has failed, and the buffer is this rank's alone since"
                    .into(),
            });
        }
        self.endpoint.clear_row(&mut registry, self.row)?;
        // The lock is held: nobody else has it.
        Ok(self.memory.take().and_then(Arc::into_inner))
    }
}

impl<D: Device> Drop for Registration<D> {
    fn drop(&mut self) {
        if self.memory.is_none() {
            return;
        }
        // Out of the table before its mappings go; waits for calls that are under way.
        let mut registry = self.endpoint.lock();
        let cleared = self.endpoint.clear_row(&mut registry, self.row);
        if cleared.is_err() {
            // The calls cannot be waited for now, so the memory has to wait for them.
            registry.set(self.row, Row::Retired);
            let mut retired = self.endpoint.retired.lock().unwrap_or_else(PoisonError::into_inner);
            let memory = self.memory.take().and_then(Arc::into_inner);
            retired.extend(memory.map(|memory| (Some(self.row), memory)));
        }
        drop(registry);
        // Before the endpoint: it may be the last that holds it, and then waits for the peers to have closed theirs.
        self.memory = None;
    }
}

/// Memory that the crate allocated on all ranks together, registered: an allreduce from it pulls without a copy.
///
/// It is a [`SymmetricMemory`] after [`register`](SymmetricMemory::register), and one again after [`Buffer::deregister`].
///
/// On the host it derefs to a slice; on a GPU it is a cudarc `DevicePtr`. A view into it is registered too. Dropping it is local;
/// the memory goes when every rank has dropped its own, and memory that is shared by CUDA IPC handles when every rank has dropped
/// its communicator and all of its buffers: the last of them waits up to 2 s for the other ranks, and leaves the memory to the
/// end of the process if they do not come. Ranks that share a process and a GPU must all be idle then: freeing device memory
/// waits for every kernel of the process, also one that waits for the rank that frees.
///
/// After a call from it has failed it is this rank's alone: as it was, or in part the result, and no longer registered. On the host it
/// is private memory then: writing it takes as much memory again, and is a fault where the process has used up its mappings
/// (`vm.max_map_count`) or its data (`RLIMIT_DATA`) since it was allocated. A fork of the process has the same memory as its parent,
/// which it must not write.
pub struct Buffer<T: Element, D: Device = Host> {
    registration: Registration<D>,
    number: u64,
    count: usize,
    elements: PhantomData<T>,
}

impl<T: Element, D: Device> Buffer<T, D> {
    /// Of memory that holds at least `count` elements.
    pub(crate) fn new(registration: Registration<D>, number: u64, count: usize) -> Self {
        Self { registration, number, count, elements: PhantomData }
    }

    /// Ends the registration and keeps the memory. Collective: every rank calls it, after the last call that uses the buffer on any
    /// rank.
    ///
    /// # Errors
    ///
    /// [`Error::Disagreement`] where ranks do not all do this with this buffer, [`Error::Unavailable`] while the last call's stream
    /// is captured, and the errors of the bootstrap. The buffer is dropped then.
    pub fn deregister(mut self) -> Result<SymmetricMemory<T, D>> {
        let endpoint = Arc::clone(self.registration.endpoint());
        let _step = symmetric::begin(&endpoint.closing, "deregister", self.number)?;
        let memory = endpoint.closing.all_succeeded(self.registration.end())?;
        Ok(SymmetricMemory::new(Arc::clone(&endpoint), memory, self.number, self.count))
    }

    /// The address of a rank's part, as this process has it mapped: for kernels, and for unsafe code that orders its accesses with
    /// the other ranks. `None` beyond the world.
    pub fn peer_address(&self, rank: usize) -> Option<u64> {
        Some(self.registration.address_of(rank)).filter(|&address| address != 0)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.registration.address()
    }

    /// The device that it is memory of.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> &D {
        &self.registration.endpoint.device
    }
}

impl<T: Element, D: Device> fmt::Debug for Buffer<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("dtype", &T::DTYPE).field("count", &self.count).finish_non_exhaustive()
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `count` elements (allocated so, zeroed, page-aligned) for the life of self, any
        // bits are a value of T, and peers only read it.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, self.count) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref; peers read it only while this rank is in a call from it, which borrows it. A call that succeeds
        // ends when all have read it; one that fails has made the mapping private before it returns, so that what peers still
        // read is not what is written here.
        unsafe { std::slice::from_raw_parts_mut(self.address() as *mut T, self.count) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::damaged::damaged;

    fn registry(rows: &[Option<(u64, u64)>]) -> Registry {
        let row = |row: &Option<(u64, u64)>| match *row {
            None => Row::Free,
            Some((base, bytes)) => Row::Used(Range { base, bytes }),
        };
        Registry { rows: rows.iter().map(row).collect(), ..Registry::default() }
    }

    #[test]
    fn a_view_is_found_with_its_offset_and_nothing_beyond_the_end_is() {
        let registry = registry(&[None, Some((1000, 100)), Some((1100, 50))]);
        let id = |row: u64| (row + 1) << FA_SOURCE_ID_SHIFT;
        assert_eq!(registry.source(1000, 100), id(1));
        assert_eq!(registry.source(1010, 90), id(1) + 10);
        assert_eq!(registry.source(1010, 91), 0, "crosses into the next buffer");
        assert_eq!(registry.source(1100, 50), id(2));
        assert_eq!(registry.source(999, 1), 0);
        assert_eq!(registry.source(u64::MAX, u64::MAX), 0);
    }

    #[test]
    fn the_next_row_is_one_that_all_ranks_have_free() {
        let mine = registry(&[None, Some((1, 1)), None]);
        let theirs = registry(&[Some((1, 1)), Some((2, 1)), None]);
        let free = [mine.free_rows(), theirs.free_rows()];
        assert_eq!(mine.next_row(&free), Ok(2));
        assert_eq!(theirs.next_row(&free), Ok(2));
        assert_eq!(mine.next_row(&[mine.free_rows(), vec![]]), Ok(3));
    }

    #[test]
    fn a_retired_row_is_neither_found_nor_free() {
        let mut registry = registry(&[Some((1000, 100)), Some((2000, 100))]);
        registry.set(0, Row::Retired);
        assert_eq!(registry.source(1000, 100), 0, "its address may be another's by now");
        assert_eq!(registry.free_rows(), []);
        registry.set(0, Row::Free);
        assert_eq!(registry.free_rows(), [0, 0]);
    }

    #[test]
    fn a_list_of_free_rows_that_cannot_be_is_refused() {
        let registry = registry(&[None]);
        for bytes in [vec![1, 0], vec![0], vec![0, 0, 0], vec![0, 0, 0, 0]] {
            let error = registry.next_row(&[vec![], bytes]).unwrap_err();
            assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{error}");
        }
    }

    proptest! {
        // Rows 1 to 3 are free here: whatever the other rank says, none is taken that is not.
        #[test]
        fn any_list_is_refused_or_of_free_rows(theirs in damaged(vec![vec![1, 0, 2, 0, 3, 0], vec![0, 0, 4, 0], vec![]])) {
            let mine = registry(&[Some((1, 1)), None, None, None, Some((2, 1))]);
            match mine.next_row(&[mine.free_rows(), theirs]) {
                Ok(row) => prop_assert!((1..=3).contains(&row) || row == 5, "row {}", row),
                Err(error) => prop_assert!(matches!(error, Error::Malformed { rank: 1, .. }), "{}", error),
            }
        }
    }
}
