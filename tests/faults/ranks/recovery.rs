//! New communicators: of the surviving ranks, and of groups.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use fast_allreduce::{Communicator, Error, Host, ReduceOp};

use crate::fixtures::world::{builder, threads, LIMIT};
use crate::random::Random;

/// Returns the sum of the members' old ranks, by an allreduce among them.
fn sum_of(communicator: &Communicator<Host>, old_rank: usize) -> u64 {
    let mut data = [old_rank as u64; 3];
    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    data[2]
}

#[test]
fn the_remaining_ranks_shrink_twice() {
    threads(
        4,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            communicator.all_reduce_in_place(&mut [1u8; 10], ReduceOp::Sum).unwrap();
            if rank == 0 {
                return;
            }
            let error = communicator.all_reduce_in_place(&mut [1u8; 10], ReduceOp::Sum).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
            assert_eq!(communicator.survivors(), [1, 2, 3]);
            let second = communicator.shrink(&[1, 2, 3]).unwrap();
            drop(communicator);
            assert_eq!((second.rank(), second.world_size()), (rank - 1, 3));
            assert_eq!(sum_of(&second, rank), 6);
            if rank == 2 {
                return;
            }
            second.all_reduce_in_place(&mut [1u8; 10], ReduceOp::Sum).unwrap_err();
            assert_eq!(second.survivors(), [0, 2]);
            let third = second.shrink(&second.survivors()).unwrap();
            assert_eq!(sum_of(&third, rank), 4);
        },
    );
}

/// A rank of a group has another number than in the world. Errors also give the number in the world, by which a program
/// knows its processes.
#[test]
fn errors_of_groups_name_the_ranks_of_the_world() {
    let settings = |_| builder().timeout(Duration::from_millis(500));
    let done = Barrier::new(5);
    threads(5, settings, |communicator| {
        let rank = communicator.rank();
        // Ranks 4 and 3, and ranks 2 and 1 of the world, in this order.
        let group =
            communicator.split(rank.checked_sub(1).map(|rank| rank as u32 / 2), -(rank as i64)).unwrap();
        let sum = |group: &Communicator<Host>| group.all_reduce_in_place(&mut [1u8; 10], ReduceOp::Sum);
        let check_error = |error: Error, what: &str| {
            let named = match &error {
                Error::Timeout { missing, .. } => missing[..] == [1],
                Error::PeerLost { rank, .. } | Error::PeerFailed { rank, .. } => *rank == 1,
                _ => false,
            };
            let text = error.to_string();
            assert!(
                named && text.matches("rank 1 here is rank 3 of the world").count() == 1,
                "{what}: {text}"
            );
        };
        if rank == 4 {
            let group = group.as_ref().unwrap();
            // A group that was split again, with the two ranks in the same order.
            let again = group.split(Some(0), 0).unwrap().unwrap();
            done.wait();
            check_error(sum(&again).unwrap_err(), "a call that the other does not make");
            check_error(
                group.split(Some(0), 0).map(drop).unwrap_err(),
                "a split that the other does not make",
            );
            done.wait();
            check_error(
                group.alloc::<u8>(10).map(drop).unwrap_err(),
                "a buffer that the other does not allocate",
            );
        } else if rank == 3 {
            let group = group.as_ref().unwrap();
            let again = group.split(Some(0), 0).unwrap().unwrap();
            done.wait();
            done.wait();
            drop(again);
        } else {
            group.iter().for_each(|group| sum(group).unwrap());
            (0..2).for_each(|_| _ = done.wait());
        }
        done.wait();
        // There is nothing to report about calls of the world itself.
        if rank != 3 {
            let error = communicator.split(Some(0), 0).map(drop).unwrap_err();
            let Error::Timeout { operation: "split", missing, last_seen, .. } = &error else {
                panic!("{error}")
            };
            assert!(*missing == [3] && last_seen.is_empty(), "{error}");
        }
        done.wait();
    });
}

#[test]
fn a_survivor_that_does_not_come_is_named_by_its_old_rank() {
    let settings = |_| builder().timeout(Duration::from_millis(500));
    let done = Barrier::new(3);
    threads(3, settings, |communicator| {
        // Ranks 0 and 1 each serve a rendezvous with rank 2, and time out.
        let members = [[0, 2], [1, 2]];
        let met = members.get(communicator.rank()).map(|members| communicator.shrink(members));
        done.wait();
        if let Some(met) = met {
            let error = met.unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [2]), "{error}");
        }
    });
}

#[test]
fn attempts_that_agree_succeed_whatever_each_rank_tried_before() {
    const TRIES: usize = 30;
    let random = Random::new("ranks::recovery::attempts_that_agree");
    let settings = |_| builder().timeout(Duration::from_millis(700));
    for round in 0..4 {
        let done = Barrier::new(4);
        threads(4, settings, |communicator| {
            let rank = communicator.rank();
            let mut random = random.fork(4 * round + rank);
            let attempt = |list: &[usize]| communicator.shrink(list).ok();
            let mut met = None;
            if rank > 0 {
                // Other lists, or the right one while the other ranks try theirs.
                for _ in 0..random.below(4) {
                    std::thread::sleep(Duration::from_millis(random.below(200) as u64));
                    let list: Vec<usize> =
                        (1..4).filter(|&other| other == rank || random.one_in(2)).collect();
                    let made = attempt(&list);
                    if list == [1, 2, 3] && made.is_some() {
                        met = made;
                        break;
                    }
                }
                met = met.or_else(|| (0..TRIES).find_map(|_| attempt(&[1, 2, 3])));
            }
            done.wait();
            if rank > 0 {
                let met = met.unwrap_or_else(|| panic!("round {round}, rank {rank}: no attempt succeeded"));
                assert_eq!((met.rank(), met.world_size()), (rank - 1, 3));
                assert_eq!(sum_of(&met, rank), 6);
            }
        });
    }
}

#[test]
fn one_different_list_costs_an_attempt_or_two() {
    let settings = |_| builder().timeout(Duration::from_secs(2));
    let done = Barrier::new(3);
    threads(3, settings, |communicator| {
        let rank = communicator.rank();
        let first = if rank == 1 { &[1, 2][..] } else { &[0, 1, 2] };
        // Rank 1 may try its second list while the first attempt of the others lasts.
        let mut lists = std::iter::once(first).chain([&[0, 1, 2][..]; 3]);
        let met = lists.find_map(|list| communicator.shrink(list).ok());
        done.wait();
        let met = met.unwrap();
        assert_eq!((met.world_size(), sum_of(&met, rank)), (3, 3));
    });
}

#[test]
fn a_list_with_a_rank_that_has_gone_fails_at_once() {
    threads(
        4,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            if rank == 0 || rank == 2 {
                return;
            }
            let started = Instant::now();
            // The missing rank is the first of the list for rank 3, and another one for rank 1.
            let list = if rank == 1 { [1, 2, 3] } else { [0, 1, 3] };
            let error = communicator.shrink(&list).unwrap_err();
            let gone = if rank == 1 { 2 } else { 0 };
            assert!(matches!(error, Error::PeerLost { rank, .. } if rank == gone), "{error}");
            // The failed attempt does not delay those who have noticed.
            assert_eq!(sum_of(&communicator.shrink(&[1, 3]).unwrap(), rank), 4);
            assert!(started.elapsed() < LIMIT / 6, "{:?}", started.elapsed());
        },
    );
}

#[test]
fn survivors_that_notice_one_after_the_other_meet_soon() {
    for _ in 0..20 {
        threads(
            4,
            |_| builder(),
            |communicator| {
                let rank = communicator.rank();
                if rank == 0 {
                    return;
                }
                let started = Instant::now();
                let met = loop {
                    if let Ok(met) = communicator.shrink(&communicator.survivors()) {
                        break met;
                    }
                    assert!(started.elapsed() < LIMIT / 6, "{:?}", started.elapsed());
                };
                assert_eq!((met.world_size(), sum_of(&met, rank)), (3, 6));
            },
        );
    }
}

/// The process of this rank lives on: it announced its failure when it failed, and its end when its communicator was
/// dropped.
#[test]
fn a_rank_that_has_failed_and_then_closed_is_no_survivor() {
    let failed = Barrier::new(3);
    let seen = Barrier::new(3);
    threads(
        3,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            if rank == 2 {
                communicator.abort();
            }
            failed.wait();
            if rank == 2 {
                seen.wait();
                // Until now the rank could have shrunk with the others.
                return;
            }
            let call = communicator.all_reduce_in_place(&mut [1u8; 10], ReduceOp::Max);
            assert!(matches!(call, Err(Error::PeerFailed { rank: 2, .. })), "{call:?}");
            assert_eq!(communicator.survivors(), [0, 1, 2]);
            seen.wait();
            let started = Instant::now();
            while communicator.survivors() != [0, 1] {
                assert!(started.elapsed() < LIMIT / 6, "{:?}", communicator.survivors());
            }
            assert_eq!(sum_of(&communicator.shrink(&[0, 1]).unwrap(), rank), 1);
        },
    );
}

#[test]
fn invalid_lists_of_survivors_are_refused() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            for list in [&[][..], &[1 - rank], &[1, 0], &[0, 0, 1], &[0, 1, 2], &[99], &[rank, 99]] {
                let error = communicator.shrink(list).unwrap_err();
                assert!(matches!(error, Error::InvalidSetting { name: "survivors", .. }), "{error}");
            }
            // A refused list has no effect.
            assert_eq!(sum_of(&communicator.shrink(&[0, 1]).unwrap(), rank), 1);
        },
    );
}

#[test]
fn groups_by_color_in_the_order_of_keys() {
    threads(
        5,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            // Colours 0 and 1 by parity, in descending order; the last rank is in no group.
            let color = (rank < 4).then_some(rank as u32 % 2);
            let group = communicator.split(color, -(rank as i64)).unwrap();
            assert_eq!(group.is_some(), rank < 4);
            if let Some(group) = group {
                assert_eq!((group.rank(), group.world_size()), (1 - rank / 2, 2));
                assert_eq!(sum_of(&group, rank), [2, 4][rank % 2]);
            }
            // The old communicator and the group can both be used.
            assert_eq!(sum_of(&communicator, rank), 10);
            let all = communicator.split(Some(7), 0).unwrap().unwrap();
            assert_eq!(all.rank(), rank);
            assert_eq!(sum_of(&all, rank), 10);
        },
    );
}

#[test]
fn a_healthy_world_may_shrink_and_split_and_stays_usable() {
    threads(
        3,
        |_| builder(),
        |communicator| {
            let rank = communicator.rank();
            for _ in 0..2 {
                if rank > 0 {
                    assert_eq!(sum_of(&communicator.shrink(&[1, 2]).unwrap(), rank), 3);
                }
                assert_eq!(sum_of(&communicator, rank), 3);
                let all = communicator.split(Some(0), 0).unwrap().unwrap();
                assert_eq!(sum_of(&all, rank), 3);
            }
        },
    );
}

/// The rank that serves a rendezvous numbers it, and is the first member in the new order.
#[test]
fn the_same_ranks_meet_again_in_another_order() {
    threads(
        3,
        |_| builder().timeout(Duration::from_secs(20)),
        |communicator| {
            let rank = communicator.rank();
            for round in 0..6 {
                for first in 0..3 {
                    // Some orders are used more often than others.
                    for _ in 0..1 + (round + first) % 3 {
                        let key = ((rank + 3 - first) % 3) as i64;
                        let group = communicator.split(Some(0), key).unwrap().unwrap();
                        assert_eq!(group.rank() as i64, key);
                        group.barrier().unwrap();
                    }
                }
                communicator.shrink(&[0, 1, 2]).unwrap().barrier().unwrap();
            }
        },
    );
}
