//! fast-allreduce for C and C++: the functions of `include/fast_allreduce.h`, which cbindgen makes of this crate.
//!
//! Comments on what is exported are for readers of the header. No panic leaves a function, and no code of a caller's is
//! taken for an enum before it has been looked up.

#![allow(non_camel_case_types)]

mod bootstrap;
mod calls;
#[rustfmt::skip]
mod catalogue;
mod codes;
mod facts;
mod fused;
mod handle;
mod init;
mod memory;
mod messages;
mod pointers;
mod scales;
mod settings;
mod status;

/// Version of the ABI that this header describes. It is increased when a program that was compiled against an older
/// header would not work any more.
pub const FAST_ALLREDUCE_ABI_VERSION: u32 = 1;

/// Most ranks of a communicator.
pub const FAST_ALLREDUCE_MAX_RANKS: usize = 16;

const _: () = assert!(FAST_ALLREDUCE_MAX_RANKS == fast_allreduce::MAX_RANKS);

/// Version of the ABI of the library that is loaded: compare it with FAST_ALLREDUCE_ABI_VERSION.
#[no_mangle]
pub extern "C" fn fast_allreduce_abi_version() -> u32 {
    FAST_ALLREDUCE_ABI_VERSION
}

/// Version of the library, such as "0.1.0".
#[no_mangle]
pub extern "C" fn fast_allreduce_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
