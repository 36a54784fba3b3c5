//! Suspends and resumes a communicator: what that gives back, and how long it takes.

use std::time::Instant;

use fast_allreduce::{CallKind, DType, ReduceOp};
use serde::Serialize;

use super::device::MeasuredRank;
use super::session::Session;
use super::work::Work;
use crate::failure::Failure;

/// The result: medians of rounds, each on the slowest rank.
#[derive(Debug, Clone, Serialize)]
pub struct Suspension {
    /// Bytes of shared memory that each rank gives back.
    pub bytes: usize,
    pub suspend_ms: f64,
    pub resume_ms: f64,
    /// Size of the allreduces that are timed.
    pub call_bytes: usize,
    /// Time of one before the suspension.
    pub call_before_ms: f64,
    /// Time of the first one afterwards.
    pub first_call_ms: f64,
}

impl Suspension {
    /// Suspends and resumes the communicator several times, with calls of `call_bytes` in between. Collective.
    pub fn measure<E: MeasuredRank>(
        session: &Session,
        measured: &E,
        call_bytes: usize,
    ) -> Result<Self, Failure> {
        const ROUNDS: usize = 11;
        let communicator = measured.communicator();
        let (dtype, elements) = (DType::F32, call_bytes / DType::F32.size());
        let (rank, ranks) = (session.rank(), session.world_size());
        let work = Work::new(CallKind::AllReduce, dtype, ReduceOp::Sum, 0, elements, rank, ranks);
        let mut data = measured.allocate(dtype, elements, false)?;
        measured.write(&mut data, &mut |bytes| bytes.fill(0))?;
        let mut bytes = 0;
        let mut call = || -> Result<f64, Failure> {
            session.fence()?;
            let start = Instant::now();
            measured.start_in_place(&work, &mut data)?;
            measured.finish()?;
            Ok(milliseconds(start))
        };
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            // As of a communicator in use: its pages have been touched.
            let before = (0..4).map(|_| call()).last().unwrap_or(Ok(0.0))?;
            session.fence()?;
            let start = Instant::now();
            bytes = communicator.suspend()?.bytes;
            let suspended = milliseconds(start);
            session.fence()?;
            let start = Instant::now();
            communicator.resume(session.limit())?;
            let resumed = milliseconds(start);
            rounds.push(session.maxima(&[suspended, resumed, before, call()?])?);
        }
        let median = |index: usize| {
            let mut times: Vec<f64> = rounds.iter().map(|round| round[index]).collect();
            times.sort_by(f64::total_cmp);
            times[ROUNDS / 2]
        };
        Ok(Self {
            bytes,
            suspend_ms: median(0),
            resume_ms: median(1),
            call_bytes,
            call_before_ms: median(2),
            first_call_ms: median(3),
        })
    }

    pub fn sentence(&self) -> String {
        let Self { bytes, suspend_ms, resume_ms, call_bytes, call_before_ms, first_call_ms } = self;
        format!(
            "suspend gave back {bytes} B of each rank in {suspend_ms:.1} ms, resume took {resume_ms:.1} ms; an \
             allreduce of {call_bytes} B took {call_before_ms:.3} ms before, and {first_call_ms:.3} ms afterwards"
        )
    }
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
