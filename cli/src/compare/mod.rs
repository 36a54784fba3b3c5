//! `compare`, as one of its ranks: this crate and other libraries on the same buffers, in turns.

pub mod contenders;
mod forms;
mod fused;
mod report;
mod row;
mod summary;

use std::collections::BTreeSet;

use fast_allreduce::{Algorithm, DType};

use self::contenders::Contenders;
use self::row::{rows, CompareConfig, Row};
use crate::arguments::{Bench, Compare};
use crate::failure::Failure;
use crate::harness::contender::Contender;
use crate::harness::device::MeasuredRank;
use crate::harness::measure::Measure;
use crate::harness::rivals::Compared;
use crate::harness::row::redop;
use crate::harness::session::Session;
use crate::harness::work::Work;
use crate::harness::{config, measure, Job};
use crate::output::Output;
use crate::results::{LeftOut, Reporting};

/// Checks the options before anything is started, and sets the environment variables that libraries read.
pub fn prepare(options: &Compare) -> Result<(), Failure> {
    options.validate()?;
    #[cfg(feature = "cuda")]
    if std::env::var_os(crate::harness::rivals::nccl::SHARED_GPU).is_none() {
        // Still the only thread, so that no other reads the environment.
        std::env::set_var(crate::harness::rivals::nccl::SHARED_GPU, "1");
    }
    Ok(())
}

impl Job for Compare {
    fn options(&self) -> &Bench {
        &self.bench
    }

    fn algorithms(&self) -> Vec<Option<Algorithm>> {
        match self.bench.is_fused() {
            true => self.bench.fused_algorithms(),
            false => self.bench.algorithms().map_or(vec![None], <[_]>::to_vec),
        }
    }

    fn run<E: Compared>(
        &self,
        session: &Session,
        measured_ranks: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure> {
        let bench = &self.bench;
        let mut measure = measure(bench, session)?;
        let entered = Contenders::new(&self.rivals(), session, &measured_ranks[0])?;
        let contenders = entered.all(measured_ranks);
        // All contenders work on memory of the first measured rank, which also computes the unfused norm.
        let norm = bench.is_fused().then(|| measured_ranks[0].ready_norm()).transpose()?;
        let forms = bench.forms();
        let steps = match bench.is_fused() {
            true => bench.fused_cases().count() * forms.len().max(1),
            false => bench.cases().count(),
        };
        let seed = measure.seed;
        let mut reporting = Reporting::start(session, bench.format, steps, || CompareConfig {
            config: config(bench, &measured_ranks[0], seed),
            rounds: self.rounds,
            against: entered.facts(),
            norm,
        })?;
        entered.unavailable().iter().try_for_each(|left| reporting.leave_out(left.clone()))?;
        let outcome = match bench.is_fused() {
            true if !forms.is_empty() => forms::run(self, &mut measure, &measured_ranks[0], &mut reporting),
            true => fused::run(self, &mut measure, &contenders, &mut reporting),
            false => run(self, &mut measure, &contenders, &mut reporting),
        };
        reporting.finish(page, outcome)
    }
}

/// Measures all cases. Returns whether every checked element is right.
fn run<E: MeasuredRank>(
    options: &Compare,
    measure: &mut Measure<'_>,
    contenders: &[Contender<'_, E>],
    reporting: &mut Reporting<Row>,
) -> Result<bool, Failure> {
    let (mut refusals, mut is_right) = (Refusals::default(), true);
    for case in options.bench.cases() {
        let (kind, dtype, op) = (case.kind, case.dtype, case.op);
        let mut able = Vec::with_capacity(contenders.len());
        for &contender in contenders {
            match contender.refusal(kind, dtype, op) {
                None => able.push(contender),
                Some(reason) => {
                    let names = (contender.name(), kind.name(), redop(kind, op));
                    refusals.report(reporting, names, dtype, reason)?;
                }
            }
        }
        reporting.show(&case);
        let work = Work::of_case(&case, measure.session.rank(), measure.session.world_size());
        let timings = measure.contest(&able, options.rounds, &work)?;
        let rows = rows(&able, &work, timings);
        is_right &= rows.iter().all(|row| row.wrong() == 0);
        reporting.add(rows)?;
    }
    Ok(is_right)
}

/// The refusals so far: each is reported once.
#[derive(Default)]
struct Refusals(BTreeSet<(&'static str, &'static str, &'static str, &'static str)>);

impl Refusals {
    fn report(
        &mut self,
        reporting: &mut Reporting<Row>,
        (name, collective, redop): (&'static str, &'static str, &'static str),
        dtype: DType,
        reason: &str,
    ) -> Result<(), Failure> {
        let dtype = dtype.name();
        if self.0.insert((name, collective, dtype, redop)) {
            let (collective, dtype, redop) = (Some(collective), Some(dtype), Some(redop));
            reporting.leave_out(LeftOut { name, collective, dtype, redop, reason: reason.into() })?;
        }
        Ok(())
    }
}
