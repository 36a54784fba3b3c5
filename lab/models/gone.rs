//! Models of waits that end without their signal: marks of ranks that have gone, aborts, and failures of
//! other blocks (`csrc/core/wait.cuh`, `src/liveness`, `Region::set_gone`).

use std::sync::Arc;

use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;

use super::explore::{exhaustively, found, HANG};
use super::rank::{GaveUp, Rank, ABORTED, GONE, MISMATCH};
use super::region::{Packets, Rules, World, KERNELS};

const RULES: Rules = Rules { limits: true, ..KERNELS };

/// Rank 1 sends its packets and leaves: it closes the pipe (a word in this model), and rank 0's watcher sees
/// that and sets the mark.
fn sends_and_leaves(rules: Rules, sends: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(2, rules);
        let pipe = Arc::new(AtomicU32::new(0));
        let watcher = {
            let (world, pipe) = (Arc::clone(&world), Arc::clone(&pipe));
            thread::spawn(move || {
                while pipe.load(Acquire) == 0 {
                    thread::yield_now();
                }
                world.heads[0].status.gone.fetch_or(1 << 1, rules.gone_store);
            })
        };
        let peer = {
            let mut peer = Rank::new(&world, 1);
            thread::spawn(move || {
                let epoch = peer.begin(false).epoch;
                if sends {
                    peer.push(epoch).unwrap();
                }
                pipe.store(1, Release);
            })
        };
        let mut rank = Rank::new(&world, 0);
        let epoch = rank.begin(false).epoch;
        let outcome = rank.collect(epoch);
        let status = &world.heads[0].status;
        if sends {
            assert_eq!(outcome, Ok(()), "a rank that has sent everything is missed");
        } else {
            assert_eq!(outcome, Err(GaveUp));
            assert_eq!((status.failure.load(Relaxed), status.missing.load(Relaxed)), (GONE, 1 << 1));
        }
        watcher.join().unwrap();
        peer.join().unwrap();
    }
}

/// Rank 2 is marked as gone while rank 0 waits for rank 1, which comes.
fn another_leaves(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(3, rules);
        let watcher = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.heads[0].status.gone.fetch_or(1 << 2, rules.gone_store);
            })
        };
        let peer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.heads[0].inbox[0][0][1].epoch.store(2, Release))
        };
        let rank = Rank::new(&world, 0);
        let word = &world.heads[0].inbox[0][0][1].epoch;
        let outcome = rank.wait_until(1, || word.load(Acquire) == 2);
        assert_eq!(outcome, Ok(()), "gave up on a rank that comes");
        watcher.join().unwrap();
        peer.join().unwrap();
    }
}

/// Rank 0 is aborted while it waits; rank 1 comes or does not.
fn abort(comes: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(2, RULES);
        let aborting = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.heads[0].status.abort.store(1, Release))
        };
        let mut peer = Rank::new(&world, 1);
        let peer = thread::spawn(move || {
            if comes {
                let epoch = peer.begin(false).epoch;
                peer.push(epoch).unwrap();
            }
        });
        let mut rank = Rank::new(&world, 0);
        let epoch = rank.begin(false).epoch;
        let outcome = rank.collect(epoch);
        let failure = world.heads[0].status.failure.load(Relaxed);
        match outcome {
            Ok(()) => assert!(comes && failure == 0),
            Err(GaveUp) => assert_eq!(failure, ABORTED),
        }
        aborting.join().unwrap();
        peer.join().unwrap();
    }
}

/// One block of rank 0 finds that rank 1 makes a different call, while another block waits for rank 1, which
/// sends nothing more.
fn blocks(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(2, rules);
        let finds = Rank::new(&world, 0);
        let other = thread::spawn(move || {
            finds.record_failure(MISMATCH, 1 << 1).unwrap_err();
        });
        let mut waits = Rank::new(&world, 0);
        let epoch = waits.begin(false).epoch;
        assert_eq!(waits.collect(epoch), Err(GaveUp));
        other.join().unwrap();
        let status = &world.heads[0].status;
        assert_eq!((status.failure.load(Relaxed), status.missing.load(Relaxed)), (MISMATCH, 1 << 1));
    }
}

/// Two blocks of rank 0 wait for rank 1, which leaves, while rank 0 is aborted; then rank 0 launches again.
fn failures(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let world = World::new(2, rules);
        let status = &world.heads[0].status;
        let leaving = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.heads[0].status.gone.fetch_or(1 << 1, rules.gone_store);
            })
        };
        let block = Rank::new(&world, 0);
        let other = thread::spawn(move || block.collect(2).unwrap_err());
        let rank = Rank::new(&world, 0);
        status.abort.store(1, Release);
        rank.collect(2).unwrap_err();
        other.join().unwrap();
        leaving.join().unwrap();
        // Of two failures at the same time either may be kept, but once the launch has ended it does not
        // change.
        let failure = status.failure.load(Relaxed);
        assert!(failure == GONE || failure == ABORTED, "failure {failure}");
        rank.collect(3).unwrap_err();
        assert_eq!(status.failure.load(Relaxed), failure, "a failure other than the first");
    }
}

#[test]
fn a_rank_that_has_sent_everything_may_leave() {
    exhaustively(sends_and_leaves(RULES, true));
    exhaustively(sends_and_leaves(Rules { packets: Packets::Words, ..RULES }, true));
}

#[test]
fn a_rank_that_leaves_without_sending_is_missed() {
    exhaustively(sends_and_leaves(RULES, false));
}

#[test]
fn another_rank_may_leave() {
    exhaustively(another_leaves(RULES));
}

#[test]
fn an_abort_ends_a_wait() {
    exhaustively(abort(false));
    exhaustively(abort(true));
}

#[test]
fn the_failure_of_a_block_ends_the_others() {
    exhaustively(blocks(RULES));
}

#[test]
fn the_failure_of_a_launch_stands() {
    exhaustively(failures(RULES));
}

const MISSED: &str = "a rank that has sent everything is missed";

#[test]
fn no_last_poll_is_found() {
    found(&[MISSED], None, sends_and_leaves(Rules { last_poll: false, ..RULES }, true));
}

#[test]
fn relaxed_marks_are_found() {
    let words = Rules { packets: Packets::Words, ..RULES };
    for rules in [RULES, words] {
        found(&[MISSED], None, sends_and_leaves(Rules { gone_store: Relaxed, ..rules }, true));
        found(&[MISSED], None, sends_and_leaves(Rules { gone_load: Relaxed, ..rules }, true));
    }
}

#[test]
fn a_mark_that_affects_all_waits_is_found() {
    found(&["gave up on a rank that comes"], None, another_leaves(Rules { gone_by_rank: false, ..RULES }));
}

#[test]
fn waits_that_outlast_a_failure_are_found() {
    found(&[HANG], None, blocks(Rules { failure_ends_waits: false, ..RULES }));
}

#[test]
fn a_failure_that_is_overwritten_is_found() {
    let found_in = failures(Rules { first_failure_stands: false, ..RULES });
    found(&["a failure other than the first"], None, found_in);
}
