//! Measures the host time of a call relative to that of a bare launch, with a driver that launches nothing.

use std::time::Instant;

use cudarc::driver::{result, sys, CudaContext};
use fast_allreduce::{Algorithm, Collective, DType, ReduceOp};

use crate::faults::errors::alone;
use crate::fixtures::fixture::{Plain, Setup};
use crate::fixtures::gpu::{context, stand_in_of_parent};
use crate::fixtures::processes::{part, this_test, Process};

tests! {
    stand_in_of_parent => launch_path;
}

const TEST: &str = "launches::cost::launch_path";
const CALLS: u32 = 100_000;

/// Returns the nanoseconds of one call, in the fastest of five rounds.
fn nanoseconds(mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let started = Instant::now();
        (0..CALLS / 5).for_each(|_| call());
        started.elapsed().as_nanos() as f64 / f64::from(CALLS / 5)
    };
    (0..5).map(round).fold(f64::INFINITY, f64::min)
}

fn launch_path() {
    if part().is_none() {
        let mut command = this_test(TEST, "measure");
        let output = Process::start(command.env("STAND_IN_NO_LAUNCH", "1")).finish().unwrap();
        return output
            .lines()
            .filter(|line| line.contains("a call costs"))
            .for_each(|line| println!("{line}"));
    }
    let context: std::sync::Arc<CudaContext> = context(0);
    let setup = Setup::with(Algorithm::OneShotPush);
    let stream = context.new_stream().unwrap();
    let communicator = setup.try_build(context.clone(), alone()).unwrap();
    let memory = [(); 2].map(|()| Plain::new(&context, 4096));
    let bare = nanoseconds(|| {
        let nothing = std::ptr::null_mut();
        // SAFETY: this driver returns before it accesses the function or its parameters.
        unsafe {
            result::launch_kernel(
                nothing as sys::CUfunction,
                (1, 1, 1),
                (32, 1, 1),
                0,
                stream.cu_stream(),
                &mut [],
            )
        }
        .unwrap();
    });
    let raw = nanoseconds(|| {
        let [input, output] = [0, 1].map(|which: usize| memory[which].address);
        // SAFETY: both buffers have 4096 bytes, and nothing runs.
        unsafe {
            communicator.collective_raw(
                stream.cu_stream(),
                Collective::AllReduce(ReduceOp::Sum),
                input,
                output,
                1000,
                DType::F32,
            )
        }
        .unwrap();
    });
    // SAFETY: only one stream uses the slices.
    unsafe { context.disable_event_tracking() };
    let input = stream.alloc_zeros::<f32>(1000).unwrap();
    let mut output = stream.alloc_zeros::<f32>(1000).unwrap();
    let typed = nanoseconds(|| {
        communicator.all_reduce(&stream, &input, &mut output, ReduceOp::Sum).unwrap();
    });
    let (raw, typed) = (raw - bare, typed - bare);
    println!("a call costs {raw:.0} ns raw and {typed:.0} ns typed over a launch of {bare:.0} ns");
    if !cfg!(debug_assertions) {
        // The times include the look-ups of the stand-in driver.
        assert!(raw < 2000.0 && typed < 2000.0);
    }
}
