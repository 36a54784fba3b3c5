//! Times and checks in turns: `all_reduce_fused`; an allreduce, then an addition and a norm; and an allreduce alone.

pub mod check;

use std::cell::RefCell;

use fast_allreduce::{CallKind, Order, ReduceOp};
use fast_allreduce_oracle::number::Number;

use self::check::{fill_residual, fill_weight, judge, Promise};
use super::check::{count_changed, Verdict};
use super::contender::{Contender, Placement, OURS};
use super::device::{Batch, Call, MeasuredRank, RowBuffers};
use super::measure::{Measure, Timings};
use super::memory::{typed, typed_mut, POISON};
use super::norm::Float;
use super::session::Session;
use super::work::Work;
use crate::arguments::FusedCase;
use crate::failure::Failure;

/// Evaluates an expression with the Rust type of a [`DType`](fast_allreduce::DType) that has the fused call.
macro_rules! with_float {
    ($dtype:expr, $type:ident => $value:expr) => {{
        use fast_allreduce::DType;
        match $dtype {
            DType::F16 => with_float!(@ $type = half::f16, $value),
            DType::Bf16 => with_float!(@ $type = half::bf16, $value),
            _ => with_float!(@ $type = f32, $value),
        }
    }};
    (@ $type:ident = $rust:ty, $value:expr) => {{
        type $type = $rust;
        $value
    }};
}
pub(crate) use with_float;

/// A sequence of calls that computes the residual and the normalised rows, or a part of it.
pub enum Sequence<'a, E: MeasuredRank> {
    /// The fused call of this crate.
    Fused(&'a E),
    /// An allreduce, then an addition and a norm.
    Unfused(Contender<'a, E>),
    /// An allreduce or a copy alone.
    Alone(Contender<'a, E>),
}

impl<'a, E: MeasuredRank> Sequence<'a, E> {
    fn measured(&self) -> &'a E {
        match self {
            Self::Fused(measured) => measured,
            Self::Unfused(contender) | Self::Alone(contender) => contender.measured(),
        }
    }

    fn batch<'b>(&'b self, call: Call<'b>) -> Result<Batch<'b>, Failure> {
        self.measured().batch(call)
    }

    /// Returns the name in results.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fused(_) => OURS,
            Self::Unfused(Contender::Ours(_)) => "unfused",
            Self::Alone(Contender::Ours(_)) => "all_reduce",
            Self::Unfused(contender) | Self::Alone(contender) => contender.name(),
        }
    }

    /// Returns the promise that its results are checked against; `None` if there are no rows.
    fn promise(&self) -> Option<Promise> {
        match self {
            Self::Fused(_) => Some(Promise::SameBits),
            Self::Unfused(Contender::Ours(measured)) => match measured.communicator().order() {
                Order::Fixed => Some(Promise::SameResidual),
                _ => Some(Promise::AnyOrder),
            },
            Self::Unfused(_) => Some(Promise::AnyOrder),
            Self::Alone(_) => None,
        }
    }

    #[inline]
    fn start<T: Float>(&self, work: &Work, buffers: &mut RowBuffers<E::Memory>) -> Result<(), Failure> {
        match self {
            Self::Fused(measured) => measured.start_fused::<T>(buffers),
            Self::Unfused(contender) => {
                contender.start(work, Placement::OutOfPlace, &mut buffers.input, &mut buffers.sum)?;
                contender.measured().start_norm::<T>(buffers)
            }
            Self::Alone(contender) => {
                contender.start(work, Placement::OutOfPlace, &mut buffers.input, &mut buffers.sum)
            }
        }
    }
}

impl Measure<'_> {
    /// Times and checks the sequences on memory of the first one's measured rank: in every round a block of each.
    /// Collective.
    pub fn sequences<T: Float, E: MeasuredRank>(
        &mut self,
        sequences: &[Sequence<E>],
        rounds: u64,
        case: &FusedCase,
    ) -> Result<Timings, Failure> {
        let Some(measured) = sequences.first().map(Sequence::measured) else {
            return Ok(Vec::new());
        };
        let (rank, world_size) = (self.session.rank(), self.session.world_size());
        let work = Work::new(
            CallKind::AllReduce,
            <T as Number>::DTYPE,
            ReduceOp::Sum,
            0,
            case.count(),
            rank,
            world_size,
        );
        let allocate = |count| measured.allocate(<T as Number>::DTYPE, count, false);
        let mut buffers = RowBuffers {
            input: measured.allocate(<T as Number>::DTYPE, case.count(), self.effort.registered)?,
            sum: allocate(case.count())?,
            residual: allocate(case.count())?,
            output: allocate(case.count())?,
            weight: allocate(case.hidden)?,
        };
        self.fill_small::<T, E>(measured, &mut buffers)?;
        let (bytes, factor) = (case.count() * size_of::<T>(), CallKind::AllReduce.bus_factor(world_size));
        let shared = RefCell::new(&mut buffers);
        let timings =
            self.time(sequences, Sequence::batch, rounds, bytes, factor, |sequence: &Sequence<E>| {
                sequence.start::<T>(&work, &mut shared.borrow_mut())
            })?;
        let timings =
            self.checked(sequences, timings, &mut |measure: &mut Self, sequence: &Sequence<E>| {
                measure.check_sequence::<T, E>(sequence, &work, &mut buffers)
            })?;
        Ok(timings.into_iter().map(Some).collect())
    }

    /// Fills the buffers for timing. Sums are so small that a residual stays finite in every type although each
    /// call adds them.
    fn fill_small<T: Float, E: MeasuredRank>(
        &mut self,
        measured: &E,
        buffers: &mut RowBuffers<E::Memory>,
    ) -> Result<(), Failure> {
        const SMALL: f64 = 1.0 / 4096.0;
        self.round += 1;
        let inputs = check::inputs(self.seed, self.round, self.session.world_size());
        let rank = self.session.rank();
        measured.write(&mut buffers.input, &mut |bytes| {
            let elements = typed_mut::<T>(bytes);
            inputs.fill(rank, elements);
            elements.iter_mut().for_each(|element| *element = T::from_f64(element.to_f64() * SMALL));
        })?;
        measured.write(&mut buffers.residual, &mut |bytes| fill_residual::<T>(&inputs, typed_mut(bytes)))?;
        measured.write(&mut buffers.weight, &mut |bytes| fill_weight::<T>(&inputs, typed_mut(bytes)))
    }

    fn check_sequence<T: Float, E: MeasuredRank>(
        &mut self,
        sequence: &Sequence<E>,
        work: &Work,
        buffers: &mut RowBuffers<E::Memory>,
    ) -> Result<Option<Verdict>, Failure> {
        let measured = sequence.measured();
        let make_inputs = |measure: &mut Self| {
            measure.round += 1;
            check::inputs(measure.seed, measure.round, measure.session.world_size())
        };
        self.check_calls(sequence.promise(), &make_inputs, &mut |session: &Session, inputs, promise| {
            let rank = session.rank();
            measured.write(&mut buffers.input, &mut |bytes| inputs.fill::<T>(rank, typed_mut(bytes)))?;
            measured.write(&mut buffers.residual, &mut |bytes| {
                fill_residual::<T>(inputs, typed_mut(bytes));
            })?;
            measured.write(&mut buffers.weight, &mut |bytes| fill_weight::<T>(inputs, typed_mut(bytes)))?;
            measured.write(&mut buffers.output, &mut |bytes| bytes.fill(POISON))?;
            session.fence()?;
            sequence.start::<T>(work, buffers)?;
            let (mut weight, mut residual) = (Vec::<T>::new(), Vec::<T>::new());
            measured.read(&buffers.weight, &mut |bytes| weight = typed(bytes).to_vec())?;
            measured.read(&buffers.residual, &mut |bytes| residual = typed(bytes).to_vec())?;
            let mut verdict = Verdict::default();
            measured.read(&buffers.output, &mut |bytes| {
                verdict = judge(inputs, &weight, &residual, typed(bytes), promise).verdict;
            })?;
            verdict.wrong += count_changed(inputs, inputs.world_size() - 1, &weight);
            measured.read(&buffers.input, &mut |bytes| {
                verdict.wrong += count_changed::<T>(inputs, rank, typed(bytes));
            })?;
            Ok(verdict)
        })
    }
}
