//! Times calls out of place and in place, of one contender or of several block by block, then checks their results.

use std::cell::RefCell;

use fast_allreduce::ReduceOp;

use super::check::{count_changed, judge, Promise, Verdict};
use super::contender::Contender;
use super::device::{Batch, Call, Endpoint};
use super::inputs::Inputs;
use super::reference::Number;
use super::row::{Row, Timing};
use super::session::Session;
use crate::failure::Failure;

/// Batches of calls that are timed one by one at most; their times are exchanged.
const MOST_SINGLES: u64 = 10_000;

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
    /// Measures one size, type, operation and algorithm. Collective.
    pub fn row<T: Number>(
        &mut self,
        endpoint: &impl Endpoint,
        count: usize,
        op: ReduceOp,
    ) -> Result<Row, Failure> {
        let input = endpoint.allocate::<T>(count, self.effort.registered)?;
        let mut memory = Memory { input, output: endpoint.allocate::<T>(count, false)? };
        let ours = [Contender::Ours(endpoint)];
        let (mut out_of_place, mut in_place) = self.both_forms(&ours, 1, &mut memory, count, op)?;
        let Memory { input, output } = &mut memory;
        let memcpy_us = self.memcpy(endpoint, &mut || endpoint.copy(input, output))?;
        let only = "each contender has a timing";
        Ok(Row {
            size: count * size_of::<T>(),
            count,
            dtype: T::DTYPE.name(),
            redop: op.name(),
            algo: endpoint.communicator().plan(count, T::DTYPE).algorithm.name(),
            out_of_place: out_of_place.pop().expect(only),
            in_place: in_place.pop().expect(only),
            memcpy_us,
        })
    }

    /// Measures one size, type and operation for all contenders, on the memory of the first: in every round a block of calls
    /// of each. Their timings, out of place and in place. Collective.
    pub fn contest<T: Number, E: Endpoint>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        count: usize,
        op: ReduceOp,
    ) -> Result<(Vec<Timing>, Vec<Timing>), Failure> {
        let Some(first) = contenders.first() else {
            return Ok(Default::default());
        };
        let input = first.endpoint().allocate::<T>(count, self.effort.registered)?;
        let output = first.endpoint().allocate::<T>(count, false)?;
        self.both_forms(contenders, rounds, &mut Memory { input, output }, count, op)
    }

    /// Checks a call out of place and in place, and times nothing: the wrong elements on all ranks. Collective.
    #[cfg(feature = "cuda")]
    pub fn wrong<T: Number>(
        &mut self,
        endpoint: &impl Endpoint,
        count: usize,
        op: ReduceOp,
    ) -> Result<u64, Failure> {
        let input = endpoint.allocate::<T>(count, self.effort.registered)?;
        let mut memory = Memory { input, output: endpoint.allocate::<T>(count, false)? };
        let ours = Contender::Ours(endpoint);
        let out_of_place = self.check_out_of_place(&ours, &mut memory, op)?;
        let in_place = self.check_in_place(&ours, &mut memory, op)?;
        let wrong = |verdict: Option<Verdict>| verdict.map_or(0, |verdict| verdict.wrong);
        Ok(wrong(out_of_place) + wrong(in_place))
    }

    fn both_forms<T: Number, E: Endpoint>(
        &mut self,
        contenders: &[Contender<E>],
        rounds: u64,
        memory: &mut Memory<E::Memory<T>>,
        count: usize,
        op: ReduceOp,
    ) -> Result<(Vec<Timing>, Vec<Timing>), Failure> {
        let bytes = count * size_of::<T>();
        self.fill(contenders, memory, op)?;
        // Calls of all contenders are ready at a time, and one of them runs.
        let shared = RefCell::new(&mut *memory);
        let out_of_place = self.time(contenders, rounds, bytes, |contender| {
            let Memory { input, output } = &mut **shared.borrow_mut();
            contender.all_reduce(input, output, op)
        })?;
        let out_of_place = self.checked(contenders, out_of_place, |measure, contender| {
            measure.check_out_of_place(contender, memory, op)
        })?;

        self.fill(contenders, memory, op)?;
        let shared = RefCell::new(&mut *memory);
        let in_place = self.time(contenders, rounds, bytes, |contender| {
            let Memory { input, output } = &mut **shared.borrow_mut();
            contender.all_reduce_in_place(input, output, op)
        })?;
        let in_place = self.checked(contenders, in_place, |measure, contender| {
            measure.check_in_place(contender, memory, op)
        })?;
        Ok((out_of_place, in_place))
    }

    fn fill<T: Number, E: Endpoint>(
        &mut self,
        contenders: &[Contender<E>],
        memory: &mut Memory<E::Memory<T>>,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        let inputs = self.next_inputs(op);
        let endpoint = contenders[0].endpoint();
        endpoint.write(&mut memory.input, |elements| inputs.fill(self.session.rank(), elements))
    }

    /// Adds what was found in each contender's results, which are of the same inputs.
    fn checked<C>(
        &mut self,
        contenders: &[C],
        timings: Vec<Timing>,
        mut check: impl FnMut(&mut Self, &C) -> Result<Option<Verdict>, Failure>,
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

    fn next_inputs(&mut self, op: ReduceOp) -> Inputs {
        self.round += 1;
        Inputs::new(self.seed, self.round, self.session.world_size(), op)
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

    fn time<E: Endpoint>(
        &self,
        contenders: &[Contender<E>],
        rounds: u64,
        bytes: usize,
        call: impl Fn(&Contender<E>) -> Result<(), Failure>,
    ) -> Result<Vec<Timing>, Failure> {
        let call = &call;
        let mut calls: Vec<_> = contenders.iter().map(|contender| move || call(contender)).collect();
        let mut lanes = Vec::with_capacity(contenders.len());
        for (contender, call) in contenders.iter().zip(&mut calls) {
            let mut batch = contender.endpoint().batch(call)?;
            let batches = self.warm_up(&mut *batch)?.div_ceil(rounds);
            lanes.push(Lane { batch, batches, means: Vec::new(), singles: Vec::new() });
        }
        for _ in 0..rounds {
            for lane in &mut lanes {
                lane.block(self.session, MOST_SINGLES.div_ceil(rounds))?;
            }
        }
        let timing = |lane: Lane| {
            let (means, singles) = (self.session.maxima(&lane.means)?, self.session.maxima(&lane.singles)?);
            Ok(Timing::new(means, singles, bytes, self.session.world_size()))
        };
        lanes.into_iter().map(timing).collect()
    }

    /// Microseconds of a copy that every rank makes at the same time.
    fn memcpy<'a>(&self, endpoint: &'a impl Endpoint, copy: Call<'a>) -> Result<f64, Failure> {
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

    fn check_out_of_place<T: Number, E: Endpoint>(
        &mut self,
        contender: &Contender<E>,
        memory: &mut Memory<E::Memory<T>>,
        op: ReduceOp,
    ) -> Result<Option<Verdict>, Failure> {
        let (endpoint, Memory { input, output }) = (contender.endpoint(), memory);
        self.check(contender.promise(), op, |session, inputs, promise| {
            let rank = session.rank();
            endpoint.write(input, |memory| inputs.fill(rank, memory))?;
            endpoint.write(output, |memory| memory.fill(T::poison()))?;
            session.fence()?;
            contender.all_reduce(input, output, op)?;
            let mut verdict = endpoint.read(output, |memory| judge(inputs, memory, promise))?;
            verdict.wrong += endpoint.read(input, |memory| count_changed(inputs, rank, memory))?;
            Ok(verdict)
        })
    }

    fn check_in_place<T: Number, E: Endpoint>(
        &mut self,
        contender: &Contender<E>,
        memory: &mut Memory<E::Memory<T>>,
        op: ReduceOp,
    ) -> Result<Option<Verdict>, Failure> {
        let (endpoint, Memory { input, output }) = (contender.endpoint(), memory);
        self.check(contender.promise(), op, |session, inputs, promise| {
            endpoint.write(input, |memory| inputs.fill(session.rank(), memory))?;
            session.fence()?;
            contender.all_reduce_in_place(input, output, op)?;
            endpoint.read(input, |memory| judge(inputs, memory, promise))
        })
    }

    /// What all ranks found in the checked calls; `None` without any.
    fn check(
        &mut self,
        promise: Option<Promise>,
        op: ReduceOp,
        mut checked_call: impl FnMut(&Session, &Inputs, Promise) -> Result<Verdict, Failure>,
    ) -> Result<Option<Verdict>, Failure> {
        let Some(promise) = promise.filter(|_| self.effort.checks > 0) else {
            return Ok(None);
        };
        let mut all = Verdict::default();
        for _ in 0..self.effort.checks {
            let inputs = self.next_inputs(op);
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

/// What is reduced; in place, the input.
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
        }
        Ok(())
    }
}
