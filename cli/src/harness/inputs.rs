//! Inputs from a random generator: every rank can compute the elements of every rank, in any order.

use fast_allreduce::ReduceOp;
use fast_allreduce_oracle::number::Number;

/// The inputs of all ranks for one round of calls.
pub struct Inputs {
    /// The start of each rank's sequence of numbers.
    starts: Vec<u64>,
    op: ReduceOp,
}

impl Inputs {
    /// Makes the inputs of a round. Rounds differ, so that leftovers of an earlier call are wrong results.
    pub fn new(seed: u64, round: u64, world_size: usize, op: ReduceOp) -> Self {
        let start = |rank| mix(mix(mix(seed).wrapping_add(round)).wrapping_add(rank));
        Self { starts: (0..world_size as u64).map(start).collect(), op }
    }

    /// Returns element `index` of `rank`'s input.
    pub fn value<T: Number>(&self, rank: usize, index: usize) -> T {
        // Element i is the i-th number of the generator.
        let random = mix(self.starts[rank].wrapping_add((index as u64).wrapping_mul(GAMMA)));
        match T::FORMAT {
            Some(_) => T::from_f64(real(random, self.op)),
            None => T::of_bits(random),
        }
    }

    /// Writes `rank`'s input.
    pub fn fill<T: Number>(&self, rank: usize, memory: &mut [T]) {
        memory.iter_mut().enumerate().for_each(|(index, element)| *element = self.value(rank, index));
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.starts.len()
    }

    /// Returns the operation.
    pub fn op(&self) -> ReduceOp {
        self.op
    }
}

/// The increment of SplitMix64's state for each number (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
/// Generators, 2014).
pub const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Computes the output of SplitMix64: a bijection.
pub fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Makes a number from 64 random bits, such that no reduction of 16 of them overflows f16: in [-1, 1), including
/// zeros of both signs; for products, of magnitude [0.5, 1.5).
fn real(random: u64, op: ReduceOp) -> f64 {
    const HAS_SIGN: u64 = 1;
    const ZERO: u64 = 0b111_1110;
    let sign = if random & HAS_SIGN == 0 { 1.0 } else { -1.0 };
    // The highest 53 bits, none of them used above.
    let unit = (random >> 11) as f64 * (0.5f64).powi(53);
    match op {
        ReduceOp::Prod => sign * (0.5 + unit),
        _ if random & ZERO == 0 => sign * 0.0,
        _ => sign * unit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_differ_by_seed_round_rank_and_index() {
        let value =
            |seed, round, rank, index| Inputs::new(seed, round, 4, ReduceOp::Sum).value::<u64>(rank, index);
        let mut all = vec![value(1, 1, 1, 1), value(2, 1, 1, 1), value(1, 2, 1, 1), value(1, 1, 2, 1)];
        all.push(value(1, 1, 1, 2));
        assert_eq!(value(1, 1, 1, 1), all[0]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn reals_are_in_range_and_fill_it() {
        let inputs = Inputs::new(7, 0, 1, ReduceOp::Sum);
        let values: Vec<f64> = (0..10_000).map(|index| inputs.value(0, index)).collect();
        assert!(values.iter().all(|value| value.abs() <= 1.0));
        assert!(values.iter().any(|value| *value < -0.99) && values.iter().any(|value| *value > 0.99));
        let has_zero = |negative| values.iter().any(|v| *v == 0.0 && v.is_sign_negative() == negative);
        assert!(has_zero(true) && has_zero(false));
        let inputs = Inputs::new(7, 0, 1, ReduceOp::Prod);
        assert!((0..10_000).map(|i| inputs.value::<f64>(0, i).abs()).all(|v| (0.5..1.5).contains(&v)));
    }
}
