//! The collectives, for every type of candle.

use candle_core::{DType, Device, Module, Result, Tensor};
use fast_allreduce::{Error, ReduceOp};
use fast_allreduce_candle::{failure, AllGather, AllReduce, AllReduceRmsNorm, Comm, ReduceScatter};

use crate::world::{tensors, values, world};

const REDUCED: [DType; 9] = [
    DType::U8,
    DType::U32,
    DType::I32,
    DType::I64,
    DType::F8E4M3,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
];

/// Returns small numbers that all types represent exactly, different ones on each rank.
fn input(rank: usize, shape: &[usize], dtype: DType) -> Tensor {
    let values: Vec<f64> =
        (0..shape.iter().product::<usize>()).map(|index| ((index * 7 + rank * 3) % 5 + 1) as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn reduced(ranks: usize, shape: &[usize], op: ReduceOp) -> Vec<f64> {
    let inputs: Vec<_> = (0..ranks).map(|rank| values(&input(rank, shape, DType::F64))).collect();
    let of = |index: usize| {
        let mut column = inputs.iter().map(|input| input[index]);
        let first = column.next().unwrap();
        column.fold(first, |so_far, next| match op {
            ReduceOp::Sum => so_far + next,
            ReduceOp::Prod => so_far * next,
            ReduceOp::Min => so_far.min(next),
            _ => so_far.max(next),
        })
    };
    (0..inputs[0].len()).map(of).collect()
}

/// Returns the values as the type represents them.
fn rounded(values: Vec<f64>, dtype: DType) -> Vec<f64> {
    let count = values.len();
    crate::world::values(&Tensor::from_vec(values, count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

#[test]
fn all_types_are_reduced() {
    for ranks in 1..=4 {
        for dtype in REDUCED {
            for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
                // Products of 4 ranks' values up to 5 exceed the exact range of bf16 and the range of u8.
                if op == ReduceOp::Prod && ranks == 4 {
                    continue;
                }
                let expected = rounded(reduced(ranks, &[3, 41], op), dtype);
                let results = tensors(ranks, move |comm| {
                    let xs = input(comm.rank(), &[3, 41], dtype);
                    let out = AllReduce::new(&comm, op).forward(&xs)?;
                    assert_eq!(values(&xs), values(&input(comm.rank(), &[3, 41], dtype)), "the input stays");
                    AllReduce::new(&comm, op).forward_in_place(&xs)?;
                    assert_eq!((values(&xs), xs.dtype()), (values(&out), dtype), "in place");
                    Ok(out)
                });
                for result in results {
                    assert_eq!((result.dims(), result.dtype()), (&[3, 41][..], dtype));
                    assert_eq!(values(&result), expected, "{ranks} ranks, {dtype:?} {op:?}");
                }
            }
        }
    }
}

/// Compares with the formula in f64, in which sums of small integers are exact, also for a part of a tensor.
#[test]
fn residuals_are_added_and_rows_normalised() {
    for ranks in 1..=3 {
        for (dtype, tolerance) in [(DType::BF16, 1e-2), (DType::F16, 2e-3), (DType::F32, 1e-6)] {
            for unit_offset in [false, true] {
                let shape = [2, 3, 40];
                let normed = move |comm: Comm| -> Result<Tensor> {
                    let of = |seed: usize, shape: &[usize]| input(seed, shape, dtype);
                    let whole = of(comm.rank(), &[4, 3, 40]);
                    let (xs, residual) = (whole.narrow(0, 1, 2)?, of(8, &shape));
                    let norm = AllReduceRmsNorm::new(&comm, of(9, &[40]), 1e-3).unit_offset(unit_offset);
                    let (normed, sum) = norm.forward(&xs, &residual)?;
                    assert_eq!((normed.dims(), sum.dims()), (&shape[..], &shape[..]));
                    assert_eq!(values(&residual), values(&of(8, &shape)), "it stays");
                    let expected = (AllReduce::sum(&comm).forward(&xs)? + &residual)?;
                    assert_eq!(values(&sum), values(&expected));
                    let all = norm.forward_with_sum(&xs, &residual)?;
                    assert_eq!(values(&all.0), values(&normed));
                    assert_eq!(values(&all.1), values(&sum));
                    assert_eq!(values(&all.2), values(&AllReduce::sum(&comm).forward(&xs)?));
                    assert_eq!(all.2.dims(), &shape[..]);
                    let wide = sum.to_dtype(DType::F64)?;
                    let weight = (of(9, &[40]).to_dtype(DType::F64)? + f64::from(u8::from(unit_offset)))?;
                    let scale = (wide.sqr()?.mean_keepdim(2)? + 1e-3)?.sqrt()?.recip()?;
                    let exact = wide.broadcast_mul(&scale)?.broadcast_mul(&weight)?;
                    for (value, exact) in values(&normed).iter().zip(values(&exact)) {
                        assert!((value - exact).abs() <= tolerance * exact.abs(), "{value} {exact}");
                    }
                    Ok(normed)
                };
                let results = tensors(ranks, normed);
                assert!(results.iter().all(|other| values(other) == values(&results[0])));
            }
        }
    }
}

#[test]
fn what_has_no_norm_is_told() {
    let said = |dtypes: [DType; 3], residual: usize, weight: usize| {
        let results = world(1, move |comm| {
            let norm = AllReduceRmsNorm::new(&comm, input(0, &[weight], dtypes[2]), 1e-5);
            norm.forward(&input(0, &[2, 8], dtypes[0]), &input(0, &[2, residual], dtypes[1])).unwrap_err()
        });
        results[0].to_string()
    };
    use DType::{F32, F64, U32};
    assert!(said([F32; 3], 7, 8).contains("residual of that"));
    assert!(said([F32; 3], 8, 7).contains("weight of (8,)"));
    assert!(said([F64; 3], 8, 8).contains("to_dtype"));
    assert!(said([U32; 3], 8, 8).contains("to_dtype"));
    assert!(said([F32, F64, F32], 8, 8).contains("to_dtype"));
}

/// Reduces 40 MiB, which go in pieces.
#[test]
fn large_tensors_are_reduced() {
    for result in tensors(2, |comm| {
        let xs = Tensor::full((comm.rank() + 1) as f32, 10 << 20, &Device::Cpu)?;
        AllReduce::sum(&comm).forward_in_place(&xs)?;
        (xs.min(0)? + xs.max(0)?)?.reshape(1)
    }) {
        assert_eq!(values(&result), [6.0]);
    }
}

#[test]
fn parts_of_tensors_are_reduced() {
    let results = tensors(3, |comm| {
        let whole = input(comm.rank(), &[6, 4], DType::F32);
        // Contiguous, at an offset.
        let rows = whole.narrow(0, 2, 3)?;
        let out = rows.apply_op1_no_bwd(&AllReduce::sum(&comm))?;
        rows.inplace_op1(&AllReduce::sum(&comm))?;
        assert_eq!(values(&rows), values(&out));
        let others = |whole: &Tensor| -> Result<Vec<f64>> {
            Ok(values(&Tensor::cat(&[whole.narrow(0, 0, 2)?, whole.narrow(0, 5, 1)?], 0)?))
        };
        assert_eq!(
            others(&whole)?,
            others(&input(comm.rank(), &[6, 4], DType::F32))?,
            "what is around it stays"
        );
        // Not contiguous: the module takes it, and the op's error names the remedy.
        let column = input(comm.rank(), &[6, 4], DType::F32).narrow(1, 1, 1)?;
        let strided = AllReduce::sum(&comm).forward(&column)?;
        for error in [
            column.apply_op1_no_bwd(&AllReduce::sum(&comm)).map(drop),
            column.inplace_op1(&AllReduce::sum(&comm)),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("contiguous()"), "{error}");
        }
        Tensor::cat(&[out.flatten_all()?, strided.flatten_all()?], 0)
    });
    let all = reduced(3, &[6, 4], ReduceOp::Sum);
    let column = (0..6).map(|row| all[4 * row + 1]);
    let expected: Vec<f64> = all[8..20].iter().copied().chain(column).collect();
    results.iter().for_each(|result| assert_eq!(values(result), expected));
}

#[test]
fn types_without_a_sum_are_refused_before_anything_is_sent() {
    let errors = world(2, |comm| {
        let xs = Tensor::new(&[1i16, 2], &Device::Cpu).unwrap();
        let errors =
            [AllReduce::sum(&comm).forward(&xs).map(drop), AllReduce::sum(&comm).forward_in_place(&xs)];
        let other = ReduceScatter::new(&comm, ReduceOp::Sum, 0).forward(&xs).map(drop);
        // The communicator is still usable.
        assert_eq!(
            values(&AllReduce::sum(&comm).forward(&Tensor::new(&[1f32], &Device::Cpu).unwrap()).unwrap()),
            [2.0]
        );
        errors.into_iter().chain([other]).map(|result| result.unwrap_err().to_string()).collect::<Vec<_>>()
    });
    for error in errors.concat() {
        assert!(error.contains("cannot be reduced"), "{error}");
    }
}

#[test]
fn all_types_are_gathered_along_any_dimension() {
    for dtype in REDUCED.into_iter().chain([DType::I16]) {
        for ranks in 1..=3 {
            for dim in 0..3 {
                let all: Vec<_> = (0..ranks).map(|rank| input(rank, &[2, 3, 5], DType::F64)).collect();
                let expected = Tensor::cat(&all, dim).unwrap();
                for result in tensors(ranks, move |comm| {
                    AllGather::new(&comm, dim).forward(&input(comm.rank(), &[2, 3, 5], dtype))
                }) {
                    assert_eq!((result.dims(), result.dtype()), (expected.dims(), dtype));
                    assert_eq!(
                        values(&result),
                        values(&expected),
                        "{ranks} ranks, {dtype:?}, dimension {dim}"
                    );
                }
            }
        }
    }
}

fn shape_of(rank: usize, dim: usize) -> [usize; 2] {
    let mut shape = [4, 4];
    shape[dim] = [3, 0, 2][rank];
    shape
}

#[test]
fn uneven_parts_are_gathered() {
    for dtype in [DType::F32, DType::I16] {
        for dim in 0..2 {
            let all: Vec<_> = [0, 2].map(|rank| input(rank, &shape_of(rank, dim), DType::F64)).into();
            let expected = Tensor::cat(&all, dim).unwrap();
            for result in tensors(3, move |comm| {
                AllGather::uneven(&comm, dim, &[3, 0, 2]).forward(&input(
                    comm.rank(),
                    &shape_of(comm.rank(), dim),
                    dtype,
                ))
            }) {
                assert_eq!(
                    (result.dims(), values(&result)),
                    (expected.dims(), values(&expected)),
                    "{dtype:?} {dim}"
                );
            }
        }
    }
}

#[test]
fn parts_are_reduced_and_scattered() {
    for dim in 0..2 {
        let all = Tensor::from_vec(reduced(3, &[6, 6], ReduceOp::Sum), (6, 6), &Device::Cpu).unwrap();
        for (sizes, uneven) in [([2, 2, 2], false), ([1, 5, 0], true)] {
            let results = tensors(3, move |comm| {
                let xs = input(comm.rank(), &[6, 6], DType::BF16);
                let op = match uneven {
                    true => ReduceScatter::uneven(&comm, ReduceOp::Sum, dim, &sizes),
                    false => ReduceScatter::new(&comm, ReduceOp::Sum, dim),
                };
                op.forward(&xs)
            });
            let mut start = 0;
            for (size, result) in sizes.into_iter().zip(&results) {
                let expected = all.narrow(dim, start, size).unwrap();
                assert_eq!((result.dims(), values(result)), (expected.dims(), values(&expected)));
                start += size;
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let errors = world(2, |comm| {
        let xs = input(0, &[3, 2], DType::F32);
        let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
        [
            AllGather::uneven(&comm, 0, &[3]).forward(&xs),
            AllGather::uneven(&comm, 0, &[4, 4]).forward(&xs),
            AllGather::new(&comm, 2).forward(&xs),
            AllGather::new(&comm, 0).forward(&scalar),
            ReduceScatter::new(&comm, ReduceOp::Sum, 0).forward(&xs),
            ReduceScatter::uneven(&comm, ReduceOp::Sum, 0, &[1, 1]).forward(&xs),
        ]
        .map(|result| result.unwrap_err().to_string())
    });
    let words =
        ["1 sizes for 2 ranks", "the sizes have 4", "no dimension 2", "dimension", "do not divide", "add up to 2"];
    for errors in errors {
        for (error, word) in errors.iter().zip(words) {
            assert!(error.contains(word), "{error}");
        }
    }
}

/// A lost rank is named in an error whose source the server can read.
#[test]
fn a_rank_that_has_gone_is_named() {
    let errors = world(3, |comm: Comm| match comm.rank() {
        1 => None,
        _ => {
            let xs = Tensor::ones(8, DType::F32, &Device::Cpu).unwrap();
            Some(AllReduce::sum(&comm).forward(&xs).unwrap_err())
        }
    });
    assert!(errors[1].is_none());
    for error in [&errors[0], &errors[2]].into_iter().flatten() {
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert!(matches!(failure(error), Some(Error::PeerLost { rank: 1, .. })), "{error:?}");
        let wrapped = candle_core::Error::Context {
            inner: Box::new(candle_core::Error::Msg("x".into())),
            context: Box::new("y"),
        };
        assert!(failure(&wrapped).is_none());
    }
}
