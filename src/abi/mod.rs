//! What Rust and the kernels share: the structs and constants of `csrc/abi.h`.
//!
//! `bindings.rs` is bindgen's output, committed; `tests/machine/bindings.rs` generates it again and compares.

#[rustfmt::skip]
#[allow(missing_docs, dead_code, clippy::all, clippy::pedantic)]
mod bindings;

pub(crate) use bindings::*;

/// The most ranks that a world may have.
pub const MAX_RANKS: usize = FA_MAX_RANKS as usize;

const _: () = {
    assert!(size_of::<FaSignal>() == FA_SIGNAL_BYTES as usize);
    assert!(size_of::<FaRegionHead>() % 128 == 0, "what follows the head is aligned");
};
