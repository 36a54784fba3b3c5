//! What a rank tells of itself.

use std::ffi::c_char;

use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded};
use crate::FAST_ALLREDUCE_MAX_RANKS;

/// This rank; 0 for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_rank(communicator: *const fast_allreduce_communicator) -> usize {
    // SAFETY: the caller's.
    unsafe { communicator.as_ref() }.map_or(0, |handle| handle.any.rank())
}

/// Number of ranks; 0 for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_nranks(communicator: *const fast_allreduce_communicator) -> usize {
    // SAFETY: the caller's.
    unsafe { communicator.as_ref() }.map_or(0, |handle| handle.any.world_size())
}

/// Where its plans come from, in words: a tuning file, or a built-in table, and why. It is valid until the communicator is
/// freed; "" for a null one.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_plan_source(
    communicator: *const fast_allreduce_communicator,
) -> *const c_char {
    // SAFETY: the caller's.
    unsafe { communicator.as_ref() }.map_or(c"".as_ptr(), |handle| handle.plan_source.as_ptr())
}

/// What the ranks' threads are bound to, in words, such as "core (0, 1)". It is valid until the communicator is freed; "" for a
/// null one.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_binding(
    communicator: *const fast_allreduce_communicator,
) -> *const c_char {
    // SAFETY: the caller's.
    unsafe { communicator.as_ref() }.map_or(c"".as_ptr(), |handle| handle.binding.as_ptr())
}

/// Whether the switch between the GPUs can add up for this communicator (NVLS). FAST_ALLREDUCE_STATUS_UNAVAILABLE where it does
/// not, and fast_allreduce_last_error() says why: nothing asked for it (the order, the algorithm), or GPUs, driver or links have no
/// such thing, or ranks share a GPU, or there are none. The communicator goes on.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_nvls(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        Ok(handle.any.nvls()?)
    })
}

/// What a rank has done so far.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_counters {
    /// Collective calls begun.
    pub calls: u64,
    /// Bytes of this rank's messages.
    pub bytes: u64,
    /// Waits for each rank that outlasted the first polls.
    pub waits: [u64; FAST_ALLREDUCE_MAX_RANKS],
    /// Waits for each rank that ended in a timeout.
    pub timeouts: [u64; FAST_ALLREDUCE_MAX_RANKS],
}

/// Tells what this rank has done so far.
///
/// # Safety
///
/// `communicator` is live, and `counters` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_get_counters(
    communicator: *const fast_allreduce_communicator,
    counters: *mut fast_allreduce_counters,
) -> fast_allreduce_status {
    guarded(|| {
        if counters.is_null() {
            return Err(argument("where to put the result is null"));
        }
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        let told = handle.any.counters();
        let by_rank = |list: &[u64]| std::array::from_fn(|rank| list.get(rank).copied().unwrap_or(0));
        let (waits, timeouts) = (by_rank(&told.waits), by_rank(&told.timeouts));
        // SAFETY: the caller's.
        unsafe {
            counters.write(fast_allreduce_counters { calls: told.calls, bytes: told.bytes, waits, timeouts })
        };
        Ok(())
    })
}
