//! Tests wrong arguments of every collective and of messages: the call returns an error that names the argument, before
//! anything is sent. The other ranks do not call.

use fast_allreduce::{Collective, Communicator, DType, Direction, Error, Host, ReduceOp, Result, Transfer};

use crate::host::Build as _;
use crate::suite::launch::threads;
use crate::suite::scenario::Setup;

const OP: ReduceOp = ReduceOp::Sum;

/// Runs `body` on each rank of three, and then checks that the communicator still works.
fn alone(body: impl Fn(&Communicator<Host>) + Sync) {
    threads(3, |rank| {
        let communicator = Setup::default().build(&rank);
        body(&communicator);
        let mut gathered = [0; 3];
        communicator.all_gather(&[rank.rank() as u32], &mut gathered).unwrap();
        assert_eq!(gathered, [0, 1, 2]);
    });
}

fn mismatch(result: Result<()>, input: usize, output: usize) {
    assert_eq!(result, Err(Error::LengthMismatch { input, output }));
}

#[test]
fn lengths() {
    alone(|c| {
        let data = [1f32; 12];
        let out = |length: usize| vec![0f32; length];
        mismatch(c.all_gather(&data[..3], &mut out(8)), 9, 8);
        mismatch(c.all_gather_v(&data[..3], &mut out(9), &[2, 2, 2]), 2, 3);
        mismatch(c.all_gather_v(&data[..2], &mut out(7), &[2, 2, 2]), 6, 7);
        mismatch(c.reduce_scatter(&data[..5], &mut out(2), OP), 6, 5);
        mismatch(c.reduce_scatter_v(&data[..7], &mut out(2), &[2, 2, 2], OP), 6, 7);
        mismatch(c.reduce_scatter_v(&data[..6], &mut out(1), &[2, 2, 2], OP), 2, 1);
        mismatch(c.reduce(&data[..4], &mut out(5), OP, c.rank()), 4, 5);
        mismatch(c.gather(&data[..4], &mut out(11), c.rank()), 12, 11);
        mismatch(c.scatter(&data[..5], &mut out(2), c.rank()), 6, 5);
        mismatch(c.all_to_all(&data[..7], &mut out(7)), 6, 7);
        mismatch(c.all_to_all(&data[..6], &mut out(9)), 6, 9);
        mismatch(c.all_to_all_v(&data[..5], &[2, 2, 2], &mut out(6), &[2, 2, 2]), 6, 5);
        mismatch(c.all_to_all_v(&data[..6], &[2, 2, 2], &mut out(5), &[2, 2, 2]), 6, 5);
        // The bytes that a rank sends to itself must equal those that it receives from itself.
        let mut received = [1; 3];
        received[c.rank()] = 3;
        mismatch(c.all_to_all_v(&data[..6], &[2, 2, 2], &mut out(5), &received), 2, 3);
    });
}

#[test]
fn operations_that_a_type_does_not_have() {
    let refused = |result: Result<()>, said: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: "reduction operation", .. }), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    };
    alone(|c| {
        let scaled = ReduceOp::PreMulSum(0.5.into());
        // Between successful calls of the same sizes.
        let mut sums = [1f32; 5];
        c.all_reduce_in_place(&mut sums, scaled).unwrap();
        assert_eq!(sums, [1.5; 5]);
        for op in ReduceOp::INTEGER_ONLY {
            refused(c.all_reduce_in_place(&mut [1f32; 5], op), "of f32");
            refused(c.all_reduce(&[1f64; 5], &mut [0.0; 5], op), "of f64");
            refused(c.reduce_scatter(&[1f32; 3], &mut [0.0], op), "of f32");
            refused(c.reduce(&[1f32; 3], &mut [0.0; 3], op, 0), "of f32");
        }
        refused(c.all_reduce_in_place(&mut [1u8; 5], scaled), "premul_sum of u8");
        refused(c.reduce_scatter_v(&[1i64; 3], &mut [0], &[1, 1, 1], scaled), "premul_sum of i64");
        c.all_reduce_in_place(&mut sums, ReduceOp::PreMulSum(2.0.into())).unwrap();
        assert_eq!(sums, [9.0; 5], "another scale is another call");
    });
}

#[test]
fn counts_by_rank() {
    alone(|c| {
        for counts in [&[][..], &[1, 1], &[1, 1, 1, 1]] {
            let results = [
                c.all_gather_v(&[1u8], &mut [0; 3], counts),
                c.reduce_scatter_v(&[1u8; 3], &mut [0], counts, OP),
                c.all_to_all_v(&[1u8; 3], counts, &mut [0; 3], &[1, 1, 1]),
                c.all_to_all_v(&[1u8; 3], &[1, 1, 1], &mut [0; 3], counts),
            ];
            for result in results {
                assert!(matches!(result, Err(Error::InvalidSetting { name: "counts", .. })), "{result:?}");
            }
        }
        let huge = [usize::MAX / 2, usize::MAX / 2, 3];
        let result = c.reduce_scatter_v(&[1u64; 3], &mut [0], &huge, OP);
        assert!(matches!(result, Err(Error::InvalidSetting { name: "count", .. })), "{result:?}");
    });
}

#[test]
fn ranks_out_of_range() {
    alone(|c| {
        for rank in [3, 16, usize::MAX] {
            let no_rank = Err(Error::RankOutOfRange { rank, world_size: 3 });
            assert_eq!(c.broadcast(&mut [1u8; 4], rank), no_rank);
            assert_eq!(c.reduce(&[1u8; 4], &mut [0; 4], OP, rank), no_rank);
            assert_eq!(c.gather(&[1u8; 4], &mut [0; 12], rank), no_rank);
            assert_eq!(c.scatter(&[1u8; 12], &mut [0; 4], rank), no_rank);
            assert_eq!(c.send(&[1u8; 4], rank, 0), no_rank);
            assert_eq!(c.recv(&mut [1u8; 4], rank, 0), no_rank);
            assert_eq!(c.send_recv(&[1u8; 4], rank, &mut [0; 4], 0, 0), no_rank);
            assert_eq!(c.send_recv(&[1u8; 4], 0, &mut [0; 4], rank, 0), no_rank);
            let bad = c.group(|group| {
                group.send(&[1u8], 0, 0).send(&[2u8], rank, 0);
                Ok(())
            });
            assert_eq!(bad, no_rank);
        }
    });
}

/// Tests shares of ten 4-byte elements with both buffers in one allocation: the offsets of in-place calls, and offsets
/// next to them.
#[test]
fn overlaps() {
    alone(|c| {
        let (rank, count) = (c.rank(), 10);
        let mut memory = vec![0u32; 200];
        let base = memory.as_mut_ptr();
        let call = |collective: Collective<'_>, input: usize, output: usize| {
            let (input, output) = (base.wrapping_add(input).cast(), base.wrapping_add(output).cast());
            // SAFETY: the call is refused, as the buffers overlap.
            unsafe { c.collective_raw(collective, input, output, count, DType::U32) }
        };
        let counts = [10, 0, 20];
        let (before, root) = (rank * count, rank);
        let before_v = [0, 10, 10][rank];
        let of_v = [10, 0, 20][rank];
        let cases = [
            (Collective::AllReduce(OP), 0, 0, true),
            (Collective::Broadcast { root }, 0, 0, true),
            (Collective::Reduce { op: OP, root }, 0, 0, true),
            (Collective::AllGather, before, 0, true),
            (Collective::Gather { root }, before, 0, true),
            (Collective::AllGatherV(&counts), before_v, 0, of_v > 0),
            (Collective::ReduceScatter(OP), 0, before, true),
            (Collective::Scatter { root }, 0, before, true),
            (Collective::ReduceScatterV(OP, &counts), 0, before_v, of_v > 0),
            (Collective::AllToAll, 0, 0, true),
            (Collective::AllToAllV { send: &[5, 6, 7], receive: &[5, 6, 7] }, 2, 0, true),
        ];
        for (collective, input, output, has_elements) in cases {
            let (input, output) = (input + 20, output + 20);
            for (input, output) in
                [(input + 1, output), (input, output + 1)].into_iter().filter(|_| has_elements)
            {
                let result = call(collective, input, output);
                assert!(matches!(result, Err(Error::Overlap { .. })), "{collective:?}: {result:?}");
            }
        }
        // This collective has no in-place form.
        let all_to_all = call(Collective::AllToAll, 0, 0);
        assert!(matches!(all_to_all, Err(Error::Overlap { .. })), "{all_to_all:?}");
    });
}

#[test]
fn messages() {
    alone(|c| {
        let next = (c.rank() + 1) % 3;
        let mut memory = [0u64; 40];
        let address = memory.as_mut_ptr() as u64;
        let item = |direction, first: u64, count| {
            let address = address + first;
            Transfer { direction, peer: next, address, count, dtype: DType::U64, tag: 0 }
        };
        // SAFETY: the call is refused, or has no elements.
        let raw = |items: &[Transfer]| unsafe { c.transfer_raw(items) };
        use Direction::{Recv, Send};
        for pair in [
            [item(Send, 0, 10), item(Recv, 72, 10)],
            [item(Recv, 0, 10), item(Send, 72, 10)],
            [item(Recv, 0, 10), item(Recv, 8, 1)],
        ] {
            assert!(matches!(raw(&pair), Err(Error::Overlap { .. })), "{pair:?}");
        }
        let misaligned = raw(&[item(Send, 4, 1)]);
        assert!(matches!(misaligned, Err(Error::InvalidPointer { which: "send", .. })), "{misaligned:?}");
        let null = raw(&[Transfer { address: 0, ..item(Recv, 0, 1) }]);
        assert!(matches!(null, Err(Error::InvalidPointer { which: "receive", .. })), "{null:?}");
        let huge = raw(&[item(Send, 0, usize::MAX)]);
        assert!(matches!(huge, Err(Error::InvalidSetting { name: "count", .. })), "{huge:?}");

        let many: Vec<_> = (0..65).map(|_| item(Send, 0, 1)).collect();
        let refused = raw(&many);
        let too_many = |result: &Result<()>| {
            matches!(result, Err(Error::InvalidSetting { name: "messages of a group", .. }))
        };
        assert!(too_many(&refused), "{refused:?}");

        // Messages to the rank itself: without a receive, with another tag, with another length.
        let own = c.rank();
        let mut data = [0u32; 4];
        let lonely = [
            c.send(&[1u32], own, 0),
            c.recv(&mut data[..1], own, 0),
            c.group(|group| {
                group.send(&[1u32; 2], own, 1).recv(&mut data[..2], own, 2);
                Ok(())
            }),
        ];
        let [mut first, mut second] = [[0u32; 2], [0; 2]];
        let shorter = c.group(|group| {
            group.send(&[1u32; 2], own, 1).recv(&mut first[..1], own, 1).recv(&mut second, own, 1);
            Ok(())
        });
        for result in lonely.into_iter().chain([shorter]) {
            let Err(Error::Disagreement { what, rank, own_rank, .. }) = &result else { panic!("{result:?}") };
            assert_eq!((*what, *rank, *own_rank), ("the messages of a rank to itself", own, own));
        }
        // The group returns the closure's error; an empty group succeeds. The other ranks take part in neither.
        let given_up = c.group(|group| {
            group.send(&[1u8], next, 0);
            Err::<(), _>(Error::Aborted)
        });
        assert_eq!(given_up, Err(Error::Aborted));
        assert_eq!(c.group(|_| Ok(7)), Ok(7));
        assert_eq!(raw(&[]), Ok(()));
    });
}

/// Tests the reuse of the state that a call derives from its messages: an equal call may reuse it, but not after a
/// refused call.
#[test]
fn messages_again_after_others() {
    threads(2, |rank| {
        let communicator = Setup::default().build(&rank);
        let (own, peer) = (rank.rank(), 1 - rank.rank());
        let [mut data, mut received] = [[0u32; 64]; 2];
        let raw = |direction, address: *const u32, count, tag| {
            let (address, dtype) = (address as u64, DType::U32);
            Transfer { direction, peer, address, count, dtype, tag }
        };
        // SAFETY: the arrays outlive the calls.
        let exchange = |transfers: &[Transfer]| unsafe { communicator.transfer_raw(transfers) };
        for turn in 0..40 {
            let (count, tag) = ([64, 64, 17][turn % 3], (turn / 4) as u32);
            data.fill((100 * turn + own) as u32);
            received.fill(u32::MAX);
            let transfers = [
                raw(Direction::Send, data.as_ptr(), count, tag),
                raw(Direction::Recv, received.as_mut_ptr(), count, tag),
            ];
            exchange(&transfers).unwrap();
            let expected = (100 * turn + peer) as u32;
            assert!(received[..count].iter().all(|&value| value == expected), "turn {turn}: {received:?}");
            assert!(received[count..].iter().all(|&value| value == u32::MAX), "turn {turn}: {received:?}");
            // The exchange is refused, possibly twice. Then the next turn makes another call with the messages of this
            // one.
            let lonely = [Transfer { peer: own, ..transfers[0] }];
            for _ in 0..turn % 3 {
                assert!(matches!(exchange(&lonely), Err(Error::Disagreement { .. })));
            }
            if turn % 5 == 0 {
                let mut sum = [own as u32 + 1];
                communicator.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3]);
            }
            // Gathers in the same memory, of which two or three have the same root, with other calls between them.
            let mut gathered = [0u32; 6];
            for again in 0..3 {
                let root = if again == turn % 4 { 1 - turn % 2 } else { turn % 2 };
                data.fill((100 * turn + 10 * again + own) as u32);
                gathered.fill(0);
                communicator.gather(&data[..3], &mut gathered, root).unwrap();
                let of = |rank: usize| [(100 * turn + 10 * again + rank) as u32; 3];
                let all = if own == root { [of(0), of(1)].concat() } else { vec![0; 6] };
                assert_eq!(gathered[..], all);
                match turn / 4 % 4 {
                    0 => {}
                    1 => exchange(&transfers).unwrap(),
                    2 => assert!(matches!(exchange(&lonely), Err(Error::Disagreement { .. }))),
                    _ => {
                        let exchanged = communicator.all_to_all(&[own as u32, 7], &mut gathered[..2]);
                        assert_eq!((exchanged, gathered[0]), (Ok(()), [0, 7][own]));
                    }
                }
            }
        }
    });
}

/// Tests the maximum number of messages of a group: to one rank, and to all.
#[test]
fn sixty_four_messages() {
    threads(3, |rank| {
        let communicator = Setup { workers: 2, ..Setup::default() }.build(&rank);
        let (own, next, last) = (rank.rank(), (rank.rank() + 1) % 3, (rank.rank() + 2) % 3);
        let data: Vec<u32> = (0..32).map(|at| 100 * own as u32 + at).collect();
        let mut received = vec![0u32; 32];
        communicator
            .group(|group| {
                for (chunk, tag) in data.chunks(1).zip(0..) {
                    group.send(chunk, next, tag);
                }
                for (chunk, tag) in received.chunks_mut(1).zip(0..32).rev() {
                    group.recv(chunk, last, tag);
                }
                Ok(())
            })
            .unwrap();
        assert!(received.iter().zip(0..).all(|(&is, at)| is == 100 * last as u32 + at), "{received:?}");
    });
}
