//! Registered memory: calls from it pull without a copy.

use std::ffi::c_void;

use fast_allreduce::AnyBuffer;

use crate::handle::fast_allreduce_communicator;
use crate::pointers::give;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Memory that is registered with a communicator. It is ended by fast_allreduce_buffer_free.
pub struct fast_allreduce_buffer {
    _memory: AnyBuffer,
}

/// # Safety
///
/// `place` is valid for a write.
unsafe fn give_buffer(place: *mut *mut fast_allreduce_buffer, memory: AnyBuffer) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { give(place, Box::into_raw(Box::new(fast_allreduce_buffer { _memory: memory }))) }
}

/// Allocates `bytes` bytes of zeros on every rank, on its device, registered: calls from within pull without a copy.
/// Collective: every rank calls it with the same number. The memory lives until fast_allreduce_buffer_free.
///
/// # Safety
///
/// `communicator` is live; `address` and `buffer` are valid for writes.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_alloc(
    communicator: *const fast_allreduce_communicator,
    bytes: usize,
    address: *mut *mut c_void,
    buffer: *mut *mut fast_allreduce_buffer,
) -> fast_allreduce_status {
    guarded(|| {
        if address.is_null() || buffer.is_null() {
            return Err(argument("where to put the result is null"));
        }
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let memory = handle.any.alloc(bytes)?;
        // SAFETY: the caller's.
        unsafe {
            give(address, memory.address() as *mut c_void)?;
            give_buffer(buffer, memory)
        }
    })
}

/// Registers `bytes` bytes of a GPU's memory that the program allocated, by cuMemAlloc or as a caching allocator does: calls
/// from within pull without a copy. Collective: every rank calls it with the same number. Memory of the host cannot be
/// registered: allocate it by fast_allreduce_alloc. The memory must outlive fast_allreduce_buffer_free on every rank: meet in
/// fast_allreduce_barrier before it goes.
///
/// # Safety
///
/// `communicator` is live, `buffer` valid for a write, and there are so many bytes at `address`, which stay as long as it says.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_register(
    communicator: *const fast_allreduce_communicator,
    address: *mut c_void,
    bytes: usize,
    buffer: *mut *mut fast_allreduce_buffer,
) -> fast_allreduce_status {
    guarded(|| {
        if buffer.is_null() {
            return Err(argument("where to put the result is null"));
        }
        // SAFETY: the caller's.
        unsafe {
            let handle = fast_allreduce_communicator::of(communicator)?;
            give_buffer(buffer, handle.any.register(address as u64, bytes)?)
        }
    })
}

/// Ends a registration, and frees memory that fast_allreduce_alloc allocated; null is nothing. Not while a call uses it.
///
/// # Safety
///
/// `buffer` is null, or live and not used any more.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_buffer_free(buffer: *mut fast_allreduce_buffer) {
    guarded(|| {
        if !buffer.is_null() {
            // SAFETY: a box's pointer, which the caller gives back.
            drop(unsafe { Box::from_raw(buffer) });
        }
        Ok(())
    });
}
