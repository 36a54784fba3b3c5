//! Times calls out of place and in place, of one contender or of several in turns, then checks their results.

use std::cell::RefCell;
use std::ops::Range;

use fast_allreduce::Algorithm;
#[cfg(feature = "cuda")]
use fast_allreduce::{CallKind, DType, ReduceOp};

use super::check::Verdict;
use super::contender::{Contender, Placement};
use super::device::{Batch, Call, MeasuredRank};
use super::elements::elements;
use super::inputs::Inputs;
use super::memory::POISON;
use super::populations;
use super::row::{CallInfo, Row, Timing};
use super::session::Session;
use super::work::{part, Work};
use crate::failure::Failure;

/// Most batches of calls that are timed one by one; their times are exchanged.
const MOST_SINGLES: u64 = 10_000;

/// Timings by contender; `None` for one that lacks the placement.
pub type Timings = Vec<Option<Timing>>;

/// A function that checks the calls of a contender.
type Check<'a, M, C> = &'a mut dyn FnMut(&mut M, &C) -> Result<Option<Verdict>, Failure>;

/// The calls that are made for a row.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Timed calls; `None` for as many as take 20 ms.
    pub iterations: Option<u64>,
    /// Calls before the timed ones.
    pub warmup: u64,
    /// Checked calls, each on new inputs.
    pub checks: u64,
    /// Keep inputs in registered buffers.
    pub registered: bool,
}

/// The state of a run's measurements.
pub struct Measure<'a> {
    pub session: &'a Session,
    pub effort: Effort,
    pub seed: u64,
    /// Number of inputs made so far.
    pub round: u64,
}

impl Measure<'_> {
    /// Returns the work of an allreduce of `count` elements.
    #[cfg(feature = "cuda")]
    pub fn all_reduce(&self, dtype: DType, count: usize, op: ReduceOp) -> Work {
        Work::new(CallKind::AllReduce, dtype, op, 0, count, self.session.rank(), self.session.world_size())
    }

    /// Measures one call with one algorithm. Collective.
    pub fn row(&mut self, measured: &impl MeasuredRank, work: &Work) -> Result<Row, Failure> {
        let mut memory = self.memory(measured, work)?;
        let ours = [Contender::Ours(measured)];
        let (mut out_of_place, mut in_place) = self.both_placements(&ours, 1, &mut memory, work)?;
        let Memory { input, output } = &mut memory;
        let memcpy_us = self.memcpy(measured, &mut || measured.copy(input, output))?;
        let only = "this crate has all calls out of place";
        Ok(Row {
            call: CallInfo::of(work),
            algo: ours[0].algorithm(work).map(Algorithm::name),
            out_of_place: out_of_place.pop().flatten().expect(only),
            in_place: in_place.pop().flatten(),
            memcpy_us,
        })
    }

    /// Measures one call for all contenders, on the memory of the first: in every round a block of calls of each.
    /// Returns the timings out of place and in place. Collective.
    pub fn contest<E: MeasuredRank>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        work: &Work,
    ) -> Result<(Timings, Timings), Failure> {
        let Some(first) = contenders.first() else {
            return Ok(Default::default());
        };
        let mut memory = self.memory(first.measured(), work)?;
        self.both_placements(contenders, rounds, &mut memory, work)
    }

    /// Checks a call out of place and in place without timing it. Returns the wrong elements on all ranks. Collective.
    #[cfg(feature = "cuda")]
    pub fn wrong(&mut self, measured: &impl MeasuredRank, work: &Work) -> Result<u64, Failure> {
        let mut memory = self.memory(measured, work)?;
        let ours = Contender::Ours(measured);
        let out_of_place = self.check(&ours, &mut memory, work, Placement::OutOfPlace)?;
        let in_place = self.check(&ours, &mut memory, work, Placement::InPlace)?;
        let wrong = |verdict: Option<Verdict>| verdict.map_or(0, |verdict| verdict.wrong);
        Ok(wrong(out_of_place) + wrong(in_place))
    }

    /// Allocates an input and an output, both as long as the largest buffer of any rank: a buffer in place may need
    /// that much, and memcpy copies that much.
    fn memory<E: MeasuredRank>(&self, measured: &E, work: &Work) -> Result<Memory<E::Memory>, Failure> {
        let allocate = |registered| measured.allocate(work.dtype, work.elements(), registered);
        Ok(Memory { input: allocate(self.effort.registered)?, output: allocate(false)? })
    }

    fn both_placements<E: MeasuredRank>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        memory: &mut Memory<E::Memory>,
        work: &Work,
    ) -> Result<(Timings, Timings), Failure> {
        let out_of_place = self.timed(contenders, rounds, memory, work, Placement::OutOfPlace)?;
        Ok((out_of_place, self.timed(contenders, rounds, memory, work, Placement::InPlace)?))
    }

    /// Times and checks the contenders that have this placement. Collective.
    fn timed<E: MeasuredRank>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        memory: &mut Memory<E::Memory>,
        work: &Work,
        placement: Placement,
    ) -> Result<Timings, Failure> {
        let able: Vec<_> =
            contenders.iter().filter(|contender| contender.has(work, placement)).copied().collect();
        let mut timings = Vec::new();
        if let Some(first) = able.first() {
            // Calls in place continue on results, which may not be finite for long.
            let inputs = self.next_inputs(work);
            let from =
                work.in_place().filter(|_| placement == Placement::InPlace).map_or(0, |(from, _)| from);
            let (rank, elements) = (self.session.rank(), elements(work.dtype)?);
            first.measured().write(&mut memory.input, &mut |bytes| {
                elements.fill(&inputs, rank, part(bytes, work, &(from..from + work.input_len())));
            })?;
            // The calls of all contenders exist at a time, and one of them runs.
            let shared = RefCell::new(&mut *memory);
            let (bytes, bus_factor) = (work.bytes(work.elements()), work.kind.bus_factor(work.world_size()));
            let call = |contender: &Contender<E>| {
                let Memory { input, output } = &mut **shared.borrow_mut();
                contender.start(work, placement, input, output)
            };
            timings = self.time(&able, Contender::batch, rounds, bytes, bus_factor, call)?;
            timings = self.checked(&able, timings, &mut |measure: &mut Self, contender: &Contender<E>| {
                measure.check(contender, memory, work, placement)
            })?;
        }
        let mut timings = timings.into_iter();
        let timing =
            |contender: &Contender<E>| contender.has(work, placement).then(|| timings.next()).flatten();
        Ok(contenders.iter().map(timing).collect())
    }

    /// Checks each contender on the same inputs, and adds the verdicts to the timings.
    pub(super) fn checked<C>(
        &mut self,
        contenders: &[C],
        timings: Vec<Timing>,
        check: Check<'_, Self, C>,
    ) -> Result<Vec<Timing>, Failure> {
        let round = self.round;
        let checked = contenders.iter().zip(timings).map(|(contender, timing)| {
            self.round = round;
            Ok(timing.checked(check(self, contender)?))
        });
        let checked = checked.collect();
        self.round = round + self.effort.checks;
        checked
    }

    fn next_inputs(&mut self, work: &Work) -> Inputs {
        self.round += 1;
        Inputs::new(self.seed, self.round, self.session.world_size(), work.op)
    }

    /// Makes the untimed calls and returns the number of batches to time.
    fn warm_up(&self, batch: &mut Batch<'_>) -> Result<u64, Failure> {
        const TARGET_SECONDS: f64 = 0.02;
        const PROBES: u64 = 3;
        // Until all ranks are ready.
        self.session.fence()?;
        batch.seconds(self.effort.warmup.div_ceil(batch.calls))?;
        if let Some(iterations) = self.effort.iterations {
            return Ok(iterations.div_ceil(batch.calls));
        }
        self.session.fence()?;
        let probes = PROBES.div_ceil(batch.calls);
        let seconds = self.slowest(batch.seconds(probes)? / (probes * batch.calls) as f64)?;
        Ok(((TARGET_SECONDS / seconds).ceil() as u64).clamp(20, 10_000).div_ceil(batch.calls))
    }

    /// Times the calls of each contender: in every round a block of each. Collective.
    pub(super) fn time<C>(
        &self,
        contenders: &[C],
        batch: for<'b> fn(&'b C, Call<'b>) -> Result<Batch<'b>, Failure>,
        rounds: u64,
        bytes: usize,
        bus_factor: f64,
        call: impl Fn(&C) -> Result<(), Failure>,
    ) -> Result<Vec<Timing>, Failure> {
        let call = &call;
        let mut calls: Vec<_> = contenders.iter().map(|contender| move || call(contender)).collect();
        let mut all_calls = Vec::with_capacity(contenders.len());
        for (contender, call) in contenders.iter().zip(&mut calls) {
            let mut batch = batch(contender, call)?;
            let batches = self.warm_up(&mut batch)?.div_ceil(rounds);
            all_calls.push(TimedCalls {
                batch,
                batches,
                means: Vec::new(),
                singles: Vec::new(),
                cores: Vec::new(),
            });
        }
        for _ in 0..rounds {
            for timed in &mut all_calls {
                timed.block(self.session, MOST_SINGLES.div_ceil(rounds))?;
            }
        }
        let timing = |timed: TimedCalls| {
            let (means, singles) = (self.session.maxima(&timed.means)?, self.session.maxima(&timed.singles)?);
            let cores = self.cores_of_all(&timed.cores)?;
            Ok(Timing::new(means, singles, bytes, bus_factor).remarked(timed.cores.len(), &cores))
        };
        all_calls.into_iter().map(timing).collect()
    }

    /// Returns the core of each rank in each sample; nothing if ranks must share cores.
    fn cores_of_all(&self, mine: &[u16]) -> Result<Vec<Vec<u16>>, Failure> {
        let bytes: Vec<u8> = mine.iter().flat_map(|core| core.to_le_bytes()).collect();
        let all = self.session.exchange(&bytes)?;
        // Those of different nodes have the same numbers.
        if self.session.nodes() > 1 || crate::facts::cores() < self.session.world_size() {
            return Ok(Vec::new());
        }
        let cores = |bytes: Vec<u8>| {
            bytes.chunks_exact(2).map(|core| u16::from_le_bytes([core[0], core[1]])).collect()
        };
        Ok(all.into_iter().map(cores).collect())
    }

    /// Returns the microseconds of a copy that every rank makes at the same time.
    fn memcpy<'a>(&self, measured: &'a impl MeasuredRank, copy: Call<'a>) -> Result<f64, Failure> {
        const TARGET_SECONDS: f64 = 0.01;
        const PROBES: u64 = 3;
        let mut batch = measured.batch(copy)?;
        batch.seconds(PROBES)?;
        self.session.fence()?;
        let seconds = self.slowest(batch.seconds(PROBES)? / PROBES as f64)?;
        let batches = ((TARGET_SECONDS / seconds).ceil() as u64).clamp(PROBES, 1_000_000);
        self.session.fence()?;
        let seconds = batch.seconds(batches)? / batches as f64;
        Ok(self.slowest(seconds / batch.calls as f64)? * 1e6)
    }

    /// Checks calls of a contender. All memory that a call does not write must keep its value: inputs too. Collective.
    fn check<E: MeasuredRank>(
        &mut self,
        contender: &Contender<E>,
        memory: &mut Memory<E::Memory>,
        work: &Work,
        placement: Placement,
    ) -> Result<Option<Verdict>, Failure> {
        let is_in_place = placement == Placement::InPlace;
        let (from, to) = match is_in_place {
            false => (0, 0),
            true => match work.in_place() {
                Some(starts) => starts,
                None => return Ok(None),
            },
        };
        let (from, to) = (from..from + work.input_len(), to..to + work.output_len());
        let (measured, Memory { input, output }) = (contender.measured(), memory);
        let make_inputs = |measure: &mut Self| measure.next_inputs(work);
        let promise = contender.promise(work);
        let elements = elements(work.dtype)?;
        self.check_calls(promise, &make_inputs, &mut |session, inputs, promise| {
            let rank = session.rank();
            measured.write(input, &mut |memory| {
                memory.fill(POISON);
                elements.fill(inputs, rank, part(memory, work, &from));
            })?;
            measured.write(output, &mut |memory| memory.fill(POISON))?;
            session.fence()?;
            contender.start(work, placement, input, output)?;
            let mut verdict = Verdict::default();
            let mut look = |memory: &[u8], input, output: Range<usize>| {
                if !output.is_empty() {
                    let result = &memory[work.bytes(output.start)..work.bytes(output.end)];
                    verdict = elements.judge(inputs, work, result, promise);
                }
                verdict.wrong += elements.count_changed(inputs, rank, memory, input, output);
            };
            match is_in_place {
                true => measured.read(input, &mut |memory| look(memory, from.clone(), to.clone()))?,
                false => {
                    measured.read(output, &mut |memory| look(memory, 0..0, to.clone()))?;
                    measured.read(input, &mut |memory| look(memory, from.clone(), 0..0))?;
                }
            }
            Ok(verdict)
        })
    }

    /// Makes the checked calls and returns the verdict of all ranks; `None` without checks.
    pub(super) fn check_calls<P: Copy>(
        &mut self,
        promise: Option<P>,
        make_inputs: &dyn Fn(&mut Self) -> Inputs,
        checked_call: &mut dyn FnMut(&Session, &Inputs, P) -> Result<Verdict, Failure>,
    ) -> Result<Option<Verdict>, Failure> {
        let Some(promise) = promise.filter(|_| self.effort.checks > 0) else {
            return Ok(None);
        };
        let mut all = Verdict::default();
        for _ in 0..self.effort.checks {
            let inputs = make_inputs(self);
            let found = checked_call(self.session, &inputs, promise)?;
            // By the bootstrap, because checking may take longer than a call's timeout.
            all.wrong += self.session.total(found.wrong)?;
            all.error = all.error.max(self.slowest(found.error)?);
        }
        Ok(Some(all))
    }

    /// Returns the largest value of any rank.
    fn slowest(&self, mine: f64) -> Result<f64, Failure> {
        Ok(self.session.maxima(&[mine])?[0])
    }
}

/// The buffers of calls. In place, calls use the input.
struct Memory<M> {
    input: M,
    output: M,
}

/// The calls of one contender, and their times on this rank.
struct TimedCalls<'a> {
    batch: Batch<'a>,
    /// Batches of each block.
    batches: u64,
    means: Vec<f64>,
    singles: Vec<f64>,
    /// The core of this rank after each of the single batches.
    cores: Vec<u16>,
}

impl TimedCalls<'_> {
    /// Times calls back to back, then up to `most_singles` batches, each after a fence.
    fn block(&mut self, session: &Session, most_singles: u64) -> Result<(), Failure> {
        let calls = self.batch.calls as f64;
        session.fence()?;
        self.means.push(self.batch.seconds(self.batches)? / (self.batches as f64 * calls));
        for _ in 0..self.batches.min(most_singles) {
            session.fence()?;
            self.singles.push(self.batch.seconds(1)? / calls);
            self.cores.push(populations::core(session.rank()));
        }
        Ok(())
    }
}
