//! Passes any bytes to the decoder that the variable `DECODER` names. `planted` has a bug that must be found.

#![no_main]

use std::sync::OnceLock;

// Links the library, whose functions are declared below.
use fast_allreduce as _;

include!(concat!(env!("OUT_DIR"), "/decoders.rs"));

/// Reads beyond the end of a message that begins with a certain word, as a decoder without a check would.
fn planted(bytes: &[u8]) {
    if let Some((b"RANK", rest)) = bytes.split_first_chunk() {
        if let Some(&length) = rest.first() {
            std::hint::black_box(rest[usize::from(length)]);
        }
    }
}

fn chosen() -> unsafe fn(&[u8]) {
    let name = std::env::var("DECODER").unwrap_or_default();
    match DECODERS.iter().find(|(known, _)| *known == name) {
        Some((_, decoder)) => *decoder,
        None if name == "planted" => planted,
        None => panic!("DECODER names no decoder: {name:?}"),
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static DECODER: OnceLock<unsafe fn(&[u8])> = OnceLock::new();
    let decoder = DECODER.get_or_init(chosen);
    // SAFETY: the function has this signature in the library, and is safe there.
    unsafe { decoder(bytes) }
});
