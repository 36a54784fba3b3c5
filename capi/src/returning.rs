//! Communicators that leave their world and come back, and ranks that take the places of others.

use std::ffi::c_void;
use std::time::Duration;

use fast_allreduce::{AnyCommunicator, Progress};

use crate::handle::fast_allreduce_communicator;
use crate::init::{fast_allreduce_unique_id, give_communicator};
use crate::memory::{fast_allreduce_buffer, give_allocated};
use crate::pointers::{check_result, give, list};
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Takes a step that ends with the number of calls that all ranks have completed.
///
/// # Safety
///
/// `communicator` is live, and `completed` null or valid for a write.
unsafe fn entered(
    communicator: *const fast_allreduce_communicator,
    seconds: f64,
    completed: *mut u64,
    enter: impl FnOnce(&AnyCommunicator, Duration) -> fast_allreduce::Result<Progress>,
) -> Result<(), Failure> {
    // SAFETY: the caller guarantees it.
    let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
    let progress = enter(&handle.any, limit(seconds)?)?;
    if !completed.is_null() {
        // SAFETY: the caller guarantees it.
        unsafe { completed.write(progress.completed) };
    }
    Ok(())
}

/// Returns a limit; 0 is none, as in the settings.
fn limit(seconds: f64) -> Result<Duration, Failure> {
    if seconds == 0.0 {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| argument("the timeout is not a number of seconds"))
}

/// Leaves the world and gives back its shared memory, but keeps the communicator's place; buffers keep their addresses
/// and contents. Collective. `*bytes` becomes the number of bytes that this rank has given back. Until
/// fast_allreduce_resume, calls return FAST_ALLREDUCE_STATUS_UNAVAILABLE. On GPUs, first wait for replays of graphs and
/// for own kernels that use other ranks' memory: nothing is mapped there until the resume.
///
/// # Safety
///
/// `communicator` is live, and `bytes` null or valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_suspend(
    communicator: *const fast_allreduce_communicator,
    bytes: *mut usize,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let suspended = unsafe { fast_allreduce_communicator::of(communicator)? }.any.suspend()?;
        if !bytes.is_null() {
            // SAFETY: the caller guarantees it.
            unsafe { bytes.write(suspended.bytes) };
        }
        Ok(())
    })
}

/// Returns into the world after fast_allreduce_suspend. Collective. It waits for `timeout` seconds at most; 0 is no
/// limit. After an error the communicator is still suspended, and can try again. `*completed` becomes the number of
/// collective calls that all ranks have completed.
///
/// # Safety
///
/// `communicator` is live, and `completed` null or valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_resume(
    communicator: *const fast_allreduce_communicator,
    timeout: f64,
    completed: *mut u64,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe { entered(communicator, timeout, completed, |any, limit| any.resume(limit)) })
}

/// Returns the id by which new processes take the places of ranks that have gone or moved, or come in addition, with
/// fast_allreduce_init. It is the same on all ranks, and for the next fast_allreduce_join, fast_allreduce_resume or
/// fast_allreduce_grow alone.
///
/// # Safety
///
/// `communicator` is live, and `id` valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_join_id(
    communicator: *const fast_allreduce_communicator,
    id: *mut fast_allreduce_unique_id,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(id)?;
        // SAFETY: the caller guarantees it.
        let found = unsafe { fast_allreduce_communicator::at_any_time(communicator)? }.any.join_id()?;
        // SAFETY: the caller guarantees it.
        unsafe { give(id, fast_allreduce_unique_id { bytes: *found.as_bytes() }) }
    })
}

/// Creates a larger communicator, of `world_size` ranks: all of this one, which keep their numbers, and new processes,
/// which call fast_allreduce_init with fast_allreduce_join_id and the numbers after them. Collective among all. It
/// waits for `timeout` seconds at most; 0 is no limit. This communicator does not change, and still has to be freed. If
/// calls of other threads leave no gap in time, the status is FAST_ALLREDUCE_STATUS_UNAVAILABLE, and on the other ranks
/// FAST_ALLREDUCE_STATUS_DISAGREEMENT with that reason.
///
/// # Safety
///
/// `communicator` is live, and `larger` is valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_grow(
    communicator: *const fast_allreduce_communicator,
    world_size: usize,
    timeout: f64,
    larger: *mut *mut fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(larger)?;
        let limit = limit(timeout)?;
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        // SAFETY: the caller guarantees it.
        unsafe { give_communicator(larger, handle.any.grow(world_size, limit)?) }
    })
}

/// Replaces the ranks that have gone by new processes, which call fast_allreduce_init with fast_allreduce_join_id, the
/// rank and the number of ranks of before. The `count` ranks in `survivors`, in ascending order, keep their places;
/// this rank is one of them. Collective among all. The communicator has usually failed; it works again, with the same
/// buffers. It waits for `timeout` seconds at most; 0 is no limit. `*completed` becomes the number of collective calls
/// that all survivors have completed: repeat from the next one. On GPUs it is 0, as their calls are not counted. After
/// an error the communicator is as it was, or suspended. If calls of other threads leave no gap in time, the statuses
/// are those of fast_allreduce_grow.
///
/// # Safety
///
/// `communicator` is live, `survivors` valid for reads of `count` numbers, and `completed` null or valid for a write.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_join(
    communicator: *const fast_allreduce_communicator,
    survivors: *const usize,
    count: usize,
    timeout: f64,
    completed: *mut u64,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let survivors = list("survivors", survivors, count)?;
        entered(communicator, timeout, completed, |any, limit| any.join(survivors, limit))
    })
}

/// Takes a buffer that a new rank has found in the place of another, filled with zeros: the one that all ranks have
/// allocated as number `number`, from 0. Local. The result is as that of fast_allreduce_alloc; `*bytes` becomes its
/// length.
///
/// # Safety
///
/// `communicator` is live; `bytes`, `address` and `buffer` are valid for writes.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_inherit(
    communicator: *const fast_allreduce_communicator,
    number: u64,
    bytes: *mut usize,
    address: *mut *mut c_void,
    buffer: *mut *mut fast_allreduce_buffer,
) -> fast_allreduce_status {
    guarded(|| {
        check_result(bytes)?;
        check_result(address)?;
        check_result(buffer)?;
        // SAFETY: the caller guarantees it.
        let memory = unsafe { fast_allreduce_communicator::of(communicator)? }.any.inherit(number)?;
        // SAFETY: the caller guarantees it.
        unsafe {
            give(bytes, memory.bytes())?;
            give_allocated(address, buffer, memory)
        }
    })
}
