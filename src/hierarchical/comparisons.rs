//! Comparisons of calls that go on in the order of streams: what came of them, once it has been copied to the host.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{sys, CudaContext, CudaSlice, CudaStream, DevicePtr};

use super::Call;
use crate::device::cuda::driver::{driver, Pinned};
use crate::error::Result;

/// Calls that streams have not come past: for more, the host waits.
const SLOTS: usize = 256;

/// In a slot until the copy is there: no word of a call, nor the largest number, which stands for none.
const AWAITED: i64 = i64::MIN;

/// Calls of which it is not known yet whether they were the same on all nodes.
pub(super) struct Comparisons {
    /// Slots of as many words as all nodes' calls have.
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
    pub(super) fn new(context: &Arc<CudaContext>, nodes: usize) -> Result<Self> {
        let words = 2 * nodes;
        let pinned = Pinned::allocate(context, SLOTS * words * size_of::<i64>())?;
        Ok(Self { pinned, words, state: Mutex::default() })
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

    /// Copies what all nodes gave of [`Call::in_place_of`] to the host, in the order of the stream.
    ///
    /// # Errors
    ///
    /// The driver's; where all slots are taken, those of [`Comparisons::check`].
    pub(super) fn read(
        &self,
        stream: &Arc<CudaStream>,
        calls: &CudaSlice<i64>,
        call: Call,
        node: usize,
    ) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.pending.len() >= SLOTS {
            // Waits on streams are bounded.
            state.pending[0].stream.synchronize().map_err(driver("cuStreamSynchronize"))?;
            self.advance(&mut state, node)?;
        }
        let slot = state.next;
        for word in self.slot(slot) {
            word.store(AWAITED, Ordering::Relaxed);
        }
        let (address, _used) = calls.device_ptr(stream);
        let (host, bytes) = (self.slot(slot).as_ptr().cast_mut().cast(), self.words * size_of::<i64>());
        // SAFETY: as many words on the device; in the slot too, which nothing else is written to before the stream has come
        // past the copy, and which `drop` waits for.
        unsafe { sys::cuMemcpyDtoHAsync_v2(host, address, bytes, stream.cu_stream()) }
            .result()
            .map_err(driver("cuMemcpyDtoHAsync"))?;
        state.next = (slot + 1) % SLOTS;
        state.pending.push_back(Pending { slot, call, stream: Arc::clone(stream) });
        Ok(())
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
