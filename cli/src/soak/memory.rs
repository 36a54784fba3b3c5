//! Memory that calls work in: views of any type at any offset, with margins that must stay as they are.

use fast_allreduce_oracle::number::Number;

use crate::harness::memory::POISON;

use super::draw::MOST_OFFSET;

const MARGIN: usize = 64;

/// Words that hold any view of `bytes` bytes and its margins.
pub fn words(bytes: usize) -> usize {
    (bytes + 2 * MARGIN + MOST_OFFSET as usize * size_of::<u64>()).div_ceil(size_of::<u64>())
}

/// `count` elements at `offset`, and the margins on both sides.
pub struct Window<'a, T> {
    before: &'a mut [u8],
    pub elements: &'a mut [T],
    after: &'a mut [u8],
}

impl<'a, T: Number> Window<'a, T> {
    /// Poisons all of it. `memory` holds [`words`] for the elements' bytes.
    pub fn new(memory: &'a mut [u64], offset: usize, count: usize) -> Self {
        let size = size_of::<T>();
        let (start, length) = (MARGIN + offset * size, count * size);
        // SAFETY: any bytes are the bytes of words, and the slice is the same memory, borrowed exclusively.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), size_of_val(memory)) };
        let bytes = &mut bytes[start - MARGIN..start + length + MARGIN];
        bytes.fill(POISON);
        let (before, rest) = bytes.split_at_mut(MARGIN);
        let (inside, after) = rest.split_at_mut(length);
        // SAFETY: `inside` is `count` elements long and aligned for T, as words are and `start` is a multiple of T's size;
        // a number has a value for any bits.
        let elements = unsafe { std::slice::from_raw_parts_mut(inside.as_mut_ptr().cast::<T>(), count) };
        Self { before, elements, after }
    }

    /// Writes over the elements, at once, what no call is to see.
    pub fn overwrite(&mut self) {
        const OTHER: u8 = 0x5b;
        // SAFETY: the elements are borrowed exclusively, and a number has a value for any bits.
        unsafe { self.elements.as_mut_ptr().write_bytes(OTHER, self.elements.len()) };
    }

    /// Bytes beside the elements that have changed.
    pub fn overwritten(&self) -> u64 {
        self.before.iter().chain(&*self.after).filter(|byte| **byte != POISON).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_beside_the_elements_is_noticed() {
        let mut memory = vec![0; words(10)];
        for offset in [0, 1, MOST_OFFSET as usize - 1] {
            let window = Window::<u32>::new(&mut memory, offset, 2);
            assert!(window.elements.iter().all(|element| *element == 0xa5a5_a5a5));
            window.elements.fill(7);
            assert_eq!(window.overwritten(), 0);
            window.after[0] = 7;
            window.before[MARGIN - 1] = 7;
            assert_eq!(window.overwritten(), 2);
        }
        Window::<f64>::new(&mut vec![0; words(80)], MOST_OFFSET as usize - 1, 10);
    }
}
