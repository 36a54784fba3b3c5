//! Inputs, grids and results of calls in one cooperative launch.

use cudarc::driver::{CudaSlice, DeviceSlice};
use fast_allreduce::device::cuda::CooperativeRanks;
use fast_allreduce::{DType, ReduceOp};

use super::probe::synchronize;
use crate::failure::{driver, Failure};
use crate::harness::elements::elements;
use crate::harness::inputs::Inputs;
use crate::harness::memory::{bits, Lines};

/// Returns the blocks and threads for a message: few for a small one, and not a power of two for a large one.
pub fn grid(world: &CooperativeRanks, bytes: usize) -> (usize, usize) {
    const BYTES_PER_BLOCK: usize = 8 << 10;
    let blocks = bytes.div_ceil(BYTES_PER_BLOCK).clamp(1, world.max_blocks());
    (blocks, if bytes < 2048 { 64 } else { 512 })
}

/// Makes the inputs of all ranks; returns the bytes of each, and the inputs.
pub fn make_inputs(
    dtype: DType,
    length: usize,
    world_size: usize,
    op: ReduceOp,
) -> Result<(usize, Vec<Lines>), Failure> {
    let numbers = Inputs::new(0x5eed, length as u64, world_size, op);
    let (bytes, elements) = (length * dtype.size(), elements(dtype)?);
    let of_rank = |rank| {
        let mut memory = Lines::new(bytes)?;
        elements.fill(&numbers, rank, &mut memory);
        Ok(memory)
    };
    Ok((bytes, (0..world_size).map(of_rank).collect::<Result<_, Failure>>()?))
}

/// Compares a whole output with what it should hold, in elements of `size` bytes.
pub fn compare(
    world: &CooperativeRanks,
    output: &CudaSlice<u8>,
    expected: &[u8],
    size: usize,
    name: &str,
) -> Result<(), Failure> {
    let result = download(world, output)?;
    let all = result.chunks(size).zip(expected.chunks(size)).enumerate();
    let mut wrong = all.filter(|(_, (is, should_be))| is != should_be);
    match wrong.next() {
        None => Ok(()),
        Some((index, (is, should_be))) => Err(Failure::Ranks(format!(
            "{name}: {} wrong elements, the first is element {index} of the buffer: {:#x} instead of {:#x}",
            wrong.count() + 1,
            bits(is),
            bits(should_be),
        ))),
    }
}

pub fn download(world: &CooperativeRanks, slice: &CudaSlice<u8>) -> Result<Vec<u8>, Failure> {
    let stream = world.stream();
    let mut bytes = vec![0; DeviceSlice::len(slice)];
    stream.memcpy_dtoh(slice, &mut bytes).map_err(driver("cuMemcpyDtoHAsync"))?;
    synchronize(stream)?;
    Ok(bytes)
}
