//! Comparisons of calls that go on in the order of streams: what came of them, once it has been copied to the host.

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

/// Calls that streams have not come past: for more, the host waits.
const SLOTS: usize = 256;

/// In a slot until the copy is there: no word of a call, nor the largest number, which stands for none.
const AWAITED: i64 = i64::MIN;

/// Calls of which it is not known yet whether they were the same on all nodes.
pub(super) struct Comparisons {
    /// Slots of as many words as all nodes' calls have: on the device, where they begin at this address, and on the host.
    device: CUdeviceptr,
    _memory: CudaSlice<i64>,
    pinned: Pinned,
    words: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    /// The slot that was not used for the longest time.
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
        // Calls on any stream may use it.
        stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
        let pinned = Pinned::allocate(stream.context(), SLOTS * words * size_of::<i64>())?;
        Ok(Self { device, _memory: memory, pinned, words, state: Mutex::default() })
    }

    fn slot(&self, slot: usize) -> &[AtomicI64] {
        debug_assert!(slot < SLOTS);
        // SAFETY: so many words of each slot are in the allocation, which lives as long as `self` and is aligned to a page;
        // the host accesses them by atomics alone.
        unsafe {
            let first = self.pinned.host_pointer().cast::<AtomicI64>().add(slot * self.words);
            std::slice::from_raw_parts(first, self.words)
        }
    }

    /// Compares a call in the order of the stream. `minimum` puts the minimum over the nodes of so many i64 at an address on
    /// it, in place. One after the other.
    ///
    /// # Errors
    ///
    /// The driver's, and those of `minimum`; where all slots are taken, those of [`Comparisons::check`].
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
        let own = call.in_place_of(node, self.words / 2);
        // SAFETY: the slot has as many words, and nothing else uses it: no stream has a copy from it before it.
        unsafe { api::cuMemcpyHtoDAsync_v2(device, own.as_ptr().cast(), bytes, stream.cu_stream()) }
            .map_err(driver("cuMemcpyHtoDAsync"))?;
        minimum(device, self.words)?;
        // SAFETY: as many words on the device, and on the host, in a slot that nobody reads as long as the copy may write it,
        // but by atomics; `drop` waits for it.
        unsafe {
            let host = self.slot(slot).as_ptr().cast_mut().cast();
            api::cuMemcpyDtoHAsync_v2(host, device, bytes, stream.cu_stream())
        }
        .map_err(driver("cuMemcpyDtoHAsync"))?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.pending.push_back(Pending { slot, call, stream: Arc::clone(stream) });
        Ok(())
    }

    /// A slot that no stream uses, maybe after a wait, which is bounded as all on streams are.
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

    /// Compares what has come so far. Waits for nothing, and asks no driver, which might forbid it during a capture.
    pub(super) fn check(&self, node: usize) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.advance(&mut state, node)
    }

    fn advance(&self, state: &mut State, node: usize) -> Result<()> {
        while let Some(Pending { slot, call, .. }) = state.pending.front() {
            // Relaxed: each word is all that is read of what the copy wrote, and no word is AWAITED after it.
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
            // An error means that the context is gone, and the copy with it.
            let _ = pending.stream.synchronize();
        }
    }
}
