//! The fused allreduce and reduce-scatters, gathers of quantised rows, and norms of divided rows.

use std::ffi::c_void;

use fast_allreduce::{
    Collective, DType, Norm, RawExperts, RawFused, RawGatheredRows, RawQuantizedRows, RawShardedRows,
};

use crate::calls::run;
use crate::codes;
use crate::facts::fast_allreduce_nranks;
use crate::handle::fast_allreduce_communicator;
use crate::pointers::list;
use crate::status::{argument, fast_allreduce_status, guarded, Failure};

/// The end of a mixture of experts: the input of a fused allreduce is computed from rows of experts. The input of the
/// call is those rows, and the number of elements of the call is that of the residual. Each rank has its own experts;
/// all ranks have experts, or none has.
#[repr(C)]
pub struct fast_allreduce_experts {
    /// `top_k` numbers for each row of the message: an experts' row, or negative for none.
    pub table: *const i32,
    /// Number of experts of a row: 1 to 64.
    pub top_k: usize,
    /// Number of experts' rows, of `hidden` elements each.
    pub rows: usize,
    /// Factors of the rows, one for each number in the table; null: all ones.
    pub weights: *const c_void,
    /// Type of `weights`: FAST_ALLREDUCE_DTYPE_F32, or the type of the call.
    pub weights_dtype: u32,
    /// Factor of the sum of the weighted rows, before the shared row is added; 0: none, as 1.
    pub routed_scale: f32,
    /// Rows of a shared expert: the number of elements of the call; null: none.
    pub shared: *const c_void,
}

/// What a fused call does with its sum. Fields that are zero are skipped; `residual` is required. All memory is
/// disjoint, except that residual_out may be residual, and that rows or, without sum, residual_out may be the input of
/// the call without experts; in a reduce-scatter, the rank's own share of the input. A norm needs rows or numbers.
#[repr(C)]
pub struct fast_allreduce_fused {
    /// Residual that is added to the sum: the number of elements of the call, or of the own share. In an allreduce it
    /// is equal on all ranks, unless `sum` is used.
    pub residual: *const c_void,
    /// Output: the sum plus the residual.
    pub residual_out: *mut c_void,
    /// Output: the plain sum of the ranks' inputs; null: not stored. A reduce-scatter refuses it.
    pub sum: *mut c_void,
    /// How rows of residual_out are normalised: a fast_allreduce_norm; 0: not at all.
    pub norm: u32,
    /// If not 0, rows are multiplied by 1 + weight.
    pub unit_offset: u32,
    /// Added before the square root of the norm: a finite number of at least 0.
    pub epsilon: f32,
    /// Number of elements of a row, 1 to 65536. A message consists of whole rows.
    pub hidden: usize,
    /// Weights of the norm: `hidden` elements of the type of the call; null: rows are not multiplied.
    pub weight: *const c_void,
    /// Bias of the norm, if it has one: `hidden` elements of the type of the call; null: nothing is added.
    pub bias: *const c_void,
    /// Output: normalised rows, in the type of the call; null: not stored. Beside numbers, it is null on all ranks or
    /// on none, also on those without rows.
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
    /// Experts from whose rows the input is computed; null: the input is read as it is. A reduce-scatter refuses
    /// experts.
    pub experts: *const fast_allreduce_experts,
}

impl fast_allreduce_fused {
    /// # Safety
    ///
    /// `experts` is null or valid for reads.
    unsafe fn raw(&self) -> Result<RawFused, Failure> {
        // SAFETY: the caller guarantees it.
        let experts = match unsafe { self.experts.as_ref() } {
            None => None,
            Some(experts) => Some(RawExperts {
                table: experts.table as u64,
                top_k: experts.top_k,
                rows: experts.rows,
                weights: experts.weights as u64,
                weights_dtype: match experts.weights.is_null() {
                    true => DType::F32,
                    false => codes::dtype(experts.weights_dtype)?,
                },
                shared: experts.shared as u64,
                // A struct that is filled with zeros has no factor.
                routed_scale: if experts.routed_scale == 0.0 { 1.0 } else { experts.routed_scale },
            }),
        };
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
            experts,
        })
    }
}

/// Adds the sum of the ranks' inputs, `count` elements each, to a residual, and normalises and quantises rows as
/// `fused` describes. This is one call instead of an allreduce, an addition, a norm and a quantisation, with bitwise
/// the same results. The types are f16, bf16 and f32.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce; `fused` and its `experts` are valid for reads. The memory to which they point is
/// valid for reads or writes until the call has completed.
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
        let raw = raw(fused)?;
        let (which, buffers) = (Collective::AllReduceFused(&raw), (input, std::ptr::null_mut()));
        run(communicator, stream, buffers, count, codes::dtype(dtype)?, which)
    })
}

/// Sums the ranks' inputs, and applies `fused` to share r of the sum on rank r. The input has `count` elements for each
/// rank. The residual and the results are those of the own share, with the bits of fast_allreduce_all_reduce_fused.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce_fused, where the input has `count` elements for each rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_reduce_scatter_fused(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    count: usize,
    dtype: u32,
    fused: *const fast_allreduce_fused,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let raw = raw(fused)?;
        let (which, buffers) = (Collective::ReduceScatterFused(&raw), (input, std::ptr::null_mut()));
        run(communicator, stream, buffers, count, codes::dtype(dtype)?, which)
    })
}

/// Reduces like fast_allreduce_reduce_scatter_fused, with `counts[r]` elements for rank r: whole rows, possibly none.
///
/// # Safety
///
/// That of fast_allreduce_reduce_scatter_fused; `counts` has one number for each rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_reduce_scatter_fused_v(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    counts: *const usize,
    dtype: u32,
    fused: *const fast_allreduce_fused,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let raw = raw(fused)?;
        let (which, buffers) = (Collective::ReduceScatterFusedV(&raw, counts), (input, std::ptr::null_mut()));
        run(communicator, stream, buffers, 0, codes::dtype(dtype)?, which)
    })
}

/// Quantised rows that are gathered. All memory is disjoint, except that numbers may be the own share of all_numbers.
#[repr(C)]
pub struct fast_allreduce_gathered_rows {
    /// Format of the rows: a fast_allreduce_scaling whose scales are written.
    pub scaling: u32,
    /// Type of the numbers, as in fast_allreduce_fused.
    pub numbers_dtype: u32,
    /// Number of elements of a row.
    pub hidden: usize,
    /// Numbers of this rank's rows, and their scales, placed as in a message that has only these rows.
    pub numbers: *const c_void,
    pub scales: *const c_void,
    /// Outputs: numbers and scales of all ranks' rows.
    pub all_numbers: *mut c_void,
    pub all_scales: *mut c_void,
}

/// Gathers quantised rows: `count` bytes of numbers of each rank, in rank order, and their scales in the layout of one
/// message.
///
/// # Safety
///
/// That of fast_allreduce_all_gather; `rows` is valid for reads. The memory to which it points is valid for reads or
/// writes until the call has completed.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather_rows(
    communicator: *const fast_allreduce_communicator,
    rows: *const fast_allreduce_gathered_rows,
    count: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let (raw, buffers, dtype) = gathered(rows)?;
        run(communicator, stream, buffers, count, codes::dtype(dtype)?, Collective::AllGatherRows(&raw))
    })
}

/// Gathers like fast_allreduce_all_gather_rows, with `counts[r]` bytes of numbers of rank r: whole rows, possibly none.
///
/// # Safety
///
/// That of fast_allreduce_all_gather_rows; `counts` has one number for each rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather_rows_v(
    communicator: *const fast_allreduce_communicator,
    rows: *const fast_allreduce_gathered_rows,
    counts: *const usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let (raw, buffers, dtype) = gathered(rows)?;
        let which = Collective::AllGatherRowsV(&raw, counts);
        run(communicator, stream, buffers, 0, codes::dtype(dtype)?, which)
    })
}

/// A part of rows whose elements are divided among the ranks: the columns that this rank has of the rows of a norm.
/// All memory is disjoint, except that output may be input if their strides are equal, and that parts may be different
/// columns of the same rows.
#[repr(C)]
pub struct fast_allreduce_sharded_rows {
    /// This rank's elements of the first row.
    pub input: *const c_void,
    /// Output: these elements, normalised.
    pub output: *mut c_void,
    /// Number of elements from a row of input to the next.
    pub input_stride: usize,
    /// Number of elements from a row of output to the next.
    pub output_stride: usize,
    /// Number of elements of a row that this rank has, 0 to 65536. It may differ among ranks.
    pub columns: usize,
    /// Number of elements of a row on all ranks, at most 1048576: what the mean of the squares is over.
    pub total: usize,
    /// Weights: `columns` elements of the type of the call; null: rows are not multiplied.
    pub weight: *const c_void,
    /// Added before the square root of the norm.
    pub epsilon: f32,
    /// If not 0, rows are multiplied by 1 + weight.
    pub unit_offset: u32,
}

/// Normalises `rows` rows whose elements are divided among the ranks, by RMSNorm over the whole rows. `parts` has
/// `parts_count` parts of each row, one or two on all ranks, which are normalised independently. The types are f16,
/// bf16 and f32.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce, without its buffers; `parts` is valid for reads. The memory to which `parts`
/// points is valid for reads or writes until the call has completed.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_sharded_rms_norm(
    communicator: *const fast_allreduce_communicator,
    parts: *const fast_allreduce_sharded_rows,
    parts_count: usize,
    rows: usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        if parts.is_null() || !(1..=2).contains(&parts_count) {
            return Err(argument("parts is null, or parts_count is not 1 or 2"));
        }
        let mut raw = [RawShardedRows::in_place(0, 0); 2];
        for (raw, part) in raw.iter_mut().zip(std::slice::from_raw_parts(parts, parts_count)) {
            *raw = RawShardedRows {
                input: part.input as u64,
                output: part.output as u64,
                input_stride: part.input_stride,
                output_stride: part.output_stride,
                columns: part.columns,
                total: part.total,
                weight: part.weight as u64,
                epsilon: part.epsilon,
                unit_offset: part.unit_offset != 0,
            };
        }
        let which = Collective::ShardedRmsNorm(&raw[..parts_count]);
        run(communicator, stream, (std::ptr::null(), std::ptr::null_mut()), rows, codes::dtype(dtype)?, which)
    })
}

type Buffers = (*const c_void, *mut c_void);

/// Returns the rows, the numbers, and the code of their type.
///
/// # Safety
///
/// `rows` is null or valid for reads.
unsafe fn gathered(
    rows: *const fast_allreduce_gathered_rows,
) -> Result<(RawGatheredRows, Buffers, u32), Failure> {
    // SAFETY: the caller's obligation.
    let rows = unsafe { rows.as_ref() }.ok_or_else(|| argument("rows is null"))?;
    let raw = RawGatheredRows {
        scaling: codes::scaling(rows.scaling)?,
        hidden: rows.hidden,
        scales: rows.scales as u64,
        all_scales: rows.all_scales as u64,
    };
    Ok((raw, (rows.numbers, rows.all_numbers), rows.numbers_dtype))
}

/// # Safety
///
/// `fused` is null or valid for reads, and so are its experts.
unsafe fn raw(fused: *const fast_allreduce_fused) -> Result<RawFused, Failure> {
    // SAFETY: the caller's obligation.
    let fused = unsafe { fused.as_ref() }.ok_or_else(|| argument("fused is null"))?;
    // SAFETY: the caller's obligation.
    unsafe { fused.raw() }
}
