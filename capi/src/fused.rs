//! The fused allreduce.

use std::ffi::c_void;

use fast_allreduce::{Collective, Norm, RawFused, RawQuantizedRows};

use crate::calls::carry_out;
use crate::codes;
use crate::handle::fast_allreduce_communicator;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// What an allreduce does with its sum. What is zero is not done, except that there has to be a residual. Memory is disjoint, except
/// that residual_out may be residual, and rows the input of the call.
#[repr(C)]
pub struct fast_allreduce_fused {
    /// As many elements as the call has, which are added to the sum. The same on all ranks, unless there is `sum`.
    pub residual: *const c_void,
    /// Where the sum with the residual goes.
    pub residual_out: *mut c_void,
    /// Where the sum of the ranks' inputs alone goes; null: nowhere.
    pub sum: *mut c_void,
    /// How rows of residual_out are normalised, a fast_allreduce_norm; 0: not at all.
    pub norm: u32,
    /// Non-zero: rows are multiplied by 1 + weight.
    pub unit_offset: u32,
    /// What is added before the square root.
    pub epsilon: f32,
    /// Elements of a row, 1 to 65536. Messages are whole rows.
    pub hidden: usize,
    /// An element for each of a row, of the type of the call; null: rows are not multiplied.
    pub weight: *const c_void,
    /// An element for each of a row, which is added, where the norm takes that; null: nothing is added.
    pub bias: *const c_void,
    /// Where normalised rows go, in the type of the call; null: nowhere.
    pub rows: *mut c_void,
    /// Where quantised rows go: a byte for each element, or for two of 4 bits; null: nowhere.
    pub numbers: *mut c_void,
    /// FAST_ALLREDUCE_DTYPE_I8, _F8E4M3 or _F8E5M2; _U8 of numbers of 4 bits.
    pub numbers_dtype: u32,
    /// The format of quantised rows, a fast_allreduce_scaling.
    pub scaling: u32,
    /// The scales of the format: the float that is given, or where the call writes floats; bytes, with numbers of 4 bits.
    pub scales: *mut c_void,
    /// Of numbers of 4 bits, by what their scales are multiplied: a positive number.
    pub global_scale: *const f32,
}

impl fast_allreduce_fused {
    fn raw(&self) -> Result<RawFused, Failure> {
        let quantized = match self.scaling {
            0 if self.numbers.is_null() => None,
            0 => return Err(argument("numbers have no scaling")),
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

/// Adds the sum of the ranks' inputs of `count` elements to a residual, and does what else `fused` says: one call in place of an
/// allreduce, an addition, a norm and a quantisation, with the bits of these. Types are f16, bf16 and f32.
///
/// # Safety
///
/// As fast_allreduce_all_reduce; `fused` is valid for reads, and what it has the addresses of, for reads or writes, until the call
/// has ended.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_reduce_fused(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    count: usize,
    dtype: u32,
    fused: *const fast_allreduce_fused,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe {
        let Some(fused) = fused.as_ref() else {
            return Err(argument("fused is null"));
        };
        let (raw, buffers) = (fused.raw()?, (input, std::ptr::null_mut()));
        let which = Collective::AllReduceFused(&raw);
        carry_out(communicator, stream, buffers, count, codes::dtype(dtype)?, which)
    })
}
