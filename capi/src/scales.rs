//! Premultiplied sums: operations with a scale, which a rank makes for its communicator.

use fast_allreduce::{ReduceOp, Scale};

use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// The first of the codes that a communicator gives.
const FIRST: u32 = 1 << 16;

/// The operation of a code, one of the library's or one that was made for the communicator.
pub fn operation(handle: &fast_allreduce_communicator, code: u32) -> Result<ReduceOp, Failure> {
    let Some(place) = code.checked_sub(FIRST) else { return codes::op(code) };
    let scale = handle.scales.lock().get(place as usize).copied().flatten();
    scale
        .map(ReduceOp::PreMulSum)
        .ok_or_else(|| argument(format!("op {code} is none of this communicator's")))
}

fn make(handle: &fast_allreduce_communicator, scale: Scale) -> Result<u32, Failure> {
    let mut scales = handle.scales.lock();
    let free = scales.iter().position(Option::is_none).unwrap_or(scales.len());
    let code = u32::try_from(free).ok().and_then(|free| free.checked_add(FIRST));
    let code = code.ok_or_else(|| argument("there are too many operations already"))?;
    if free == scales.len() {
        scales.push(None);
    }
    scales[free] = Some(scale);
    Ok(code)
}

/// Makes an operation of this rank, for this communicator: a sum of the ranks' inputs, of which this rank's is multiplied by
/// `scale` first. The product is computed as sums are accumulated, and rounded to the type. The other ranks take such an operation
/// for the same call, each with a scale of its own; elements are floats.
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
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        // SAFETY: the caller's.
        let op = unsafe { op.as_mut() }.ok_or_else(|| argument("where to put the result is null"))?;
        *op = make(handle, Scale::new(scale))?;
        Ok(())
    })
}

/// Ends an operation that fast_allreduce_op_create_premul_sum has made. Calls that are under way are not affected; what is not
/// destroyed ends with its communicator.
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
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::of(communicator)? };
        let place = op.checked_sub(FIRST).map(|place| place as usize);
        let taken = place.and_then(|place| handle.scales.lock().get_mut(place).and_then(Option::take));
        taken.map(drop).ok_or_else(|| argument(format!("op {op} was not made by this communicator")))
    })
}
