//! The fused allreduce.

use std::ffi::c_void;

use fast_allreduce::{Collective, Norm, RawFused, RawQuantizedRows};

use crate::calls::run;
use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// What a fused allreduce does with its sum. Fields that are zero are skipped; `residual` is required. All memory is
/// disjoint, except that residual_out may be residual, and rows may be the input of the call.
#[repr(C)]
pub struct fast_allreduce_fused {
    /// Residual that is added to the sum: the number of elements of the call. Equal on all ranks unless `sum` is used.
    pub residual: *const c_void,
    /// Output: the sum plus the residual.
    pub residual_out: *mut c_void,
    /// Output: the plain sum of the ranks' inputs; null: not stored.
    pub sum: *mut c_void,
    /// How rows of residual_out are normalised: a fast_allreduce_norm; 0: not at all.
    pub norm: u32,
    /// If not 0, rows are multiplied by 1 + weight.
    pub unit_offset: u32,
    /// Added before the square root of the norm.
    pub epsilon: f32,
    /// Number of elements of a row, 1 to 65536. A message consists of whole rows.
    pub hidden: usize,
    /// Weights of the norm: `hidden` elements of the type of the call; null: rows are not multiplied.
    pub weight: *const c_void,
    /// Bias of the norm, if it has one: `hidden` elements of the type of the call; null: nothing is added.
    pub bias: *const c_void,
    /// Output: normalised rows, in the type of the call; null: not stored.
    pub rows: *mut c_void,
    /// Output: quantised rows, one byte per element or per two elements of 4 bits; null: not stored.
    pub numbers: *mut c_void,
    /// Type of `numbers`: FAST_ALLREDUCE_DTYPE_I8, _F8E4M3 or _F8E5M2; _U8 for numbers of 4 bits.
    pub numbers_dtype: u32,
    /// Format of quantised rows: a fast_allreduce_scaling.
    pub scaling: u32,
    /// Scales of the format. Input: the given float; or output: floats, or the bytes of e4m3 or E8M0. Their number and
    /// order: docs/quantized-rows.md.
    pub scales: *mut c_void,
    /// For NVFP4: a positive factor of the scales.
    pub global_scale: *const f32,
}

impl fast_allreduce_fused {
    fn raw(&self) -> Result<RawFused, Failure> {
        let quantized = match self.scaling {
            0 if self.numbers.is_null() => None,
            0 => return Err(argument("numbers is set, but scaling is 0")),
            code => Some(RawQuantizedRows {
                scaling: codes::scaling(code)?,
                dtype: codes::dtype(self.numbers_dtype)?,
                numbers: self.numbers as u64,
                scales: self.scales as u64,
                global: self.global_scale as u64,
            }),
        };
        Ok(RawFused {
            residual: self.residual as u64,
            residual_out: self.residual_out as u64,
            sum: self.sum as u64,
            norm: Norm::of_code(codes::norm(self.norm)?, self.epsilon, self.unit_offset != 0)?,
            hidden: self.hidden,
            weight: self.weight as u64,
            bias: self.bias as u64,
            rows: self.rows as u64,
            quantized,
        })
    }
}

/// Adds the sum of the ranks' inputs, `count` elements each, to a residual, and normalises and quantises rows as
/// `fused` describes. This is one call instead of an allreduce, an addition, a norm and a quantisation, with bitwise
/// the same results. The types are f16, bf16 and f32.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce; `fused` is valid for reads. The memory to which `fused` points is valid for reads
/// or writes until the call has completed.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_reduce_fused(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    count: usize,
    dtype: u32,
    fused: *const fast_allreduce_fused,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let Some(fused) = fused.as_ref() else {
            return Err(argument("fused is null"));
        };
        let (raw, buffers) = (fused.raw()?, (input, std::ptr::null_mut()));
        let which = Collective::AllReduceFused(&raw);
        run(communicator, stream, buffers, count, codes::dtype(dtype)?, which)
    })
}
