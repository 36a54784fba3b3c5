//! Worlds of another size than before, and spares that wait for a place.

use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Error, Host};
use nix::sys::resource::{getrusage, UsageWho};
use nix::sys::time::TimeValLike as _;

use super::returning::{join, sum, SHORT};
use crate::fixtures::world::{builder, threads, LIMIT};

/// The survivors of a smaller world know how far each of them came.
#[test]
fn a_smaller_world_counts_on() {
    threads(
        3,
        |_| builder(),
        |communicator| {
            (0..5).for_each(|_| communicator.barrier().unwrap());
            if communicator.rank() == 2 {
                return;
            }
            communicator.barrier().unwrap_err();
            while communicator.survivors().len() == 3 {
                std::thread::yield_now();
            }
            let smaller = communicator.shrink(&[0, 1]).unwrap();
            assert_eq!(smaller.progress().completed, 5);
            assert_eq!(smaller.progress().of_rank, [Some(5), Some(5)]);
        },
    );
}

/// A rank is lost, and the world is then of another size: larger, or smaller with a new rank.
#[test]
fn a_world_of_another_size_has_survivors_and_new_ranks() {
    for (first, list, second) in [(2, vec![0, 1], 4), (3, vec![0, 2], 4), (4, vec![1, 3], 3)] {
        let (send, receive) = channel::<UniqueId>();
        let (send, left) = (Mutex::new(send), list.len());
        std::thread::scope(|scope| {
            let new = scope.spawn(move || {
                let id = receive.recv_timeout(LIMIT).unwrap();
                let join = |rank| {
                    std::thread::spawn(move || {
                        let communicator = join(builder(), &id, rank, second, LIMIT).unwrap();
                        assert_eq!(communicator.progress().of_rank[rank], None);
                        assert!(communicator.inherited().is_empty());
                        (sum(&communicator).unwrap(), communicator)
                    })
                };
                (left..second)
                    .map(join)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .map(|rank| rank.join().unwrap())
                    .collect()
            });
            let grown = threads(
                first,
                |_| builder(),
                |communicator| {
                    let rank = communicator.rank();
                    assert_eq!(sum(&communicator), Ok((first * (first + 1) / 2) as u64));
                    if !list.contains(&rank) {
                        return None;
                    }
                    let survivors = match list.len() == first {
                        true => communicator,
                        false => {
                            sum(&communicator).unwrap_err();
                            communicator.shrink(&list).unwrap()
                        }
                    };
                    if survivors.rank() == 0 {
                        send.lock().unwrap().send(survivors.join_id().unwrap()).unwrap();
                    }
                    for size in [0, left, 17] {
                        let error = survivors.grow(size, LIMIT).unwrap_err();
                        assert!(matches!(error, Error::InvalidSetting { .. }), "{error}");
                    }
                    let grown = survivors.grow(second, LIMIT).unwrap();
                    assert_eq!((grown.rank(), grown.world_size()), (survivors.rank(), second));
                    assert_eq!(grown.progress().completed, 1);
                    let total = sum(&grown).unwrap();
                    // The smaller one goes on.
                    assert_eq!(sum(&survivors), Ok((left * (left + 1) / 2) as u64));
                    Some((total, grown))
                },
            );
            let new: Vec<_> = new.join().unwrap();
            for (total, _) in grown.iter().flatten().chain(&new) {
                assert_eq!(*total, (second * (second + 1) / 2) as u64);
            }
        });
    }
}

#[test]
fn a_world_that_cannot_grow_stays() {
    let (send, receive) = channel::<UniqueId>();
    let (send, step) = (Mutex::new(send), &Barrier::new(3));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let id = receive.recv_timeout(LIMIT).unwrap();
            // Nobody comes; then one with another setting, one for a taken place, and one of another size.
            step.wait();
            let other = join(builder().max_bytes(4096), &id, 2, 3, LIMIT).unwrap_err();
            assert!(matches!(other, Error::Disagreement { .. }), "{other}");
            step.wait();
            step.wait();
            Local::connect(&id, 3, 4, SHORT).unwrap_err();
            let communicator = join(builder(), &id, 2, 3, LIMIT).unwrap();
            assert_eq!(sum(&communicator), Ok(6));
            let taken = Local::connect(&id, 2, 3, SHORT).unwrap_err();
            assert!(matches!(taken, Error::Refused { .. } | Error::Timeout { .. }), "{taken}");
            step.wait();
        });
        threads(
            2,
            |_| builder(),
            |communicator| {
                let late = communicator.grow(3, SHORT).unwrap_err();
                assert!(matches!(late, Error::Timeout { .. } | Error::PeerLost { .. }), "{late}");
                assert_eq!(sum(&communicator), Ok(3));
                if communicator.rank() == 0 {
                    send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                }
                step.wait();
                let other = communicator.grow(3, LIMIT).unwrap_err();
                assert!(matches!(&other, Error::Disagreement { .. }), "{other}");
                assert_eq!(sum(&communicator), Ok(3));
                step.wait();
                step.wait();
                let grown = communicator.grow(3, LIMIT).unwrap();
                assert_eq!(sum(&grown), Ok(6));
                step.wait();
                // Nobody else comes.
                let again = communicator.grow(3, SHORT).unwrap_err();
                assert!(matches!(again, Error::Timeout { .. } | Error::PeerLost { .. }), "{again}");
                communicator.barrier().unwrap();
                if communicator.rank() == 1 {
                    return;
                }
                // The other rank has gone.
                let lost = communicator.grow(4, LIMIT).unwrap_err();
                assert!(matches!(lost, Error::PeerLost { rank: 1, .. }), "{lost}");
            },
        );
    });
}

/// The larger world does not keep the name at which the ranks of the smaller one meet.
#[test]
fn a_world_that_has_grown_can_suspend_and_grow_again() {
    let (send, receive) = channel::<UniqueId>();
    let send = Mutex::new(send);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let grown = [(); 3].map(|()| {
                let id = receive.recv_timeout(LIMIT).unwrap();
                let grown = join(builder(), &id, 2, 3, LIMIT).unwrap();
                assert_eq!(sum(&grown), Ok(6));
                grown
            });
            grown.iter().for_each(|grown| assert_eq!(sum(grown), Ok(6)));
        });
        threads(
            2,
            |_| builder(),
            |communicator| {
                let grow = || {
                    if communicator.rank() == 0 {
                        send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                    }
                    let grown = communicator.grow(3, LIMIT).unwrap();
                    assert_eq!(sum(&grown), Ok(6));
                    grown
                };
                let (first, second) = (grow(), grow());
                communicator.suspend().unwrap();
                if communicator.rank() == 1 {
                    let spare = Local::spare(&communicator.join_id().unwrap(), LIMIT).map(drop).unwrap_err();
                    // Rank 0 has begun to resume.
                    assert!(
                        matches!(&spare, Error::Refused { reason } if reason.contains("no place")),
                        "{spare}"
                    );
                }
                communicator.resume(LIMIT).unwrap();
                assert_eq!(sum(&communicator), Ok(3));
                [first, second, grow()].iter().for_each(|grown| assert_eq!(sum(grown), Ok(6)));
            },
        );
    });
}

/// A spare takes the place of whichever rank is lost. Until then it waits without using a core.
#[test]
fn a_spare_waits_and_takes_any_place() {
    let no_world = Local::spare(&UniqueId::new().unwrap(), LIMIT).unwrap_err();
    assert!(matches!(no_world, Error::InvalidSetting { .. }), "{no_world}");
    for lost in 0..3 {
        let (send, receive) = channel::<UniqueId>();
        let (send, waited, joined) = (Mutex::new(send), &Barrier::new(2), &Barrier::new(3));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let id = receive.recv_timeout(LIMIT).unwrap();
                let (start, before) = (Instant::now(), processor_time());
                let early = Local::spare(&id, 2 * SHORT).unwrap_err();
                assert!(early.to_string().contains("nobody serves this id"), "{early}");
                let (took, waiting) = (processor_time() - before, start.elapsed());
                assert!(took < waiting / 4, "{took:?} of {waiting:?}");
                waited.wait();
                let communicator = builder().build(Host::new(), Local::spare(&id, LIMIT).unwrap()).unwrap();
                assert_eq!((communicator.rank(), communicator.world_size()), (lost, 3));
                assert_eq!(sum(&communicator), Ok(6));
                // There was one place, in a world that has formed.
                let second = Local::spare(&id, SHORT).unwrap_err();
                assert!(second.to_string().contains("nobody serves this id"), "{second}");
                joined.wait();
            });
            threads(
                3,
                |_| builder(),
                |communicator| {
                    let rank = communicator.rank();
                    if rank == lost {
                        send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                        waited.wait();
                        return;
                    }
                    sum(&communicator).unwrap_err();
                    let survivors: Vec<_> = (0..3).filter(|&rank| rank != lost).collect();
                    communicator.join(&survivors, LIMIT).unwrap();
                    assert_eq!(sum(&communicator), Ok(6));
                    joined.wait();
                },
            );
        });
    }
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let [user, system] = [usage.user_time(), usage.system_time()];
    Duration::from_micros((user + system).num_microseconds() as u64)
}
