//! System calls that sandboxes refuse: ranks work without them, or all ranks get an error in time.

use std::time::{Duration, Instant};

use fast_allreduce::Algorithm;

use crate::fixtures::pool::{Outcome, Pool};
use crate::fixtures::rank::Part;
use crate::fixtures::world::LIMIT;

const SIZE: usize = 3;
const VICTIM: usize = 1;

/// Far below the limit, yet enough on a busy machine.
const IN_TIME: Duration = Duration::from_secs(30);

/// Runs a world in which some ranks are refused some system calls. Returns the outcomes by rank.
fn outcomes(refused: &[i64], errno: i32, is_refused: impl Fn(usize) -> bool) -> Vec<Outcome> {
    let mut pool = Pool::default();
    for rank in (0..SIZE).filter(|&rank| is_refused(rank)) {
        refused.iter().for_each(|&call| pool.forbid(rank, call, errno));
    }
    let parts = [Part::Calls(40); SIZE];
    let ranks = pool.start(Algorithm::TwoShotPull, 7, LIMIT.as_millis() as u64, &parts);
    ranks.iter().map(|rank| rank.outcome()).collect()
}

/// A server that runs beside the tests may have its metrics there, in a directory with another name.
fn left_in_shared_memory() -> Vec<String> {
    let entries = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("fast-allreduce") && !name.contains("-vllm-")).collect()
}

#[test]
fn memory_is_shared_without_memfd_create_and_fallocate() {
    let all: [&[i64]; 3] =
        [&[libc::SYS_memfd_create], &[libc::SYS_fallocate], &[libc::SYS_memfd_create, libc::SYS_fallocate]];
    for refused in all {
        for errno in [libc::EPERM, libc::ENOSYS] {
            for one in [false, true] {
                for outcome in outcomes(refused, errno, |rank| !one || rank == VICTIM) {
                    let what = format!("{refused:?}, {errno}, of one rank: {one}");
                    assert_eq!((outcome.kind.as_str(), outcome.calls), ("ok", 40), "{what}: {outcome:?}");
                }
            }
        }
    }
    assert_eq!(left_in_shared_memory(), [""; 0]);
}

/// Without memfd_create, memory comes from files in /dev/shm that never have a name.
#[test]
fn killed_ranks_leave_nothing_in_shared_memory() {
    let mut pool = Pool::default();
    (0..SIZE).for_each(|rank| pool.forbid(rank, libc::SYS_memfd_create, libc::EPERM));
    let ranks = pool.start(Algorithm::TwoShotPull, 7, LIMIT.as_millis() as u64, &[Part::Endless; SIZE]);
    ranks.iter().for_each(|rank| _ = rank.await_line("ready"));
    assert_eq!(left_in_shared_memory(), [""; 0]);
    ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
    drop(pool);
    assert_eq!(left_in_shared_memory(), [""; 0]);
}

/// System calls that old kernels lack, or whose results are only informative.
#[test]
fn ranks_work_without_optional_system_calls() {
    let calls = [
        libc::SYS_accept4,
        libc::SYS_getrandom,
        libc::SYS_sched_getaffinity,
        libc::SYS_madvise,
        libc::SYS_process_vm_readv,
        libc::SYS_get_robust_list,
        libc::SYS_prlimit64,
        libc::SYS_sched_yield,
        libc::SYS_flock,
        libc::SYS_prctl,
    ];
    for call in calls {
        for errno in [libc::EPERM, libc::ENOSYS] {
            for outcome in outcomes(&[call], errno, |_| true) {
                let outcome_of = (outcome.kind.as_str(), outcome.calls);
                assert_eq!(outcome_of, ("ok", 40), "{call}, {errno}: {outcome:?}");
            }
        }
    }
}

/// System calls without an alternative.
#[test]
fn a_call_that_is_refused_to_one_rank_is_an_error_on_all() {
    let calls = [
        (libc::SYS_bind, "bind"),
        (libc::SYS_listen, "listen"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_socketpair, "socketpair"),
        (libc::SYS_eventfd2, "eventfd"),
        (libc::SYS_epoll_create1, "epoll_create"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
    ];
    for (call, name) in calls {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let started = Instant::now();
            for (rank, outcome) in outcomes(&[call], errno, |rank| rank == VICTIM).iter().enumerate() {
                let what = format!("{name}, {errno}, rank {rank}: {outcome:?}");
                match rank {
                    VICTIM => assert!(outcome.kind == "other" && outcome.text.contains(name), "{what}"),
                    _ => {
                        assert!(["failed", "lost"].contains(&outcome.kind.as_str()), "{what}");
                        assert_eq!(outcome.named, [VICTIM], "{what}");
                    }
                }
            }
            assert!(started.elapsed() < IN_TIME, "{name}, {errno}: {:?}", started.elapsed());
        }
    }
}
