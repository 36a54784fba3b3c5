//! Models of pushes: `csrc/core/packet.cuh`, alone and between pulls.

use loom::sync::atomic::Ordering::Relaxed;

use super::explore::{exhaustively, found, within, HANG, RACE};
use super::rank::Rank;
use super::region::{Count, Packets, Rules, KERNELS};
use super::run;

const WORDS: Rules = Rules { packets: Packets::Words, swap_staging: false, ..KERNELS };

fn one_shot(size: usize, launches: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for _ in 0..launches {
                rank.one_shot_push().unwrap();
            }
        });
    }
}

fn two_shot(size: usize, launches: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, move |rank: &mut Rank| {
            for _ in 0..launches {
                rank.two_shot_push().unwrap();
            }
        });
    }
}

fn pull_push_pull(size: usize, rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(size, rules, |rank: &mut Rank| {
            rank.one_shot_pull(false).unwrap();
            rank.one_shot_push().unwrap();
            rank.one_shot_pull(false).unwrap();
        });
    }
}

fn push_pull_push(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        run(2, rules, |rank: &mut Rank| {
            rank.one_shot_push().unwrap();
            rank.one_shot_pull(true).unwrap();
            rank.one_shot_push().unwrap();
        });
    }
}

#[test]
fn one_shots_of_two_ranks() {
    exhaustively(one_shot(2, 3, KERNELS));
    exhaustively(one_shot(2, 3, WORDS));
}

#[test]
fn two_shots_of_two_ranks() {
    exhaustively(two_shot(2, 1, KERNELS));
    exhaustively(two_shot(2, 2, WORDS));
}

#[test]
fn pulls_around_a_push() {
    exhaustively(pull_push_pull(2, KERNELS));
    exhaustively(pull_push_pull(2, WORDS));
}

#[test]
fn pushes_around_a_pull() {
    exhaustively(push_pull_push(WORDS));
}

#[test]
fn one_shots_of_three_ranks() {
    within(1, one_shot(3, 3, KERNELS));
    within(1, one_shot(3, 3, WORDS));
}

#[test]
fn a_two_shot_of_three_ranks() {
    within(1, two_shot(3, 1, WORDS));
}

#[test]
fn pulls_around_a_push_of_three_ranks() {
    within(1, pull_push_pull(3, WORDS));
}

#[test]
fn relaxed_tags_are_found() {
    found(&[RACE], None, one_shot(2, 1, Rules { flag_store: Relaxed, ..KERNELS }));
    found(&[RACE], None, one_shot(2, 1, Rules { flag_load: Relaxed, ..KERNELS }));
    found(&[RACE], Some(2), two_shot(3, 1, Rules { flag_store: Relaxed, ..KERNELS }));
}

#[test]
fn one_generation_of_mailboxes_is_found() {
    found(&[RACE, HANG], None, one_shot(2, 2, Rules { mailbox_generations: 1, ..KERNELS }));
    found(&[HANG], None, one_shot(2, 2, Rules { mailbox_generations: 1, ..WORDS }));
    found(&[HANG], Some(2), one_shot(3, 2, Rules { mailbox_generations: 1, ..WORDS }));
}

#[test]
fn data_apart_from_its_tag_is_found() {
    found(&["wrong sum"], None, one_shot(2, 1, Rules { packets: Packets::TornWords, ..KERNELS }));
}

#[test]
fn staging_by_launches_is_found() {
    found(&[RACE], None, pull_push_pull(2, Rules { staging_by: Count::Epochs, ..WORDS }));
    found(&[RACE], Some(2), pull_push_pull(3, Rules { staging_by: Count::Epochs, ..WORDS }));
}
