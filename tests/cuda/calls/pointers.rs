//! Tests which pointers the raw call refuses before it launches anything.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fast_allreduce::{Collective, Communicator, Cuda, DType, Error, ReduceOp, Result};

use crate::faults::errors::alone;
use crate::fixtures::fixture::{Plain, Setup};
use crate::fixtures::gpu::{context, gpu, two_gpus};

tests! {
    gpu => pointers_are_checked;
    two_gpus => memory_of_another_gpu_is_refused;
}

/// A communicator with a stream and two buffers of 4096 bytes.
struct Caller {
    communicator: Communicator<Cuda>,
    stream: Arc<CudaStream>,
    memory: [Plain; 2],
}

impl Caller {
    fn new() -> Self {
        let context = context(0);
        Self {
            communicator: Setup::default().try_build(context.clone(), alone()).unwrap(),
            stream: context.new_stream().unwrap(),
            memory: [(); 2].map(|()| Plain::new(&context, 4096)),
        }
    }

    fn call(&self, input: u64, output: u64, count: usize) -> Result<()> {
        let stream = self.stream.cu_stream();
        // SAFETY: invalid pointers are refused; the others are to the test's memory.
        unsafe {
            self.communicator.collective_raw(
                stream,
                Collective::AllReduce(ReduceOp::Sum),
                input,
                output,
                count,
                DType::F32,
            )
        }
    }

    /// Checks that a valid call succeeds after the refused ones.
    fn is_not_broken(&self) {
        let [a, b] = [0, 1].map(|at: usize| self.memory[at].address);
        assert_eq!(self.call(a, b, 4), Ok(()), "the communicator still works");
        assert_eq!(self.communicator.synchronize(&self.stream), Ok(()));
    }
}

fn problem(result: Result<()>) -> (&'static str, &'static str) {
    match result {
        Err(Error::InvalidPointer { which, problem, .. }) => (which, problem),
        result => panic!("not refused as a pointer: {result:?}"),
    }
}

fn pointers_are_checked() {
    let caller = Caller::new();
    let call = |input, output, count| caller.call(input, output, count);
    let host = [0f32; 16];
    let host = host.as_ptr() as u64;
    let [a, b] = [0, 1].map(|at: usize| caller.memory[at].address);
    assert_eq!(problem(call(0, b, 4)), ("input", "null"));
    assert_eq!(problem(call(a, 0, 4)), ("output", "null"));
    assert_eq!(problem(call(a + 2, b, 4)), ("input", "not aligned to its element"));
    assert_eq!(problem(call(a, b + 1, 4)), ("output", "not aligned to its element"));
    assert_eq!(problem(call(host, b, 4)), ("input", "not device memory"));
    assert_eq!(problem(call(a, host, 4)), ("output", "not device memory"));
    assert_eq!(problem(call(u64::MAX - 3, b, 4)), ("input", "too near the end of the address space"));
    assert!(matches!(call(a, a + 4, 4), Err(Error::Overlap { .. })));
    assert!(matches!(call(a + 8, a, 4), Err(Error::Overlap { .. })));
    assert!(matches!(call(a, b, usize::MAX), Err(Error::InvalidSetting { name: "count", .. })));
    assert_eq!(call(0, 0, 0), Ok(()), "nothing to reduce");
    caller.is_not_broken();
}

fn memory_of_another_gpu_is_refused() {
    let caller = Caller::new();
    let elsewhere = Plain::new(&context(1), 4096);
    let [a, b] = [0, 1].map(|at: usize| caller.memory[at].address);
    assert_eq!(problem(caller.call(elsewhere.address, b, 4)), ("input", "memory of another device"));
    assert_eq!(problem(caller.call(a, elsewhere.address, 4)), ("output", "memory of another device"));
    caller.is_not_broken();
}
