//! Arguments of a call: a collective on addresses, and its division into pieces, one for each launch.

use super::collective::Collective;
use super::fused::RawFused;
use super::identity::{CallId, CallKind};
use super::operand::Operand;
use super::sharded;
use super::transfer::{Direction, Transfer};
use crate::abi::{self, FaFused, FaGatheredRows, FaLaunch, FaShardedNorm, FaShare, FaTransfers, MAX_RANKS};
use crate::catalogue::{DType, Division, Extent, ReadsInputs, SwapsStaging};
use crate::error::{Error, Result};
use crate::plan::{Algorithm, Limits};

/// Collective on addresses of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub collective: Collective<'a>,
    pub input: u64,
    pub output: u64,
    pub count: usize,
    pub dtype: DType,
}

/// Arguments that alone determine the messages of a call and its identity, if it has no counts by rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessagesKey {
    kind: CallKind,
    root: Option<usize>,
    input: u64,
    output: u64,
    count: usize,
    dtype: DType,
}

impl Division {
    /// Iterates over the first elements of the pieces, one piece for each launch. A piece has at most `piece`
    /// elements; all pieces together have `extent` elements.
    #[inline]
    pub fn pieces(self, extent: usize, piece: usize) -> impl Iterator<Item = usize> {
        // A call without elements, such as a barrier, has one piece.
        let end = if self == Self::Empty { 1 } else { extent };
        let mut next = 0_usize;
        std::iter::from_fn(move || {
            let done = next;
            next = next.saturating_add(piece);
            (done < end).then_some(done)
        })
    }
}

impl<'a> Call<'a> {
    /// Creates a fused call.
    pub fn fused(collective: Collective<'a>, input: u64, count: usize, dtype: DType) -> Self {
        Call { collective, input, output: collective.output(0), count, dtype }
    }
}

impl Call<'_> {
    #[inline]
    pub fn division(&self) -> Division {
        self.collective.kind().division()
    }

    /// Returns the identity of the call, which ranks compare. `algorithm` is `None` except in allreduces.
    #[inline]
    pub fn id(&self, algorithm: Option<Algorithm>) -> CallId {
        let counts = self.collective.counts();
        CallId {
            kind: self.collective.kind(),
            dtype: self.dtype,
            op: self.collective.reduction(),
            algorithm,
            root: self.collective.root().map(|root| root as u8),
            digest: self.digest(),
            count: counts.map_or(self.count, |counts| counts.iter().sum()),
            counts: match (counts, self.collective.fused(), self.collective.gathered()) {
                (Some(counts), Some(_), _) | (Some(counts), _, Some(_)) => CallId::short_digest(counts),
                _ => 0,
            },
        }
    }

    /// Returns the digest of the arguments that [`CallId`] has no field for: fused operations, transport, rows, or else
    /// counts by rank.
    #[inline]
    fn digest(&self) -> u64 {
        let collective = self.collective;
        match (collective, collective.fused(), collective.gathered()) {
            (_, Some(fused), _) => fused.digest(),
            (_, _, Some(rows)) => rows.digest(),
            (Collective::AllReduceQuantized(quantized), ..) => quantized.digest(),
            (Collective::ShardedRmsNorm(parts), ..) => sharded::digest(parts),
            _ => collective.counts().map_or(0, CallId::digest),
        }
    }

    /// Returns whether peers may read this rank's registered input directly. `algorithm` is `None` except in
    /// allreduces.
    #[inline]
    pub fn pulls(&self, algorithm: Option<Algorithm>, input_bytes: u64) -> bool {
        match algorithm.map(Algorithm::reads_inputs) {
            // Peers read the quantised input, which is staged.
            _ if self.collective.quantized().is_some() => false,
            // Peers read two parts, numbers and scales.
            _ if self.collective.gathered().is_some() => false,
            // Peers read what is computed, which is staged.
            _ if self.computes_input() => false,
            Some(ReadsInputs::Never) => false,
            Some(ReadsInputs::OutOfPlace) => self.input != self.output,
            Some(ReadsInputs::Always) => true,
            None => input_bytes > 0,
        }
    }

    /// Returns whether each rank first multiplies its input by a scale, or computes it from experts' rows.
    #[inline]
    fn computes_input(&self) -> bool {
        self.collective.reduction().is_some_and(|op| op.scale().is_some()) || self.has_experts()
    }

    #[inline]
    fn has_experts(&self) -> bool {
        self.collective.fused().is_some_and(|fused| fused.experts.is_some())
    }

    /// Returns whether the call repeats the call with this identity; buffers may differ. The result is always false
    /// for calls with counts by rank.
    #[inline]
    pub fn repeats(&self, id: &CallId) -> bool {
        let same = (id.dtype, id.count) == (self.dtype, self.count);
        match self.collective {
            Collective::AllReduce(op) => same && id.kind == CallKind::AllReduce && id.op == Some(op),
            collective => {
                same && id.kind == collective.kind()
                    && id.op == collective.reduction()
                    && id.root.map(usize::from) == collective.root()
                    && collective.counts().is_none()
                    && id.digest == self.digest()
            }
        }
    }

    /// Returns the number of elements of a rank's share; of the message, for calls that are not divided into shares.
    #[inline]
    pub fn share(&self, rank: usize) -> usize {
        self.collective.counts().map_or(self.count, |counts| counts[rank])
    }

    /// Returns the number of elements that are divided into pieces: those of the message, or of the largest share.
    #[inline]
    pub fn extent(&self, world_size: usize) -> usize {
        match self.division() {
            Division::Shares => (0..world_size).map(|rank| self.share(rank)).max().unwrap_or(0),
            _ => self.count,
        }
    }

    /// Returns the size of `count` elements in bytes.
    #[inline]
    fn bytes(&self) -> usize {
        self.count.saturating_mul(self.dtype.size())
    }

    /// Returns the number of shares that each rank stages at once, in a launch of a collective that is not an
    /// allreduce.
    #[inline]
    pub fn staged_shares(&self, world_size: usize) -> usize {
        match self.division() {
            Division::Shares if self.collective.reduction().is_some() => world_size,
            _ => 1,
        }
    }

    /// Returns the size of the input in bytes.
    #[inline]
    pub fn input_bytes(&self, rank: usize, world_size: usize) -> u64 {
        (self.collective.input_len(self.count, rank, world_size) * self.dtype.size()) as u64
    }

    /// Returns how many bytes a rank of the host stages in each launch, for calls that use the staging ring. `piece`
    /// is the largest number of bytes of the message, or of each share, in a launch. Returns `None` if two ranks may
    /// swap their staging instead, or if nothing is staged.
    #[inline]
    pub fn ring_bytes(&self, piece: usize, world_size: usize) -> Option<usize> {
        let bytes = piece.min(self.extent(world_size).saturating_mul(self.dtype.size()));
        let kind = self.collective.kind();
        match kind.division() {
            Division::Empty | Division::Transfers => None,
            _ if self.collective.quantized().is_some() || self.collective.sharded().is_some() => None,
            // Each share is rounded up to whole packs.
            Division::Shares if kind.reduces() => {
                Some(bytes.next_multiple_of(abi::FA_HOST_PACK_BYTES as usize) * world_size)
            }
            _ if kind.swaps_staging() == SwapsStaging::Never => Some(bytes),
            _ if self.collective.gathered().is_some() => {
                (world_size > 2).then(|| self.collective.gathered().map_or(bytes, |rows| rows.staged(bytes)))
            }
            _ => (world_size > 2).then(|| match self.collective.fused().and_then(RawFused::row) {
                None => bytes,
                // A rank also stages its normalised rows.
                Some(row) => bytes + bytes / world_size + row * self.dtype.size(),
            }),
        }
    }

    /// Returns whether two ranks may swap the regions that they stage in. They may if each rank reads only what the
    /// other has staged. A two-shot needs no swap: it reduces a slice in place in staging, which has the same effect.
    #[inline]
    pub fn can_swap(&self, algorithm: Algorithm) -> bool {
        match self.collective.kind().swaps_staging() {
            // Each rank also reads what it has computed.
            _ if self.computes_input() => false,
            SwapsStaging::Never => false,
            SwapsStaging::Always => true,
            SwapsStaging::ByAlgorithm => algorithm.swaps_staging(),
        }
    }

    /// Sets the piece of a launch: it begins at element `done` and has at most `most` elements of the message, or of
    /// each share. `source` is the address of the whole input for peers, or 0.
    #[inline]
    pub fn set_piece(&self, launch: &mut FaLaunch, done: usize, most: usize, source: u64) {
        let size = self.dtype.size();
        let (rank, world_size) = (launch.rank as usize, launch.world as usize);
        let shift = |address: u64, elements: usize| match address {
            0 => 0,
            address => address + (elements * size) as u64,
        };
        match self.division() {
            Division::Shares => {
                let mut first = 0;
                for other in 0..world_size {
                    let share = self.share(other);
                    let skipped = done.min(share);
                    launch.shares[other] = FaShare {
                        first: (first + skipped) as u64,
                        count: (share - skipped).min(most) as u64,
                    };
                    first += share;
                }
                launch.count = launch.shares[rank].count;
                let own_done = done.min(self.share(rank));
                let gathers = self.collective.reduction().is_none();
                launch.input = shift(self.input, if gathers { own_done } else { 0 });
                launch.output = shift(self.output, if gathers { 0 } else { own_done });
                launch.source = shift(source, if gathers { own_done } else { 0 });
            }
            _ => {
                launch.count = (self.count - done).min(most) as u64;
                // Every piece may need any of the experts' rows.
                launch.input = shift(self.input, if self.has_experts() { 0 } else { done });
                launch.output = shift(self.output, done);
                launch.source = shift(source, done);
            }
        }
    }

    /// Returns the fused operations of a rank in the piece that begins at element `done` of the message, or of each
    /// share, and has at most `most` elements.
    #[inline]
    pub fn fused_of_piece(&self, rank: usize, done: usize, most: usize) -> Option<FaFused> {
        let fused = self.collective.fused()?;
        let share = self.share(rank);
        let done = done.min(share);
        Some(fused.piece(self.dtype, done, (share - done).min(most), share))
    }

    /// Returns the operands of a gather of rows, in the piece that begins at element `done` of each share.
    #[inline]
    pub fn gathered_of_piece(&self, rank: usize, world_size: usize, done: usize) -> Option<FaGatheredRows> {
        let rows = self.collective.gathered()?;
        let (own, all) = (self.share(rank), (0..world_size).map(|rank| self.share(rank)).sum());
        Some(rows.piece(done.min(own), own, all))
    }

    /// Returns the rows of a sharded norm in the piece that begins at row `done` and has at most `most` rows.
    #[inline]
    pub fn sharded_of_piece(&self, done: usize, most: usize) -> Option<FaShardedNorm> {
        let parts = self.collective.sharded()?;
        Some(sharded::piece(parts, self.dtype, done, (self.count - done).min(most)))
    }

    /// Returns the code of the kernel.
    #[inline]
    pub fn kernel(&self, algorithm: Algorithm, limits: &Limits) -> u32 {
        let kind = self.collective.kind();
        match self.collective {
            // The planner chooses only algorithms that have a fused kernel.
            Collective::AllReduceFused(_) => algorithm.norm_kernel().expect("an algorithm with norms"),
            // With one rank, nothing is moved, so nothing is quantised.
            Collective::AllReduceQuantized(_) if limits.world_size == 1 => abi::FA_ONE_SHOT_PULL,
            _ => match kind.kernel_of_large() {
                Some(kernel) if limits.scatters_broadcast(self.bytes()) => kernel,
                _ => kind.kernel().unwrap_or(algorithm as u32),
            },
        }
    }

    /// Returns the arguments that determine the call's messages; `None` if it has counts by rank.
    #[inline]
    pub fn messages_key(&self) -> Option<MessagesKey> {
        let Call { collective, input, output, count, dtype } = *self;
        let has_counts = collective.counts().or(collective.sends()).or(collective.receives()).is_some();
        let (kind, root) = (collective.kind(), collective.root());
        (!has_counts).then_some(MessagesKey { kind, root, input, output, count, dtype })
    }

    /// Fills the list with the messages between pairs of ranks that carry out the collective.
    pub fn transfers(&self, rank: usize, world_size: usize, transfers: &mut Vec<Transfer>) {
        let Call { collective, input, output, count, dtype } = *self;
        let (kind, root) = (collective.kind(), collective.root().unwrap_or(rank));
        let tag = tag_of(kind, collective.root());
        transfers.clear();
        let mut add = |direction, extent, base: u64, counts: Option<&[usize]>| {
            let mut transfer = |peer, first: usize, count| {
                let address = base + (first * dtype.size()) as u64;
                transfers.push(Transfer { direction, peer, address, count, dtype, tag });
            };
            match extent {
                Extent::Nothing => {}
                Extent::Share if is_all_gather(kind) => {
                    (0..world_size).for_each(|peer| transfer(peer, 0, self.share(rank)));
                }
                Extent::Share => transfer(root, 0, count),
                Extent::ShareOfRoot | Extent::AllSharesOfRoot if root != rank => {}
                Extent::ShareOfRoot => (0..world_size).for_each(|peer| transfer(peer, 0, count)),
                Extent::AllShares | Extent::AllSharesOfRoot => {
                    let mut first = 0;
                    for peer in 0..world_size {
                        let count = counts.map_or(count, |counts| counts[peer]);
                        transfer(peer, first, count);
                        first += count;
                    }
                }
            }
        };
        add(Direction::Send, kind.reads(), input, collective.sends());
        add(Direction::Recv, kind.writes(), output, collective.receives().or(collective.counts()));
    }

    /// Checks arguments and buffers.
    ///
    /// # Errors
    ///
    /// Those of [`Call::check_arguments`], [`Error::InvalidPointer`] and [`Error::Overlap`].
    pub fn check(&self, rank: usize, world_size: usize) -> Result<()> {
        self.check_arguments(rank, world_size)?;
        self.check_buffers(rank, world_size)
    }

    /// Checks the arguments except the buffers.
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`] for an operation that the type does not have, counts that are not one for each
    ///   rank, and invalid fused operations or transport.
    /// * [`Error::RankOutOfRange`] for a root that is not a rank.
    /// * [`Error::LengthMismatch`] if the rank's own share has different counts for sending and receiving.
    pub fn check_arguments(&self, rank: usize, world_size: usize) -> Result<()> {
        if let Some(op) = self.collective.reduction() {
            op.check(self.dtype)?;
        }
        if let Some(root) = self.collective.root().filter(|&root| root >= world_size) {
            return Err(Error::RankOutOfRange { rank: root, world_size });
        }
        self.collective.check_counts(world_size)?;
        let (sends, receives) = (self.collective.sends(), self.collective.receives());
        if let Some(quantized) = self.collective.quantized() {
            quantized.check(self.dtype)?;
        }
        if let Some(fused) = self.collective.fused() {
            fused.check_arguments(self.share(rank), self.dtype)?;
            self.collective.counts().into_iter().flatten().try_for_each(|&count| fused.check_rows(count))?;
            if self.division() == Division::Shares && fused.sum != 0 {
                return Err(Error::InvalidSetting {
                    name: "sum",
                    value: "an output".to_owned(),
                    expected: "none; the plain sum of a share is that of reduce_scatter",
                });
            }
            if self.division() == Division::Shares && fused.experts.is_some() {
                return Err(Error::InvalidSetting {
                    name: "experts",
                    value: "a table".to_owned(),
                    expected: "none; all_reduce_fused computes its input from experts' rows",
                });
            }
        }
        if let Some(rows) = self.collective.gathered() {
            rows.check_arguments(self.dtype)?;
            (0..world_size).try_for_each(|rank| rows.check_rows(self.share(rank)))?;
        }
        if let Some(parts) = self.collective.sharded() {
            sharded::check_arguments(parts, self.dtype)?;
        }
        if let (Some(send), Some(receive)) = (sends, receives) {
            if send[rank] != receive[rank] {
                return Err(Error::LengthMismatch { input: send[rank], output: receive[rank] });
            }
        }
        Ok(())
    }

    /// Checks that the buffers are aligned, fit the address space, and overlap only as the collective permits.
    fn check_buffers(&self, rank: usize, world_size: usize) -> Result<()> {
        if let Some(parts) = self.collective.sharded() {
            return sharded::check_buffers(parts, self.count, self.dtype);
        }
        let input = self.collective.input_len(self.count, rank, world_size);
        let output = self.collective.output_len(self.count, rank, world_size);
        let input = Operand::new("input", self.input, input, self.dtype)?;
        if let Some(fused) = self.collective.fused() {
            let (before, _) =
                self.collective.in_place(self.count, rank, world_size).map_or((0, 0), |(a, b)| (b, a));
            let own = input.address + (before * self.dtype.size()) as u64;
            return fused.check_buffers(&input, own, self.share(rank), self.dtype);
        }
        let output = Operand::new("output", self.output, output, self.dtype)?;
        if input.overlaps(&output) && !self.is_in_place(rank, world_size, &input, &output) {
            let (bytes, input, output) = (input.bytes.min(output.bytes), input.address, output.address);
            return Err(Error::Overlap {
                input: input as usize,
                output: output as usize,
                bytes: bytes as usize,
            });
        }
        match self.collective.gathered() {
            Some(rows) => rows.check_buffers([input, output], self.share(rank), output.bytes as usize),
            None => Ok(()),
        }
    }

    /// Returns whether the buffers overlap as the collective permits for a call in place.
    fn is_in_place(&self, rank: usize, world_size: usize, input: &Operand, output: &Operand) -> bool {
        let bytes = |elements: usize| elements as u64 * self.dtype.size() as u64;
        self.collective.in_place(self.count, rank, world_size).is_some_and(|(before_input, before_output)| {
            input.address + bytes(before_output) == output.address + bytes(before_input)
        })
    }
}

/// Returns whether the call is an all-gather of elements, which the host may carry out by messages.
#[inline]
pub(crate) const fn is_all_gather(kind: CallKind) -> bool {
    matches!(kind, CallKind::AllGather | CallKind::AllGatherV)
}

/// Returns the tag of a collective's messages, with number 0. Messages of users are unlikely to have such a tag, so
/// that a collective on one rank and a message on another are reported as different calls.
fn tag_of(kind: CallKind, root: Option<usize>) -> u32 {
    const _: () = assert!(CallKind::ALL.len() < 1 << 5 && MAX_RANKS <= 1 << 4);
    COLLECTIVE_TAG | (kind as u32) << 19 | (root.unwrap_or(0) as u32) << 15
}

/// Bits that are set in all tags of collectives.
const COLLECTIVE_TAG: u32 = 0xFF << 24;

/// Bits of the number of the collective in its tag.
const NUMBER: u32 = (1 << 15) - 1;

/// Sets the number of a collective in the tags of its messages.
///
/// If ranks call different collectives, their messages may match nevertheless, or may never be received. The numbers
/// reveal the difference in the next collective.
pub(crate) fn set_number(transfers: &mut FaTransfers, number: u32, world_size: usize) {
    let end = transfers.first[2 * world_size] as usize;
    for transfer in &mut transfers.transfer[..end] {
        transfer.tag = transfer.tag & !NUMBER | number;
    }
}

/// Returns the next number; never 0, which means no number.
pub(crate) const fn number_after(number: u32) -> u32 {
    number % NUMBER + 1
}

/// Describes the tag of a message in an error: by the name of the collective that the message belongs to, if any.
pub(crate) fn tag_in_words(tag: u32) -> String {
    let of_transfers = |kind: &&CallKind| {
        let may_be_messages = kind.division() == Division::Transfers || is_all_gather(**kind);
        may_be_messages && tag_of(**kind, None) == tag & !(NUMBER | 0xF << 15)
    };
    let Some(kind) = CallKind::ALL.iter().find(of_transfers) else {
        return format!("with tag {tag}");
    };
    let root = kind.has_root().then(|| format!("root {}", tag >> 15 & 0xF));
    let number = Some(tag & NUMBER).filter(|&number| number != 0).map(|number| format!("call {number}"));
    let facts: Vec<_> = root.into_iter().chain(number).collect();
    match facts.is_empty() {
        true => format!("of {}", kind.name()),
        false => format!("of {} ({})", kind.name(), facts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::quantized::{QuantizedTransport, Transport};
    use super::*;
    use crate::catalogue::ReduceOp;

    #[test]
    fn a_call_repeats_only_an_equal_call() {
        let of = |collective, count, dtype| Call { collective, input: 0, output: 0, count, dtype };
        let counts = [1, 2];
        let quantized = |transport, tolerance| {
            Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance })
        };
        let calls = [
            of(Collective::AllReduce(ReduceOp::Sum), 3, DType::F32),
            of(Collective::AllReduce(ReduceOp::Max), 3, DType::F32),
            of(Collective::AllReduce(ReduceOp::PreMulSum(0.5.into())), 3, DType::F32),
            of(Collective::AllReduce(ReduceOp::PreMulSum(0.25.into())), 3, DType::F32),
            of(Collective::AllReduce(ReduceOp::Sum), 4, DType::F32),
            of(Collective::AllReduce(ReduceOp::Sum), 3, DType::F16),
            of(quantized(Transport::Int8, 0.1), 3, DType::F32),
            of(quantized(Transport::Int8, 0.2), 3, DType::F32),
            of(quantized(Transport::F8E4M3, 0.1), 3, DType::F32),
            of(Collective::AllGather, 3, DType::F32),
            of(Collective::ReduceScatter(ReduceOp::Sum), 3, DType::F32),
            of(Collective::Reduce { op: ReduceOp::Sum, root: 0 }, 3, DType::F32),
            of(Collective::Reduce { op: ReduceOp::Sum, root: 1 }, 3, DType::F32),
            of(Collective::Broadcast { root: 0 }, 3, DType::F32),
            of(Collective::AllGatherV(&counts), 3, DType::F32),
        ];
        for (first, call) in calls.iter().enumerate() {
            for (next, other) in calls.iter().enumerate() {
                let again = first == next && call.collective.counts().is_none();
                assert_eq!(other.repeats(&call.id(None)), again, "{other:?} after {call:?}");
            }
        }
    }
}
