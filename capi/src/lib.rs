//! C and C++ interface of fast-allreduce: the functions of `include/fast_allreduce.h`, which cbindgen generates from
//! this crate.
//!
//! Doc comments of exported items are for readers of the header. No panic crosses the interface. Codes from the caller
//! are checked before they are converted to an enum.

#![allow(non_camel_case_types)]

mod bootstrap;
mod calls;
#[rustfmt::skip]
mod catalogue;
mod codes;
mod facts;
mod fused;
mod handle;
mod hierarchical;
mod init;
mod memory;
mod messages;
mod pointers;
mod returning;
mod scales;
mod settings;
mod status;

/// Version of the ABI of this header. It is incremented when programs that were compiled with an older header would no
/// longer work.
pub const FAST_ALLREDUCE_ABI_VERSION: u32 = 1;

/// Maximum number of ranks of a communicator.
pub const FAST_ALLREDUCE_MAX_RANKS: usize = 16;

const _: () = assert!(FAST_ALLREDUCE_MAX_RANKS == fast_allreduce::MAX_RANKS);

/// Returns the ABI version of the loaded library; compare it with FAST_ALLREDUCE_ABI_VERSION.
#[no_mangle]
pub extern "C" fn fast_allreduce_abi_version() -> u32 {
    FAST_ALLREDUCE_ABI_VERSION
}

/// Returns the version of the library, such as "0.1.0".
#[no_mangle]
pub extern "C" fn fast_allreduce_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
