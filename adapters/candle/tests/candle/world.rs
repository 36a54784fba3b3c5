//! Runs ranks as threads.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Communicator, Host};
use fast_allreduce_candle::Comm;

/// Runs `rank` on `ranks` ranks, and returns their results.
pub fn world<R: Send + 'static>(ranks: usize, rank: impl Fn(Comm) -> R + Send + Sync + 'static) -> Vec<R> {
    let rank = Arc::new(rank);
    let started: Vec<_> = Threads::world(ranks)
        .unwrap()
        .into_iter()
        .map(|bootstrap| {
            let rank = Arc::clone(&rank);
            std::thread::spawn(move || {
                let communicator = Communicator::builder().build(Host::new(), bootstrap).unwrap();
                rank(Comm::new(communicator))
            })
        })
        .collect();
    started.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Runs [`world`], and panics if a rank fails.
pub fn tensors(ranks: usize, rank: impl Fn(Comm) -> Result<Tensor> + Send + Sync + 'static) -> Vec<Tensor> {
    world(ranks, rank).into_iter().map(Result::unwrap).collect()
}

/// Returns the elements as f64, which is exact for the tests' values.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.flatten_all().unwrap();
    // Via f32: candle 0.11.1 recurses forever from f8 to f64.
    let flat = if flat.dtype() == DType::F8E4M3 { flat.to_dtype(DType::F32).unwrap() } else { flat };
    flat.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Returns numbers between -1 and 1 with a period of 2^31 elements, different ones for each seed.
pub fn numbers(seed: u64, shape: &[usize]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = std::iter::repeat_with(next).take(shape.iter().product()).collect();
    Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap()
}
