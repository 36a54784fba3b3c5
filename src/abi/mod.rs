//! Structs and constants that Rust and the kernels share, from `csrc/abi.h`.
//!
//! `bindings.rs` is committed output of bindgen; `catalogue/tests/bindings.rs` generates it again and compares.

#[rustfmt::skip]
#[allow(missing_docs, dead_code, clippy::all, clippy::pedantic)]
mod bindings;

pub(crate) use bindings::*;

/// Maximum number of ranks of a communicator.
pub const MAX_RANKS: usize = FA_MAX_RANKS as usize;

const _: () = {
    assert!(size_of::<FaSignal>() == FA_SIGNAL_BYTES as usize);
    assert!(size_of::<FaRegionHead>() % 128 == 0, "the part after the head is aligned");
};
