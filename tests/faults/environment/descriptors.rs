//! Descriptors run out while a communicator is in use: all ranks get an error, and existing buffers remain valid.

use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Instant;

use fast_allreduce::ReduceOp;

use crate::fixtures::rank::{limit_descriptors, set_descriptor_limit};
use crate::fixtures::world::{builder, threads, SOON};

/// Set in the process that runs the test alone, because the limit applies to the whole process.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

#[test]
fn a_buffer_without_descriptors_is_an_error_on_all_ranks() {
    if std::env::var_os(ALONE).is_none() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "environment::descriptors::a_buffer_without_descriptors_is_an_error_on_all_ranks",
                "--nocapture",
            ])
            .env(ALONE, "1")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{text}");
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let meeting = Barrier::new(3);
    let worked = threads(
        3,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            let mut kept = communicator.alloc::<u32>(500).unwrap();
            let mut worked = Vec::new();
            for spare in (0..24).rev() {
                meeting.wait();
                let limit = (rank == 0).then(|| limit_descriptors(spare));
                meeting.wait();
                let started = Instant::now();
                let made = communicator.alloc::<u32>(700);
                assert!(started.elapsed() < SOON, "{spare} descriptors: {:?}", started.elapsed());
                meeting.wait();
                limit.map(set_descriptor_limit);
                meeting.wait();
                worked.push(made.as_ref().map(drop).map_err(ToString::to_string));
                // Existing buffers still work, and new ones can be allocated again.
                for buffer in [&mut kept, &mut communicator.alloc::<u32>(300).unwrap()] {
                    buffer.fill(1 + rank as u32);
                    communicator.all_reduce_in_place(buffer, ReduceOp::Sum).unwrap();
                    assert!(buffer.iter().all(|&element| element == 6), "{spare} descriptors");
                }
            }
            worked
        },
    );
    for (spare, of_rank) in (0..24).rev().zip(0..) {
        let results = [0, 1, 2].map(|rank: usize| &worked[rank][of_rank]);
        let is_same = results.iter().all(|result| result.is_ok() == results[0].is_ok());
        assert!(is_same, "{spare} descriptors: {results:?}");
        let says_so =
            results.iter().any(|result| result.as_ref().is_err_and(|error| error.contains("EMFILE")));
        assert!(results[0].is_ok() || says_so, "{spare} descriptors: {results:?}");
    }
    assert!(worked[0][0].is_ok() && worked[0][23].is_err(), "{:?}", worked[0]);
}
