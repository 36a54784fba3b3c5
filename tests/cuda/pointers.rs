//! What the raw call refuses before anything is launched.

use fast_allreduce::{DType, Error, ReduceOp};

use crate::errors::alone;
use crate::gpu::{context, gpus};
use crate::seat::{Plain, Setup};

#[test]
fn pointers_are_checked() {
    let Some(gpus) = gpus(1) else { return };
    let context_0 = context(0);
    let communicator = Setup::default().try_build(context_0.clone(), alone()).unwrap();
    let stream = context_0.new_stream().unwrap();
    let memory = Plain::new(&context_0, 4096);
    let other = Plain::new(&context_0, 4096);
    let call = |input: u64, output: u64, count: usize| {
        // SAFETY: what is not valid is refused; the rest is the test's memory.
        unsafe {
            communicator.all_reduce_raw(stream.cu_stream(), input, output, count, DType::F32, ReduceOp::Sum)
        }
    };
    let problem = |result: fast_allreduce::Result<()>| match result {
        Err(Error::InvalidPointer { which, problem, .. }) => (which, problem),
        result => panic!("not refused as a pointer: {result:?}"),
    };
    let host = [0f32; 16];
    let host = host.as_ptr() as u64;
    let (a, b) = (memory.address, other.address);
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
    if gpus.count > 1 {
        let elsewhere = Plain::new(&context(1), 4096);
        assert_eq!(problem(call(elsewhere.address, b, 4)), ("input", "memory of another device"));
        assert_eq!(problem(call(a, elsewhere.address, 4)), ("output", "memory of another device"));
    }
    assert_eq!(call(a, b, 4), Ok(()), "and nothing is broken");
    assert_eq!(communicator.synchronize(&stream), Ok(()));
}
