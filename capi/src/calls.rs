//! The collectives.

use std::ffi::c_void;

use fast_allreduce::{Collective, DType, QuantizedTransport, ReduceOp};

use crate::codes;
use crate::facts::fast_allreduce_nranks;
use crate::handle::fast_allreduce_communicator;
use crate::pointers::list;
use crate::scales;
use crate::status::{fast_allreduce_status, guarded, Failure, Outcome};

/// The operation of a code.
///
/// # Safety
///
/// `communicator` is null or live.
unsafe fn operation(
    communicator: *const fast_allreduce_communicator,
    code: u32,
) -> Result<ReduceOp, Failure> {
    // SAFETY: the caller's.
    scales::operation(unsafe { fast_allreduce_communicator::of(communicator)? }, code)
}

/// Carries out a collective.
///
/// # Safety
///
/// The header's: `communicator` is live, and the buffers as the collective's function says.
unsafe fn collective(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    buffers: (*const c_void, *mut c_void),
    count: usize,
    dtype: u32,
    which: impl FnOnce() -> Result<Collective<'static>, Failure>,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe { carry_out(communicator, stream, buffers, count, codes::dtype(dtype)?, which()?) })
}

/// # Safety
///
/// As [`collective`].
pub unsafe fn carry_out(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    (input, output): (*const c_void, *mut c_void),
    count: usize,
    dtype: DType,
    which: Collective<'_>,
) -> Outcome {
    // SAFETY: the caller's.
    unsafe {
        let handle = fast_allreduce_communicator::of(communicator)?;
        Ok(handle.any.collective(stream as u64, which, [input as u64, output as u64], count, dtype)?)
    }
}

/// Reduces the ranks' inputs of `count` elements, element by element, into every rank's output. In place: the same pointer
/// twice. On the host `stream` is null, in this and all calls, and the call has ended when it returns. On a GPU it is a
/// CUstream of the GPU's primary context, on which the call is put: fast_allreduce_synchronize waits for it and says whether it
/// succeeded.
///
/// # Safety
///
/// `communicator` is live, `input` valid for reads and `output` for writes of that many elements of `dtype`, until the call
/// has ended; nobody else writes the one or accesses the other meanwhile. So too for all calls.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_reduce(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::AllReduce(operation(communicator, op)?))
        })
    }
}

/// Sums the ranks' inputs of `count` elements into every rank's output, moving about a byte for each element: for links that are
/// slow. `transport` is a fast_allreduce_transport; types are f16, bf16 and f32. No element is further from the exact sum than
/// `tolerance` times the sum over the ranks of the largest magnitude among the 32 elements of its group; a tolerance that the
/// transport cannot keep is refused, with what it can. The result is the same on all ranks. In place: the same pointer twice.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_reduce_quantized(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    transport: u32,
    tolerance: f32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            let transport = codes::transport(transport)?;
            Ok(Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance }))
        })
    }
}

/// Brings the ranks' inputs of `count` elements, one after the other, into every rank's output. In place: the input is this
/// rank's share of the output.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe { collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::AllGather)) }
}

/// The same with `counts[r]` elements from rank r.
///
/// # Safety
///
/// As fast_allreduce_all_reduce; `counts` is valid for reads of a number for each rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather_v(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let which = Collective::AllGatherV(counts);
        carry_out(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// Reduces the ranks' inputs, which have a share of `count` elements for each rank, and brings share r to rank r. In place:
/// the output is this rank's share of the input.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_reduce_scatter(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::ReduceScatter(operation(communicator, op)?))
        })
    }
}

/// The same with `counts[r]` elements for rank r.
///
/// # Safety
///
/// As fast_allreduce_all_gather_v.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_reduce_scatter_v(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let which = Collective::ReduceScatterV(operation(communicator, op)?, counts);
        carry_out(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// Copies `count` elements at the root's `data` to that of all ranks.
///
/// # Safety
///
/// As fast_allreduce_all_reduce, for reads and writes of `data`.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_broadcast(
    communicator: *const fast_allreduce_communicator,
    data: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (data, data), count, dtype, || Ok(Collective::Broadcast { root }))
    }
}

/// Reduces the ranks' inputs of `count` elements into the root's output. That of others may be null.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_reduce(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    root: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::Reduce { op: operation(communicator, op)?, root })
        })
    }
}

/// Brings the ranks' inputs of `count` elements, one after the other, into the root's output. That of others may be null.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_gather(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::Gather { root }))
    }
}

/// Brings share r of the root's input, of `count` elements, to rank r. The input of others may be null.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_scatter(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::Scatter { root }))
    }
}

/// Brings share r of every rank's input, of `count` elements, to rank r, in the order of the ranks. Not in place.
///
/// # Safety
///
/// As fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_to_all(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    unsafe { collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::AllToAll)) }
}

/// The same with `send_counts[r]` elements for rank r, and `receive_counts[r]` from it.
///
/// # Safety
///
/// As fast_allreduce_all_reduce; both lists are valid for reads of a number for each rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_to_all_v(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    send_counts: *const usize,
    output: *mut c_void,
    receive_counts: *const usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe {
        let nranks = fast_allreduce_nranks(communicator);
        let send = list("send_counts", send_counts, nranks)?;
        let receive = list("receive_counts", receive_counts, nranks)?;
        let which = Collective::AllToAllV { send, receive };
        carry_out(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// No rank comes back before all have called it; on a GPU what is on the stream after it waits so long.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_barrier(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
) -> fast_allreduce_status {
    let nothing = (std::ptr::null(), std::ptr::null_mut());
    // SAFETY: the caller's; a barrier looks at no buffer.
    unsafe { collective(communicator, stream, nothing, 0, DType::U8 as u32, || Ok(Collective::Barrier)) }
}

/// Says whether the calls so far succeeded, also those on streams that nobody has waited for, as far as is known by now. It waits for
/// nothing.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_check(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller's.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        Ok(handle.any.check()?)
    })
}

/// Waits for the work on `stream`, and says whether the calls so far succeeded: after it the results of those on the stream may be used.
/// FAST_ALLREDUCE_STATUS_UNAVAILABLE for a stream that is being captured, which goes on. On the host it is fast_allreduce_check.
///
/// # Safety
///
/// `communicator` is live, and `stream` as for the calls.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_synchronize(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller's.
    guarded(|| unsafe { Ok(fast_allreduce_communicator::of(communicator)?.any.synchronize(stream as u64)?) })
}
