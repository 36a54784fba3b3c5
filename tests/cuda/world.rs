//! What `CudaWorld` refuses. What it gives is in `conformance::one_launch`.

use cudarc::driver::CudaSlice;
use fast_allreduce::device::cuda::CudaWorld;
use fast_allreduce::{Algorithm, Error, ReduceOp};

use crate::gpu::{gpus, LIMIT};

#[test]
fn what_a_world_refuses() {
    let Some(_gpus) = gpus(1) else { return };
    assert_eq!(CudaWorld::new(0, 17, 4096, 0, LIMIT).err(), Some(Error::WorldSize { world_size: 17 }));
    let world = CudaWorld::new(0, 2, 4096, 0, LIMIT).unwrap();
    let slices = |count: usize, length: usize| -> Vec<CudaSlice<f32>> {
        (0..count).map(|_| world.stream().alloc_zeros(length).unwrap()).collect()
    };
    let call = |inputs: &[CudaSlice<f32>], outputs: &mut [CudaSlice<f32>], (offset, count), grid| {
        let push = Algorithm::OneShotPush;
        world.all_reduce(inputs, outputs, offset, count, ReduceOp::Sum, push, grid, false)
    };
    let good = (1, 32);
    assert_eq!(call(&slices(2, 8), &mut slices(2, 8), (0, 8), good), Ok(()));
    let mismatch = |result| assert!(matches!(result, Err(Error::LengthMismatch { .. })), "{result:?}");
    mismatch(call(&slices(2, 8), &mut slices(1, 8), (0, 8), good));
    mismatch(call(&slices(1, 8), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&slices(2, 7), &mut slices(2, 8), (0, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (1, 8), good));
    mismatch(call(&[], &mut slices(2, 8), (usize::MAX, 8), good));
    for grid in [(0, 32), (1, 0), (1, 31), (1, 513), (world.max_blocks() + 1, 32)] {
        let result = call(&[], &mut slices(2, 8), (0, 8), grid);
        assert!(matches!(result, Err(Error::InvalidSetting { name: "grid", .. })), "{result:?}");
    }
}
