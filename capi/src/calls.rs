//! The collectives.

use std::ffi::c_void;

use fast_allreduce::{Collective, DType, QuantizedTransport, ReduceOp};

use crate::codes;
use crate::facts::fast_allreduce_nranks;
use crate::handle::fast_allreduce_communicator;
use crate::pointers::list;
use crate::scales;
use crate::status::{fast_allreduce_status, guarded, Failure, Outcome};

/// Converts a code to an operation.
///
/// # Safety
///
/// `communicator` is null or live.
unsafe fn operation(
    communicator: *const fast_allreduce_communicator,
    code: u32,
) -> Result<ReduceOp, Failure> {
    // SAFETY: the caller guarantees it.
    scales::operation(unsafe { fast_allreduce_communicator::of(communicator)? }, code)
}

/// Runs a collective, and converts its outcome to a status.
///
/// # Safety
///
/// `communicator` is null or live, and the buffers are as the header requires for the collective.
unsafe fn collective(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    buffers: (*const c_void, *mut c_void),
    count: usize,
    dtype: u32,
    which: impl FnOnce() -> Result<Collective<'static>, Failure>,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe { run(communicator, stream, buffers, count, codes::dtype(dtype)?, which()?) })
}

/// Runs a collective.
///
/// # Safety
///
/// That of [`collective`].
pub unsafe fn run(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
    (input, output): (*const c_void, *mut c_void),
    count: usize,
    dtype: DType,
    which: Collective<'_>,
) -> Outcome {
    // SAFETY: the caller guarantees it.
    unsafe {
        let handle = fast_allreduce_communicator::of(communicator)?;
        Ok(handle.any.collective(stream as u64, which, [input as u64, output as u64], count, dtype)?)
    }
}

/// Reduces the inputs of all ranks, `count` elements each, element by element into every rank's output. In place: input
/// and output are the same pointer.
///
/// In this and all other calls: on the host, `stream` is null, and the call has completed when the function returns. On
/// a GPU, `stream` is a CUstream of the GPU's primary context, on which the call is enqueued;
/// fast_allreduce_synchronize waits for it and returns whether it succeeded.
///
/// # Safety
///
/// `communicator` is live. Until the call has completed, `input` is valid for reads and `output` for writes of this
/// number of elements of `dtype`, and nobody else writes to `input` or accesses `output`. The same holds for all calls.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::AllReduce(operation(communicator, op)?))
        })
    }
}

/// Sums the inputs of all ranks, `count` elements each, into every rank's output, and moves about one byte per element:
/// for slow links. `transport` is a fast_allreduce_transport; the types are f16, bf16 and f32.
///
/// The error of an element is at most `tolerance` times the sum over the ranks of the largest magnitude among the 32
/// elements of its group. A tolerance that the transport cannot guarantee is refused; the text of the error says what
/// it guarantees. The result is bitwise equal on all ranks. In place: input and output are the same pointer.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            let transport = codes::transport(transport)?;
            Ok(Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance }))
        })
    }
}

/// Gathers the inputs of all ranks, `count` elements each, in rank order into every rank's output. In place: the input
/// is this rank's share of the output.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    unsafe { collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::AllGather)) }
}

/// Gathers the inputs of all ranks like fast_allreduce_all_gather, with `counts[r]` elements from rank r.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce; `counts` is valid for reads of one number per rank.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_gather_v(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let which = Collective::AllGatherV(counts);
        run(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// Reduces the inputs of all ranks, which have a share of `count` elements for each rank, and stores share r in the
/// output of rank r. In place: the output is this rank's share of the input.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::ReduceScatter(operation(communicator, op)?))
        })
    }
}

/// Reduces and scatters like fast_allreduce_reduce_scatter, with `counts[r]` elements for rank r.
///
/// # Safety
///
/// That of fast_allreduce_all_gather_v.
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
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let counts = list("counts", counts, fast_allreduce_nranks(communicator))?;
        let which = Collective::ReduceScatterV(operation(communicator, op)?, counts);
        run(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// Copies `count` elements from the root's `data` to the `data` of all other ranks.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce, for reads and writes of `data`.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_broadcast(
    communicator: *const fast_allreduce_communicator,
    data: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (data, data), count, dtype, || Ok(Collective::Broadcast { root }))
    }
}

/// Reduces the inputs of all ranks, `count` elements each, into the root's output. The output of other ranks may be
/// null.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || {
            Ok(Collective::Reduce { op: operation(communicator, op)?, root })
        })
    }
}

/// Gathers the inputs of all ranks, `count` elements each, in rank order into the root's output. The output of other
/// ranks may be null.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::Gather { root }))
    }
}

/// Copies share r of the root's input, of `count` elements, to the output of rank r. The input of other ranks may be
/// null.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
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
    // SAFETY: the caller guarantees it.
    unsafe {
        collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::Scatter { root }))
    }
}

/// Copies share r of every rank's input, of `count` elements, to the output of rank r, in rank order. Not in place.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_all_to_all(
    communicator: *const fast_allreduce_communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    unsafe { collective(communicator, stream, (input, output), count, dtype, || Ok(Collective::AllToAll)) }
}

/// Exchanges shares like fast_allreduce_all_to_all, with `send_counts[r]` elements for rank r and `receive_counts[r]`
/// elements from rank r.
///
/// # Safety
///
/// That of fast_allreduce_all_reduce; both lists are valid for reads of one number per rank.
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
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe {
        let nranks = fast_allreduce_nranks(communicator);
        let send = list("send_counts", send_counts, nranks)?;
        let receive = list("receive_counts", receive_counts, nranks)?;
        let which = Collective::AllToAllV { send, receive };
        run(communicator, stream, (input, output), 0, codes::dtype(dtype)?, which)
    })
}

/// Waits until all ranks have called this. On a GPU, the wait is on the stream: later work on it starts after all ranks
/// have reached the barrier.
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
    // SAFETY: the caller guarantees it; a barrier accesses no buffer.
    unsafe { collective(communicator, stream, nothing, 0, DType::U8 as u32, || Ok(Collective::Barrier)) }
}

/// Returns whether the calls so far have succeeded, as far as is known, including calls on streams that nobody has
/// waited for. It does not wait.
///
/// # Safety
///
/// `communicator` is live.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_check(
    communicator: *const fast_allreduce_communicator,
) -> fast_allreduce_status {
    guarded(|| {
        // SAFETY: the caller guarantees it.
        let handle = unsafe { fast_allreduce_communicator::at_any_time(communicator)? };
        Ok(handle.any.check()?)
    })
}

/// Waits for the work on `stream`, and returns whether the calls so far have succeeded. After success, the results of
/// the calls on the stream may be used. It returns FAST_ALLREDUCE_STATUS_UNAVAILABLE if the stream is being captured;
/// the capture goes on. On the host it is the same as fast_allreduce_check.
///
/// # Safety
///
/// `communicator` is live, and `stream` is as for the calls.
#[no_mangle]
pub unsafe extern "C" fn fast_allreduce_synchronize(
    communicator: *const fast_allreduce_communicator,
    stream: *mut c_void,
) -> fast_allreduce_status {
    // SAFETY: the caller guarantees it.
    guarded(|| unsafe { Ok(fast_allreduce_communicator::of(communicator)?.any.synchronize(stream as u64)?) })
}
