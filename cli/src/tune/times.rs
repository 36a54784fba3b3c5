//! Times several plans on the same buffers, in turns.

use std::time::Duration;

use fast_allreduce::plan::PlannedCall;
use fast_allreduce::{CallKind, DType, Device, ReduceOp};

use super::select::Size;
use crate::failure::Failure;
use crate::harness::device::MeasuredRank;
use crate::harness::memory::typed_mut;
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Rounds, in each of which every plan is timed once.
const ROUNDS: usize = 9;

/// Plans slower than the fastest by this factor are not timed in rounds.
const HOPELESS: f64 = 2.0;

/// A kind of call of one size, as nccl-tests counts.
#[derive(Debug, Clone, Copy)]
pub struct Subject {
    pub calls: PlannedCall,
    pub bytes: usize,
}

impl Subject {
    /// Messages are sent to the right neighbour.
    fn work(self, session: &Session) -> Work {
        let kind = match self.calls {
            PlannedCall::AllGather => CallKind::AllGather,
            PlannedCall::ReduceScatter => CallKind::ReduceScatter,
            PlannedCall::Broadcast => CallKind::Broadcast,
            PlannedCall::Reduce => CallKind::Reduce,
            PlannedCall::Messages => CallKind::SendRecv,
            _ => CallKind::AllReduce,
        };
        let elements = self.bytes / size_of::<f32>();
        Work::new(kind, DType::F32, ReduceOp::Sum, 0, elements, session.rank(), session.world_size())
    }

    /// Returns the bytes by which the plan is looked up: those of a share if buffers hold several.
    pub fn planned_bytes(self, ranks: usize) -> usize {
        match self.calls {
            PlannedCall::AllGather | PlannedCall::ReduceScatter => {
                self.bytes / size_of::<f32>() / ranks * size_of::<f32>()
            }
            _ => self.bytes,
        }
    }
}

/// Times one size for about `budget`: f32 sums out of place. The first measured rank is always timed; of those with
/// the same plan, only the first. All ranks get the same numbers, those of the slowest. Collective.
pub fn time<E: MeasuredRank>(
    session: &Session,
    measured_ranks: &[E],
    subject: Subject,
    budget: Duration,
) -> Result<Size, Failure> {
    let bytes = subject.bytes;
    let work = subject.work(session);
    let count = work.elements();
    let same_as = same_as(measured_ranks, subject);
    let mut distinct: Vec<usize> = (0..measured_ranks.len()).filter(|&one| same_as[one] == one).collect();
    let mut input = measured_ranks[0].allocate(DType::F32, count, false)?;
    let mut output = measured_ranks[0].allocate(DType::F32, count, false)?;
    for memory in [&mut input, &mut output] {
        measured_ranks[0].write(memory, &mut |bytes| typed_mut::<f32>(bytes).fill(1.0))?;
    }
    // Returns the seconds of a call, of `batches` back to back after a fence.
    let mut time = |one: usize, batches: u64| -> Result<f64, Failure> {
        let measured = &measured_ranks[one];
        let mut call = || measured.start(&work, &input, &mut output);
        let mut batch = measured.batch(&mut call)?;
        session.fence()?;
        let batches = batches.div_ceil(batch.calls).max(1);
        Ok(batch.seconds(batches)? / (batches * batch.calls) as f64)
    };

    const PROBES: u64 = 4;
    let mut probed = Vec::with_capacity(distinct.len());
    for &one in &distinct {
        time(one, 1)?;
        // The better of two, so that a disturbed probe does not drop a plan.
        probed.push(time(one, PROBES)?.min(time(one, PROBES)?));
    }
    let probed = session.maxima(&probed)?;
    let fastest = probed.iter().copied().fold(f64::MAX, f64::min);
    let hopeful = |&index: &usize| distinct[index] == 0 || probed[index] <= HOPELESS * fastest;
    let kept: Vec<_> = (0..distinct.len()).filter(hopeful).collect();
    let turn = budget.as_secs_f64() / (ROUNDS * kept.len()) as f64;
    let calls: Vec<_> = kept.iter().map(|&index| ((turn / probed[index]) as u64).clamp(1, 10_000)).collect();
    distinct = kept.iter().map(|&index| distinct[index]).collect();

    let mut mine = vec![0.0; ROUNDS * distinct.len()];
    for round in 0..ROUNDS {
        for position in 0..distinct.len() {
            // Each round begins with another plan, so that the order varies.
            let index = (position + round) % distinct.len();
            mine[index * ROUNDS + round] = time(distinct[index], calls[index])?;
        }
    }
    let slowest = session.maxima(&mine)?;
    let mut seconds = vec![Vec::new(); measured_ranks.len()];
    for (&one, rounds) in distinct.iter().zip(slowest.chunks(ROUNDS)) {
        seconds[one] = rounds.to_vec();
    }
    Ok(Size { bytes, same_as, seconds })
}

/// Returns for each measured rank the index of the first one with the same plan.
pub fn same_as<E: MeasuredRank>(measured_ranks: &[E], subject: Subject) -> Vec<usize> {
    let plan = |measured: &E| {
        let communicator = measured.communicator();
        let bytes = subject.planned_bytes(communicator.world_size());
        let mut plan = match subject.calls {
            PlannedCall::AllReduce => communicator.plan(bytes / size_of::<f32>(), DType::F32),
            calls => communicator.plan_of(calls, bytes),
        };
        // The piece size does not matter for a message of one piece.
        plan.piece_bytes = plan.piece_bytes.min(bytes);
        plan
    };
    let plans: Vec<_> = measured_ranks.iter().map(plan).collect();
    plans.iter().map(|plan| plans.iter().position(|other| other == plan).unwrap_or(0)).collect()
}

/// Returns the worst link of the world.
pub fn link<E: MeasuredRank>(measured: &E) -> fast_allreduce::topology::LinkClass {
    measured.communicator().device().link()
}
