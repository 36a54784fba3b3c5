//! Premultiplied sums: operations with a scale, which a rank creates for its communicator.

use fast_allreduce::{ReduceOp, Scale};

use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// The first code of operations that are created for a communicator.
const FIRST: u32 = 1 << 16;

/// Converts a code to an operation: a built-in one, or one that was created for the communicator.
pub fn operation(handle: &fast_allreduce_communicator, code: u32) -> Result<ReduceOp, Failure> {
    let Some(index) = code.checked_sub(FIRST) else { return codes::op(code) };
    let scale = handle.scales.lock().get(index as usize).copied().flatten();
    scale
        .map(ReduceOp::PreMulSum)
        .ok_or_else(|| argument(format!("op {code} was not created for this communicator")))
}

fn create(handle: &fast_allreduce_communicator, scale: Scale) -> Result<u32, Failure> {
    let mut scales = handle.scales.lock();
    let free = scales.iter().position(Option::is_none).unwrap_or(scales.len());
    let code = u32::try_from(free).ok().and_then(|free| free.checked_add(FIRST));
    let code = code.ok_or_else(|| argument("the communicator has too many operations"))?;
    if free == scales.len() {
        scales.push(None);
    }
    scales[free] = Some(scale);
    Ok(code)
}

/// Creates an operation for this communicator, like ncclRedOpCreatePreMulSum: a sum in which this rank's input is first
/// multiplied by `scale`. The product is computed in the type in which sums are accumulated, and rounded to the element
/// type. In a call, all ranks use such an operation, each with its own scale. Elements are floats.
///
/// # Safety
///
/// `communicator` is live; `op` is valid for writes.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_op_create_premul_sum(
    communicator: *const fast_allreduce_communicator,
    scale: f64,
    op: *mut u32,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        // SAFETY: the caller guarantees it.
        let op = unsafe { op.as_mut() }.ok_or_else(|| argument("the pointer for the result is null"))?;
        *op = create(handle, Scale::new(scale))?;
        Ok(())
    })
}

/// Frees an operation of fast_allreduce_op_create_premul_sum. Calls under way are not affected. Freeing the
/// communicator destroys the remaining operations.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_op_destroy(
    communicator: *const fast_allreduce_communicator,
    op: u32,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let index = op.checked_sub(FIRST).map(|index| index as usize);
        let taken = index.and_then(|index| handle.scales.lock().get_mut(index).and_then(Option::take));
        taken.map(drop).ok_or_else(|| argument(format!("op {op} was not created for this communicator")))
    })
}
