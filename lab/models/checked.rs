//! Models of call comparison: by announcements (`csrc/core/check.cuh`), and by the start signals of pulls
//! (`csrc/core/barrier.cuh`).

use loom::sync::atomic::Ordering::Relaxed;

use super::explore::{exhaustively, found, within, HANG, RACE};
use super::rank::{GaveUp, Rank, MISMATCH};
use super::region::{Rules, KERNELS};
use super::run;

/// `alike` calls that agree on all ranks, then one in which rank 0 differs.
fn calls(size: usize, alike: u64, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for call in 0..alike {
                let epoch = rank.begin(false).epoch;
                assert_eq!(rank.same_call(epoch, 10 + call), Ok(()), "a mismatch of equal calls");
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

const WRONG: [&str; 3] = ["a mismatch of equal calls", "not the calls that were made", HANG];

#[test]
fn two_ranks_compare_calls() {
    exhaustively(calls(2, 2, KERNELS));
}

#[test]
fn three_ranks_compare_calls() {
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

/// `alike` pulls that agree on all ranks, then one in which rank 0 makes a different call, with an input that
/// the others do not expect.
fn pulls(size: usize, alike: u64, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for call in 0..alike {
                rank.call = 10 + call;
                assert_eq!(rank.one_shot_pull(false), Ok(()), "a mismatch of equal calls");
            }
            rank.call = if rank.rank == 0 { 1 } else { 2 };
            assert_eq!(rank.one_shot_pull(false), Err(GaveUp), "the data of another call");
            assert_eq!(rank.own().status.failure.load(Relaxed), MISMATCH);
        });
    }
}

#[test]
fn pulls_compare_calls() {
    exhaustively(pulls(2, 1, KERNELS));
    within(1, pulls(3, 1, KERNELS));
}

#[test]
fn pulls_that_compare_nothing_are_found() {
    found(&["the data of another call"], None, pulls(2, 0, Rules { compares_calls: false, ..KERNELS }));
}

#[test]
fn calls_behind_relaxed_signals_are_found() {
    let wrong = ["a mismatch of equal calls", "the data of another call", RACE];
    found(&wrong, None, pulls(2, 1, Rules { flag_store: Relaxed, ..KERNELS }));
    found(&wrong, None, pulls(2, 1, Rules { flag_load: Relaxed, ..KERNELS }));
}
