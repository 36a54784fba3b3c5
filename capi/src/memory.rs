//! Registered memory: calls from it pull without a copy.

use std::ffi::c_void;

use fast_allreduce::{Buffer, Error, Host};
#[cfg(feature = "cuda")]
use fast_allreduce::{Cuda, RegisteredMemory};

use crate::handle::{fast_allreduce_communicator, Any};
use crate::init::give;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// Memory that is registered with a communicator. It is ended by fast_allreduce_buffer_free.
pub struct fast_allreduce_buffer {
    _memory: Memory,
}

enum Memory {
    Host {
        _buffer: Buffer<u8, Host>,
    },
    #[cfg(feature = "cuda")]
    Cuda {
        _buffer: Buffer<u8, Cuda>,
    },
    #[cfg(feature = "cuda")]
    Existing {
        _registered: RegisteredMemory,
    },
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
        let (memory, start) = match &handle.any {
            Any::Host(communicator) => {
                let mut buffer = communicator.alloc::<u8>(bytes)?;
                let start = buffer.as_mut_ptr() as u64;
                (Memory::Host { _buffer: buffer }, start)
            }
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator) => {
                let buffer = communicator.alloc::<u8>(bytes)?;
                let start = buffer.peer_address(communicator.rank()).unwrap_or_default();
                (Memory::Cuda { _buffer: buffer }, start)
            }
        };
        // SAFETY: the caller's.
        unsafe {
            give(address, start as *mut c_void)?;
            give(buffer, Box::into_raw(Box::new(fast_allreduce_buffer { _memory: memory })))
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
#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
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
        match unsafe { &fast_allreduce_communicator::of(communicator)?.any } {
            Any::Host(_) => Err(Failure::Library(Error::Unavailable {
                what: "registering memory of the host that is there already".into(),
                reason: "peers cannot map it: allocate it by fast_allreduce_alloc, which registers it".into(),
            })),
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator) => {
                // SAFETY: the caller's.
                let registered = unsafe { communicator.register_raw(address as u64, bytes)? };
                let memory = Memory::Existing { _registered: registered };
                // SAFETY: the caller's.
                unsafe { give(buffer, Box::into_raw(Box::new(fast_allreduce_buffer { _memory: memory }))) }
            }
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
