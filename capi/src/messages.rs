//! Messages between pairs.

use std::ffi::c_void;

use fast_allreduce::{Direction, Transfer};

use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{fast_allreduce_status, guarded, Failure};

/// # Safety
///
/// As fast_allreduce_send, and for a receive `address` is valid for writes.
unsafe fn message(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    transfer: impl FnOnce() -> Result<Transfer, Failure>,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let (transfer, stream) = (transfer()?, stream as u64);
        match handle.gathered(transfer, stream)? {
            true => Ok(()),
            // SAFETY: the caller's.
            false => Ok(unsafe { handle.any.transfer(stream, &[transfer]) }?),
        }
    })
}

/// Sends `count` elements to a rank, which receives them with the same tag. Between fast_allreduce_group_begin and
/// fast_allreduce_group_end of the same thread it is carried out by the latter, on the stream of that: `stream` is the same, or null.
///
/// # Safety
///
/// `communicator` is live, and `data` valid for reads of that many elements until the call, or the group's end, has ended.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_send(
    communicator: *const fast_allreduce_communicator,
    data: *const c_void,
    count: usize,
    dtype: u32,
    to: usize,
    tag: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    let (direction, address) = (Direction::Send, data as u64);
    // SAFETY: the caller's.
    unsafe {
        message(communicator, stream, || {
            Ok(Transfer { direction, peer: to, address, count, dtype: codes::dtype(dtype)?, tag })
        })
    }
}

/// Receives `count` elements from a rank, as fast_allreduce_send.
///
/// # Safety
///
/// As fast_allreduce_send, for writes.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_recv(
    communicator: *const fast_allreduce_communicator,
    data: *mut c_void,
    count: usize,
    dtype: u32,
    from: usize,
    tag: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    let (direction, address) = (Direction::Recv, data as u64);
    // SAFETY: the caller's.
    unsafe {
        message(communicator, stream, || {
            Ok(Transfer { direction, peer: from, address, count, dtype: codes::dtype(dtype)?, tag })
        })
    }
}

/// Begins a group of this thread: messages that it sends and receives from here on are carried out together, side by side,
/// by fast_allreduce_group_end; at most 64. Collectives are carried out at once, also within a group.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_group_begin(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe { fast_allreduce_communicator::of(communicator)? }.begin_group())
}

/// Carries out the messages of this thread's group.
///
/// # Safety
///
/// `communicator` is live, and the messages' buffers are as fast_allreduce_send and fast_allreduce_recv say.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_group_end(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let stream = stream as u64;
        let transfers = handle.end_group(stream)?;
        // SAFETY: the caller's, of each message.
        Ok(unsafe { handle.any.transfer(stream, &transfers) }?)
    })
}
