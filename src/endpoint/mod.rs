//! What a rank needs to launch kernels: its device, its region, the registered buffers, and the connection that outlives them.

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

/// What a rank needs to launch kernels: kept by its communicator and by every registered buffer.
pub(crate) struct Endpoint<D: Device> {
    // What kernels use goes when they have ended, and never if that cannot be found out.
    pub device: ManuallyDrop<D>,
    pub region: ManuallyDrop<Region<D>>,
    state: Exclusive<State>,
    /// The memory of registrations, with its row.
    registered: Mutex<Vec<(usize, Weak<D::Shared>)>>,
    /// What was dropped while its kernels could not be waited for: memory, with its row where it was registered.
    retired: ManuallyDrop<Mutex<Retired<D>>>,
    /// Symmetric memories that ranks have agreed to allocate: equal on all.
    numbered: AtomicU64,
    // Last: what the peers have mapped goes after this rank's own mappings.
    pub connection: Arc<Connection<D>>,
}

/// What calls and registrations change.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub registry: Registry,
    pub calls: CallCache,
}

type Retired<D> = Vec<(Option<usize>, <D as sealed::Device>::Shared)>;

impl<D: Device> Endpoint<D> {
    pub fn new(device: D, region: Region<D>, connection: Arc<Connection<D>>) -> Self {
        let (device, region) = (ManuallyDrop::new(device), ManuallyDrop::new(region));
        let (state, registered, retired, numbered) = Default::default();
        Self { device, region, state, registered, retired, numbered, connection }
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
        let Connection { bootstrap, timeout, .. } = &*self.connection;
        let free_rows = self.lock().registry.free_rows();
        let free_rows = bootstrap.all_gather(&free_rows, *timeout)?;
        let row = self.lock().registry.next_row(&free_rows);
        let registration =
            row.and_then(|row| Registration::new(Arc::clone(self), memory, row, bootstrap.rank(), bytes));
        // No rank pulls from the memory before all have it in their tables; where one has not, it goes from all.
        self.connection.all_succeeded(registration)
    }

    /// Lets memory that is not registered go, when no kernel can be using it.
    pub fn retire(&self, memory: D::Shared) {
        // A fork launches nothing, and the lock may be one that another thread of its parent held.
        if self.connection.here().is_err() {
            return;
        }
        if self.is_entered_here() {
            // By the call that this thread is in, whose kernels may use the memory.
            return self.set_aside(None, memory);
        }
        // No call comes in between.
        let _state = self.lock();
        if self.device.wait_for_calls().is_err() {
            self.set_aside(None, memory);
        }
    }

    /// Keeps memory, with its row where it is registered, until no kernel can be using it.
    fn set_aside(&self, row: Option<usize>, memory: D::Shared) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push((row, memory));
    }

    /// After a launch that failed, and before its call returns: peers that go on with the call may still read the registered
    /// buffer that `source` names, which is the caller's again. They read no other: a call that succeeds ends when all have read.
    /// The lock is held, and nobody writes the buffer, which the call borrows.
    pub fn make_private(&self, source: u64) {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let is_source = |(row, _): &&(usize, Weak<_>)| {
            source_word(*row, 0) >> FA_SOURCE_ID_SHIFT == source >> FA_SOURCE_ID_SHIFT
        };
        if let Some(memory) = registered.iter().find(is_source).and_then(|(_, memory)| memory.upgrade()) {
            memory.make_private();
        }
    }

    /// Takes a row out of the table, if no kernel can be reading it. The lock is held.
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

    /// Held for the whole of a call: calls are ordered, and no buffer goes while a kernel reads the table. This thread is in no call.
    pub fn lock(&self) -> Held<'_, State> {
        self.state.lock()
    }

    /// [`Endpoint::lock`] of a call, whose program may end the wait.
    pub fn enter(&self) -> Result<Held<'_, State>> {
        self.state.enter()
    }

    /// Whether this thread holds the lock: it is in a call.
    #[inline]
    pub fn is_entered_here(&self) -> bool {
        self.state.is_mine()
    }
}

impl<D: Device> Drop for Endpoint<D> {
    fn drop(&mut self) {
        // Tried twice, as nobody tries again later.
        let ended = self.device.wait_for_calls().or_else(|_| self.device.wait_for_calls());
        if let Err(error) = ended {
            let is_here = self.connection.here().is_ok();
            let rank = self.connection.bootstrap.rank();
            if !is_here || !self.device.is_lost() {
                // Kernels may still run, from the module, in the regions and in what is retired.
                self.connection.keep_mappings();
                self.device.leave();
                if is_here {
                    tracing::warn!(rank, %error, "closed while calls may still run: what they use stays until the process ends");
                }
                return;
            }
            tracing::warn!(rank, %error, "closed on a device that has failed");
        }
        // SAFETY: each goes once, here, and nothing uses them any more. The kernels have ended, or the device runs none.
        unsafe {
            ManuallyDrop::drop(&mut self.device);
            ManuallyDrop::drop(&mut self.region);
            ManuallyDrop::drop(&mut self.retired);
        }
    }
}
