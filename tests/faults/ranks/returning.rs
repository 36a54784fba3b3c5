//! Ranks that suspend, resume and join: what works afterwards, and what is refused.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local, Threads, UniqueId};
use fast_allreduce::flight::RankState;
use fast_allreduce::{Algorithm, Builder, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::world::{builder, threads, LIMIT};
use crate::random::Random;
use crate::tier;

/// A limit that a rank reaches whose partners do not come.
pub(super) const SHORT: Duration = Duration::from_millis(300);

pub(super) fn sum(communicator: &Communicator<Host>) -> Result<u64> {
    let mut data = [communicator.rank() as u64 + 1; 100];
    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
    Ok(data[99])
}

fn is_refused_while_suspended<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.to_string().contains("suspended: resume it first"))
}

#[test]
fn everything_works_after_each_resume() {
    let rounds = tier::rounds("suspend and resume", 50, 6);
    for algorithm in [None, Some(Algorithm::OneShotPush), Some(Algorithm::TwoShotPull)] {
        let settings = |_| builder().max_bytes(64 << 10).algorithm(algorithm);
        threads(3, settings, |communicator| {
            let (rank, next) = (communicator.rank(), (communicator.rank() + 1) % 3);
            let mut buffer = communicator.alloc::<u32>(5000).unwrap();
            let memory = communicator.symmetric_memory::<u64>(10).unwrap();
            for round in 0..rounds as u32 {
                buffer.fill(round + rank as u32);
                memory.view(next).unwrap().store(3, u64::from(round) * 8 + rank as u64).unwrap();
                communicator.barrier().unwrap();
                let suspended = communicator.suspend().unwrap();
                assert!(suspended.bytes > 64 << 10 && suspended.kept_bytes == 20_080, "{suspended:?}");
                assert!(communicator.is_suspended());
                assert!(buffer.iter().all(|&element| element == round + rank as u32));
                let progress = communicator.resume(LIMIT).unwrap();
                assert_eq!(progress.of_rank, [Some(progress.completed); 3]);
                assert_eq!(progress, communicator.progress());
                // Every kind of protocol.
                communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|&element| element == 3 * round + 3));
                let previous = (rank + 2) % 3;
                assert_eq!(memory.view(rank).unwrap().load(3), Ok(u64::from(round) * 8 + previous as u64));
                memory.view(next).unwrap().store(4, rank as u64).unwrap();
                communicator.barrier().unwrap();
                assert_eq!(memory.view(rank).unwrap().load(4), Ok(previous as u64));
                let mut all = [0; 3];
                communicator.all_gather(&[rank as u8], &mut all).unwrap();
                assert_eq!(all, [0, 1, 2]);
                let received = &mut [0_u32; 7000];
                communicator.send_recv(&[rank as u32; 7000], next, received, previous, 5).unwrap();
                assert!(received.iter().all(|&element| element == previous as u32));
                assert_eq!(sum(&communicator), Ok(6));
                let pair = communicator.split(Some(u32::from(rank == 2)), 0).unwrap().unwrap();
                assert_eq!(sum(&pair), Ok(if rank == 2 { 1 } else { 3 }));
            }
            let calls = communicator.counters().calls;
            assert!(calls >= 6 * rounds as u64, "{calls}");
            memory.free().unwrap();
            buffer.deregister().unwrap().free().unwrap();
        });
    }
}

#[test]
fn a_suspended_communicator_refuses_everything_else() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            let buffer = communicator.alloc::<u8>(10).unwrap();
            let memory = communicator.symmetric_memory::<u8>(10).unwrap();
            let not_suspended = communicator.resume(LIMIT).unwrap_err();
            assert!(not_suspended.to_string().contains("is not suspended"), "{not_suspended}");
            communicator.suspend().unwrap();
            assert!(is_refused_while_suspended(communicator.suspend()));
            assert!(is_refused_while_suspended(communicator.barrier()));
            assert!(is_refused_while_suspended(communicator.check()));
            assert!(is_refused_while_suspended(communicator.alloc::<u8>(10)));
            assert!(is_refused_while_suspended(communicator.split(Some(0), 0)));
            assert!(is_refused_while_suspended(communicator.shrink(&[0, 1])));
            assert!(is_refused_while_suspended(communicator.join(&[0, 1], LIMIT)));
            let peer = 1 - communicator.rank();
            assert!(memory.view(peer).is_err() && memory.peer_address(peer).is_none());
            assert!(memory.view(communicator.rank()).is_ok());
            assert!(is_refused_while_suspended(memory.free()));
            assert_eq!(communicator.survivors(), [] as [usize; 0]);
            assert_eq!(communicator.counters().waits, [0, 0]);
            communicator.resume(LIMIT).unwrap();
            assert_eq!(sum(&communicator), Ok(3));
            let before = communicator.flight_record();
            communicator.suspend().unwrap();
            // The record of the world that it has left.
            let record = communicator.flight_record();
            assert_eq!((&record.world, record.ranks.len(), record.unread.len()), (&before.world, 2, 0));
            for rank in &record.ranks {
                assert_eq!((rank.state, rank.calls.last().unwrap().count), (RankState::Open, 100));
            }
            let calls = "fast_allreduce_calls_total{";
            assert!(communicator.metrics().contains(calls), "{}", communicator.metrics());
            communicator.abort();
            assert_eq!(communicator.resume(LIMIT), Err(Error::Aborted));
            assert_eq!(communicator.barrier(), Err(Error::Aborted));
            assert_eq!(communicator.check(), Err(Error::Aborted));
            assert_eq!(communicator.suspend(), Err(Error::Aborted));
            assert_eq!(communicator.join_id(), Err(Error::Aborted));
            assert_eq!(buffer.deregister().unwrap_err(), Error::Aborted);
            // A drop of a suspended communicator waits for nobody.
        },
    );
}

/// An attempt that ends ends the meeting of all.
#[test]
fn a_rank_that_tries_again_finds_its_place() {
    let rounds = tier::rounds("attempts to resume", 50, 6);
    let tried = AtomicUsize::new(0);
    threads(
        3,
        |_| builder(),
        |communicator| {
            for round in 0..rounds {
                communicator.suspend().unwrap();
                // The last rank comes after the attempts, which cannot succeed without it.
                match communicator.rank() {
                    1 => {
                        let early: Vec<_> = (0..10).map(|_| communicator.resume(Duration::ZERO)).collect();
                        // Relaxed: nothing is published by it.
                        tried.fetch_add(1, Ordering::Relaxed);
                        assert!(early.iter().all(Result::is_err), "{early:?}");
                    }
                    2 => {
                        while tried.load(Ordering::Relaxed) <= round {
                            std::thread::yield_now();
                        }
                    }
                    _ => {}
                }
                communicator.resume(LIMIT).unwrap();
                assert_eq!(sum(&communicator), Ok(6));
            }
        },
    );
}

#[test]
fn a_suspend_that_the_others_do_not_make_is_an_error() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            let result = match communicator.rank() {
                0 => communicator.suspend().map(drop),
                _ => communicator.symmetric_memory::<u8>(1).map(drop),
            };
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error}");
            assert!(!communicator.is_suspended());
        },
    );
    let done = Barrier::new(2);
    threads(
        2,
        |_| builder().timeout(Duration::from_secs(2)),
        |communicator| {
            if communicator.rank() == 0 {
                let error = communicator.suspend().unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
                assert!(!communicator.is_suspended());
            }
            done.wait();
        },
    );
}

#[test]
fn a_call_of_another_thread_keeps_the_world() {
    let done = Barrier::new(2);
    threads(
        2,
        |_| builder(),
        |communicator| {
            std::thread::scope(|scope| {
                let waiting = (communicator.rank() == 0)
                    .then(|| scope.spawn(|| communicator.recv(&mut [0_u8], 1, 0).unwrap()));
                while communicator.rank() == 0 && communicator.counters().calls == 0 {
                    std::thread::yield_now();
                }
                let error = communicator.suspend().unwrap_err();
                let text = error.to_string();
                assert!(text.contains("under way in another thread"), "{text}");
                done.wait();
                if communicator.rank() == 1 {
                    communicator.send(&[1_u8], 0, 0).unwrap();
                }
                drop(waiting);
            });
            assert_eq!(sum(&communicator), Ok(3));
        },
    );
}

#[test]
fn a_join_does_not_wait_for_ever_for_a_call_of_another_thread() {
    beside_a_call_of_rank_0(builder(), |communicator| {
        let limit = if communicator.rank() == 0 { Duration::from_secs(2) } else { LIMIT };
        communicator.join(&[0, 1], limit).unwrap_err()
    });
}

#[test]
fn a_world_does_not_wait_for_ever_for_such_a_call_to_grow() {
    std::thread::scope(|scope| {
        let (send, receive) = channel::<UniqueId>();
        let joining = scope.spawn(move || {
            let local = Local::connect(&receive.recv_timeout(LIMIT).unwrap(), 2, 3, LIMIT).unwrap();
            let error = builder().build(Host::new(), local).map(drop).unwrap_err().to_string();
            assert!(error.contains("under way in another thread"), "{error}");
        });
        let send = Mutex::new(Some(send));
        beside_a_call_of_rank_0(builder(), |communicator| {
            let taken = send.lock().unwrap().take();
            if let Some(send) = taken {
                send.send(communicator.join_id().unwrap()).unwrap();
            }
            let limit = if communicator.rank() == 0 { Duration::from_secs(2) } else { LIMIT };
            communicator.grow(3, limit).map(drop).unwrap_err()
        });
        joining.join().unwrap();
    });
}

#[test]
fn survivors_do_not_wait_for_ever_for_such_a_call_to_shrink() {
    let builder = builder().timeout(Duration::from_secs(4));
    beside_a_call_of_rank_0(builder, |communicator| communicator.shrink(&[0, 1]).map(drop).unwrap_err());
}

/// Makes a step of two ranks while another thread of rank 0 receives a message. All ranks learn why it fails.
fn beside_a_call_of_rank_0(builder: Builder, step: impl Fn(&Communicator<Host>) -> Error + Sync) {
    let (ready, done) = (Barrier::new(2), Barrier::new(2));
    threads(
        2,
        |_| builder.clone().first_call_timeout(LIMIT),
        |communicator| {
            let rank = communicator.rank();
            std::thread::scope(|scope| {
                let waiting =
                    (rank == 0).then(|| scope.spawn(|| communicator.recv(&mut [0_u8], 1, 0).unwrap()));
                while rank == 0 && communicator.counters().calls == 0 {
                    std::thread::yield_now();
                }
                ready.wait();
                let text = step(&communicator).to_string();
                assert!(text.contains("under way in another thread"), "{text}");
                done.wait();
                if rank == 1 {
                    communicator.send(&[1_u8], 0, 0).unwrap();
                }
                drop(waiting);
            });
            assert_eq!(sum(&communicator), Ok(3));
        },
    );
}

/// A bootstrap of threads. When its gathers have counted `left` down to 0, two ranks get no answer, as if rank 2 had
/// ended in that gather.
struct EndsInLastGather {
    inner: Threads,
    left: AtomicUsize,
}

impl Bootstrap for EndsInLastGather {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let gathered = self.inner.all_gather(bytes, timeout)?;
        let is_last = self.left.load(Ordering::Relaxed) == 1;
        self.left.fetch_sub(1, Ordering::Relaxed);
        match is_last && self.rank() > 0 {
            true => Err(Error::PeerLost { rank: 2, reason: "its process ended".into() }),
            false => Ok(gathered),
        }
    }
}

#[test]
fn survivors_of_which_one_is_suspended_meet() {
    let world = |left: usize, outcome: &(dyn Fn(Communicator<Host>, &AtomicUsize) + Sync)| {
        std::thread::scope(|scope| {
            for inner in Threads::world(3).unwrap() {
                scope.spawn(move || {
                    let bootstrap = Arc::new(EndsInLastGather { inner, left: AtomicUsize::new(usize::MAX) });
                    let communicator = builder().build(Host::new(), Arc::clone(&bootstrap)).unwrap();
                    assert_eq!(sum(&communicator), Ok(6));
                    bootstrap.left.store(left, Ordering::Relaxed);
                    outcome(communicator, &bootstrap.left);
                });
            }
        });
    };
    // How many gathers a suspend has, if it is not disturbed.
    let gathers = AtomicUsize::new(0);
    world(1000, &|communicator, left| {
        communicator.suspend().unwrap();
        gathers.store(1000 - left.load(Ordering::Relaxed), Ordering::Relaxed);
    });

    let meeting = Barrier::new(3);
    let id = Mutex::new(None);
    world(gathers.into_inner(), &|communicator, _| {
        let rank = communicator.rank();
        let suspended = communicator.suspend();
        if rank == 0 {
            *id.lock().unwrap() = communicator.join_id().ok();
        }
        meeting.wait();
        assert_eq!(suspended.is_ok(), rank == 0, "rank {rank}: {suspended:?}");
        let new_id = (*id.lock().unwrap()).unwrap();
        let communicator = match rank {
            0 => {
                communicator.resume(LIMIT).unwrap();
                communicator
            }
            1 => {
                assert_eq!(communicator.join_id().unwrap(), new_id);
                assert_eq!(communicator.survivors()[..2], [0, 1]);
                // A rank that is suspended takes part in no step of the old world.
                let error = communicator.shrink(&[0, 1]).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
                communicator.join(&[0, 1], LIMIT).unwrap();
                communicator
            }
            // A new rank takes the place of the one that has ended.
            _ => {
                drop(communicator);
                join(builder(), &new_id, 2, 3, LIMIT).unwrap()
            }
        };
        assert_eq!(sum(&communicator), Ok(6));
        communicator.barrier().unwrap();
    });
}

/// A world of `Local` ranks, one of which leaves. Runs `survivor` on the others, and `joiner` with their id.
fn after_a_death<R: Send>(
    size: usize,
    survivor: impl Fn(&Communicator<Host>) -> R + Sync,
    joiner: impl FnOnce(UniqueId) + Send,
) -> Vec<R> {
    let (send, receive) = channel();
    let send = Mutex::new(send);
    std::thread::scope(|scope| {
        let joining = scope.spawn(move || joiner(receive.recv_timeout(LIMIT).unwrap()));
        let outcomes = threads(
            size,
            |_| builder(),
            |communicator| {
                let rank = communicator.rank();
                assert_eq!(sum(&communicator), Ok((size * (size + 1) / 2) as u64));
                if rank + 1 == size {
                    return None;
                }
                sum(&communicator).unwrap_err();
                let id = communicator.join_id().unwrap();
                if rank == 0 {
                    send.lock().unwrap().send(id).unwrap();
                }
                Some(survivor(&communicator))
            },
        );
        joining.join().unwrap();
        outcomes.into_iter().flatten().collect()
    })
}

pub(super) fn join(
    settings: Builder,
    id: &UniqueId,
    rank: usize,
    size: usize,
    limit: Duration,
) -> Result<Communicator<Host>> {
    settings.build(Host::new(), Local::connect(id, rank, size, limit)?)
}

#[test]
fn a_new_rank_inherits_what_the_survivors_have() {
    let (send, receive) = channel();
    let send = Mutex::new(send);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let id = receive.recv_timeout(LIMIT).unwrap();
            let communicator = join(builder(), &id, 2, 3, LIMIT).unwrap();
            let facts: Vec<_> =
                communicator.inherited().iter().map(|memory| (memory.number, memory.bytes)).collect();
            assert_eq!(facts, [(0, 400), (3, 80)]);
            communicator.inherit_buffer::<f32>(3).unwrap_err();
            communicator.inherit_buffer::<f32>(1).unwrap_err();
            let mut buffer = communicator.inherit_buffer::<f32>(0).unwrap();
            communicator.inherit_buffer::<f32>(0).unwrap_err();
            let memory = communicator.inherit_memory::<u64>(3).unwrap();
            assert!(communicator.inherited().is_empty());
            assert_eq!(communicator.progress().of_rank, [Some(1), Some(1), None]);
            buffer.fill(3.0);
            communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|&element| element == 6.0));
            memory.view(0).unwrap().store(9, 7).unwrap();
            communicator.barrier().unwrap();
            // Steps go on with the same numbers.
            let more = communicator.alloc::<u8>(10).unwrap();
            buffer.deregister().unwrap().free().unwrap();
            drop(more);
            communicator.barrier().unwrap();
        });
        threads(
            3,
            |_| builder(),
            |communicator| {
                let rank = communicator.rank();
                let mut buffer = communicator.alloc::<f32>(100).unwrap();
                let dropped = communicator.alloc::<f32>(100).unwrap();
                let some_drop = communicator.alloc::<f32>(100).unwrap();
                let memory = communicator.symmetric_memory::<u64>(10).unwrap();
                drop(dropped);
                assert_eq!(sum(&communicator), Ok(6));
                if rank == 2 {
                    return;
                }
                // The call fails while the buffer is in it.
                buffer.fill(1.0);
                communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap_err();
                let mut some_drop = (rank == 0).then_some(some_drop);
                if rank == 0 {
                    send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                }
                let progress = communicator.join(&[0, 1], LIMIT).unwrap();
                assert_eq!((progress.completed, progress.of_rank), (1, vec![Some(1), Some(1), None]));
                communicator.check().unwrap();
                buffer.fill(rank as f32 + 1.0);
                communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|&element| element == 6.0));
                communicator.barrier().unwrap();
                if rank == 0 {
                    assert_eq!(memory.view(0).unwrap().load(9), Ok(7));
                }
                let more = communicator.alloc::<u8>(10).unwrap();
                buffer.deregister().unwrap().free().unwrap();
                if let Some(some_drop) = &mut some_drop {
                    some_drop.fill(2.0);
                }
                drop((more, some_drop));
                communicator.barrier().unwrap();
            },
        );
    });
}

#[test]
fn invalid_joins_change_nothing() {
    // The survivors meet no new rank, then one with another setting, then the right one.
    let refused = Barrier::new(3);
    let texts = after_a_death(
        3,
        |communicator| {
            assert!(matches!(communicator.join(&[1, 0], LIMIT), Err(Error::InvalidSetting { .. })));
            assert!(matches!(communicator.join(&[], LIMIT), Err(Error::InvalidSetting { .. })));
            let late = communicator.join(&[0, 1], SHORT).unwrap_err();
            assert!(matches!(late, Error::Timeout { .. } | Error::PeerLost { .. }), "{late}");
            assert!(!communicator.is_suspended() && communicator.check().is_err());
            refused.wait();
            let other = communicator.join(&[0, 1], LIMIT).unwrap_err();
            assert!(matches!(other, Error::Disagreement { .. }), "{other}");
            assert!(!communicator.is_suspended() && communicator.check().is_err());
            refused.wait();
            communicator.join(&[0, 1], LIMIT).unwrap();
            let ok = sum(communicator);
            refused.wait();
            (ok, other.to_string())
        },
        |id| {
            let size = Local::connect(&id, 0, 1, SHORT).unwrap_err();
            assert!(matches!(size, Error::Timeout { .. } | Error::Refused { .. }), "{size}");
            refused.wait();
            let other = join(builder().max_bytes(4096), &id, 2, 3, LIMIT).unwrap_err();
            assert!(matches!(other, Error::Disagreement { .. }), "{other}");
            refused.wait();
            let communicator = join(builder(), &id, 2, 3, LIMIT).unwrap();
            assert_eq!(sum(&communicator), Ok(6));
            // A second process for the place, and an id of a world that is over.
            let second = Local::connect(&id, 2, 3, SHORT).map(drop).unwrap_err();
            assert!(matches!(second, Error::Refused { .. } | Error::Timeout { .. }), "{second}");
            assert_ne!(communicator.join_id().unwrap(), id);
            let stale = Local::connect(&communicator.join_id().unwrap(), 2, 3, SHORT).map(drop).unwrap_err();
            assert!(stale.to_string().contains("nobody serves this id"), "{stale}");
            refused.wait();
        },
    );
    assert!(texts.iter().all(|(ok, text)| *ok == Ok(6) && text.contains("4096")), "{texts:?}");
}

#[test]
fn survivors_that_disagree_learn_it() {
    let errors = after_a_death(
        3,
        |communicator| {
            let list: &[usize] = if communicator.rank() == 0 { &[0] } else { &[0, 1] };
            let error = communicator.join(list, LIMIT).unwrap_err();
            assert!(!communicator.is_suspended() && communicator.check().is_err());
            error
        },
        |id| {
            let error = join(builder(), &id, 2, 3, LIMIT).map(drop).unwrap_err();
            assert!(matches!(error, Error::Disagreement { what: "the survivors", .. }), "{error}");
        },
    );
    for error in errors {
        assert!(matches!(error, Error::Disagreement { what: "the survivors", .. }), "{error}");
    }
}

#[test]
fn an_abort_ends_a_join() {
    let errors = after_a_death(
        2,
        |communicator| {
            std::thread::scope(|scope| {
                let joining = scope.spawn(|| communicator.join(&[0], LIMIT).unwrap_err());
                std::thread::sleep(
                    Random::new("abort of a join").below(20) as u32 * Duration::from_millis(1),
                );
                // It may come before the join has begun, too.
                while !joining.is_finished() {
                    communicator.abort();
                    std::thread::yield_now();
                }
                joining.join().unwrap()
            })
        },
        |_| {},
    );
    assert_eq!(errors, [Error::Aborted]);
}

#[test]
fn an_abort_ends_a_grow() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            let error = std::thread::scope(|scope| {
                let limit = if communicator.rank() == 0 { LIMIT } else { SHORT };
                let communicator = &communicator;
                let growing = scope.spawn(move || communicator.grow(3, limit).unwrap_err());
                while communicator.rank() == 0 && !growing.is_finished() {
                    communicator.abort();
                    std::thread::yield_now();
                }
                growing.join().unwrap()
            });
            match (communicator.rank(), &error) {
                (0, Error::Aborted) | (1, Error::Timeout { .. } | Error::PeerLost { .. }) => {}
                (rank, error) => panic!("rank {rank}: {error}"),
            }
        },
    );
}

/// A rank moves to another process while all are suspended.
#[test]
fn a_rank_of_a_suspended_world_may_move() {
    let (send, receive) = channel();
    let send = Mutex::new(send);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let communicator = join(builder(), &receive.recv_timeout(LIMIT).unwrap(), 0, 2, LIMIT).unwrap();
            assert_eq!(sum(&communicator), Ok(3));
            communicator.suspend().unwrap();
            let bootstrap = Local::connect(&receive.recv_timeout(LIMIT).unwrap(), 0, 2, LIMIT).unwrap();
            communicator.resume_with(bootstrap).unwrap();
            assert_eq!(sum(&communicator), Ok(3));
        });
        threads(
            2,
            |_| builder(),
            |communicator| {
                communicator.suspend().unwrap();
                if communicator.rank() == 0 {
                    send.lock().unwrap().send(communicator.join_id().unwrap()).unwrap();
                    return;
                }
                if let Err(early) = communicator.resume(Duration::ZERO) {
                    assert!(communicator.is_suspended(), "{early}");
                    communicator.resume(LIMIT).unwrap();
                }
                assert_eq!(sum(&communicator), Ok(3));
                communicator.suspend().unwrap();
                let [alone] = <[Threads; 1]>::try_from(Threads::world(1).unwrap()).ok().unwrap();
                assert!(matches!(communicator.resume_with(alone), Err(Error::InvalidSetting { .. })));
                let id = UniqueId::new().unwrap();
                send.lock().unwrap().send(id).unwrap();
                communicator.resume_with(Local::connect(&id, 1, 2, LIMIT).unwrap()).unwrap();
                assert_eq!(sum(&communicator), Ok(3));
            },
        );
    });
}
