//! Collectives with the arguments of every rank, and the layout of their in-place form.

use fast_allreduce::{Collective as Call, DType, Direction, ReduceOp, Transfer};

use crate::oracle::of_rank;
use crate::random::Random;

/// Maximum number of messages of a group: fewer than a call accepts, even if a rank has both sides of each.
const MOST_MESSAGES: usize = 24;

/// A collective with the arguments of all ranks.
///
/// Independent of the library's type on purpose: it holds the counts of all ranks, and its expected results
/// (`oracle.rs`) follow from the documentation, not from the library's description of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collective {
    AllReduce(ReduceOp),
    AllGather,
    AllGatherV(Vec<usize>),
    ReduceScatter(ReduceOp),
    ReduceScatterV(ReduceOp, Vec<usize>),
    Broadcast {
        root: usize,
    },
    Reduce {
        op: ReduceOp,
        root: usize,
    },
    Gather {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    AllToAll,
    /// Elements by sender and receiver, and by receiver and sender.
    AllToAllV {
        sent: Vec<Vec<usize>>,
        received: Vec<Vec<usize>>,
    },
    Barrier,
    /// A group of messages: each rank's sends and receives in the order in which it posts them.
    Group(Vec<Vec<Item>>),
}

/// A message from the view of one of its two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Index of the message in the group.
    pub number: usize,
    pub direction: Direction,
    pub peer: usize,
    pub tag: u32,
    /// Elements before the message in the input or the output.
    pub first: usize,
    pub count: usize,
}

impl Item {
    /// Returns the library's message, for a rank whose input and output are at these addresses.
    pub fn transfer(&self, input: u64, output: u64, dtype: DType) -> Transfer {
        let Self { direction, peer, tag, first, count, .. } = *self;
        let base = if direction == Direction::Send { input } else { output };
        Transfer { direction, peer, address: base + (first * dtype.size()) as u64, count, dtype, tag }
    }
}

impl Collective {
    /// Number of kinds of collectives besides allreduce.
    pub const OTHERS: usize = 12;

    /// Number of these kinds that reduce.
    pub const REDUCING: usize = 3;

    /// Returns a collective of the kind `number`, with about `count` elements in each share. Kinds with counts get
    /// uneven ones, including zeros.
    pub fn other(number: usize, random: &mut Random, op: ReduceOp, count: usize, world: usize) -> Self {
        let root = random.below(world);
        match number % Self::OTHERS {
            0 => Self::AllGather,
            1 => Self::AllGatherV(uneven(random, count, world)),
            2 => Self::ReduceScatter(op),
            3 => Self::ReduceScatterV(op, uneven(random, count, world)),
            4 => Self::Broadcast { root },
            5 => Self::Reduce { op, root },
            6 => Self::Gather { root },
            7 => Self::Scatter { root },
            8 => Self::AllToAll,
            9 => {
                let sent: Vec<_> = (0..world).map(|_| uneven(random, count, world)).collect();
                let received = (0..world).map(|to| sent.iter().map(|from| from[to]).collect()).collect();
                Self::AllToAllV { sent, received }
            }
            10 => Self::Barrier,
            _ => group(random, count, world),
        }
    }

    /// Returns how many times `count` elements, approximately, a rank's input or output has at most in a collective of
    /// the kind `number`.
    pub fn most_shares(number: usize, world: usize) -> usize {
        match number % Self::OTHERS {
            4 | 5 => 1,
            11 => MOST_MESSAGES,
            _ => world,
        }
    }

    pub fn op(&self) -> Option<ReduceOp> {
        match *self {
            Self::AllReduce(op)
            | Self::ReduceScatter(op)
            | Self::ReduceScatterV(op, _)
            | Self::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// Returns the call of a rank; `None` for a group, whose messages are in `items`.
    pub fn call(&self, rank: usize) -> Option<Call<'_>> {
        Some(match *self {
            Self::AllReduce(op) => Call::AllReduce(of_rank(op, rank)),
            Self::AllGather => Call::AllGather,
            Self::AllGatherV(ref counts) => Call::AllGatherV(counts),
            Self::ReduceScatter(op) => Call::ReduceScatter(of_rank(op, rank)),
            Self::ReduceScatterV(op, ref counts) => Call::ReduceScatterV(of_rank(op, rank), counts),
            Self::Broadcast { root } => Call::Broadcast { root },
            Self::Reduce { op, root } => Call::Reduce { op: of_rank(op, rank), root },
            Self::Gather { root } => Call::Gather { root },
            Self::Scatter { root } => Call::Scatter { root },
            Self::AllToAll => Call::AllToAll,
            Self::AllToAllV { ref sent, ref received } => {
                Call::AllToAllV { send: &sent[rank], receive: &received[rank] }
            }
            Self::Barrier => Call::Barrier,
            Self::Group(_) => return None,
        })
    }

    /// Returns the messages of a rank in a group.
    pub fn items(&self, rank: usize) -> &[Item] {
        match self {
            Self::Group(items) => &items[rank],
            _ => &[],
        }
    }

    /// Returns the number of elements of each rank's share, for collectives with shares.
    pub fn shares(&self, count: usize, world: usize) -> Vec<usize> {
        match self {
            Self::AllGatherV(counts) | Self::ReduceScatterV(_, counts) => counts.clone(),
            _ => vec![count; world],
        }
    }

    /// Returns the offsets in elements of a rank's input and output in one shared buffer, or `None` if the collective
    /// has no in-place form.
    pub fn in_place(&self, rank: usize, count: usize, world: usize) -> Option<(usize, usize)> {
        let before: usize = self.shares(count, world)[..rank].iter().sum();
        match *self {
            Self::AllReduce(_) | Self::Broadcast { .. } | Self::Reduce { .. } => Some((0, 0)),
            Self::AllGather | Self::AllGatherV(_) => Some((before, 0)),
            Self::ReduceScatter(_) | Self::ReduceScatterV(..) => Some((0, before)),
            Self::Gather { root } => Some((if root == rank { before } else { 0 }, 0)),
            Self::Scatter { root } => Some((0, if root == rank { before } else { 0 })),
            Self::AllToAll | Self::AllToAllV { .. } | Self::Barrier | Self::Group(_) => None,
        }
    }
}

/// Returns counts around `count` for each rank, some of them zero.
fn uneven(random: &mut Random, count: usize, world: usize) -> Vec<usize> {
    (0..world).map(|_| if random.one_in(4) { 0 } else { random.below(2 * count + 1) }).collect()
}

/// Returns messages between any ranks, some without elements, some from a rank to itself. The two ranks of a message
/// have it at different positions in their lists; messages with the same tag between two ranks keep their order.
fn group(random: &mut Random, count: usize, world: usize) -> Collective {
    let mut items = vec![Vec::new(); world];
    for number in 0..=random.below(MOST_MESSAGES) {
        let (from, to) = (random.below(world), random.below(world));
        let (tag, count) = (random.pick(&[0, 1, 7, u32::MAX]), uneven(random, count, 1)[0]);
        let item = |direction, peer| Item { number, direction, peer, tag, first: 0, count };
        items[from].push(item(Direction::Send, to));
        items[to].push(item(Direction::Recv, from));
    }
    for of_rank in &mut items {
        let of_channel = |item: &Item| (item.direction, item.peer, item.tag);
        let mut channels: Vec<_> = of_rank.iter().map(of_channel).collect();
        for last in (1..channels.len()).rev() {
            channels.swap(last, random.below(last + 1));
        }
        let mut firsts = [0, 0];
        for channel in channels {
            let next = of_rank.iter().position(|item| of_channel(item) == channel).expect("one for each");
            let item = of_rank.remove(next);
            let first = &mut firsts[usize::from(item.direction == Direction::Recv)];
            of_rank.push(Item { first: *first, ..item });
            *first += item.count;
        }
    }
    Collective::Group(items)
}
