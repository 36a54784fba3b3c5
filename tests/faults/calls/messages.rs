//! Messages between two ranks that disagree, that never arrive, or whose other side leaves: both sides get an error in
//! time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::{Algorithm, Buffer, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::world::{builder, threads, SOON};
use crate::random::Random;
use crate::tier::rounds;

const SHORT: Duration = Duration::from_millis(600);

/// More bytes than a channel holds.
const LONG: usize = 200_000;

/// Rank 0 sends to rank 1 in a world of 3, after some successful messages. Returns the results of both.
fn between(
    send: fn(&Communicator<Host>) -> Result<()>,
    receive: fn(&Communicator<Host>) -> Result<()>,
) -> [Result<()>; 2] {
    let settings = |_| builder().timeout(SHORT).max_bytes(64 << 10);
    let results = threads(3, settings, |communicator| {
        let rank = communicator.rank();
        for tag in 0..5 {
            let mut data = [rank as u32; 100];
            communicator.send_recv(&data.clone(), (rank + 1) % 3, &mut data, (rank + 2) % 3, tag).unwrap();
            assert_eq!(data, [(rank as u32 + 2) % 3; 100]);
        }
        let started = Instant::now();
        let result = match rank {
            0 => send(&communicator),
            1 => receive(&communicator),
            _ => Ok(()),
        };
        assert!(started.elapsed() < SHORT + SOON, "{:?}", started.elapsed());
        if let Err(error) = &result {
            assert_eq!(communicator.barrier(), Err(error.clone()), "poisoned");
        }
        result
    });
    [results[0].clone(), results[1].clone()]
}

fn other_message(result: &Result<()>, sent: &str, awaited: &str) {
    let Err(Error::Disagreement { what, rank, theirs, own_rank, ours }) = result else {
        panic!("{result:?}")
    };
    assert_eq!((*what, *rank, *own_rank), ("the message between them", 0, 1));
    assert_eq!((theirs.as_str(), ours.as_str()), (sent, awaited));
}

#[test]
fn another_tag() {
    let [sender, receiver] = between(|c| c.send(&[1u32; 10], 1, 7), |c| c.recv(&mut [0u32; 10], 0, 8));
    other_message(&receiver, "a message of 40 bytes with tag 7", "a message of 40 bytes with tag 8");
    // The sender has done its part.
    assert_eq!(sender, Ok(()));
}

#[test]
fn another_length() {
    let [_, receiver] = between(|c| c.send(&[1u32; 10], 1, 7), |c| c.recv(&mut [0u32; 11], 0, 7));
    other_message(&receiver, "a message of 40 bytes with tag 7", "a message of 44 bytes with tag 7");
    let [_, receiver] = between(|c| c.send::<u8>(&[], 1, u32::MAX), |c| c.recv(&mut [0u8; 1], 0, u32::MAX));
    let [sent, awaited] = [0, 1].map(|bytes| format!("a message of {bytes} bytes with tag {}", u32::MAX));
    other_message(&receiver, &sent, &awaited);
}

/// A share of a gather is described as such, without a tag.
#[test]
fn another_length_of_a_gather() {
    let settings = |_| builder().timeout(SHORT).check(false);
    let results = threads(2, settings, |communicator| {
        let (input, mut output) = (vec![1u32; 5 - communicator.rank()], [0; 10]);
        communicator.gather(&input[..], &mut output[..10 * (1 - communicator.rank())], 0)
    });
    let Err(Error::Disagreement { rank: 1, theirs, ours, .. }) = &results[0] else { panic!("{results:?}") };
    let described = [16, 20].map(|bytes| format!("a message of {bytes} bytes of gather (root 0, call 1)"));
    assert_eq!([theirs, ours], [&described[0], &described[1]]);
}

/// The sender of a long message still waits when the receiver finds the mismatch.
#[test]
fn another_tag_of_a_long_message() {
    let [sender, receiver] = between(|c| c.send(&[1u8; LONG], 1, 7), |c| c.recv(&mut [0u8; LONG], 0, 0));
    other_message(&receiver, "a message of 200000 bytes with tag 7", "a message of 200000 bytes with tag 0");
    let Err(Error::PeerFailed { rank: 1, reason }) = &sender else { panic!("{sender:?}") };
    assert!(reason.contains("with tag 7"), "{reason}");
}

/// Every rank receives what it waits for, but a message that nobody asked for remains. The next call fails instead of
/// delivering it.
#[test]
fn another_root() {
    let results = threads(
        3,
        |_| builder().timeout(SHORT).check(false),
        |communicator| {
            let (rank, mut share) = (communicator.rank(), [0u32]);
            let scattered = |root| [0, 1, 2].map(|share| 10 * root as u32 + share);
            let own_root = usize::from(rank == 1);
            let first = communicator.scatter(&scattered(own_root), &mut share, own_root);
            assert_eq!((first, share[0]), (Ok(()), 10 * own_root as u32 + rank as u32));
            communicator.scatter(&[100, 101, 102], &mut share, 1).map(|()| share[0])
        },
    );
    for rank in [0, 2] {
        let Err(Error::Disagreement { rank: 1, theirs, ours, .. }) = &results[rank] else {
            panic!("{results:?}")
        };
        let described = [1, 2].map(|call| format!("a message of 4 bytes of scatter (root 1, call {call})"));
        assert_eq!([theirs, ours], [&described[0], &described[1]]);
    }
}

#[test]
fn a_collective_of_another_kind() {
    let results = threads(
        3,
        |_| builder().timeout(SHORT).check(false),
        |communicator| match communicator.rank() {
            0 => communicator.gather(&[0u8; 4], &mut [0; 12], 0),
            _ => communicator.all_to_all(&[0u8; 12], &mut [0; 12]),
        },
    );
    let Err(Error::Disagreement { what: "the message between them", own_rank: 0, .. }) = &results[0] else {
        panic!("{results:?}")
    };
    assert!(results[1..].iter().all(Result::is_err), "{results:?}");
}

#[test]
fn a_message_that_is_never_sent() {
    let [_, receiver] = between(
        |_| {
            std::thread::sleep(2 * SHORT);
            Ok(())
        },
        |c| c.recv(&mut [0u8; 10], 0, 3),
    );
    let Err(Error::Timeout { operation: "recv", missing, waited: SHORT, last_seen, .. }) = &receiver else {
        panic!("{receiver:?}")
    };
    assert_eq!(*missing, [0]);
    assert!(last_seen.contains("returned from call 5, send_recv"), "{last_seen}");
}

#[test]
fn a_message_that_is_never_received() {
    let never: fn(&Communicator<Host>) -> Result<()> = |_| {
        std::thread::sleep(2 * SHORT);
        Ok(())
    };
    let [sender, _] = between(|c| c.send(&[0u8; LONG], 1, 3), never);
    let Err(Error::Timeout { operation: "send", missing, .. }) = &sender else { panic!("{sender:?}") };
    assert_eq!(*missing, [1]);
    // The call returns while a short message is still on its way.
    let [sender, _] = between(|c| c.send(&[0u8; 10], 1, 3), |_| Ok(()));
    assert_eq!(sender, Ok(()));
}

/// Messages sent before the sender left arrive; for the next one there is an error.
#[test]
fn a_sender_that_leaves() {
    for round in 0..50 {
        let results = threads(
            2,
            |_| builder(),
            |communicator| {
                if communicator.rank() == 0 {
                    return communicator.send(&[round as u8; 5000], 1, 1);
                }
                let mut data = [0; 5000];
                if round % 2 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                communicator.recv(&mut data, 0, 1).unwrap();
                assert_eq!(data, [round as u8; 5000]);
                communicator.recv(&mut data, 0, 2)
            },
        );
        assert_eq!(results[0], Ok(()));
        let Err(Error::PeerLost { rank: 0, reason }) = &results[1] else { panic!("{results:?}") };
        assert!(reason.contains("closed its communicator"), "{reason}");
    }
}

/// A rank does not wait for a rank with which it exchanges no message, even if that one fails.
#[test]
fn ranks_without_a_message_go_on() {
    let results = threads(
        4,
        |_| builder(),
        |communicator| {
            let mut data = [communicator.rank() as u64; 3000];
            match communicator.rank() {
                0 => communicator.recv(&mut data, 1, 0),
                1 => {
                    std::thread::sleep(Duration::from_millis(30));
                    communicator.abort();
                    Ok(())
                }
                rank => {
                    for tag in 0..200 {
                        communicator.send_recv(&data.clone(), 5 - rank, &mut data, 5 - rank, tag)?;
                    }
                    Ok(())
                }
            }
        },
    );
    assert!(matches!(results[0], Err(Error::PeerFailed { rank: 1, .. })), "{results:?}");
    assert_eq!(results[1..], [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn abort_ends_a_receive() {
    threads(
        2,
        |_| builder(),
        |communicator| {
            if communicator.rank() == 1 {
                let started = Instant::now();
                let error = communicator.recv(&mut [0u8], 0, 0).unwrap_err();
                assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
                assert!(started.elapsed() < SOON);
                return;
            }
            std::thread::scope(|scope| {
                let receiving = scope.spawn(|| communicator.recv(&mut [0u8; 100], 1, 0));
                std::thread::sleep(Duration::from_millis(50));
                assert!(!receiving.is_finished());
                communicator.abort();
                assert_eq!(receiving.join().unwrap(), Err(Error::Aborted));
            });
            assert_eq!(communicator.send(&[1u8], 1, 0), Err(Error::Aborted));
        },
    );
}

/// After different numbers of calls, ranks still find who is absent from a collective.
#[test]
fn an_absent_rank_is_named_after_messages_of_some_ranks() {
    // Concurrently, because they sleep most of the time.
    std::thread::scope(|scope| {
        Algorithm::ALL.into_iter().for_each(|algorithm| drop(scope.spawn(move || who_is_absent(algorithm))));
    });
}

fn who_is_absent(algorithm: Algorithm) {
    let errors = threads(
        4,
        |_| builder().timeout(SHORT).algorithm(algorithm),
        |communicator| {
            let rank = communicator.rank();
            let mut data = [0u8; 10];
            for _ in 0..rank % 2 * 3 {
                communicator.send_recv(&[1; 10], 4 - rank, &mut data, 4 - rank, 0).unwrap();
            }
            if rank == 2 {
                std::thread::sleep(2 * SHORT);
                return None;
            }
            // One rank times out before those that wait for it: it does not forward what it has not received.
            std::thread::sleep(Duration::from_millis(20 * (rank as u64 % 2)));
            Some(communicator.all_reduce_in_place(&mut [1f32; 1000], ReduceOp::Sum).unwrap_err())
        },
    );
    for error in errors.into_iter().flatten() {
        let Error::Timeout { missing, .. } = &error else { panic!("{algorithm}: {error}") };
        assert_eq!(*missing, [2], "{algorithm}: {error}");
    }
}

/// Elements of a message that is read directly, in pieces.
const COUNT: usize = 400_000;

/// Rank 0 sends one message after another and is aborted at some moment. It then owns its message again, overwrites it
/// and frees it. Rank 1 receives each message whole, or gets an error that names rank 0. Returns the number of received
/// messages.
fn abort_a_sender(registered: bool, seed: u64) -> usize {
    let received = AtomicUsize::new(0);
    let settings = |_| builder().max_bytes(64 << 10);
    let wait = Duration::from_micros(Random::fixed(seed).below(3000) as u64);
    threads(2, settings, |communicator| {
        let buffer: Option<Buffer<u32>> = registered.then(|| communicator.alloc(COUNT).unwrap());
        communicator.barrier().unwrap();
        if communicator.rank() == 1 {
            let mut data = vec![0; COUNT];
            for number in 0.. {
                match communicator.recv(&mut data, 0, number) {
                    Ok(()) => assert!(data.iter().all(|&element| element == number), "message {number}"),
                    Err(error) => {
                        assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
                        return;
                    }
                }
                received.fetch_add(1, Ordering::Relaxed);
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(wait);
                communicator.abort();
            });
            let mut buffer = buffer;
            for number in 0.. {
                let mut private = Vec::new();
                let data: &mut [u32] = match &mut buffer {
                    Some(buffer) => buffer,
                    None => {
                        private.resize(COUNT, 0);
                        &mut private
                    }
                };
                data.fill(number);
                let sent = communicator.send(data, 1, number);
                data.fill(u32::MAX);
                if let Err(error) = sent {
                    assert_eq!(error, Error::Aborted);
                    break;
                }
            }
        });
    });
    received.into_inner()
}

#[test]
fn a_sender_that_gives_up_owns_its_message() {
    let worlds = rounds("messages, aborts of senders", 400, 60) as u64;
    let received: usize = (0..worlds).map(|seed| abort_a_sender(seed % 2 == 0, seed)).sum();
    println!("{worlds} worlds, {received} messages");
    assert!(received > 0);
}

/// The receiver is late, and finds a message that the sender has withdrawn.
#[test]
fn a_message_that_is_received_too_late() {
    let results = threads(
        2,
        |rank| builder().timeout(if rank == 0 { SHORT } else { 10 * SHORT }),
        |communicator| {
            if communicator.rank() == 0 {
                return communicator.send(&vec![1u8; LONG], 1, 3);
            }
            std::thread::sleep(2 * SHORT);
            communicator.recv(&mut vec![0u8; LONG], 0, 3)
        },
    );
    let Err(Error::Timeout { missing, .. }) = &results[0] else { panic!("{results:?}") };
    assert_eq!(*missing, [1]);
    // Rank 0 waited for this rank.
    assert!(
        matches!(&results[1], Err(Error::PeerFailed { rank: 0, .. } | Error::Timeout { .. })),
        "{results:?}"
    );
}
