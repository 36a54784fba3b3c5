//! Premultiplied sums: operations with a scale, which a rank makes for its communicator.

use fast_allreduce::{Exclusive, ReduceOp, Scale};

use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// The first of the codes that a communicator gives.
const FIRST: u32 = 1 << 16;

/// The scales that have been made and not destroyed, by code.
#[derive(Default)]
pub struct Scales(Exclusive<Vec<Option<Scale>>>);

impl Scales {
    fn with<T>(&self, done: impl FnOnce(&mut Vec<Option<Scale>>) -> T) -> T {
        done(&mut self.0.lock())
    }

    /// Whether this thread changes or reads them.
    pub fn is_mine(&self) -> bool {
        self.0.is_mine()
    }

    fn make(&self, scale: Scale) -> Result<u32, Failure> {
        self.with(|scales| {
            let free = scales.iter().position(Option::is_none).unwrap_or(scales.len());
            let code = u32::try_from(free).ok().and_then(|free| free.checked_add(FIRST));
            let code = code.ok_or_else(|| argument("there are too many operations already"))?;
            if free == scales.len() {
                scales.push(None);
            }
            scales[free] = Some(scale);
            Ok(code)
        })
    }

    fn destroy(&self, code: u32) -> Result<(), Failure> {
        let place = code.checked_sub(FIRST).map(|place| place as usize);
        let taken = self.with(|scales| scales.get_mut(place?).and_then(Option::take));
        taken.map(drop).ok_or_else(|| argument(format!("op {code} was not made by this communicator")))
    }

    /// The operation of a code, of the library's or of these.
    pub fn operation(&self, code: u32) -> Result<ReduceOp, Failure> {
        let Some(place) = code.checked_sub(FIRST) else { return codes::op(code) };
        let scale = self.with(|scales| scales.get(place as usize).copied().flatten());
        scale
            .map(ReduceOp::PreMulSum)
            .ok_or_else(|| argument(format!("op {code} is none of this communicator's")))
    }
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
        *op = handle.scales.make(Scale::new(scale))?;
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
        handle.scales.destroy(op)
    })
}
