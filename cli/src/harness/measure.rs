//! Times calls out of place and in place, of one contender or of several block by block, then checks their results.

use std::cell::RefCell;

use fast_allreduce::Algorithm;
#[cfg(feature = "cuda")]
use fast_allreduce::{CallKind, DType, ReduceOp};

use super::check::{count_overwritten, Verdict};
use super::contender::{Contender, Placement};
use super::device::{Batch, Call, MeasuredRank};
use super::elements::elements;
use super::inputs::Inputs;
use super::memory::POISON;
use super::populations;
use super::row::{Row, Timing};
use super::session::Session;
use super::work::Work;
use crate::collective::redop;
use crate::failure::Failure;

/// Batches of calls that are timed one by one at most; their times are exchanged.
const MOST_SINGLES: u64 = 10_000;

/// By contender; `None` of one that lacks the placement.
pub type Timings = Vec<Option<Timing>>;

/// Checks the calls of a contender.
type Check<'a, M, C> = &'a mut dyn FnMut(&mut M, &C) -> Result<Option<Verdict>, Failure>;

/// How much is done for a row.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Timed calls; `None`: as many as take 20 ms.
    pub iterations: Option<u64>,
    /// Calls before the timed ones.
    pub warmup: u64,
    /// Checked calls, on new inputs each.
    pub checks: u64,
    /// Keep inputs in registered buffers.
    pub registered: bool,
}

/// Makes rows.
pub struct Measure<'a> {
    pub session: &'a Session,
    pub effort: Effort,
    pub seed: u64,
    /// Inputs that have been made so far.
    pub round: u64,
}

impl Measure<'_> {
    /// An allreduce of `count` elements.
    #[cfg(feature = "cuda")]
    pub fn all_reduce(&self, dtype: DType, count: usize, op: ReduceOp) -> Work {
        Work::new(CallKind::AllReduce, dtype, op, 0, count, self.session.rank(), self.session.world_size())
    }

    /// Measures one call with one algorithm. Collective.
    pub fn row(&mut self, endpoint: &impl MeasuredRank, work: &Work) -> Result<Row, Failure> {
        let mut memory = self.memory(endpoint, work)?;
        let ours = [Contender::Ours(endpoint)];
        let (mut out_of_place, mut in_place) = self.both_placements(&ours, 1, &mut memory, work)?;
        let Memory { input, output } = &mut memory;
        let memcpy_us = self.memcpy(endpoint, &mut || endpoint.copy(input, output))?;
        let only = "this crate has all calls out of place";
        Ok(Row {
            collective: work.kind.name(),
            size: work.bytes(work.elements()),
            count: work.count(),
            dtype: work.dtype.name(),
            redop: redop(work.kind, work.op),
            root: work.root(),
            algo: ours[0].algorithm(work, work.dtype).map(Algorithm::name),
            out_of_place: out_of_place.pop().flatten().expect(only),
            in_place: in_place.pop().flatten(),
            memcpy_us,
        })
    }

    /// Measures one call for all contenders, on the memory of the first: in every round a block of calls of each. Their timings,
    /// out of place and in place, as far as they have them. Collective.
    pub fn contest<E: MeasuredRank>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        work: &Work,
    ) -> Result<(Timings, Timings), Failure> {
        let Some(first) = contenders.first() else {
            return Ok(Default::default());
        };
        let mut memory = self.memory(first.endpoint(), work)?;
        self.both_placements(contenders, rounds, &mut memory, work)
    }

    /// Checks a call out of place and in place, and times nothing: the wrong elements on all ranks. Collective.
    #[cfg(feature = "cuda")]
    pub fn wrong(&mut self, endpoint: &impl MeasuredRank, work: &Work) -> Result<u64, Failure> {
        let mut memory = self.memory(endpoint, work)?;
        let ours = Contender::Ours(endpoint);
        let out_of_place = self.check_out_of_place(&ours, &mut memory, work)?;
        let in_place = self.check_in_place(&ours, &mut memory, work)?;
        let wrong = |verdict: Option<Verdict>| verdict.map_or(0, |verdict| verdict.wrong);
        Ok(wrong(out_of_place) + wrong(in_place))
    }

    /// An input and an output, both as long as the larger of all ranks': a buffer in place may hold that much, and a copy of that
    /// much goes from one to the other.
    fn memory<E: MeasuredRank>(&self, endpoint: &E, work: &Work) -> Result<Memory<E::Memory>, Failure> {
        let allocate = |registered| endpoint.allocate(work.dtype, work.elements(), registered);
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

    /// The timings of those that have this placement.
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
        if !able.is_empty() {
            self.fill(&able, memory, work, placement)?;
            // Calls of all contenders are ready at a time, and one of them runs.
            let shared = RefCell::new(&mut *memory);
            let (bytes, bus_factor) = (work.bytes(work.elements()), work.kind.bus_factor(work.world_size()));
            timings = self.time(
                &able,
                Contender::endpoint,
                rounds,
                bytes,
                bus_factor,
                |contender: &Contender<E>| {
                    let Memory { input, output } = &mut **shared.borrow_mut();
                    match placement {
                        Placement::OutOfPlace => contender.start(work, input, output),
                        Placement::InPlace => contender.start_in_place(work, input, output),
                    }
                },
            )?;
            timings = self.checked(&able, timings, &mut |measure: &mut Self, contender: &Contender<E>| {
                match placement {
                    Placement::OutOfPlace => measure.check_out_of_place(contender, memory, work),
                    Placement::InPlace => measure.check_in_place(contender, memory, work),
                }
            })?;
        }
        let mut timings = timings.into_iter();
        let timing =
            |contender: &Contender<E>| contender.has(work, placement).then(|| timings.next()).flatten();
        Ok(contenders.iter().map(timing).collect())
    }

    /// What is timed: inputs of numbers, whose reductions may not be finite for long, as calls in place go on from results.
    fn fill<E: MeasuredRank>(
        &mut self,
        contenders: &[Contender<E>],
        memory: &mut Memory<E::Memory>,
        work: &Work,
        placement: Placement,
    ) -> Result<(), Failure> {
        let inputs = self.next_inputs(work);
        let endpoint = contenders[0].endpoint();
        let start =
            if placement == Placement::InPlace { work.in_place().map_or(0, |(from, _)| from) } else { 0 };
        let length = work.input_len();
        let (rank, elements) = (self.session.rank(), elements(work.dtype)?);
        endpoint.write(&mut memory.input, &mut |bytes| {
            elements.fill(&inputs, rank, part(bytes, work, start, length));
        })
    }

    /// Adds what was found in each contender's results, which are of the same inputs.
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

    /// Makes the untimed calls and says how many batches to time.
    fn warm_up(&self, batch: &mut dyn Batch) -> Result<u64, Failure> {
        const TARGET_SECONDS: f64 = 0.02;
        const PROBES: u64 = 3;
        // What a rank prepared is ready on all.
        self.session.fence()?;
        batch.seconds(self.effort.warmup.div_ceil(batch.calls()))?;
        if let Some(iterations) = self.effort.iterations {
            return Ok(iterations.div_ceil(batch.calls()));
        }
        self.session.fence()?;
        let probes = PROBES.div_ceil(batch.calls());
        let seconds = self.slowest(batch.seconds(probes)? / (probes * batch.calls()) as f64)?;
        Ok(((TARGET_SECONDS / seconds).ceil() as u64).clamp(20, 10_000).div_ceil(batch.calls()))
    }

    /// Times the calls of each contender, whose endpoint is told: in every round a block of each. Collective.
    pub(super) fn time<'e, C, E: MeasuredRank + 'e>(
        &self,
        contenders: &[C],
        endpoint: fn(&C) -> &'e E,
        rounds: u64,
        bytes: usize,
        bus_factor: f64,
        call: impl Fn(&C) -> Result<(), Failure>,
    ) -> Result<Vec<Timing>, Failure> {
        let call = &call;
        let mut calls: Vec<_> = contenders.iter().map(|contender| move || call(contender)).collect();
        let mut lanes = Vec::with_capacity(contenders.len());
        for (contender, call) in contenders.iter().zip(&mut calls) {
            let mut batch = endpoint(contender).batch(call)?;
            let batches = self.warm_up(&mut *batch)?.div_ceil(rounds);
            lanes.push(Lane { batch, batches, means: Vec::new(), singles: Vec::new(), cores: Vec::new() });
        }
        for _ in 0..rounds {
            for lane in &mut lanes {
                lane.block(self.session, MOST_SINGLES.div_ceil(rounds))?;
            }
        }
        let timing = |lane: Lane| {
            let (means, singles) = (self.session.maxima(&lane.means)?, self.session.maxima(&lane.singles)?);
            let cores = self.cores_of_all(&lane.cores)?;
            Ok(Timing::new(means, singles, bytes, bus_factor).remarked(lane.cores.len(), &cores))
        };
        lanes.into_iter().map(timing).collect()
    }

    /// By rank: where it was, sample by sample. None where ranks must share cores.
    fn cores_of_all(&self, mine: &[u16]) -> Result<Vec<Vec<u16>>, Failure> {
        let bytes: Vec<u8> = mine.iter().flat_map(|core| core.to_le_bytes()).collect();
        let all = self.session.exchange(&bytes)?;
        if crate::facts::cores() < self.session.world_size() {
            return Ok(Vec::new());
        }
        let cores = |bytes: Vec<u8>| {
            bytes.chunks_exact(2).map(|core| u16::from_le_bytes([core[0], core[1]])).collect()
        };
        Ok(all.into_iter().map(cores).collect())
    }

    /// Microseconds of a copy that every rank makes at the same time.
    fn memcpy<'a>(&self, endpoint: &'a impl MeasuredRank, copy: Call<'a>) -> Result<f64, Failure> {
        const TARGET_SECONDS: f64 = 0.01;
        const PROBES: u64 = 3;
        let mut batch = endpoint.batch(copy)?;
        batch.seconds(PROBES)?;
        self.session.fence()?;
        let seconds = self.slowest(batch.seconds(PROBES)? / PROBES as f64)?;
        let batches = ((TARGET_SECONDS / seconds).ceil() as u64).clamp(PROBES, 1_000_000);
        self.session.fence()?;
        let seconds = batch.seconds(batches)? / batches as f64;
        Ok(self.slowest(seconds / batch.calls() as f64)? * 1e6)
    }

    fn check_out_of_place<E: MeasuredRank>(
        &mut self,
        contender: &Contender<E>,
        memory: &mut Memory<E::Memory>,
        work: &Work,
    ) -> Result<Option<Verdict>, Failure> {
        let (endpoint, Memory { input, output }) = (contender.endpoint(), memory);
        let (input_len, output_len) = (work.input_len(), work.output_len());
        let make_inputs = |measure: &mut Self| measure.next_inputs(work);
        let promise = contender.promise(work, work.dtype);
        let (elements, size) = (elements(work.dtype)?, work.dtype.size());
        self.check_calls(promise, &make_inputs, &mut |session, inputs, promise| {
            let rank = session.rank();
            endpoint.write(input, &mut |memory| {
                memory.fill(POISON);
                elements.fill(inputs, rank, part(memory, work, 0, input_len));
            })?;
            endpoint.write(output, &mut |memory| memory.fill(POISON))?;
            session.fence()?;
            contender.start(work, input, output)?;
            let mut verdict = Verdict::default();
            endpoint.read(output, &mut |memory| {
                verdict = elements.judge(inputs, work, &memory[..work.bytes(output_len)], promise);
                verdict.wrong += count_overwritten(memory, size, 0..output_len);
            })?;
            endpoint.read(input, &mut |memory| {
                verdict.wrong += elements.count_changed(inputs, rank, &memory[..work.bytes(input_len)]);
                verdict.wrong += count_overwritten(memory, size, 0..input_len);
            })?;
            Ok(verdict)
        })
    }

    /// What a call in place does not write stays as it was: inputs too.
    fn check_in_place<E: MeasuredRank>(
        &mut self,
        contender: &Contender<E>,
        memory: &mut Memory<E::Memory>,
        work: &Work,
    ) -> Result<Option<Verdict>, Failure> {
        let (endpoint, Memory { input, output: spare }) = (contender.endpoint(), memory);
        let Some((from, to)) = work.in_place() else {
            return Ok(None);
        };
        let (input_len, output_len) = (work.input_len(), work.output_len());
        let make_inputs = |measure: &mut Self| measure.next_inputs(work);
        let promise = contender.promise(work, work.dtype);
        let elements = elements(work.dtype)?;
        self.check_calls(promise, &make_inputs, &mut |session, inputs, promise| {
            let rank = session.rank();
            endpoint.write(input, &mut |memory| {
                memory.fill(POISON);
                elements.fill(inputs, rank, part(memory, work, from, input_len));
            })?;
            session.fence()?;
            contender.start_in_place(work, input, spare)?;
            let mut verdict = Verdict::default();
            endpoint.read(input, &mut |memory| {
                let (before, output) = (from..from + input_len, to..to + output_len);
                let result = &memory[work.bytes(output.start)..work.bytes(output.end)];
                verdict = elements.judge(inputs, work, result, promise);
                verdict.wrong += elements.count_changed_beside(inputs, rank, memory, before, output);
            })?;
            Ok(verdict)
        })
    }

    /// What all ranks found in the checked calls; `None` without any.
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
            // Checking takes longer than a call may wait.
            all.wrong += self.session.total(found.wrong)?;
            all.error = all.error.max(self.slowest(found.error)?);
        }
        Ok(Some(all))
    }

    /// The largest that any rank gave.
    fn slowest(&self, mine: f64) -> Result<f64, Failure> {
        Ok(self.session.maxima(&[mine])?[0])
    }
}

/// Some of the elements. None are nowhere.
fn part<'a>(memory: &'a mut [u8], work: &Work, start: usize, length: usize) -> &'a mut [u8] {
    match length {
        0 => &mut [],
        _ => &mut memory[work.bytes(start)..work.bytes(start + length)],
    }
}

/// What calls work on; in place, the input.
struct Memory<M> {
    input: M,
    output: M,
}

/// One contender's calls, and what they took on this rank.
struct Lane<'a> {
    batch: Box<dyn Batch + 'a>,
    /// In each block.
    batches: u64,
    means: Vec<f64>,
    singles: Vec<f64>,
    /// Where this rank was after each of the singles.
    cores: Vec<u16>,
}

impl Lane<'_> {
    /// Calls back to back, then up to `most_singles` batches after a fence each.
    fn block(&mut self, session: &Session, most_singles: u64) -> Result<(), Failure> {
        let calls = self.batch.calls() as f64;
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
