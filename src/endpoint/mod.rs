//! The endpoint: what a rank needs to launch kernels. It has the device, the region, the registered buffers, and the
//! connection to the other ranks, which outlives them.

mod connection;
mod exported;
mod region;
mod registration;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

pub(crate) use self::connection::Connection;
pub(crate) use self::region::Region;
pub(crate) use self::registration::Registration;
use crate::abi::FA_SOURCE_ID_SHIFT;
use crate::call::CallCache;
use crate::device::sealed::{self, Shared as _};
use crate::device::Device;
use crate::error::Result;
use crate::exclusive::{Exclusive, Held};
use crate::region::source_word;
use crate::registry::{Registry, Row};

/// What a rank needs to launch kernels. Its communicator and every registered buffer hold it.
pub(crate) struct Endpoint<D: Device> {
    // What kernels use is dropped when they have ended, and is leaked if that cannot be determined.
    pub device: ManuallyDrop<D>,
    pub region: ManuallyDrop<Region<D>>,
    state: Exclusive<State>,
    /// Registered memory, with its row in the table.
    registered: Mutex<Vec<(usize, Weak<D::Shared>)>>,
    /// Memory that was dropped while kernels could not be waited for, with its row if it was registered.
    retired: ManuallyDrop<Mutex<Retired<D>>>,
    /// Number of symmetric allocations so far, equal on all ranks.
    allocations: AtomicU64,
    // Dropped last: exported memory is freed after this rank's own mappings are closed.
    pub connection: Arc<Connection<D>>,
}

/// State that calls and registrations change.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub registry: Registry,
    pub calls: CallCache,
}

type Retired<D> = Vec<(Option<usize>, <D as sealed::Device>::Shared)>;

impl<D: Device> Endpoint<D> {
    pub fn new(device: D, region: Region<D>, connection: Arc<Connection<D>>) -> Self {
        let (device, region) = (ManuallyDrop::new(device), ManuallyDrop::new(region));
        let (state, registered, retired, allocations) = Default::default();
        Self { device, region, state, registered, retired, allocations, connection }
    }

    /// Returns the number of the next symmetric allocation. Called in a step, which orders it with
    /// [`Self::take_number`].
    pub fn next_number(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Takes the next number, on all ranks. Called in a step.
    pub fn take_number(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    /// Registers memory that all ranks have mapped, in the tables of all ranks. Collective, in a step.
    pub fn register(self: &Arc<Self>, memory: D::Shared, bytes: usize) -> Result<Registration<D>> {
        let Connection { bootstrap, timeout, .. } = &*self.connection;
        let free_rows = self.lock().registry.free_rows();
        let free_rows = bootstrap.all_gather(&free_rows, *timeout)?;
        let row = self.lock().registry.next_row(&free_rows);
        let registration =
            row.and_then(|row| Registration::new(Arc::clone(self), memory, row, bootstrap.rank(), bytes));
        // No rank pulls from the memory before all ranks have it in their tables. If one rank fails, all undo it.
        self.connection.all_succeeded(registration)
    }

    /// Drops unregistered memory, at once or when no kernel can be using it any more.
    pub fn retire(&self, memory: D::Shared) {
        // A fork launches no kernels, and another thread of its parent may have held the lock.
        if self.connection.check_fork().is_err() {
            return;
        }
        if self.is_in_call() {
            // This thread is in a call, whose kernels may use the memory.
            return self.set_aside(None, memory);
        }
        // The lock keeps other calls out.
        let _state = self.lock();
        if self.device.wait_for_calls().is_err() {
            self.set_aside(None, memory);
        }
    }

    /// Keeps memory, and its row if it is registered, until no kernel can be using it.
    fn set_aside(&self, row: Option<usize>, memory: D::Shared) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push((row, memory));
    }

    /// Makes a registered buffer private to this rank, after a failed launch and before its call returns.
    ///
    /// Peers that go on with the call may still read the registered buffer that `source` names, but the caller may
    /// write to it again. They read no other buffer: a successful call ends after all peers have read. The caller holds
    /// the lock, and the call borrows the buffer, so that nobody writes to it meanwhile.
    pub fn make_private(&self, source: u64) {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_source = |(row, _): &&(usize, Weak<_>)| {
            source_word(*row, 0) >> FA_SOURCE_ID_SHIFT == source >> FA_SOURCE_ID_SHIFT
        };
        if let Some(memory) = registered.iter().find(is_source).and_then(|(_, memory)| memory.upgrade()) {
            memory.make_private();
        }
    }

    /// Clears a row of the table, if no kernel can be reading it. The caller holds the lock.
    fn clear_row(&self, registry: &mut Registry, row: usize) -> Result<()> {
        self.region.write_row(&self.device, row, &Default::default())?;
        registry.set(row, Row::Free);
        Ok(())
    }

    /// Notes the memory of a row, and forgets dropped memory.
    fn track(&self, row: usize, memory: &Arc<D::Shared>) {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.retain(|(other, memory)| *other != row && memory.strong_count() > 0);
        registered.push((row, Arc::downgrade(memory)));
    }

    /// Retries to clear retired rows, and returns the memory that may be dropped.
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

    /// Locks the state. A call holds the lock until it ends: calls are ordered, and no buffer is dropped while a kernel
    /// reads the table. The calling thread must not be in a call.
    pub fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }

    /// Locks the state for a call. The program may end the wait.
    pub fn enter(&self) -> Result<Held<'_, State>> {
        self.state.enter()
    }

    /// Returns whether this thread is in a call and holds the lock.
    #[inline]
    pub fn is_in_call(&self) -> bool {
        self.state.is_mine()
    }
}

impl<D: Device> Drop for Endpoint<D> {
    fn drop(&mut self) {
        // Two attempts, since this is the last opportunity.
        let ended = self.device.wait_for_calls().or_else(|_| self.device.wait_for_calls());
        if let Err(error) = ended {
            let in_owner = self.connection.check_fork().is_ok();
            let rank = self.connection.bootstrap.rank();
            if !in_owner || !self.device.is_lost() {
                // Kernels may still run, and use their module, the regions and retired memory.
                self.connection.keep_mappings();
                self.device.leave();
                if in_owner {
                    tracing::warn!(
                        rank, %error,
                        "closed while calls may still run: their memory stays allocated until the process ends"
                    );
                }
                return;
            }
            tracing::warn!(rank, %error, "closed on a device that has failed");
        }
        // SAFETY: each is dropped once, here, and not used afterwards. The kernels have ended, or the device has failed
        // and runs none.
        unsafe {
            ManuallyDrop::drop(&mut self.device);
            ManuallyDrop::drop(&mut self.region);
            ManuallyDrop::drop(&mut self.retired);
        }
    }
}
