//! Comparisons of calls between nodes in stream order. The results are evaluated after they have been copied to the
//! host.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::Call;
use crate::device::cuda::api;
use crate::device::cuda::driver::driver;
use crate::device::cuda::memory::Pinned;
use crate::error::Result;

/// Maximum number of pending comparisons; beyond it, the host waits.
const SLOTS: usize = 256;

/// Value of a slot's words until the result is copied. It differs from all words of a call, and from `i64::MAX`, which
/// stands for no call.
const AWAITED: i64 = i64::MIN;

/// Pending comparisons of calls.
pub(super) struct Comparisons {
    /// Address of the slots on the device. A slot has the words of all nodes' calls; `pinned` has the same slots on the
    /// host.
    device: CUdeviceptr,
    _memory: CudaSlice<i64>,
    pinned: Pinned,
    words: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    /// The least recently used slot.
    next: usize,
}

struct Pending {
    slot: usize,
    call: Call,
    stream: Arc<CudaStream>,
}

impl Comparisons {
    pub(super) fn new(stream: &Arc<CudaStream>, nodes: usize) -> Result<Self> {
        let words = 2 * nodes;
        let memory = stream.alloc_zeros(SLOTS * words).map_err(driver("cuMemAllocAsync"))?;
        let device = memory.device_ptr(stream).0;
        // Calls on any stream may use the memory.
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let pinned = Pinned::allocate(stream.context(), SLOTS * words * size_of::<i64>())?;
        Ok(Self { device, _memory: memory, pinned, words, state: Mutex::default() })
    }

    fn slot(&self, slot: usize) -> &[AtomicI64] {
        debug_assert!(slot < SLOTS);
        // SAFETY: the allocation has this number of words for each slot, lives as long as `self`, and is page-aligned;
        // the host accesses it only by atomics.
        unsafe {
            let first = self.pinned.host_pointer().cast::<AtomicI64>().add(slot * self.words);
            std::slice::from_raw_parts(first, self.words)
        }
    }

    /// Enqueues the comparison of a call on a stream. `minimum(address, count)` enqueues the minimum over the nodes of
    /// `count` i64 at `address`, in place. Must not be called concurrently.
    ///
    /// # Errors
    ///
    /// Those of the driver and of `minimum`; if all slots are in use, those of [`Comparisons::check`].
    pub(super) fn start(
        &self,
        stream: &Arc<CudaStream>,
        call: Call,
        node: usize,
        minimum: impl FnOnce(CUdeviceptr, usize) -> Result<()>,
    ) -> Result<()> {
        let slot = self.take_slot(node)?;
        for word in self.slot(slot) {
            word.store(AWAITED, Ordering::Relaxed);
        }
        let bytes = self.words * size_of::<i64>();
        let device = self.device + (slot * bytes) as u64;
        let own = call.to_minima(node, self.words / 2);
        // SAFETY: the slot has this size, and nothing else uses it: earlier copies from it have been completed.
        unsafe { api::cuMemcpyHtoDAsync_v2(device, own.as_ptr().cast(), bytes, stream.cu_stream()) }
            .map_err(driver("cuMemcpyHtoDAsync"))?;
        minimum(device, self.words)?;
        // SAFETY: the slot has this size on the device and on the host. While the copy may write it, the host accesses
        // it only by atomics; `drop` waits for the copy.
        unsafe {
            let host = self.slot(slot).as_ptr().cast_mut().cast();
            api::cuMemcpyDtoHAsync_v2(host, device, bytes, stream.cu_stream())
        }
        .map_err(driver("cuMemcpyDtoHAsync"))?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.pending.push_back(Pending { slot, call, stream: Arc::clone(stream) });
        Ok(())
    }

    /// Returns a slot that no stream uses. This may wait for a stream, whose waits all have a time limit.
    fn take_slot(&self, node: usize) -> Result<usize> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.pending.len() + 1 >= SLOTS {
            if let Some(Pending { stream, .. }) = state.pending.front() {
                stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
            }
            self.advance(&mut state, node)?;
        }
        let slot = state.next;
        state.next = (slot + 1) % SLOTS;
        Ok(slot)
    }

    /// Evaluates the results that have arrived. It neither waits nor calls the driver, which may be forbidden during a
    /// capture.
    pub(super) fn check(&self, node: usize) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.advance(&mut state, node)
    }

    fn advance(&self, state: &mut State, node: usize) -> Result<()> {
        while let Some(Pending { slot, call, .. }) = state.pending.front() {
            // Relaxed: only these words are read, each is written once by the copy, and none is AWAITED after that.
            let calls: Vec<_> = self.slot(*slot).iter().map(|word| word.load(Ordering::Relaxed)).collect();
            if calls.contains(&AWAITED) {
                break;
            }
            let call = *call;
            state.pending.pop_front();
            call.compare_all(node, &calls)?;
        }
        Ok(())
    }
}

impl Drop for Comparisons {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for pending in &state.pending {
            // An error means that the context no longer exists, and that the copy has ended.
            let _ = pending.stream.synchronize();
        }
    }
}
