//! One GPU for each rank process: a launcher sets `FAST_ALLREDUCE_UNIQUE_ID`, `_RANK` and `_WORLD_SIZE`.
//!
//! It checks its result, and fails on a machine without a GPU.

use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::{Communicator, Cuda, ReduceOp};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let local = Local::from_env()?.ok_or("not started by a launcher")?;
    let device = Cuda::open(local.rank())?; // or Cuda::new(context) for a cudarc context of yours
    let stream = device.context().new_stream()?;
    let communicator = Communicator::builder().build(device, local)?;

    let mut data = stream.clone_htod(&vec![1.0f32; 4096])?;
    communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum)?; // returns when it is launched
    communicator.synchronize(&stream)?; // the result, or an error that names the rank that is missing
    assert_eq!(stream.clone_dtoh(&data)?, vec![communicator.world_size() as f32; 4096]);
    Ok(())
}
