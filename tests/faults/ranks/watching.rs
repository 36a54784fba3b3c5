//! Departures are noticed without pidfds, even if other processes hold the ranks' descriptors.

use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Error};

use crate::fixtures::pool::Pool;
use crate::fixtures::rank::{set_descriptor_limit, Part};
use crate::fixtures::world::{builder, threads, LIMIT};

const SIZE: usize = 3;
const VICTIM: usize = 1;

/// More than the time in which a busy machine notices a departure, and less than the limit of calls.
const NOTICED: Duration = Duration::from_secs(10);

/// The ranks to which pidfds are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Without {
    None,
    All(i32),
    Victim(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Departure {
    Kill,
    Exit,
    Close,
    ForkThenKill,
    ForkThenClose,
    ForkThenAbort,
}

/// The victim leaves while the others call. Both others notice at once, and know who is left.
fn leaves(without: Without, departure: Departure) {
    let mut pool = Pool::default();
    for rank in 0..SIZE {
        match without {
            Without::All(errno) => pool.forbid(rank, libc::SYS_pidfd_open, errno),
            Without::Victim(errno) if rank == VICTIM => pool.forbid(rank, libc::SYS_pidfd_open, errno),
            _ => {}
        }
    }
    let mut parts = [Part::Endless; SIZE];
    parts[VICTIM] = match departure {
        Departure::Kill => Part::Endless,
        Departure::Exit => Part::Exit(5),
        Departure::Close => Part::Calls(5),
        Departure::ForkThenKill => Part::Fork(5),
        Departure::ForkThenClose => Part::ForkThenClose(5),
        Departure::ForkThenAbort => Part::ForkThenAbort(5),
    };
    let ranks = pool.start(Algorithm::TwoShotPull, 1, LIMIT.as_millis() as u64, &parts);
    ranks.iter().enumerate().for_each(|(rank, process)| {
        if departure == Departure::Kill || rank != VICTIM {
            process.await_line("ready");
        }
    });
    let started = Instant::now();
    let mut fork = None;
    match departure {
        Departure::Kill => ranks[VICTIM].signal(libc::SIGKILL),
        Departure::Exit | Departure::Close => {}
        _ => {
            fork = ranks[VICTIM].await_line("child").split_once(' ').map(|(child, _)| child.parse().unwrap())
        }
    }
    let context = format!("{without:?}, {departure:?}");
    let stays = matches!(departure, Departure::Close | Departure::ForkThenClose | Departure::ForkThenAbort);
    for rank in (0..SIZE).filter(|&rank| stays || rank != VICTIM) {
        let outcome = ranks[rank].outcome();
        assert!(started.elapsed() < NOTICED, "{context}: {outcome:?} after {:?}", started.elapsed());
        assert!(outcome.drop_us < NOTICED.as_micros() as u64, "{context}: {outcome:?}");
        let expected = match departure {
            Departure::Close | Departure::ForkThenClose if rank == VICTIM => ("ok", vec![]),
            Departure::ForkThenAbort if rank == VICTIM => ("other", vec![]),
            Departure::ForkThenAbort => ("failed", vec![VICTIM]),
            _ => ("lost", vec![VICTIM]),
        };
        assert_eq!((outcome.kind.as_str(), outcome.named.clone()), expected, "{context}: {outcome:?}");
        if rank != VICTIM && departure != Departure::ForkThenAbort {
            assert!(!outcome.text.contains(&format!(", {VICTIM},")), "{context}: {outcome:?}");
        }
    }
    if let Some(fork) = fork {
        // SAFETY: the fork ends by itself only after 30 s, so its process id has not been reused.
        assert_eq!(unsafe { libc::kill(fork, libc::SIGKILL) }, 0, "{context}: the fork has ended");
    }
}

#[test]
fn without_pidfds_ranks_that_end_are_noticed() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        for without in [Without::All(errno), Without::Victim(errno)] {
            for departure in [Departure::Kill, Departure::Exit, Departure::Close] {
                leaves(without, departure);
            }
        }
    }
}

#[test]
fn a_fork_that_lives_on_does_not_hide_that_its_parent_leaves() {
    for departure in [Departure::ForkThenClose, Departure::ForkThenAbort, Departure::ForkThenKill] {
        leaves(Without::None, departure);
    }
}

#[test]
fn a_fork_hides_nothing_without_pidfds_either() {
    for departure in [Departure::ForkThenClose, Departure::ForkThenAbort, Departure::ForkThenKill] {
        leaves(Without::All(libc::ENOSYS), departure);
    }
}

/// Set in the process that runs a test alone, because the limit applies to the whole process.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

/// Some sandboxes forbid further descriptors after setup.
#[test]
fn a_rank_that_may_open_nothing_more_still_notices() {
    if std::env::var_os(ALONE).is_none() {
        let name = "ranks::watching::a_rank_that_may_open_nothing_more_still_notices";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).env(ALONE, "1").stdin(Stdio::null());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{text}{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let meeting = Barrier::new(3);
    threads(
        3,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            meeting.wait();
            if rank == 1 {
                set_descriptor_limit(0);
                return;
            }
            // The departure has already woken the watcher thread, which continues under the limit.
            let started = Instant::now();
            while communicator.survivors() != [0, 2] {
                assert!(started.elapsed() < NOTICED, "{:?}", communicator.survivors());
            }
            std::thread::sleep(Duration::from_millis(100));
            if rank == 0 {
                let error = communicator.recv(&mut [0u8; 10], 2, 1).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
                assert!(started.elapsed() < NOTICED, "{:?}", started.elapsed());
            }
        },
    );
}

/// Daemons do this, and programs that close all descriptors they do not know.
#[test]
fn closed_descriptors_hold_up_no_drop() {
    let mut pool = Pool::default();
    let ranks = pool.start(
        Algorithm::OneShotPull,
        3,
        LIMIT.as_millis() as u64,
        &[Part::ReplaceDescriptors(3), Part::Endless],
    );
    let outcomes: Vec<_> = ranks.iter().map(|rank| rank.outcome()).collect();
    assert_eq!(outcomes[0].kind, "ok", "{outcomes:?}");
    assert!(outcomes[0].drop_us < 20_000_000, "{outcomes:?}");
    assert_eq!((outcomes[1].kind.as_str(), &outcomes[1].named[..]), ("lost", &[0][..]), "{outcomes:?}");
}
