//! Point-to-point messages, and groups of them.

use std::ffi::c_void;

use fast_allreduce::{Direction, Transfer};

use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{fast_allreduce_status, guarded, Failure};

/// Adds a message to the open group of this thread, or sends or receives it at once.
///
/// # Safety
///
/// That of fast_allreduce_send; for a receive, `address` is valid for writes.
unsafe fn message(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    transfer: impl FnOnce() -> Result<Transfer, Failure>,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let (transfer, stream) = (transfer()?, stream as u64);
        match handle.add_to_group(transfer, stream)? {
            true => Ok(()),
            // SAFETY: the caller guarantees it.
            false => Ok(unsafe { handle.any.transfer(stream, &[transfer]) }?),
        }
    })
}

/// Sends `count` elements to a rank, which receives them with the same tag. Between fast_allreduce_group_begin and
/// fast_allreduce_group_end of the same thread, the message is sent by fast_allreduce_group_end, on its stream;
/// `stream` is then the same, or null.
///
/// # Safety
///
/// `communicator` is live, and `data` is valid for reads of `count` elements until the call, or the end of the group,
/// has completed.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        message(communicator, stream, || {
            Ok(Transfer { direction, peer: to, address, count, dtype: codes::dtype(dtype)?, tag })
        })
    }
}

/// Receives `count` elements that a rank sends by fast_allreduce_send with the same tag. The rules for groups are the
/// same.
///
/// # Safety
///
/// That of fast_allreduce_send, with `data` valid for writes.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        message(communicator, stream, || {
            Ok(Transfer { direction, peer: from, address, count, dtype: codes::dtype(dtype)?, tag })
        })
    }
}

/// Begins a group of this thread: its messages from here on, at most 64, are sent and received concurrently by
/// fast_allreduce_group_end. Collectives in a group are run at once.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_group_begin(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe { fast_allreduce_communicator::of(communicator)? }.begin_group())
}

/// Sends and receives the messages of this thread's group, and closes it.
///
/// # Safety
///
/// `communicator` is live, and the buffers of the messages are as fast_allreduce_send and fast_allreduce_recv require.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_group_end(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let stream = stream as u64;
        let transfers = handle.end_group(stream)?;
        // SAFETY: the caller guarantees it for each message.
        Ok(unsafe { handle.any.transfer(stream, &transfers) }?)
    })
}
