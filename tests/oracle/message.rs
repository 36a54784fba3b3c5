//! Calls of all ranks with their expected results, and the memory that a rank uses for its part.

use std::sync::Arc;

use fast_allreduce::{DType, Direction, ReduceOp};

pub use crate::collective::Collective;
use crate::oracle;
use crate::order::Order;
use crate::random::{elements, Random, Values};

/// One call of a collective: the input of each rank and the expected output of each rank.
pub struct Message {
    pub collective: Collective,
    pub dtype: DType,
    /// Elements, in the unit of the call's `count`.
    pub count: usize,
    /// Inputs of the ranks, as bytes.
    inputs: Vec<Vec<u8>>,
    expected: Vec<Arc<[u8]>>,
}

impl Message {
    /// Creates an allreduce by a direct algorithm.
    pub fn new(
        random: &mut Random,
        kind: (DType, ReduceOp),
        count: usize,
        world: usize,
        values: Values,
    ) -> Self {
        Self::in_order(random, kind, count, world, values, Order::Ranks)
    }

    /// Creates an allreduce by an algorithm with this order of additions.
    pub fn in_order(
        random: &mut Random,
        (dtype, op): (DType, ReduceOp),
        count: usize,
        world: usize,
        values: Values,
        order: Order,
    ) -> Self {
        let inputs = (0..world).map(|_| elements(random, dtype, count, values)).collect();
        Self::of_inputs((dtype, op), inputs, order)
    }

    /// Creates an allreduce of these inputs (bytes of each rank).
    pub fn of_inputs((dtype, op): (DType, ReduceOp), inputs: Vec<Vec<u8>>, order: Order) -> Self {
        let result = match order {
            Order::Ranks => oracle::reduce(dtype, op, &inputs),
            _ => order.reduce(dtype, op, &inputs),
        };
        let count = result.len() / dtype.size();
        let expected = vec![result.into(); inputs.len()];
        Self { collective: Collective::AllReduce(op), dtype, count, inputs, expected }
    }

    /// Creates a message of any collective; an allreduce is by a direct algorithm.
    pub fn of(
        random: &mut Random,
        collective: Collective,
        dtype: DType,
        count: usize,
        world: usize,
        values: Values,
    ) -> Self {
        let length = |rank| match collective.call(rank) {
            Some(call) => call.input_len(count, rank, world),
            None => group_len(&collective, rank, Direction::Send),
        };
        let inputs: Vec<_> = (0..world).map(|rank| elements(random, dtype, length(rank), values)).collect();
        let expected = expected(&collective, dtype, count, &inputs);
        Self { collective, dtype, count, inputs, expected }
    }

    /// Returns the input of a rank.
    pub fn input(&self, rank: usize) -> &[u8] {
        &self.inputs[rank]
    }

    /// Returns the expected output of a rank; empty if it has no output.
    pub fn expected(&self, rank: usize) -> &[u8] {
        &self.expected[rank]
    }

    /// Returns the size in bytes of the largest input or output of a rank.
    pub fn bytes(&self) -> usize {
        let lengths = self.inputs.iter().map(Vec::len).chain(self.expected.iter().map(|bytes| bytes.len()));
        lengths.max().unwrap_or(0)
    }

    /// Returns the offsets in bytes of a rank's input and output in one shared buffer, or `None` if the collective
    /// has no in-place form.
    pub fn in_place(&self, rank: usize) -> Option<(usize, usize)> {
        let size = self.dtype.size();
        let (input, output) = self.collective.in_place(rank, self.count, self.inputs.len())?;
        Some((input * size, output * size))
    }
}

/// Returns the number of elements that a rank sends or receives in a group.
fn group_len(collective: &Collective, rank: usize, direction: Direction) -> usize {
    let items = collective.items(rank).iter().filter(|item| item.direction == direction);
    items.map(|item| item.count).sum()
}

/// Returns the expected output of each rank.
fn expected(collective: &Collective, dtype: DType, count: usize, inputs: &[Vec<u8>]) -> Vec<Arc<[u8]>> {
    let (size, world) = (dtype.size(), inputs.len());
    let reduced = || oracle::reduce(dtype, collective.op().expect("it reduces"), inputs);
    let shares = collective.shares(count, world);
    // The bytes of `count` elements, from element `first` on.
    let part = |of: &[u8], first: usize, count: usize| of[first * size..(first + count) * size].to_vec();
    let share = |of: &[u8], rank: usize| part(of, shares[..rank].iter().sum(), shares[rank]);
    let at_root = |root: usize, result: Vec<u8>| {
        (0..world).map(|rank| if rank == root { result.clone() } else { Vec::new() }).collect()
    };
    let by_rank: Vec<Vec<u8>> = match collective {
        Collective::AllReduce(_) => vec![reduced(); world],
        Collective::AllGather | Collective::AllGatherV(_) => vec![inputs.concat(); world],
        Collective::ReduceScatter(_) | Collective::ReduceScatterV(..) => {
            let whole = reduced();
            (0..world).map(|rank| share(&whole, rank)).collect()
        }
        Collective::Broadcast { root } => vec![inputs[*root].clone(); world],
        Collective::Reduce { root, .. } => at_root(*root, reduced()),
        Collective::Gather { root } => at_root(*root, inputs.concat()),
        Collective::Scatter { root } => (0..world).map(|rank| share(&inputs[*root], rank)).collect(),
        Collective::AllToAll => {
            let received = |rank| inputs.iter().flat_map(move |input| share(input, rank)).collect();
            (0..world).map(received).collect()
        }
        Collective::AllToAllV { sent, .. } => {
            let from =
                |from: usize, to: usize| part(&inputs[from], sent[from][..to].iter().sum(), sent[from][to]);
            (0..world).map(|to| (0..world).flat_map(|rank| from(rank, to)).collect()).collect()
        }
        Collective::Barrier => vec![Vec::new(); world],
        Collective::Group(_) => {
            let sent = |receiver: usize, number: usize, sender: usize| {
                let is_it = |item: &&_| is_send_of(item, receiver, number);
                let item = collective.items(sender).iter().find(is_it).expect("what is received is sent");
                part(&inputs[sender], item.first, item.count)
            };
            let received = |rank| {
                let items = collective.items(rank).iter();
                let receives = items.filter(|item| item.direction == Direction::Recv);
                receives.flat_map(|item| sent(rank, item.number, item.peer)).collect()
            };
            (0..world).map(received).collect()
        }
    };
    by_rank.into_iter().map(Arc::from).collect()
}

fn is_send_of(item: &crate::collective::Item, receiver: usize, number: usize) -> bool {
    item.direction == Direction::Send && item.peer == receiver && item.number == number
}

/// Returns the content of an output before the call: every byte is wrong.
pub fn poison(expected: &[u8]) -> Vec<u8> {
    expected.iter().map(|byte| !byte).collect()
}

/// Kind of memory on one side of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// From the system's allocator; on a GPU from `cuMemAlloc`.
    Plain,
    /// From a GPU's stream-ordered pool; plain memory elsewhere.
    Pool,
    /// A registered buffer.
    Registered,
}

/// Memory of one side of a call: its kind, and the offset in elements from a 64-byte boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub kind: MemoryKind,
    pub offset: usize,
}

impl Place {
    pub const fn plain(offset: usize) -> Self {
        Self { kind: MemoryKind::Plain, offset }
    }

    pub const fn registered(offset: usize) -> Self {
        Self { kind: MemoryKind::Registered, offset }
    }
}

/// Memory of a rank's input and output. `None`: in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub input: Place,
    pub output: Option<Place>,
}

impl Placement {
    pub fn random(random: &mut Random) -> Self {
        let mut place = || Place {
            kind: random.pick(&[
                MemoryKind::Plain,
                MemoryKind::Pool,
                MemoryKind::Registered,
                MemoryKind::Registered,
            ]),
            offset: random.pick(&[0, 0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 33]),
        };
        let (input, output) = (place(), place());
        Self { input, output: (!random.one_in(3)).then_some(output) }
    }

    /// Returns a random placement for each rank.
    pub fn randoms(random: &mut Random, world: usize) -> Vec<Self> {
        (0..world).map(|_| Self::random(random)).collect()
    }
}
