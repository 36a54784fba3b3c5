//! Shared resources: links, caches, issue slots. Users may come out of order in simulated time, so each
//! resource records how much of its capacity is taken in each stretch of time.

/// Length of a stretch in cycles.
const STRETCH: f64 = 64.0;

/// A resource that moves a fixed number of bytes per cycle.
pub(crate) struct Pipe {
    per_cycle: f64,
    /// Bytes taken of each stretch.
    taken: Vec<f64>,
    /// All stretches before this one are full.
    first: usize,
}

impl Pipe {
    pub fn new(per_cycle: f64) -> Self {
        Self { per_cycle, taken: Vec::new(), first: 0 }
    }

    /// Returns when bytes that come at `at` have passed.
    pub fn pass(&mut self, at: f64, bytes: f64) -> f64 {
        let whole = self.per_cycle * STRETCH;
        let mut stretch = ((at / STRETCH) as usize).max(self.first);
        let mut left = bytes;
        loop {
            if self.taken.len() <= stretch {
                self.taken.resize(stretch + 1, 0.0);
            }
            let taken = &mut self.taken[stretch];
            let part = left.min(whole - *taken);
            *taken += part;
            left -= part;
            if left <= 1e-9 {
                let full = stretch as f64 * STRETCH + *taken / self.per_cycle;
                return full.max(at + bytes / self.per_cycle);
            }
            if self.first == stretch {
                self.first += 1;
            }
            stretch += 1;
        }
    }
}

/// Issue slots: one instruction per cycle.
#[derive(Default)]
pub(crate) struct Slots {
    taken: Vec<u64>,
}

impl Slots {
    /// Takes the first free cycle from `at` on, and returns it.
    pub fn take(&mut self, at: f64) -> f64 {
        let at = at.ceil() as usize;
        let (mut word, mut from) = (at / 64, at % 64);
        loop {
            if self.taken.len() <= word {
                self.taken.resize(word + 64, 0);
            }
            let free = !self.taken[word] >> from << from;
            if free != 0 {
                let bit = free.trailing_zeros() as usize;
                self.taken[word] |= 1 << bit;
                return (word * 64 + bit) as f64;
            }
            (word, from) = (word + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_takes_no_more_than_it_moves() {
        let mut pipe = Pipe::new(2.0);
        assert_eq!(pipe.pass(0.0, 20.0), 10.0);
        let last = (0..100).map(|_| pipe.pass(0.0, 64.0)).fold(0.0, f64::max);
        assert!((last - (20.0 + 6400.0) / 2.0).abs() < 1.0, "{last}");
        // Bytes that come before all others are not delayed.
        let mut pipe = Pipe::new(2.0);
        pipe.pass(10_000.0, 2_000.0);
        assert_eq!(pipe.pass(0.0, 2.0), 1.0);
    }

    #[test]
    fn a_slot_is_taken_once() {
        let mut slots = Slots::default();
        let cycles: Vec<f64> = [5.0, 5.0, 4.2, 0.0, 5.0].into_iter().map(|at| slots.take(at)).collect();
        assert_eq!(cycles, [5.0, 6.0, 7.0, 0.0, 8.0]);
        (0..200).for_each(|_| _ = slots.take(0.0));
        assert_eq!(slots.take(0.0), 205.0);
    }
}
