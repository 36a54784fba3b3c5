//! Ranks that compare their calls: by announcements (`csrc/core/check.cuh`), and by the start signals of pulls (`csrc/core/barrier.cuh`).

use loom::sync::atomic::Ordering::Relaxed;

use super::explore::{exhaustively, found, within, HANG, RACE};
use super::rank::{GaveUp, Rank, MISMATCH};
use super::region::{Rules, KERNELS};
use super::run;

/// Calls that all ranks make alike, then one that rank 0 makes otherwise.
fn calls(size: usize, alike: u64, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for call in 0..alike {
                let epoch = rank.begin(false).epoch;
                assert_eq!(rank.same_call(epoch, 10 + call), Ok(()), "a mismatch that is none");
            }
            let epoch = rank.begin(false).epoch;
            let others = rank.same_call(epoch, if rank.rank == 0 { 1 } else { 2 });
            let expected = match rank.rank {
                0 => (1..rank.size()).map(|peer| (peer, 2)).collect(),
                _ => vec![(0, 1)],
            };
            assert_eq!(others, Err(expected), "not the calls that were made");
            assert_eq!(rank.own().status.failure.load(Relaxed), MISMATCH);
        });
    }
}

const WRONG: [&str; 3] = ["a mismatch that is none", "not the calls that were made", HANG];

#[test]
fn two_ranks_tell_calls_apart() {
    exhaustively(calls(2, 2, KERNELS));
}

#[test]
fn three_ranks_tell_calls_apart() {
    within(1, calls(3, 1, KERNELS));
}

#[test]
fn relaxed_announcements_are_found() {
    found(&WRONG[..2], None, calls(2, 1, Rules { flag_store: Relaxed, ..KERNELS }));
    found(&WRONG[..2], None, calls(2, 1, Rules { flag_load: Relaxed, ..KERNELS }));
}

#[test]
fn one_generation_of_announcements_is_found() {
    found(&WRONG, None, calls(2, 1, Rules { announcement_generations: 1, ..KERNELS }));
}

/// Pulls that all ranks make alike, then one that rank 0 takes for another. Its input is not what the others expect.
fn pulls(size: usize, alike: u64, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for call in 0..alike {
                rank.call = 10 + call;
                assert_eq!(rank.one_shot_pull(false), Ok(()), "a mismatch that is none");
            }
            rank.call = if rank.rank == 0 { 1 } else { 2 };
            assert_eq!(rank.one_shot_pull(false), Err(GaveUp), "the data of another call");
            assert_eq!(rank.own().status.failure.load(Relaxed), MISMATCH);
        });
    }
}

#[test]
fn pulls_tell_calls_apart() {
    exhaustively(pulls(2, 1, KERNELS));
    within(1, pulls(3, 1, KERNELS));
}

#[test]
fn pulls_that_compare_nothing_are_found() {
    found(&["the data of another call"], None, pulls(2, 0, Rules { compares_calls: false, ..KERNELS }));
}

#[test]
fn calls_behind_relaxed_signals_are_found() {
    let wrong = ["a mismatch that is none", "the data of another call", RACE];
    found(&wrong, None, pulls(2, 1, Rules { flag_store: Relaxed, ..KERNELS }));
    found(&wrong, None, pulls(2, 1, Rules { flag_load: Relaxed, ..KERNELS }));
}
