//! Too little address space for a communicator: every rank gets an error, at once.

use std::time::Instant;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Host, ReduceOp};

use crate::fixtures::alone::is_alone;
use crate::fixtures::world::{builder, SOON};

/// Limits the address space to `spare` bytes more than is mapped now, or removes the limit.
fn limit_address_space(spare: Option<u64>) {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mapped = statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls access only this structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &mut limits), 0);
        limits.rlim_cur = spare.map_or(limits.rlim_max, |spare| mapped + spare);
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &limits), 0);
    }
}

#[test]
fn ranks_without_memory_have_an_error_at_once() {
    if !is_alone("environment::memory::ranks_without_memory_have_an_error_at_once", []) {
        return;
    }
    // A region of 33 MiB, which both ranks map twice.
    let mut worked = Vec::new();
    for spare in (2..=20).rev().map(|step: u64| 12 * step) {
        let ranks = Threads::world(2).unwrap();
        let meeting = std::sync::Barrier::new(3);
        let started = Instant::now();
        let built: Vec<bool> = std::thread::scope(|scope| {
            let run = |bootstrap: Threads| {
                let meeting = &meeting;
                scope.spawn(move || {
                    // The threads start before the limit applies.
                    meeting.wait();
                    meeting.wait();
                    let built = builder().max_bytes(8 << 20).build(Host::new(), bootstrap);
                    let communicator = built.map_err(|error| println!("{spare} MiB: {error}")).ok()?;
                    let mut data = [1u8; 100];
                    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [2; 100]);
                    Some(())
                })
            };
            let running: Vec<_> = ranks.into_iter().map(run).collect();
            meeting.wait();
            limit_address_space(Some(spare << 20));
            meeting.wait();
            running.into_iter().map(|rank| rank.join().unwrap().is_some()).collect()
        });
        limit_address_space(None);
        assert!(started.elapsed() < SOON, "{spare} MiB: {:?}", started.elapsed());
        assert_eq!(built[0], built[1], "{spare} MiB");
        worked.push(built[0]);
    }
    assert!(worked[0] && !worked[worked.len() - 1], "{worked:?}");
}
