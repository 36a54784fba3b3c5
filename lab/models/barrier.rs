//! Models of consecutive pulls: `csrc/core/barrier.cuh`, and the accesses that it orders.

use loom::sync::atomic::Ordering::Relaxed;

use super::explore::{exhaustively, found, within, HANG, RACE};
use super::rank::Rank;
use super::region::{Rules, KERNELS};
use super::run;

fn staged(size: usize, launches: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for _ in 0..launches {
                rank.one_shot_pull(false).unwrap();
            }
        });
    }
}

/// Registered inputs, which the callers write between the launches.
fn registered(launches: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(2, rules, move |rank: &mut Rank| {
            for _ in 0..launches {
                rank.one_shot_pull(true).unwrap();
            }
        });
    }
}

/// Rank 0's input is registered and rank 1's is not, then the reverse.
fn sources(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(2, rules, |rank: &mut Rank| {
            rank.one_shot_pull(rank.rank == 0).unwrap();
            rank.one_shot_pull(rank.rank == 1).unwrap();
        });
    }
}

fn two_shot(size: usize, launches: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for _ in 0..launches {
                rank.two_shot_pull().unwrap();
            }
        });
    }
}

/// A one-shot's staging is swapped; that of the two-shots before and after it is not.
fn mixed() -> impl Fn() + Send + Sync + 'static {
    || {
        run(2, KERNELS, |rank: &mut Rank| {
            rank.two_shot_pull().unwrap();
            rank.one_shot_pull(false).unwrap();
            rank.one_shot_pull(false).unwrap();
            rank.two_shot_pull().unwrap();
        });
    }
}

#[test]
fn staged_launches_of_two_ranks() {
    exhaustively(staged(2, 3, KERNELS));
}

#[test]
fn registered_launches_of_two_ranks() {
    exhaustively(registered(2, KERNELS));
}

#[test]
fn staged_and_registered_inputs() {
    exhaustively(sources(KERNELS));
}

#[test]
fn two_shots_of_two_ranks() {
    exhaustively(two_shot(2, 2, KERNELS));
}

#[test]
fn unswapped_pulls_of_two_ranks() {
    let unswapped = Rules { swap_staging: false, ..KERNELS };
    exhaustively(staged(2, 3, unswapped));
    exhaustively(two_shot(2, 2, unswapped));
}

#[test]
fn one_shots_between_two_shots() {
    within(2, mixed());
}

#[test]
fn staged_launches_of_three_ranks() {
    within(1, staged(3, 3, KERNELS));
}

#[test]
fn a_two_shot_of_three_ranks() {
    within(1, two_shot(3, 1, KERNELS));
}

#[test]
fn relaxed_signals_are_found() {
    found(&[RACE], None, staged(2, 1, Rules { flag_store: Relaxed, ..KERNELS }));
    found(&[RACE], None, staged(2, 1, Rules { flag_load: Relaxed, ..KERNELS }));
    found(&[RACE], None, two_shot(2, 1, Rules { second_store: Relaxed, ..KERNELS }));
    found(&[RACE], Some(2), staged(3, 1, Rules { flag_store: Relaxed, ..KERNELS }));
}

#[test]
fn one_generation_of_signals_is_found() {
    found(&[HANG], None, staged(2, 2, Rules { signal_generations: 1, ..KERNELS }));
}

#[test]
fn one_generation_of_staging_is_found() {
    let one = Rules { staging_generations: 1, ..KERNELS };
    // The second launch writes where the same rank has read.
    found(&[RACE], None, staged(2, 3, one));
    found(&[RACE], None, staged(2, 2, Rules { swap_staging: false, ..one }));
    found(&[RACE], Some(2), staged(3, 2, Rules { staging_generations: 1, ..KERNELS }));
}

#[test]
fn a_registered_pull_without_its_end_barrier_is_found() {
    found(&[RACE], None, registered(2, Rules { end_barrier: false, ..KERNELS }));
}

#[test]
fn a_source_after_its_signal_is_found() {
    found(&[RACE, "wrong sum", HANG], None, sources(Rules { source_first: false, ..KERNELS }));
}
