//! Tests communicators with their own streams on the host, between threads and between processes.

use fast_allreduce::{AnyCommunicator, Collective, DType, DeviceId, Error, ReduceOp, StreamCommunicator};

use crate::host::Build as _;
use crate::suite::launch::{threads, InThreads, Launch, LocalProcesses, Rank};
use crate::suite::scenario::Setup;

fn open(rank: &Rank) -> StreamCommunicator {
    StreamCommunicator::new(Setup::default().build(rank)).unwrap()
}

fn address<T>(memory: &mut [T]) -> u64 {
    memory.as_mut_ptr() as u64
}

// SAFETY of the blocks below: only this rank uses the memory; it is large enough, and is not accessed until `sync`
// returns.

fn collectives(communicator: &StreamCommunicator) {
    let (rank, world) = (communicator.communicator().rank(), communicator.communicator().world_size());
    let sum = (0..world).sum::<usize>() as i32;
    let mut data = vec![rank as i32; 5000];
    // SAFETY: as above.
    unsafe {
        communicator.collective(
            Collective::AllReduce(ReduceOp::Sum),
            [address(&mut data); 2],
            5000,
            DType::I32,
        )
    }
    .unwrap();
    communicator.sync().unwrap();
    assert_eq!(data, vec![sum; 5000]);

    for root in 0..world {
        let mut data = [rank as f64 + 0.25; 33];
        // SAFETY: as above.
        unsafe {
            communicator.collective(Collective::Broadcast { root }, [address(&mut data); 2], 33, DType::F64)
        }
        .unwrap();
        communicator.sync().unwrap();
        assert_eq!(data, [root as f64 + 0.25; 33]);
    }

    let (mut own, mut all) = ([rank as u8 + 1; 7], vec![0u8; 7 * world]);
    // SAFETY: as above.
    unsafe {
        communicator.collective(Collective::AllGather, [address(&mut own), address(&mut all)], 7, DType::U8)
    }
    .unwrap();
    communicator.sync().unwrap();
    assert_eq!(all, Vec::from_iter((0..7 * world).map(|index| (index / 7) as u8 + 1)));

    let mut input = Vec::from_iter((0..9 * world).map(|index| (index + rank) as i32));
    let mut output = [0; 9];
    // SAFETY: as above.
    unsafe {
        let addresses = [address(&mut input), address(&mut output)];
        communicator.collective(Collective::ReduceScatter(ReduceOp::Sum), addresses, 9, DType::I32)
    }
    .unwrap();
    communicator.sync().unwrap();
    let expected = |index: usize| (world * (9 * rank + index)) as i32 + sum;
    assert_eq!(output, std::array::from_fn(expected));

    let (mut output, mut input) =
        (vec![0; world], Vec::from_iter((0..world).map(|to| (10 * rank + to) as i64)));
    // SAFETY: as above.
    unsafe {
        let addresses = [address(&mut input), address(&mut output)];
        communicator.collective(Collective::AllToAll, addresses, 1, DType::I64)
    }
    .unwrap();
    communicator.barrier().unwrap();
    assert_eq!(output, Vec::from_iter((0..world).map(|from| (10 * from + rank) as i64)));
}

/// Sends to all other ranks before any rank receives. A collective after the transfers uses the received data.
fn transfers(communicator: &StreamCommunicator) {
    let (rank, world) = (communicator.communicator().rank(), communicator.communicator().world_size());
    let value = |from: usize, to: usize, tag: usize| (100 * from + 10 * to + tag) as u32;
    let others = (0..world).filter(|&peer| peer != rank);
    for count in [1, 3000] {
        let mut sent: Vec<_> = others
            .clone()
            .flat_map(|to| [2, 1].map(|tag| (to, tag, vec![value(rank, to, tag); count * tag])))
            .collect();
        let mut received: Vec<_> =
            others.clone().flat_map(|from| [1, 2].map(|tag| (from, tag, vec![0u32; count * tag]))).collect();
        // SAFETY: as above.
        unsafe {
            for (to, tag, data) in &mut sent {
                communicator.send(address(data), data.len(), DType::U32, *to, *tag as u32).unwrap();
            }
            for (from, tag, data) in &mut received {
                communicator.recv(address(data), data.len(), DType::U32, *from, *tag as u32).unwrap();
            }
        }
        if let Some((_, _, data)) = received.first_mut().filter(|_| world == 2) {
            // SAFETY: as above.
            unsafe {
                communicator.collective(
                    Collective::AllReduce(ReduceOp::Sum),
                    [address(data); 2],
                    data.len(),
                    DType::U32,
                )
            }
            .unwrap();
            communicator.sync().unwrap();
            assert_eq!(*data, vec![value(0, 1, 1) + value(1, 0, 1); count]);
            continue;
        }
        communicator.sync().unwrap();
        for (from, tag, data) in received {
            assert_eq!(data, vec![value(from, rank, tag); count * tag], "from {from}, tag {tag}");
        }
    }
}

fn splits(communicator: &StreamCommunicator) {
    let (rank, world) = (communicator.communicator().rank(), communicator.communicator().world_size());
    // The last rank joins no part; the ranks of the part are in reverse order.
    let color = (rank + 1 < world).then_some(3);
    let part = communicator.split(color, -(rank as i64)).unwrap();
    assert_eq!(part.is_some(), rank + 1 < world);
    if let Some(part) = part {
        assert_eq!(
            (part.communicator().rank(), part.communicator().world_size()),
            (world - 2 - rank, world - 1)
        );
        collectives(&part);
        part.barrier().unwrap();
    }
    communicator.barrier().unwrap();
}

fn everything(rank: &Rank) {
    let communicator = open(rank);
    collectives(&communicator);
    transfers(&communicator);
    splits(&communicator);
}

#[test]
fn between_threads() {
    [1, 2, 3].into_iter().for_each(|size| InThreads.run(size, &everything));
}

#[test]
fn between_processes() {
    let processes = LocalProcesses::new("raw::between_processes");
    [2, 3].into_iter().for_each(|size| processes.run(size, &everything));
}

/// Tests more messages than one launch takes, sent and received.
#[test]
fn many_messages() {
    threads(3, |rank| {
        let communicator = open(&rank);
        let (own, others) = (rank.rank(), (0..3).filter(|&peer| peer != rank.rank()));
        let value = |from: usize, to: usize, tag: u32| (1000 * from + 100 * to) as u64 + u64::from(tag);
        let mut memory: Vec<_> = others
            .flat_map(|peer| (0..50).rev().map(move |tag| (peer, tag)))
            .map(|(peer, tag)| (peer, tag, [value(own, peer, tag); 5], [0; 5]))
            .collect();
        // SAFETY: as above.
        unsafe {
            for (peer, tag, data, _) in &mut memory {
                communicator.send(address(data), 5, DType::U64, *peer, *tag).unwrap();
            }
            for (peer, tag, _, data) in memory.iter_mut().rev() {
                communicator.recv(address(data), 5, DType::U64, *peer, *tag).unwrap();
            }
        }
        communicator.sync().unwrap();
        for (peer, tag, _, data) in memory {
            assert_eq!(data, [value(peer, own, tag); 5], "from {peer}, tag {tag}");
        }
    });
}

/// Tests events on the host: every order that they request already holds, and an invalid event is an error.
#[test]
fn events_of_the_host() {
    threads(2, |rank| {
        let (communicator, other) = (open(&rank), open(&rank));
        let any = communicator.communicator();
        let event = any.create_event().unwrap();
        let (mut own, mut theirs) = ([rank.rank() as u64; 10], [9; 10]);
        // SAFETY: as above; the event is recorded after the messages.
        unsafe {
            any.record_event(event, 0).unwrap();
            communicator.wait(event).unwrap();
            let peer = 1 - rank.rank();
            communicator.send(address(&mut own), 10, DType::U64, peer, 0).unwrap();
            communicator.recv(address(&mut theirs), 10, DType::U64, peer, 0).unwrap();
            communicator.record(event).unwrap();
            any.wait_event(0, event).unwrap();
        }
        assert_eq!(theirs, [1 - rank.rank() as u64; 10], "the event covers the earlier messages");
        // An event can be used with any communicator.
        other.wait(event).unwrap();
        other.communicator().destroy_event(event).unwrap();
        for error in [any.destroy_event(event), communicator.record(event), communicator.wait(event)] {
            let error = error.unwrap_err();
            assert!(matches!(error, Error::InvalidSetting { name: "event", .. }), "{error}");
        }
        communicator.sync().unwrap();
    });
}

/// Tests that a peer outside of the world is refused at once, and that a dropped communicator does not execute
/// transfers that were not yet submitted.
#[test]
fn transfers_that_do_not_happen() {
    threads(2, |rank| {
        let communicator = open(&rank);
        let mut data = [rank.rank() as u8; 3];
        // SAFETY: as above; the communicator is dropped before the memory.
        unsafe {
            let error = communicator.send(address(&mut data), 3, DType::U8, 2, 0).unwrap_err();
            assert_eq!(error, Error::RankOutOfRange { rank: 2, world_size: 2 });
            communicator.recv(address(&mut data), 3, DType::U8, 1 - rank.rank(), 0).unwrap();
        }
        drop(communicator);
        assert_eq!(data, [rank.rank() as u8; 3]);
    });
}

/// Tests that the host has no streams, and registers the memory that it allocates.
#[test]
fn any_communicator_of_the_host() {
    threads(2, |rank| {
        let any = AnyCommunicator::from(Setup::default().build(&rank));
        assert!(any.device_id() == DeviceId::Cpu && any.binding().is_some());
        let buffer = any.alloc(64).unwrap();
        assert_eq!(buffer.bytes(), 64);
        let sum = Collective::AllReduce(ReduceOp::Sum);
        // SAFETY: the buffer is this rank's, and an invalid stream is refused before memory is accessed.
        unsafe {
            let refused = [
                any.check_stream(1),
                any.synchronize(1),
                any.order_streams(0, 1),
                any.collective(1, sum, [buffer.address(); 2], 8, DType::U64),
                any.transfer(1, &[]),
            ];
            for error in refused.map(Result::unwrap_err) {
                assert!(matches!(error, Error::InvalidSetting { name: "stream", .. }), "{error}");
            }
            let error = any.register(buffer.address(), 64).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            (buffer.address() as *mut u64).write(rank.rank() as u64 + 1);
            any.collective(0, sum, [buffer.address(); 2], 8, DType::U64).unwrap();
            any.synchronize(0).unwrap();
            assert_eq!((buffer.address() as *const u64).read(), 3);
        }
        let part = any.split(Some(0), 0).unwrap().expect("it has a color");
        part.barrier().unwrap();
        any.abort();
        assert_eq!((any.check(), part.check()), (Err(Error::Aborted), Ok(())));
        part.barrier().unwrap();
    });
}
