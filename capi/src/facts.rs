//! Queries about a rank and its communicator.

use std::ffi::c_char;

use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};
use crate::FAST_ALLREDUCE_MAX_RANKS;

/// Returns this rank; 0 for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_rank(communicator: *const fast_allreduce_communicator) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { communicator.as_ref() }.map_or(0, |handle| handle.any.rank())
}

/// Returns the number of ranks; 0 for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_nranks(communicator: *const fast_allreduce_communicator) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { communicator.as_ref() }.map_or(0, |handle| handle.any.world_size())
}

/// Returns a description of where the plans come from: a tuning file or a built-in table, and why. The string is valid
/// until the communicator is freed; it is "" for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_plan_source(
    communicator: *const fast_allreduce_communicator,
) -> *const c_char {
    // SAFETY: the caller guarantees it.
    unsafe { communicator.as_ref() }.map_or(c"".as_ptr(), |handle| handle.plan_source.as_ptr())
}

/// Returns a description of what the ranks' threads are bound to, such as "core (0, 1)". The string is valid until the
/// communicator is freed; it is "" for a null communicator.
///
/// # Safety
///
/// `communicator` is null or live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_binding(
    communicator: *const fast_allreduce_communicator,
) -> *const c_char {
    // SAFETY: the caller guarantees it.
    unsafe { communicator.as_ref() }.map_or(c"".as_ptr(), |handle| handle.binding.as_ptr())
}

/// Returns whether this communicator can use in-switch reduction (NVLS). If not, the status is
/// FAST_ALLREDUCE_STATUS_UNAVAILABLE, and fast_allreduce_last_error() has the reason: the settings `order` and
/// `algorithm` do not ask for it, the GPUs, the driver or the links do not support it, ranks share a GPU, or the ranks
/// are on the host. The communicator stays usable.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_nvls(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        Ok(handle.any.nvls()?)
    })
}

/// Counters of a rank.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_counters {
    /// Number of collective calls that have begun.
    pub calls: u64,
    /// Number of bytes of this rank's messages.
    pub bytes: u64,
    /// Number of waits for each rank that lasted longer than the first polls.
    pub waits: [u64; FAST_ALLREDUCE_MAX_RANKS],
    /// Number of waits for each rank that ended in a timeout.
    pub timeouts: [u64; FAST_ALLREDUCE_MAX_RANKS],
}

/// Reads the counters of this rank.
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
            return Err(argument("the pointer for the result is null"));
        }
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        let read = handle.any.counters();
        let by_rank = |list: &[u64]| std::array::from_fn(|rank| list.get(rank).copied().unwrap_or(0));
        let (waits, timeouts) = (by_rank(&read.waits), by_rank(&read.timeouts));
        // SAFETY: the caller guarantees it.
        unsafe {
            counters.write(fast_allreduce_counters { calls: read.calls, bytes: read.bytes, waits, timeouts })
        };
        Ok(())
    })
}

/// Writes the flight record of all ranks of this machine as JSON, with a final 0: what each rank did last, also ranks
/// that hang or have ended. `fast-allreduce inspect --json` prints a list of such objects.
///
/// `*needed` becomes its size with the 0. If that is more than `capacity`, `json` gets the beginning, with a final 0,
/// and the status is FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT: call again with more, the record may have grown. `json`
/// may be null if `capacity` is 0. It does not wait, and works while another thread is in a call, but not in a signal
/// handler.
///
/// # Safety
///
/// `communicator` is live, `json` valid for writes of `capacity` bytes, and `needed` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_flight_record(
    communicator: *const fast_allreduce_communicator,
    json: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let handle = fast_allreduce_communicator::at_any_time(communicator)?;
        write_text(&handle.any.flight_record().to_json(), json, capacity, needed)
    })
}

/// Writes the metrics of this rank in Prometheus' text format, with a final 0. Arguments and results are those of
/// fast_allreduce_flight_record().
///
/// # Safety
///
/// As fast_allreduce_flight_record().
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_metrics(
    communicator: *const fast_allreduce_communicator,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let handle = fast_allreduce_communicator::at_any_time(communicator)?;
        write_text(&handle.any.metrics(), text, capacity, needed)
    })
}

/// Writes as much of a text as there is room for, and a final 0.
///
/// # Safety
///
/// `to` is valid for writes of `capacity` bytes, and `needed` for a write, unless they are null.
unsafe fn write_text(
    text: &str,
    to: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Result<(), Failure> {
    if needed.is_null() || (to.is_null() && capacity > 0) {
        return Err(argument("the pointer for the result is null"));
    }
    // SAFETY: the caller guarantees it, and it is not null.
    unsafe { needed.write(text.len() + 1) };
    if let Some(room) = capacity.checked_sub(1) {
        let bytes = room.min(text.len());
        // SAFETY: the text has that many bytes, and with the 0 they fit into `capacity`.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), bytes);
            to.add(bytes).write(0);
        }
    }
    match text.len() < capacity {
        true => Ok(()),
        false => Err(argument("the result does not fit: see `needed`")),
    }
}
