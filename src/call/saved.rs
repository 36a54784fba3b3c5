//! A call that can be saved and made again elsewhere: its arguments, and the memory that it reads and writes.

use serde::{Deserialize, Serialize};

use super::arguments::Call;
use super::collective::Collective;
use super::fused::RawFused;
use super::gathered::RawGatheredRows;
use super::identity::CallKind;
use super::operand::Operand;
use super::quantized::QuantizedTransport;
use super::sharded::{self, RawShardedRows};
use crate::catalogue::{DType, ReduceOp};
use crate::error::Result;

/// A call without borrows. Addresses are those of the process that made it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedCall {
    kind: CallKind,
    op: Option<ReduceOp>,
    root: Option<usize>,
    counts: Vec<usize>,
    sends: Vec<usize>,
    receives: Vec<usize>,
    fused: Option<RawFused>,
    gathered: Option<RawGatheredRows>,
    sharded: Vec<RawShardedRows>,
    quantized: Option<QuantizedTransport>,
    input: u64,
    output: u64,
    count: usize,
    dtype: DType,
}

/// Memory that a call reads or writes as one operand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UsedMemory {
    pub name: &'static str,
    pub operand: Operand,
    /// Bytes of an element; 1 for numbers of other types than the call's.
    pub element: usize,
    pub is_written: bool,
}

/// Memory of a call without overlaps: operands that overlap share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub address: u64,
    pub bytes: u64,
    /// Whether the results depend on what it has before the call.
    pub is_read: bool,
    pub is_written: bool,
}

impl Span {
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.bytes
    }
}

impl SavedCall {
    pub fn of(call: &Call<'_>) -> Self {
        let &Call { collective, input, output, count, dtype } = call;
        let list = |counts: Option<&[usize]>| counts.unwrap_or_default().to_vec();
        Self {
            kind: collective.kind(),
            op: collective.reduction(),
            root: collective.root(),
            counts: list(collective.counts()),
            sends: list(collective.sends()),
            receives: list(collective.receives()),
            fused: collective.fused().copied(),
            gathered: collective.gathered().copied(),
            sharded: collective.sharded().unwrap_or_default().to_vec(),
            quantized: collective.quantized(),
            input,
            output,
            count,
            dtype,
        }
    }

    /// Returns the call; `None` if it lacks an argument that its kind has. Nothing has been checked.
    pub fn call(&self) -> Option<Call<'_>> {
        let (fused, gathered) = (self.fused.as_ref(), self.gathered.as_ref());
        let collective = match self.kind {
            CallKind::AllReduceFused => Collective::AllReduceFused(fused?),
            CallKind::ReduceScatterFused => Collective::ReduceScatterFused(fused?),
            CallKind::ReduceScatterFusedV => Collective::ReduceScatterFusedV(fused?, &self.counts),
            CallKind::AllGatherRows => Collective::AllGatherRows(gathered?),
            CallKind::AllGatherRowsV => Collective::AllGatherRowsV(gathered?, &self.counts),
            CallKind::ShardedRmsNorm => Collective::ShardedRmsNorm(&self.sharded),
            CallKind::AllReduceQuantized => Collective::AllReduceQuantized(self.quantized?),
            kind => {
                let (op, root) = (self.op.unwrap_or(ReduceOp::Sum), self.root.unwrap_or(0));
                Collective::of(kind, op, root, &self.counts, [&self.sends, &self.receives])?
            }
        };
        let (input, output) = (self.input, collective.output(self.output));
        Some(Call { collective, input, output, count: self.count, dtype: self.dtype })
    }

    /// Replaces every address.
    pub fn relocate(&mut self, to: impl Fn(u64) -> u64) {
        let Self { fused, gathered, sharded, input, output, .. } = self;
        let mut all = vec![input, output];
        if let Some(RawFused {
            residual, residual_out, sum, weight, bias, rows, quantized, experts, ..
        }) = fused
        {
            all.extend([residual, residual_out, sum, weight, bias, rows]);
            all.extend(
                quantized.iter_mut().flat_map(|one| [&mut one.numbers, &mut one.scales, &mut one.global]),
            );
            all.extend(
                experts.iter_mut().flat_map(|one| [&mut one.table, &mut one.weights, &mut one.shared]),
            );
        }
        all.extend(gathered.iter_mut().flat_map(|one| [&mut one.scales, &mut one.all_scales]));
        all.extend(sharded.iter_mut().flat_map(|one| [&mut one.input, &mut one.output, &mut one.weight]));
        all.into_iter().filter(|address| **address != 0).for_each(|address| *address = to(*address));
    }
}

impl Call<'_> {
    /// Returns the memory that the call reads and writes on a rank, operand by operand. [`Call::check`] has passed.
    pub fn memory(&self, rank: usize, world_size: usize) -> Result<Vec<UsedMemory>> {
        let &Call { collective, input, output, count, dtype } = self;
        let element = dtype.size();
        let of = |name, operand, element, is_written| UsedMemory { name, operand, element, is_written };
        if let Some(parts) = collective.sharded() {
            let all = sharded::operands(parts, count, dtype)?;
            return Ok(all.iter().map(|one| of(one.name, one.operand, element, one.is_written)).collect());
        }
        let read = collective.input_len(count, rank, world_size);
        let written = collective.output_len(count, rank, world_size);
        let mut all = vec![of("input", Operand::new("input", input, read, dtype)?, element, false)];
        if let Some(fused) = collective.fused() {
            for one in fused.operands(self.share(rank), dtype)? {
                let element = match (one.name, fused.quantized) {
                    ("scales", Some(rows)) => rows.scaling.scale_type().size(),
                    ("numbers", _) => 1,
                    _ => element,
                };
                all.push(of(one.name, one.operand, element, one.is_written));
            }
            return Ok(all);
        }
        all.push(of("output", Operand::new("output", output, written, dtype)?, element, true));
        if let Some(rows) = collective.gathered() {
            for (name, operand) in rows.operands(self.share(rank), written)? {
                all.push(of(name, operand, rows.scaling.scale_type().size(), name == "all_scales"));
            }
        }
        Ok(all)
    }

    /// Returns the memory of the call without overlaps, by rising address. [`Call::check`] has passed.
    pub fn spans(&self, rank: usize, world_size: usize) -> Result<Vec<Span>> {
        let has_stride = self.collective.sharded().is_some();
        let mut all: Vec<_> =
            self.memory(rank, world_size)?.into_iter().filter(|one| one.operand.bytes > 0).collect();
        all.sort_by_key(|one| one.operand.address);
        let mut spans: Vec<Span> = Vec::with_capacity(all.len());
        for UsedMemory { name, operand: Operand { address, bytes }, is_written, .. } in all {
            // Some results are written with gaps: the padding of scales, and what is between the rows of a tensor.
            let is_read = !is_written || has_stride || matches!(name, "scales" | "all_scales");
            match spans.last_mut().filter(|last| last.address + last.bytes > address) {
                Some(last) => {
                    last.bytes = last.bytes.max(address + bytes - last.address);
                    (last.is_read, last.is_written) = (last.is_read | is_read, last.is_written | is_written);
                }
                None => spans.push(Span { address, bytes, is_read, is_written }),
            }
        }
        Ok(spans)
    }
}
