//! Divided layers, compared with whole ones.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Linear;
use fast_allreduce_candle::{
    invariant, share, AllGather, AllReduce, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
};

use crate::world::{numbers, tensors, values};

fn assert_close(actual: &Tensor, expected: &Tensor) {
    assert_eq!(actual.dims(), expected.dims());
    for (actual, expected) in values(actual).iter().zip(values(expected)) {
        assert!((actual - expected).abs() < 1e-4, "{actual} {expected}");
    }
}

/// Shares of 10 channels on up to 4 ranks: (4, 3, 3), and so on.
#[test]
fn a_pair_of_layers_is_what_whole_layers_are() {
    let (first, first_bias) = (numbers(1, &[10, 6]), numbers(2, &[10]));
    let (second, second_bias) = (numbers(3, &[7, 10]), numbers(4, &[7]));
    let xs = numbers(5, &[2, 3, 6]);
    let hidden = Linear::new(first.clone(), Some(first_bias.clone())).forward(&xs).unwrap();
    let expected =
        Linear::new(second.clone(), Some(second_bias.clone())).forward(&hidden.relu().unwrap()).unwrap();
    for ranks in 1..=4 {
        let (first, first_bias) = (first.clone(), first_bias.clone());
        let (second, second_bias, xs, hidden) =
            (second.clone(), second_bias.clone(), xs.clone(), hidden.clone());
        let results = tensors(ranks, move |comm| {
            let own = share(10, comm.rank(), ranks);
            let rows = |of: &Tensor| of.narrow(0, own.start, own.len());
            let column = ColumnParallelLinear::new(Linear::new(rows(&first)?, Some(rows(&first_bias)?)));
            let row = RowParallelLinear::new(
                second.narrow(1, own.start, own.len())?.contiguous()?,
                Some(second_bias.clone()),
                AllReduce::sum(&comm),
            );
            let sizes: Vec<_> = (0..ranks).map(|rank| share(10, rank, ranks).len()).collect();
            let gathered = column.clone().gathered(AllGather::uneven(&comm, 2, &sizes));
            assert_close(&gathered.forward(&xs)?, &hidden);
            row.forward(&column.forward(&xs)?.relu()?)
        });
        results.iter().for_each(|result| assert_close(result, &expected));
    }
}

#[test]
fn an_embedding_in_parts_has_the_bits_of_a_whole_one() {
    let table = numbers(6, &[11, 5]);
    let tokens = Tensor::new(&[[0u32, 10, 3], [3, 7, 4]], &Device::Cpu).unwrap();
    let whole = candle_nn::Embedding::new(table.clone(), 5).forward(&tokens).unwrap();
    for ranks in 1..=4 {
        for dtype in [DType::F32, DType::BF16] {
            let (table, tokens) = (table.to_dtype(dtype).unwrap(), tokens.clone());
            let expected = whole.to_dtype(dtype).unwrap();
            let results = tensors(ranks, move |comm| {
                let own = share(11, comm.rank(), ranks);
                let part = table.narrow(0, own.start, own.len())?;
                VocabParallelEmbedding::new(part, own, AllReduce::sum(&comm))?.forward(&tokens)
            });
            for result in results {
                assert_eq!(
                    (result.dims(), values(&result)),
                    (expected.dims(), values(&expected)),
                    "{ranks} {dtype:?}"
                );
            }
        }
    }
}

#[test]
fn a_table_of_other_tokens_is_refused() {
    let results = crate::world::world(1, |comm| {
        let table = Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap();
        VocabParallelEmbedding::new(table, 0..3, AllReduce::sum(&comm)).map(drop)
    });
    assert!(results[0].as_ref().unwrap_err().to_string().contains("4 rows"));
}

/// The number of ranks does not change a bit, for one row and for several, which candle computes differently.
#[test]
fn invariant_layers_have_the_same_bits_for_every_number_of_ranks() {
    let (units, unit, width) = (9, 32, 96);
    let (first, second) = (numbers(7, &[units * unit, width]), numbers(8, &[width, units * unit]));
    for rows in [1, 5] {
        let xs = numbers(9, &[rows, width]);
        let whole =
            xs.matmul(&first.t().unwrap()).unwrap().relu().unwrap().matmul(&second.t().unwrap()).unwrap();
        let mut bits = None;
        for ranks in 1..=units {
            let (first, second, xs) = (first.clone(), second.clone(), xs.clone());
            let results = tensors(ranks, move |comm| {
                let own = share(units, comm.rank(), ranks);
                let (start, len) = (own.start * unit, own.len() * unit);
                let column = invariant::ColumnLinear::new(&first.narrow(0, start, len)?, unit)?;
                let part = second.narrow(1, start, len)?.contiguous()?;
                let row = invariant::RowLinear::new(&part, unit, AllReduce::sum(&comm))?;
                row.forward(&column.forward(&xs)?.relu()?)
            });
            for result in results {
                assert_close(&result, &whole);
                let result: Vec<u32> =
                    values(&result).iter().map(|&value| (value as f32).to_bits()).collect();
                assert_eq!(*bits.get_or_insert_with(|| result.clone()), result, "{ranks} ranks, {rows} rows");
            }
        }
    }
}

#[test]
fn units_that_do_not_divide_are_refused() {
    assert!(invariant::ColumnLinear::new(&numbers(1, &[10, 4]), 4).is_err());
    assert!(invariant::ColumnLinear::new(&numbers(1, &[10, 4]), 0).is_err());
}
