//! Registered memory, from which peers pull directly, without staging.

use std::ffi::c_void;

use fast_allreduce::AnyBuffer;

use crate::handle::fast_allreduce_communicator;
use crate::pointers::give;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Memory that is registered with a communicator. Freed by fast_allreduce_buffer_free.
pub struct fast_allreduce_buffer {
    _memory: AnyBuffer,
}

/// # Safety
///
/// `pointer` is valid for a write.
unsafe fn give_buffer(pointer: *mut *mut fast_allreduce_buffer, memory: AnyBuffer) -> Result<(), Failure> {
    // SAFETY: the caller guarantees it.
    unsafe { give(pointer, Box::into_raw(Box::new(fast_allreduce_buffer { _memory: memory }))) }
}

/// Gives memory and its address to the caller.
///
/// # Safety
///
/// The pointers are valid for writes.
pub unsafe fn give_allocated(
    address: *mut *mut c_void,
    buffer: *mut *mut fast_allreduce_buffer,
    memory: AnyBuffer,
) -> Result<(), Failure> {
    // SAFETY: the caller guarantees it.
    unsafe {
        give(address, memory.address() as *mut c_void)?;
        give_buffer(buffer, memory)
    }
}

/// Allocates `bytes` bytes of zeroed memory on every rank's device, and registers it: calls with inputs in it need no
/// copy to staging. Collective: every rank calls this with the same size. The memory is valid until
/// fast_allreduce_buffer_free.
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
            return Err(argument("the pointer for the result is null"));
        }
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let memory = handle.any.alloc(bytes)?;
        // SAFETY: the caller guarantees it.
        unsafe { give_allocated(address, buffer, memory) }
    })
}

/// Registers `bytes` bytes of GPU memory that the program allocated, by cuMemAlloc or a caching allocator: calls with
/// inputs in it need no copy to staging. Collective: every rank calls this with the same size. Host memory cannot be
/// registered: allocate it by fast_allreduce_alloc. The memory must stay allocated until all ranks have called
/// fast_allreduce_buffer_free: call fast_allreduce_barrier before freeing it.
///
/// # Safety
///
/// `communicator` is live, `buffer` is valid for a write, and `address` points to `bytes` bytes, which stay allocated
/// for the time described above.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_register(
    communicator: *const fast_allreduce_communicator,
    address: *mut c_void,
    bytes: usize,
    buffer: *mut *mut fast_allreduce_buffer,
) -> fast_allreduce_status {
    guarded(|| {
        if buffer.is_null() {
            return Err(argument("the pointer for the result is null"));
        }
        // SAFETY: the caller guarantees it.
        unsafe {
            let handle = fast_allreduce_communicator::of(communicator)?;
            give_buffer(buffer, handle.any.register(address as u64, bytes)?)
        }
    })
}

/// Ends a registration, and frees the memory if fast_allreduce_alloc allocated it; does nothing for null. No call may
/// be using it.
///
/// # Safety
///
/// `buffer` is null, or live and not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_buffer_free(buffer: *mut fast_allreduce_buffer) {
    guarded(|| {
        if !buffer.is_null() {
            // SAFETY: the pointer comes from a box, and the caller does not use it afterwards.
            drop(unsafe { Box::from_raw(buffer) });
        }
        Ok(())
    });
}
