//! One row: times a call out of place and in place, then checks its results.

use std::hint::black_box;
use std::time::Instant;

use fast_allreduce::{Communicator, Error, Host, ReduceOp};

use super::check::{count_changed, count_wrong};
use super::inputs::Inputs;
use super::memory::Memory;
use super::reference::Number;
use super::row::{Row, Timing};
use super::session::Session;
use crate::arguments::Bench;
use crate::failure::Failure;

/// Single calls that are timed at most; their times are exchanged.
const MOST_SINGLE_CALLS: u64 = 10_000;

/// Makes rows.
pub struct Measure<'a> {
    pub session: &'a Session,
    pub options: &'a Bench,
    pub seed: u64,
    /// Inputs that have been made so far.
    pub round: u64,
}

impl Measure<'_> {
    /// Measures one size, type, operation and algorithm. Collective.
    pub fn row<T: Number>(
        &mut self,
        communicator: &Communicator<Host>,
        count: usize,
        op: ReduceOp,
    ) -> Result<Row, Failure> {
        let mut input = match self.options.registered {
            true => Memory::<T>::registered(communicator, count)?,
            false => Memory::private(count)?,
        };
        let mut output = Memory::private(count)?;

        self.next_inputs(op).fill(self.session.rank(), &mut input);
        let mut call = || communicator.all_reduce(&input, &mut output, op);
        let iterations = self.warm_up(&mut call)?;
        let mut out_of_place = self.time(iterations, count * size_of::<T>(), &mut call)?;
        let memcpy_us = self.memcpy(&input, &mut output)?;
        out_of_place.wrong = self.check(op, |inputs, rank| {
            inputs.fill(rank, &mut input);
            output.fill(T::poison());
            communicator.all_reduce(&input, &mut output, op)?;
            Ok(count_wrong(inputs, &output) + count_changed(inputs, rank, &input))
        })?;

        let data = &mut *input;
        self.next_inputs(op).fill(self.session.rank(), data);
        let mut call = || communicator.all_reduce_in_place(data, op);
        self.warm_up(&mut call)?;
        let mut in_place = self.time(iterations, count * size_of::<T>(), &mut call)?;
        in_place.wrong = self.check(op, |inputs, rank| {
            inputs.fill(rank, data);
            communicator.all_reduce_in_place(data, op)?;
            Ok(count_wrong(inputs, data))
        })?;

        Ok(Row {
            size: count * size_of::<T>(),
            count,
            dtype: T::DTYPE.name(),
            redop: op.name(),
            algo: communicator.plan(count, T::DTYPE).algorithm.name(),
            out_of_place,
            in_place,
            memcpy_us,
        })
    }

    fn next_inputs(&mut self, op: ReduceOp) -> Inputs {
        self.round += 1;
        Inputs::new(self.seed, self.round, self.session.world_size(), op)
    }

    /// Makes the untimed calls and says how many to time.
    fn warm_up(&self, call: &mut impl FnMut() -> Result<(), Error>) -> Result<u64, Failure> {
        const TARGET_SECONDS: f64 = 0.02;
        const PROBES: u64 = 3;
        repeat(self.options.warmup, call)?;
        if let Some(iterations) = self.options.iterations {
            return Ok(iterations);
        }
        self.session.fence()?;
        let seconds = repeat(PROBES, call)? / PROBES as f64;
        Ok(((TARGET_SECONDS / self.slowest(seconds)?).ceil() as u64).clamp(20, 10_000))
    }

    fn time(
        &self,
        iterations: u64,
        bytes: usize,
        call: &mut impl FnMut() -> Result<(), Error>,
    ) -> Result<Timing, Failure> {
        self.session.fence()?;
        let mean = self.slowest(repeat(iterations, call)? / iterations as f64)?;
        let singles = iterations.min(MOST_SINGLE_CALLS);
        let mut seconds = Vec::with_capacity(singles as usize);
        for _ in 0..singles {
            self.session.fence()?;
            seconds.push(repeat(1, call)?);
        }
        let seconds = self.session.maxima(&seconds)?;
        Ok(Timing::new(mean, seconds, bytes, self.session.world_size()))
    }

    /// Microseconds of a copy that every rank makes at the same time.
    fn memcpy<T: Number>(&self, from: &[T], to: &mut [T]) -> Result<f64, Failure> {
        const TARGET_SECONDS: f64 = 0.01;
        const PROBES: u64 = 3;
        let mut copy = || {
            black_box(&mut *to).copy_from_slice(black_box(from));
            Ok(())
        };
        repeat(PROBES, &mut copy)?;
        self.session.fence()?;
        let seconds = self.slowest(repeat(PROBES, &mut copy)? / PROBES as f64)?;
        let copies = ((TARGET_SECONDS / seconds).ceil() as u64).clamp(PROBES, 1_000_000);
        self.session.fence()?;
        let seconds = repeat(copies, &mut copy)?;
        Ok(self.slowest(seconds / copies as f64)? * 1e6)
    }

    /// Wrong elements of all ranks in the checked calls; `None` without any.
    fn check(
        &mut self,
        op: ReduceOp,
        mut checked_call: impl FnMut(&Inputs, usize) -> Result<u64, Error>,
    ) -> Result<Option<u64>, Failure> {
        let mut wrong = 0;
        for _ in 0..self.options.checks {
            let inputs = self.next_inputs(op);
            wrong += checked_call(&inputs, self.session.rank())?;
            // Checking takes longer than a call may wait.
            wrong = self.session.total(wrong)?;
        }
        Ok((self.options.checks > 0).then_some(wrong))
    }

    fn slowest(&self, seconds: f64) -> Result<f64, Failure> {
        Ok(self.session.maxima(&[seconds])?[0])
    }
}

/// Seconds that `count` calls take one after the other.
fn repeat(count: u64, call: &mut impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    for _ in 0..count {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64())
}
