//! A call of any collective on one rank: the lengths of its buffers, the expected output, and the call itself.
//!
//! The code of each call is inlined, because it is part of the timed code.

use std::ops::Range;

use fast_allreduce::{
    CallKind, Collective, Communicator, DType, Direction, Host, ReduceOp, Result, Transfer,
};

use super::memory::{typed, typed_mut};
use crate::arguments::Case;

/// One call of one rank.
#[derive(Debug, Clone)]
pub struct Work {
    pub kind: CallKind,
    pub dtype: DType,
    /// Ignored by calls that do not reduce.
    pub op: ReduceOp,
    /// Ignored by calls without a root.
    pub root: usize,
    pub rank: usize,
    /// Elements of each share, by rank; in all-to-alls by the distance to the receiver on the right. A whole
    /// message is the first share.
    pub shares: Vec<usize>,
    /// Elements of an all-to-all, by the other rank.
    pub sends: Vec<usize>,
    pub receives: Vec<usize>,
    /// Computed once for all calls.
    input_len: usize,
    output_len: usize,
    in_place: Option<(usize, usize)>,
}

/// A part of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub length: usize,
    pub source: Source,
}

/// The source of a part: elements from index `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The reduction of all ranks' inputs.
    Reduced { first: usize },
    /// The input of one rank.
    Copied { rank: usize, first: usize },
}

impl Work {
    /// Returns the work of a case of the command line.
    pub fn of_case(case: &Case, rank: usize, world_size: usize) -> Self {
        let Case { kind, dtype, op, root, bytes } = *case;
        Self::new(kind, dtype, op, root, bytes / dtype.size(), rank, world_size)
    }

    /// Returns the work of a call whose larger buffer has at most `elements` elements, as nccl-tests counts.
    ///
    /// Shares of the uneven collectives grow by one element from each to the next: that of rank r has r more than
    /// the first, and in an all-to-all those that go r ranks to the right.
    pub fn new(
        kind: CallKind,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        elements: usize,
        rank: usize,
        world_size: usize,
    ) -> Self {
        let shares = match kind {
            _ if kind.is_whole() => vec![elements; world_size],
            _ if kind.has_counts() => uneven(elements, world_size),
            _ => vec![elements / world_size; world_size],
        };
        Self::of_shares(kind, dtype, op, root, shares, rank)
    }

    /// Returns the work of a call with these [`Work::shares`].
    pub fn of_shares(
        kind: CallKind,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        shares: Vec<usize>,
        rank: usize,
    ) -> Self {
        let n = shares.len();
        let (sends, receives) = match kind {
            CallKind::AllToAll | CallKind::AllToAllV => (
                (0..n).map(|to| shares[(to + n - rank) % n]).collect(),
                (0..n).map(|from| shares[(rank + n - from) % n]).collect(),
            ),
            _ => Default::default(),
        };
        let work = Self {
            kind,
            dtype,
            op,
            root,
            rank,
            shares,
            sends,
            receives,
            input_len: 0,
            output_len: 0,
            in_place: None,
        };
        let count = work.shares[0];
        let input_len = work.collective().map_or(count, |collective| collective.input_len(count, rank, n));
        let output_len = work.parts().iter().map(|part| part.length).sum();
        let in_place = work.collective().and_then(|collective| collective.in_place(count, rank, n));
        Self { input_len, output_len, in_place, ..work }
    }

    #[inline]
    pub fn world_size(&self) -> usize {
        self.shares.len()
    }

    /// Returns the elements of the largest buffer of any rank.
    #[inline]
    pub fn elements(&self) -> usize {
        if self.kind.is_whole() {
            return self.count();
        }
        self.shares.iter().sum()
    }

    /// Returns the elements of the message or of a share; the mean if shares differ.
    pub fn count(&self) -> usize {
        match self.kind {
            kind if kind.has_counts() => self.shares.iter().sum::<usize>() / self.world_size(),
            _ => self.shares[0],
        }
    }

    /// Returns the root, if the collective has one.
    pub fn root(&self) -> Option<usize> {
        self.kind.has_root().then_some(self.root)
    }

    /// Returns the elements that this rank reads.
    #[inline]
    pub fn input_len(&self) -> usize {
        self.input_len
    }

    /// Returns the elements that this rank writes.
    #[inline]
    pub fn output_len(&self) -> usize {
        self.output_len
    }

    /// Returns the bytes of elements.
    #[inline]
    pub fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size()
    }

    /// Returns where the input and the output start in one buffer; `None` if the call cannot be in place.
    #[inline]
    pub fn in_place(&self) -> Option<(usize, usize)> {
        self.in_place
    }

    /// Returns the parts of this rank's output, from its start.
    pub fn parts(&self) -> Vec<Part> {
        let is_root = self.rank == self.root;
        let reduced = |first, length| Part { length, source: Source::Reduced { first } };
        let copied = |rank, first, length| Part { length, source: Source::Copied { rank, first } };
        match self.kind {
            CallKind::AllReduce => vec![reduced(0, self.shares[0])],
            CallKind::ReduceScatter | CallKind::ReduceScatterV => {
                vec![reduced(self.before(self.rank), self.shares[self.rank])]
            }
            CallKind::Reduce if is_root => vec![reduced(0, self.shares[0])],
            CallKind::Broadcast => vec![copied(self.root, 0, self.shares[0])],
            CallKind::AllGather | CallKind::AllGatherV => self.gathered(),
            CallKind::Gather if is_root => self.gathered(),
            CallKind::Reduce | CallKind::Gather => Vec::new(),
            CallKind::Scatter => vec![copied(self.root, self.before(self.rank), self.shares[self.rank])],
            CallKind::AllToAll | CallKind::AllToAllV => {
                let n = self.world_size();
                // An input has the shares of the receivers in rank order.
                let first = |from: usize| (0..self.rank).map(|to| self.shares[(to + n - from) % n]).sum();
                (0..n).map(|from| copied(from, first(from), self.receives[from])).collect()
            }
            CallKind::SendRecv => vec![copied(self.left(), 0, self.shares[0])],
            // Other calls are not measured.
            _ => Vec::new(),
        }
    }

    /// Makes the call, with the data at the start of `input` and `output`.
    #[inline]
    pub fn run(&self, communicator: &Communicator<Host>, input: &[u8], output: &mut [u8]) -> Result<()> {
        let input = &input[..self.bytes(self.input_len())];
        let output = &mut output[..self.bytes(self.output_len())];
        match self.kind {
            CallKind::AllReduce => self.all_reduce(communicator, input, output),
            // SAFETY: the slices are as long as what the collective reads and writes, and borrowed for the call.
            _ => unsafe { self.run_raw(communicator, input.as_ptr(), output.as_mut_ptr()) },
        }
    }

    /// Makes the call on slices of a type, as most programs do.
    #[inline]
    fn all_reduce(&self, communicator: &Communicator<Host>, input: &[u8], output: &mut [u8]) -> Result<()> {
        macro_rules! of {
            ($type:ty) => {
                communicator.all_reduce::<$type>(typed(input), typed_mut(output), self.op)
            };
        }
        match self.dtype {
            DType::F16 => of!(half::f16),
            DType::Bf16 => of!(half::bf16),
            DType::F32 => of!(f32),
            DType::F64 => of!(f64),
            DType::I8 => of!(i8),
            DType::U8 => of!(u8),
            DType::I32 => of!(i32),
            DType::U32 => of!(u32),
            DType::I64 => of!(i64),
            DType::U64 => of!(u64),
            // SAFETY: the slices are as long as the message, and borrowed for the call.
            _ => unsafe { self.run_raw(communicator, input.as_ptr(), output.as_mut_ptr()) },
        }
    }

    /// Makes the call in place. Does nothing if the call cannot be in place.
    #[inline]
    pub fn run_in_place(&self, communicator: &Communicator<Host>, data: &mut [u8]) -> Result<()> {
        let data = &mut data[..self.bytes(self.elements())];
        let Some((from, to)) = self.in_place() else {
            return Ok(());
        };
        let base = data.as_mut_ptr();
        // SAFETY: input and output are within the elements of the slice, which is borrowed for the call, and where
        // they overlap they do so as this collective permits.
        unsafe { self.run_raw(communicator, base.add(self.bytes(from)), base.add(self.bytes(to))) }
    }

    /// # Safety
    ///
    /// As for [`Communicator::collective_raw`], with this rank's lengths.
    #[inline]
    unsafe fn run_raw(
        &self,
        communicator: &Communicator<Host>,
        input: *const u8,
        output: *mut u8,
    ) -> Result<()> {
        let (count, dtype) = (self.shares[0], self.dtype);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.collective() {
                Some(collective) => {
                    communicator.collective_raw(collective, input.cast(), output.cast(), count, dtype)
                }
                None => communicator.transfer_raw(&self.transfers(input as u64, output as u64)),
            }
        }
    }

    /// Returns the collective for a call on raw pointers; `None` if the call is [`Work::transfers`].
    #[inline]
    pub fn collective(&self) -> Option<Collective<'_>> {
        Collective::of(self.kind, self.op, self.root, &self.shares, [&self.sends, &self.receives])
    }

    /// Returns the messages of a [`CallKind::SendRecv`].
    #[inline]
    pub fn transfers(&self, input: u64, output: u64) -> [Transfer; 2] {
        [(Direction::Send, self.right(), input), (Direction::Recv, self.left(), output)].map(
            |(direction, peer, address)| Transfer {
                direction,
                peer,
                address,
                count: self.shares[0],
                dtype: self.dtype,
                tag: 0,
            },
        )
    }

    /// Returns the sum of the shares before a rank's.
    #[inline]
    pub fn before(&self, rank: usize) -> usize {
        self.shares[..rank].iter().sum()
    }

    fn gathered(&self) -> Vec<Part> {
        let shares = self.shares.iter().enumerate();
        shares.map(|(rank, &length)| Part { length, source: Source::Copied { rank, first: 0 } }).collect()
    }

    pub fn right(&self) -> usize {
        (self.rank + 1) % self.world_size()
    }

    pub fn left(&self) -> usize {
        (self.rank + self.world_size() - 1) % self.world_size()
    }
}

/// Returns a range of the work's elements. An empty range may be anywhere.
pub fn part<'a>(memory: &'a mut [u8], work: &Work, range: &Range<usize>) -> &'a mut [u8] {
    match range.is_empty() {
        true => &mut [],
        false => &mut memory[work.bytes(range.start)..work.bytes(range.end)],
    }
}

/// Divides at most `elements` into shares, each with one element more than the one before while elements are left.
fn uneven(elements: usize, world_size: usize) -> Vec<usize> {
    let steps = world_size * (world_size - 1) / 2;
    let least = elements.saturating_sub(steps) / world_size;
    let mut left = elements;
    let share = |index: usize| {
        let share = (least + index).min(left);
        left -= share;
        share
    };
    (0..world_size).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: ReduceOp = ReduceOp::Sum;

    #[test]
    fn uneven_shares_grow_and_fit() {
        assert_eq!(uneven(100, 4), [23, 24, 25, 26]);
        assert_eq!(uneven(6, 4), [0, 1, 2, 3]);
        assert_eq!(uneven(2, 4), [0, 1, 1, 0]);
        assert_eq!(uneven(7, 1), [7]);
        for elements in 0..200 {
            assert!((1..=16).all(|ranks| uneven(elements, ranks).iter().sum::<usize>() <= elements));
        }
    }

    #[test]
    fn sizes_are_those_of_the_larger_buffer_and_counts_of_a_share() {
        for kind in CallKind::MEASURED {
            let work = Work::new(kind, DType::F32, SUM, 1, 103, 2, 4);
            let expected = match kind {
                _ if kind.is_whole() => (103, 103),
                _ if kind.has_counts() => (102, 25),
                _ => (100, 25),
            };
            assert_eq!((work.elements(), work.count()), expected, "{}", kind.name());
            assert!(work.input_len() <= work.elements() && work.output_len() <= work.elements());
            for (start, length) in work
                .in_place()
                .into_iter()
                .flat_map(|(from, to)| [(from, work.input_len()), (to, work.output_len())])
            {
                assert!(length == 0 || start + length <= work.elements(), "{}", kind.name());
            }
        }
    }

    #[test]
    fn what_all_ranks_send_is_what_all_receive() {
        for kind in [CallKind::AllToAll, CallKind::AllToAllV, CallKind::AllGatherV, CallKind::Scatter] {
            let works: Vec<_> = (0..5).map(|rank| Work::new(kind, DType::F32, SUM, 3, 77, rank, 5)).collect();
            for (rank, work) in works.iter().enumerate() {
                for part in work.parts() {
                    let Source::Copied { rank: from, first } = part.source else {
                        panic!("{kind:?} reduces");
                    };
                    assert!(first + part.length <= works[from].input_len(), "{kind:?} of {rank}");
                    if kind == CallKind::AllToAllV {
                        assert_eq!(works[from].sends[rank], part.length);
                        assert_eq!(first, works[from].sends[..rank].iter().sum::<usize>());
                    }
                }
            }
        }
    }

    #[test]
    fn only_a_root_has_what_is_reduced_or_gathered() {
        for kind in [CallKind::Reduce, CallKind::Gather] {
            assert_eq!(Work::new(kind, DType::F32, SUM, 1, 12, 0, 3).output_len(), 0);
            assert_eq!(Work::new(kind, DType::F32, SUM, 1, 12, 1, 3).output_len(), 12);
        }
        for kind in [CallKind::Broadcast, CallKind::Scatter] {
            assert_eq!(Work::new(kind, DType::F32, SUM, 1, 12, 0, 3).input_len(), 0);
            assert_eq!(Work::new(kind, DType::F32, SUM, 1, 12, 1, 3).input_len(), 12);
        }
    }
}
