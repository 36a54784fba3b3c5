//! Memory that calls work in: views of any type at any offset, with margins that must not change.

use std::ops::Range;

use fast_allreduce::Buffer;
use fast_allreduce_oracle::number::Number;

use super::draw::{Layout, View, MOST_OFFSET};
use crate::harness::memory::POISON;
use crate::harness::work::Work;

const MARGIN: usize = 64;

/// Returns the words that hold any view of `bytes` bytes and its margins.
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
    /// Poisons the window. `memory` holds [`words`] for the elements' bytes.
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
        // SAFETY: `inside` is `count` elements long and aligned for T, because words are and `start` is a multiple
        // of T's size; a number has a value for any bits.
        let elements = unsafe { std::slice::from_raw_parts_mut(inside.as_mut_ptr().cast::<T>(), count) };
        Self { before, elements, after }
    }

    /// Overwrites the elements with values that no call may read.
    pub fn overwrite(&mut self) {
        const OTHER: u8 = 0x5b;
        // SAFETY: the elements are borrowed exclusively, and a number has a value for any bits.
        unsafe { self.elements.as_mut_ptr().write_bytes(OTHER, self.elements.len()) };
    }

    /// Returns the number of margin bytes that have changed.
    pub fn overwritten(&self) -> u64 {
        self.before.iter().chain(&*self.after).filter(|byte| **byte != POISON).count() as u64
    }
}

/// The private and registered memory that a call's input and output may be in.
pub struct Memories<'a> {
    input: (&'a mut [u64], Option<&'a mut [u64]>),
    output: (&'a mut [u64], Option<&'a mut [u64]>),
}

impl<'a> Memories<'a> {
    pub fn new([first, second]: &'a mut [Vec<u64>; 2], registered: &'a mut Option<Buffer<u64>>) -> Self {
        let halves = registered.as_mut().map(|buffer| {
            let half = buffer.len() / 2;
            buffer.split_at_mut(half)
        });
        let (input, output) = halves.unzip();
        Self { input: (first, input), output: (second, output) }
    }

    /// Returns the memory that views are in: registered memory if the view asks for it and there is some.
    pub fn choose(self, input: View, output: View) -> (&'a mut [u64], &'a mut [u64]) {
        let one = |(private, registered): (&'a mut [u64], Option<_>), view: View| {
            registered.filter(|_| view.is_registered).unwrap_or(private)
        };
        (one(self.input, input), one(self.output, output))
    }
}

/// The buffers of a call.
pub struct CallBuffers<'a> {
    /// The only buffer of a call in place.
    pub input: Window<'a, u8>,
    pub output: Window<'a, u8>,
    pub is_in_place: bool,
    /// The call's input within `input`.
    pub from: Range<usize>,
    /// The call's output within `output`, or in place within `input`.
    pub to: Range<usize>,
}

impl<'a> CallBuffers<'a> {
    pub fn new(memories: Memories<'a>, layout: &Layout, work: &Work) -> Self {
        let in_place = work.in_place().filter(|_| layout.output.is_none());
        let is_in_place = in_place.is_some();
        let view = layout.output.unwrap_or_default();
        let (input, output) = memories.choose(layout.input, view);
        let (input_len, output_len) = match is_in_place {
            true => (work.elements(), 0),
            false => (work.input_len(), work.output_len()),
        };
        let (from, to) = in_place.unwrap_or_default();
        Self {
            input: Window::new(input, work.bytes(layout.input.offset), work.bytes(input_len)),
            output: Window::new(output, work.bytes(view.offset), work.bytes(output_len)),
            is_in_place,
            from: from..from + work.input_len(),
            to: to..to + work.output_len(),
        }
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
