//! Memory of elements: poisoned before calls, aligned for every type, as bytes or as elements of a type.

use std::ops::{Deref, DerefMut};

use fast_allreduce_oracle::number::Number;

use crate::failure::Failure;

/// The value of every byte of an output before a checked call.
pub const POISON: u8 = 0xa5;

/// Returns an element of poisoned bytes.
pub fn poison<T: Number>() -> T {
    T::of_bits(u64::from_ne_bytes([POISON; 8]))
}

/// Converts bytes to elements.
///
/// # Panics
///
/// The bytes are not aligned for elements, or end within one.
#[inline]
pub fn typed<T: Number>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() {
        return &[];
    }
    // SAFETY: every bit pattern is a value of a number.
    let (before, elements, after) = unsafe { bytes.align_to() };
    assert!(before.is_empty() && after.is_empty(), "{} bytes are no whole elements", bytes.len());
    elements
}

/// Converts bytes to elements, like [`typed`].
#[inline]
pub fn typed_mut<T: Number>(bytes: &mut [u8]) -> &mut [T] {
    if bytes.is_empty() {
        return &mut [];
    }
    // SAFETY: every bit pattern is a value of a number, and the bytes of any value are bytes.
    let (before, elements, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "these bytes are no whole elements");
    elements
}

/// Returns the bits of an element as a number.
#[cfg(feature = "cuda")]
pub fn bits(element: &[u8]) -> u64 {
    element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// Private memory, aligned to a cache line.
pub struct Lines {
    storage: Vec<u8>,
    start: usize,
}

impl Lines {
    /// Allocates poisoned memory.
    pub fn new(bytes: usize) -> Result<Self, Failure> {
        const ALIGNMENT: usize = 64;
        let length = bytes.saturating_add(ALIGNMENT);
        let mut storage = Vec::new();
        let none = |_| Failure::Usage(format!("no memory for a buffer of {bytes} bytes"));
        storage.try_reserve_exact(length).map_err(none)?;
        storage.resize(length, POISON);
        let start = storage.as_ptr().align_offset(ALIGNMENT);
        storage.truncate(start + bytes);
        Ok(Self { storage, start })
    }
}

impl Deref for Lines {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.storage[self.start..]
    }
}

impl DerefMut for Lines {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_poisoned() {
        for bytes in [0, 1, 63, 64, 4097] {
            let lines = Lines::new(bytes).unwrap();
            assert_eq!(lines.len(), bytes);
            assert!(bytes == 0 || lines.as_ptr() as usize % 64 == 0);
            assert!(lines.iter().all(|byte| *byte == POISON));
        }
    }

    #[test]
    fn poison_is_poison_of_every_type() {
        assert_eq!(typed::<u64>(&Lines::new(8).unwrap()), [poison::<u64>()]);
        assert_eq!(typed::<half::f16>(&Lines::new(2).unwrap())[0].to_bits(), poison::<half::f16>().to_bits());
    }
}
