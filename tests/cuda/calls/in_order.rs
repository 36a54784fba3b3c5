//! Tests collectives and messages in stream order: the typed calls, and graphs of them.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fast_allreduce::{Collective, Communicator, Cuda, DType, Direction, Error, ReduceOp, Transfer};

use crate::calls::collectives::{Case, BYTES};
use crate::faults::errors::alone;
use crate::fixtures::fixture::{compare, download, upload, MemoryKind, Setup};
use crate::fixtures::gpu::{context, gpu};
use crate::fixtures::threads::{fixtures, threads};
use crate::launches::graphs::capture;
use crate::random::Random;

tests! {
    gpu => typed_collectives, captured_collectives_and_messages, what_collectives_refuse;
}

const WORLD: usize = 3;

/// Returns the input of a rank at an index.
fn value(rank: usize, index: usize) -> i32 {
    (rank * 1000 + index) as i32
}

fn values(rank: usize, indices: std::ops::Range<usize>) -> Vec<i32> {
    indices.map(|index| value(rank, index)).collect()
}

/// Returns the sum over the ranks at each index.
fn sums(indices: std::ops::Range<usize>) -> Vec<i32> {
    indices.map(|index| (0..WORLD).map(|rank| value(rank, index)).sum()).collect()
}

/// A rank with one stream, on which it makes all its calls.
struct Caller {
    communicator: Communicator<Cuda>,
    stream: Arc<CudaStream>,
}

impl Caller {
    /// Calls with an input view and an output view that are not aligned to a pack, and returns the output.
    fn call(
        &self,
        input: &[i32],
        room: usize,
        call: impl FnOnce(
            &cudarc::driver::CudaView<'_, i32>,
            &mut cudarc::driver::CudaViewMut<'_, i32>,
        ) -> fast_allreduce::Result<()>,
    ) -> Vec<i32> {
        let from = self.stream.clone_htod(&[&[7], input, &[7]].concat()).unwrap();
        let mut to = self.stream.clone_htod(&vec![-7; room + 5]).unwrap();
        call(&from.slice(1..=input.len()), &mut to.slice_mut(3..room + 3)).unwrap();
        self.communicator.synchronize(&self.stream).unwrap();
        let all = self.stream.clone_dtoh(&to).unwrap();
        assert_eq!((&all[..3], &all[room + 3..]), (&[-7; 3][..], &[-7; 2][..]), "outside of the output");
        all[3..room + 3].to_vec()
    }
}

fn typed_collectives() {
    const N: usize = 101;
    let counts = [5, 0, 77];
    // Counts sent to each rank: the left neighbour sends one element more than the right neighbour.
    let sends = |from: usize| [0, 1, 2].map(|to| 10 + (WORLD + to - from) % WORLD);
    threads(WORLD, 1, |rank, context| {
        let communicator = Setup::default().try_build(context.clone(), rank).unwrap();
        let stream = context.new_stream().unwrap();
        let caller = Caller { communicator, stream };
        let Caller { communicator: ranks, stream: s } = &caller;
        let own = ranks.rank();
        // cudarc synchronises the context when its first stream is created.
        ranks.barrier().unwrap();
        let mine = |length: usize| values(own, 0..length);
        let concat = |length: usize| (0..WORLD).flat_map(|rank| values(rank, 0..length)).collect::<Vec<_>>();
        let if_root = |root: usize, values: Vec<i32>| if own == root { values } else { Vec::new() };
        let share = own * N..(own + 1) * N;

        assert_eq!(caller.call(&mine(N), 3 * N, |from, to| ranks.all_gather(s, from, to)), concat(N));
        let all_v: Vec<i32> = (0..WORLD).flat_map(|rank| values(rank, 0..counts[rank])).collect();
        let gathered =
            caller.call(&mine(counts[own]), all_v.len(), |from, to| ranks.all_gather_v(s, from, to, &counts));
        assert_eq!(gathered, all_v);
        let scattered =
            caller.call(&mine(3 * N), N, |from, to| ranks.reduce_scatter(s, from, to, ReduceOp::Sum));
        assert_eq!(scattered, sums(share.clone()));
        let first: usize = counts[..own].iter().sum();
        let scattered = caller.call(&mine(82), counts[own], |from, to| {
            ranks.reduce_scatter_v(s, from, to, &counts, ReduceOp::Sum)
        });
        assert_eq!(scattered, sums(first..first + counts[own]));
        for root in 0..WORLD {
            let copied = caller.call(&[], N, |_, to| {
                s.memcpy_htod(&mine(N), to).unwrap();
                ranks.broadcast(s, to, root)
            });
            assert_eq!(copied, values(root, 0..N));
            let room = if own == root { N } else { 4 };
            let reduced =
                caller.call(&mine(N), room, |from, to| ranks.reduce(s, from, to, ReduceOp::Sum, root));
            assert_eq!(if_root(root, reduced), if_root(root, sums(0..N)));
            let room = if own == root { 3 * N } else { 4 };
            let gathered = caller.call(&mine(N), room, |from, to| ranks.gather(s, from, to, root));
            assert_eq!(if_root(root, gathered), if_root(root, concat(N)));
            let has = if own == root { 3 * N } else { 4 };
            let scattered = caller.call(&mine(has), N, |from, to| ranks.scatter(s, from, to, root));
            assert_eq!(scattered, values(root, share.clone()));
        }
        let turned: Vec<i32> = (0..WORLD).flat_map(|rank| values(rank, share.clone())).collect();
        assert_eq!(caller.call(&mine(3 * N), 3 * N, |from, to| ranks.all_to_all(s, from, to)), turned);
        let receives = [0, 1, 2].map(|from| sends(from)[own]);
        let turned: Vec<i32> = (0..WORLD)
            .flat_map(|from| {
                let first = sends(from)[..own].iter().sum();
                values(from, first..first + sends(from)[own])
            })
            .collect();
        let exchanged =
            caller.call(&mine(33), 33, |from, to| ranks.all_to_all_v(s, from, &sends(own), to, &receives));
        assert_eq!(exchanged, turned);

        let (right, left) = ((own + 1) % WORLD, (own + WORLD - 1) % WORLD);
        let from_left =
            caller.call(&mine(9000), 9000, |from, to| ranks.send_recv(s, from, right, to, left, 4));
        assert_eq!(from_left, values(left, 0..9000));
        // Messages along a chain: rank 0 sends, and each other rank forwards what it receives.
        let passed = caller.call(&mine(N), N, |from, to| match own {
            0 => ranks.send(s, from, 1, 8),
            _ => {
                ranks.recv(s, to, own - 1, 8)?;
                if own + 1 < WORLD {
                    ranks.send(s, to, own + 1, 8)?;
                }
                Ok(())
            }
        });
        if own > 0 {
            assert_eq!(passed, values(0, 0..N));
        }
        ranks.barrier_on(s).unwrap();
        ranks.synchronize(s).unwrap();
        ranks.barrier().unwrap();
    });
}

/// Indices of the captured collectives: allgather, reduce-scatter, broadcast and all-to-all.
const CAPTURED: [usize; 4] = [1, 3, 5, 9];

fn captured_collectives_and_messages() {
    const COUNT: usize = 700;
    let random = Random::new("calls::in_order::captured_collectives_and_messages");
    for graph_registration in [false, true] {
        let setup = Setup { graph_registration, first_epoch: u32::MAX - 20, ..Setup::default() };
        fixtures(WORLD, 1, setup, BYTES, |fixture| {
            let (own, stream) = (fixture.rank(), fixture.stream.cu_stream());
            let (right, left) = ((own + 1) % WORLD, (own + WORLD - 1) % WORLD);
            // Each collective has its own part of the memory; the last part is for the messages.
            let place = |which: usize, number: usize| {
                fixture.address((MemoryKind::Plain, 0), which, 1) + ((number * BYTES / 5) & !63) as u64
            };
            let message = |direction, peer, address| Transfer {
                direction,
                peer,
                address,
                count: COUNT,
                dtype: DType::F32,
                tag: 3,
            };
            let messages =
                [message(Direction::Send, right, place(0, 4)), message(Direction::Recv, left, place(1, 4))];
            let mut shared = random.fork(0);
            let mut cases = CAPTURED.map(|which| Case::exactly(&mut shared, which, WORLD, COUNT));
            let graph = capture(&fixture.stream, || {
                for (number, case) in cases.iter().enumerate() {
                    let (input, output) = (place(0, number), place(1, number));
                    // SAFETY: the memory is the fixture's and outlives the graph.
                    unsafe {
                        let collective = case.collective(own);
                        fixture
                            .communicator
                            .collective_raw(stream, collective, input, output, COUNT, case.dtype)
                    }
                    .unwrap();
                }
                // SAFETY: as above.
                unsafe { fixture.communicator.transfer_raw(stream, &messages) }.unwrap();
                fixture.communicator.barrier_on(&fixture.stream).unwrap();
            });
            fixture.communicator.register_graph_buffers().unwrap();
            for round in 1..6 {
                let mut shared = random.fork(round);
                cases.iter_mut().for_each(|case| case.renew(&mut shared, WORLD));
                for (number, case) in cases.iter().enumerate() {
                    upload(&fixture.stream, place(0, number), &case.inputs[own]);
                    upload(&fixture.stream, place(1, number), &vec![0x5C; case.expected(own).len()]);
                }
                let sent = |rank: usize| vec![(rank * 16 + round) as u8; COUNT * 4];
                upload(&fixture.stream, place(0, 4), &sent(own));
                upload(&fixture.stream, place(1, 4), &vec![0x5C; COUNT * 4]);
                graph.launch().unwrap();
                fixture.communicator.synchronize(&fixture.stream).unwrap();
                for (number, case) in cases.iter().enumerate() {
                    let expected = case.expected(own);
                    compare(&download(&fixture.stream, place(1, number), expected.len()), &expected, 4)
                        .unwrap_or_else(|problem| panic!("{:?}: {problem}", case.collective(own)));
                }
                compare(&download(&fixture.stream, place(1, 4), COUNT * 4), &sent(left), 4).unwrap();
            }
            fixture.communicator.barrier().unwrap();
        });
    }
}

fn what_collectives_refuse() {
    let communicator = Setup::default().try_build(context(0), alone()).unwrap();
    let stream = communicator.device().context().new_stream().unwrap();
    let input = stream.alloc_zeros::<f32>(8).unwrap();
    let mut output = stream.alloc_zeros::<f32>(8).unwrap();
    let no_rank = Err(Error::RankOutOfRange { rank: 1, world_size: 1 });
    assert_eq!(communicator.broadcast(&stream, &mut output, 1), no_rank);
    assert_eq!(communicator.gather(&stream, &input, &mut output, 1), no_rank);
    assert_eq!(communicator.send(&stream, &input, 1, 0), no_rank);
    let counts = communicator.all_gather_v(&stream, &input, &mut output, &[4, 4]);
    assert!(matches!(counts, Err(Error::InvalidSetting { name: "counts", .. })), "{counts:?}");
    let short = communicator.all_gather(&stream, &input.slice(..7), &mut output);
    assert_eq!(short, Err(Error::LengthMismatch { input: 7, output: 8 }));
    let lonely = communicator.send(&stream, &input, 0, 0);
    assert!(matches!(lonely, Err(Error::Disagreement { rank: 0, .. })), "{lonely:?}");
    let host = [0_f32; 8];
    // SAFETY: the call is refused before it accesses memory.
    let host = unsafe {
        let (address, collective) = (host.as_ptr() as u64, Collective::AllGather);
        communicator.collective_raw(stream.cu_stream(), collective, address, address, 8, DType::F32)
    };
    assert!(matches!(host, Err(Error::InvalidPointer { problem: "not device memory", .. })), "{host:?}");
    // The communicator still works.
    assert_eq!(communicator.all_gather(&stream, &input, &mut output), Ok(()));
    assert_eq!(communicator.barrier_on(&stream), Ok(()));
    assert_eq!(communicator.synchronize(&stream), Ok(()));
}
