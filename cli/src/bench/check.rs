//! Compares results with the reference, element by element.

use fast_allreduce::MAX_RANKS;

use super::inputs::Inputs;
use super::reference::Number;

/// Elements of `output` that are not the reduction of all ranks' inputs, bit for bit and by its bound in f64.
pub fn count_wrong<T: Number>(inputs: &Inputs, output: &[T]) -> u64 {
    let (op, world_size) = (inputs.op(), inputs.world_size());
    let mut values = [T::poison(); MAX_RANKS];
    let values = &mut values[..world_size];
    let is_wrong = |(index, result): (usize, &T)| {
        values.iter_mut().enumerate().for_each(|(rank, value)| *value = inputs.value(rank, index));
        result.bits() != T::reduce(op, values).bits() || !result.is_plausible(op, values)
    };
    output.iter().enumerate().map(is_wrong).map(u64::from).sum()
}

/// Elements of an input that are no longer what `rank` gave.
pub fn count_changed<T: Number>(inputs: &Inputs, rank: usize, input: &[T]) -> u64 {
    let is_changed = |(index, element): (usize, &T)| element.bits() != inputs.value::<T>(rank, index).bits();
    input.iter().enumerate().map(is_changed).map(u64::from).sum()
}

#[cfg(test)]
mod tests {
    use fast_allreduce::ReduceOp;
    use half::{bf16, f16};

    use super::*;

    const COUNT: usize = 100;

    fn right<T: Number>(inputs: &Inputs) -> Vec<T> {
        let values =
            |index| (0..inputs.world_size()).map(|rank| inputs.value(rank, index)).collect::<Vec<T>>();
        (0..COUNT).map(|index| T::reduce(inputs.op(), &values(index))).collect()
    }

    fn notices_each_corruption<T: Number>(flip: fn(T) -> T) {
        for op in ReduceOp::ALL {
            let inputs = Inputs::new(3, 0, 5, op);
            let right = right::<T>(&inputs);
            assert_eq!(count_wrong(&inputs, &right), 0, "{} {op}", T::DTYPE);
            for index in 0..COUNT {
                let mut output = right.clone();
                output[index] = flip(output[index]);
                assert_eq!(count_wrong(&inputs, &output), 1, "{} {op} at {index}", T::DTYPE);
            }
        }
    }

    #[test]
    fn one_flipped_bit_is_one_wrong_element() {
        notices_each_corruption::<f16>(|value| f16::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<bf16>(|value| bf16::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<f32>(|value| f32::from_bits(value.to_bits() ^ 1));
        notices_each_corruption::<f64>(|value| -value);
        notices_each_corruption::<i8>(|value| value ^ 1);
        notices_each_corruption::<u8>(|value| value ^ 128);
        notices_each_corruption::<i32>(|value| value ^ 1);
        notices_each_corruption::<u32>(|value| value ^ 1);
        notices_each_corruption::<i64>(|value| value ^ i64::MIN);
        notices_each_corruption::<u64>(|value| value ^ 1);
    }

    #[test]
    fn poison_old_results_and_missing_ranks_are_wrong() {
        let inputs = Inputs::new(3, 1, 4, ReduceOp::Sum);
        let count = COUNT as u64;
        assert_eq!(count_wrong(&inputs, &[f32::poison(); COUNT]), count);
        let old = right::<u64>(&Inputs::new(3, 0, 4, ReduceOp::Sum));
        assert_eq!(count_wrong(&inputs, &old), count);
        let without_one = right::<u64>(&Inputs::new(3, 1, 3, ReduceOp::Sum));
        assert_eq!(count_wrong(&inputs, &without_one), count);
    }

    #[test]
    fn a_changed_input_is_noticed() {
        let inputs = Inputs::new(3, 1, 2, ReduceOp::Sum);
        let mut memory = [0i32; COUNT];
        inputs.fill(1, &mut memory);
        assert_eq!(count_changed(&inputs, 1, &memory), 0);
        memory[COUNT - 1] ^= 1;
        assert_eq!(count_changed(&inputs, 1, &memory), 1);
        assert_eq!(count_changed(&inputs, 0, &memory), COUNT as u64);
    }
}
