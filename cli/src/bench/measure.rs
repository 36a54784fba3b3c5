//! One row: times a call out of place and in place, then checks its results.

use fast_allreduce::ReduceOp;

use super::check::{count_changed, count_wrong};
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
        let mut input = endpoint.allocate::<T>(count, self.effort.registered)?;
        let mut output = endpoint.allocate::<T>(count, false)?;
        let bytes = count * size_of::<T>();

        let inputs = self.next_inputs(op);
        endpoint.write(&mut input, |memory| inputs.fill(self.session.rank(), memory))?;
        let mut out_of_place =
            self.time(endpoint, bytes, &mut || endpoint.all_reduce(&input, &mut output, op))?;
        let memcpy_us = self.memcpy(endpoint, &mut || endpoint.copy(&input, &mut output))?;
        out_of_place.wrong = self.check_out_of_place(endpoint, &mut input, &mut output, op)?;

        let inputs = self.next_inputs(op);
        endpoint.write(&mut input, |memory| inputs.fill(self.session.rank(), memory))?;
        let mut in_place =
            self.time(endpoint, bytes, &mut || endpoint.all_reduce_in_place(&mut input, op))?;
        in_place.wrong = self.check_in_place(endpoint, &mut input, op)?;

        Ok(Row {
            size: bytes,
            count,
            dtype: T::DTYPE.name(),
            redop: op.name(),
            algo: endpoint.communicator().plan(count, T::DTYPE).algorithm.name(),
            out_of_place,
            in_place,
            memcpy_us,
        })
    }

    /// Checks a call out of place and in place, and times nothing: the wrong elements on all ranks. Collective.
    #[cfg(feature = "cuda")]
    pub fn wrong<T: Number>(
        &mut self,
        endpoint: &impl Endpoint,
        count: usize,
        op: ReduceOp,
    ) -> Result<u64, Failure> {
        let mut input = endpoint.allocate::<T>(count, self.effort.registered)?;
        let mut output = endpoint.allocate::<T>(count, false)?;
        let out_of_place = self.check_out_of_place(endpoint, &mut input, &mut output, op)?;
        let in_place = self.check_in_place(endpoint, &mut input, op)?;
        Ok(out_of_place.unwrap_or(0) + in_place.unwrap_or(0))
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

    fn time<'a>(&self, endpoint: &'a impl Endpoint, bytes: usize, call: Call<'a>) -> Result<Timing, Failure> {
        let mut batch = endpoint.batch(call)?;
        let batches = self.warm_up(&mut *batch)?;
        let calls = batch.calls() as f64;
        self.session.fence()?;
        let mean = self.slowest(batch.seconds(batches)? / (batches as f64 * calls))?;
        let singles = batches.min(MOST_SINGLES);
        let mut seconds = Vec::with_capacity(singles as usize);
        for _ in 0..singles {
            self.session.fence()?;
            seconds.push(batch.seconds(1)? / calls);
        }
        let seconds = self.session.maxima(&seconds)?;
        Ok(Timing::new(mean, seconds, bytes, self.session.world_size()))
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

    fn check_out_of_place<E: Endpoint, T: Number>(
        &mut self,
        endpoint: &E,
        input: &mut E::Memory<T>,
        output: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<Option<u64>, Failure> {
        self.check(op, |session, inputs| {
            let rank = session.rank();
            endpoint.write(input, |memory| inputs.fill(rank, memory))?;
            endpoint.write(output, |memory| memory.fill(T::poison()))?;
            session.fence()?;
            endpoint.all_reduce(input, output, op)?;
            let wrong = endpoint.read(output, |memory| count_wrong(inputs, memory))?;
            Ok(wrong + endpoint.read(input, |memory| count_changed(inputs, rank, memory))?)
        })
    }

    fn check_in_place<E: Endpoint, T: Number>(
        &mut self,
        endpoint: &E,
        data: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<Option<u64>, Failure> {
        self.check(op, |session, inputs| {
            endpoint.write(data, |memory| inputs.fill(session.rank(), memory))?;
            session.fence()?;
            endpoint.all_reduce_in_place(data, op)?;
            endpoint.read(data, |memory| count_wrong(inputs, memory))
        })
    }

    /// Wrong elements of all ranks in the checked calls; `None` without any.
    fn check(
        &mut self,
        op: ReduceOp,
        mut checked_call: impl FnMut(&Session, &Inputs) -> Result<u64, Failure>,
    ) -> Result<Option<u64>, Failure> {
        let mut wrong = 0;
        for _ in 0..self.effort.checks {
            let inputs = self.next_inputs(op);
            wrong += checked_call(self.session, &inputs)?;
            // Checking takes longer than a call may wait.
            wrong = self.session.total(wrong)?;
        }
        Ok((self.effort.checks > 0).then_some(wrong))
    }

    fn slowest(&self, seconds: f64) -> Result<f64, Failure> {
        Ok(self.session.maxima(&[seconds])?[0])
    }
}
