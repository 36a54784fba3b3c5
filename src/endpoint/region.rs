//! A rank's mapped region, with access to its table and its status.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::{FaCall, FaFailure, FaRegionHead, FaStatus, FA_MAX_BLOCKS, MAX_RANKS};
use crate::device::sealed::{Probe, Shared as _, Status as _};
use crate::device::Device;
use crate::error::Result;
use crate::liveness::Waits;
use crate::region::{Layout, TableRow, TABLE_ROWS};

/// This rank's region and its mappings of the peers'.
pub(crate) struct Region<D: Device> {
    pub layout: Layout,
    // Dropped before the memory, into which it may point.
    status: D::Status,
    memory: D::Shared,
    /// Multicast windows for in-switch reduction (NVLS).
    pub windows: Option<D::Windows>,
    rank: usize,
    first_epoch: u32,
    gone: Mutex<Gone>,
}

/// Where ranks are marked that have gone.
enum Gone {
    /// Here, a bit for each: the status may still be that of the region of before.
    Here(u32),
    InStatus,
    /// Nowhere: the status may be another region's.
    Nowhere,
}

impl<D: Device> Region<D> {
    /// Creates a region in unused memory that all ranks have mapped. `epoch` is the number of the launch before the
    /// first.
    pub fn new(
        device: &D,
        layout: Layout,
        epoch: u32,
        memory: D::Shared,
        windows: Option<D::Windows>,
        rank: usize,
    ) -> Result<Self> {
        let epochs = epoch.to_ne_bytes().repeat(FA_MAX_BLOCKS as usize);
        let address = memory.address(rank) + offset_of!(FaRegionHead, epoch) as u64;
        // SAFETY: the epochs are within the head of the region, and no kernel has been launched.
        unsafe { device.write(address, &epochs) }?;
        let (status, gone) = (device.status(&memory)?, Mutex::new(Gone::Here(0)));
        Ok(Self { layout, status, memory, windows, rank, first_epoch: epoch, gone })
    }

    /// Begins the use of the region. If the device keeps addresses, it gets those of the region of before, whose use
    /// has ended.
    pub fn begin(&self) -> Result<()> {
        self.memory.settle()?;
        let mut gone = self.gone();
        if let Gone::Here(marks) = *gone {
            // Relaxed: the lock of the endpoint, under which calls launch, publishes them.
            (0..size_of::<FaStatus>()).step_by(4).for_each(|offset| {
                self.status_word(offset).store(0, Ordering::Relaxed);
            });
            self.status_word(offset_of!(FaStatus, gone)).fetch_or(marks, Ordering::Release);
            *gone = Gone::InStatus;
        }
        Ok(())
    }

    /// Ends the use of the region: its memory and status may be used by another one.
    pub fn end(&self) {
        *self.gone() = Gone::Nowhere;
    }

    /// Ends the use without an agreement of the ranks: unmaps the peers' parts. This rank's own part stays, as a peer
    /// in this process may have entered the world and use the same mapping.
    pub fn abandon(&self) -> Result<()> {
        self.end();
        self.memory.unmap_peers()
    }

    fn gone(&self) -> MutexGuard<'_, Gone> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a function that reports whether all launches have ended; see
    /// [`Device::ended_probe`](crate::device::sealed::Device::ended_probe).
    pub fn ended_probe(&self, device: &D) -> Probe {
        device.ended_probe(&self.memory, self.rank, offset_of!(FaRegionHead, epoch), self.first_epoch)
    }

    pub fn address(&self, rank: usize) -> u64 {
        self.memory.address(rank)
    }

    pub fn memory(&self) -> &D::Shared {
        &self.memory
    }

    pub fn status_address(&self) -> u64 {
        self.status.device_address()
    }

    /// Writes a row of the table of registered buffers. No kernel may be running.
    pub fn write_row(&self, device: &D, row: usize, bases: &TableRow) -> Result<()> {
        debug_assert!(row < TABLE_ROWS);
        let offset = self.layout.table_offset + row * size_of::<TableRow>();
        let bytes = bases.map(u64::to_ne_bytes).concat();
        // SAFETY: the row is within the table of this rank's region, and the caller guarantees that no kernel runs.
        unsafe { device.write(self.address(self.rank) + offset as u64, &bytes) }
    }

    /// Returns the address of the table.
    pub fn table_address(&self) -> u64 {
        self.address(self.rank) + self.layout.table_offset as u64
    }

    /// Returns the failure that this rank's kernels have recorded, or `FA_OK`.
    pub fn failure(&self) -> FaFailure {
        self.status_word(offset_of!(FaStatus, failure)).load(Ordering::Acquire)
    }

    /// Returns the ranks that were missing when a kernel failed, and the epoch.
    pub fn missing(&self) -> (Vec<usize>, u32) {
        let missing = self.status_word(offset_of!(FaStatus, missing)).load(Ordering::Acquire);
        let epoch = self.status_word(offset_of!(FaStatus, epoch)).load(Ordering::Acquire);
        ((0..MAX_RANKS).filter(|rank| missing >> rank & 1 == 1).collect(), epoch)
    }

    /// Returns the ranks whose call differs from this rank's, with their calls, if a kernel has found and recorded
    /// them.
    pub fn others(&self) -> Vec<(usize, FaCall)> {
        let word = |rank: usize, offset: usize| {
            let offset = offset_of!(FaStatus, others) + rank * size_of::<FaCall>() + offset;
            self.status_long(offset).load(Ordering::Acquire)
        };
        let call = |rank| FaCall {
            what: word(rank, offset_of!(FaCall, what)),
            count: word(rank, offset_of!(FaCall, count)),
            digest: word(rank, offset_of!(FaCall, digest)),
        };
        (0..MAX_RANKS).map(|rank| (rank, call(rank))).filter(|(_, call)| call.what != 0).collect()
    }

    /// Returns the waits for each rank so far.
    pub fn waits(&self) -> Waits {
        let count = |rank| self.status_word(offset_of!(FaStatus, waits) + rank * size_of::<u32>());
        let ns = |rank| self.status_long(offset_of!(FaStatus, waited_ns) + rank * size_of::<u64>());
        Waits {
            waiting: self.status_word(offset_of!(FaStatus, waiting)).load(Ordering::Relaxed),
            counts: std::array::from_fn(|rank| count(rank).load(Ordering::Relaxed).into()),
            ns: std::array::from_fn(|rank| ns(rank).load(Ordering::Relaxed)),
        }
    }

    /// Returns the waits so far, after a call: none of them goes on.
    pub fn take_waits(&self) -> Waits {
        self.status_word(offset_of!(FaStatus, waiting)).store(0, Ordering::Relaxed);
        self.waits()
    }

    /// Returns the number of waits so far that outlasted the first polls; 0 on GPUs.
    pub fn slow(&self) -> u32 {
        self.status_word(offset_of!(FaStatus, slow)).load(Ordering::Relaxed)
    }

    /// Returns the number of messages that this rank's kernels have read directly from other processes.
    pub fn read_directly(&self) -> u32 {
        self.status_word(offset_of!(FaStatus, read_directly)).load(Ordering::Relaxed)
    }

    /// Marks a rank as gone for this rank's kernels. Release: after everything that the rank has sent.
    pub fn set_gone(&self, rank: usize) {
        match &mut *self.gone() {
            Gone::Here(marks) => *marks |= 1 << rank,
            Gone::InStatus => {
                self.status_word(offset_of!(FaStatus, gone)).fetch_or(1 << rank, Ordering::Release);
            }
            Gone::Nowhere => {}
        }
    }

    /// Makes waiting kernels of this rank give up.
    pub fn abort(&self) {
        // Held, so that the words do not become those of another region meanwhile.
        let gone = self.gone();
        if !matches!(*gone, Gone::Nowhere) {
            self.status_word(offset_of!(FaStatus, abort)).store(1, Ordering::Release);
        }
    }

    /// Returns the 64-bit word at a byte offset of the status.
    fn status_long(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset % 8 == 0 && offset < size_of::<FaStatus>());
        // SAFETY: a word of the status, which lives as long as self and is aligned for 64-bit words; kernels and this
        // process access its words only atomically.
        unsafe { AtomicU64::from_ptr(self.status.host_pointer().byte_add(offset).cast()) }
    }

    /// Returns the 32-bit word at a byte offset of the status.
    fn status_word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset % 4 == 0 && offset < size_of::<FaStatus>());
        // SAFETY: a word of the status, which lives as long as self; kernels and this process access its words only
        // atomically.
        unsafe { AtomicU32::from_ptr(self.status.host_pointer().byte_add(offset).cast()) }
    }
}
