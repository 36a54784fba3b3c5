//! Tests that memory is freed beside a kernel of a peer that waits for the rank that frees. The stand-in driver's
//! `cuMemFree` waits for the peers' devices, as a driver may.

use std::time::Duration;

use fast_allreduce::{Algorithm, Error, ReduceOp, Result};

use crate::faults::settings::with;
use crate::fixtures::fixture::Setup;
use crate::fixtures::gpu::{stand_in_of_parent, LIMIT};
use crate::fixtures::threads::threads;

tests! {
    stand_in_of_parent => a_buffer_is_freed_beside_a_kernel_that_waits;
}

/// Lets rank 1's kernel wait for rank 0, which frees a buffer and then makes its call. Returns the results by rank.
fn free_beside_a_kernel(timeout: Duration) -> Vec<Result<()>> {
    threads(2, 2, |rank, context| {
        let setup = Setup { timeout, ..Setup::with(Algorithm::OneShotPush) };
        let communicator = setup.try_build(context, rank).unwrap();
        let stream = communicator.device().context().new_stream().unwrap();
        let mut data = communicator.alloc::<f32>(1000).unwrap();
        let unused = communicator.alloc::<f32>(1000).unwrap();
        if communicator.rank() == 1 {
            // So rank 0 has the last reference to both ranks' memory.
            drop(unused);
            communicator.barrier().unwrap();
            communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum).unwrap();
            communicator.barrier().unwrap();
        } else {
            communicator.barrier().unwrap();
            communicator.barrier().unwrap();
            drop(unused);
            communicator.all_reduce_in_place(&stream, &mut data, ReduceOp::Sum)?;
        }
        communicator.synchronize(&stream)
    })
}

fn a_buffer_is_freed_beside_a_kernel_that_waits() {
    let test = "memory::freeing::a_buffer_is_freed_beside_a_kernel_that_waits";
    with(test, "VMM", &[], || assert_eq!(free_beside_a_kernel(LIMIT), [Ok(()), Ok(())]));
    // Without VMM the free waits for the kernel, which waits for the call after the free: until it times out.
    with(test, "no VMM", &[("STAND_IN_NO_VMM", "1")], || {
        let results = free_beside_a_kernel(Duration::from_secs(3));
        let is_late = |result: &Result<()>| matches!(result, Err(Error::Timeout { .. }));
        assert!(is_late(&results[1]), "{results:?}");
    });
}
