//! `compare`, as one of its ranks: this crate and others on the same buffers, in turns.

mod contenders;
mod html;
mod report;
mod rms_norm;
mod row;
mod summary;

use std::collections::BTreeSet;

use fast_allreduce::Algorithm;

use self::contenders::Contenders;
use self::report::Report;
use self::row::{rows, CompareConfig, LeftOut};
use crate::arguments::{Bench, Compare};
use crate::failure::Failure;
use crate::harness::progress::Progress;
use crate::harness::rivals::Compared;
use crate::harness::session::Session;
use crate::harness::work::Work;
use crate::harness::{config, measure, Job};
use crate::output::Output;
use crate::page::render;

/// Refuses what cannot be, before anything is started, and sets what libraries read from the environment.
pub fn prepare(options: &Compare) -> Result<(), Failure> {
    options.validate()?;
    #[cfg(feature = "cuda")]
    if std::env::var_os(crate::harness::rivals::nccl::SHARED_GPU).is_none() {
        // This process has one thread yet.
        std::env::set_var(crate::harness::rivals::nccl::SHARED_GPU, "1");
    }
    Ok(())
}

impl Job for Compare {
    fn options(&self) -> &Bench {
        &self.bench
    }

    fn algorithms(&self) -> Vec<Option<Algorithm>> {
        match self.bench.is_rms_norm() {
            true => self.bench.rows_algorithms(),
            false => self.bench.algorithms().map_or(vec![None], <[_]>::to_vec),
        }
    }

    fn run<E: Compared>(
        &self,
        session: &Session,
        endpoints: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure> {
        let mut measure = measure(&self.bench, session)?;
        let entered = Contenders::new(&self.rivals(), session, &endpoints[0])?;
        let contenders = entered.all(endpoints);
        // What is measured together works on memory of the first.
        let norm = self.bench.is_rms_norm().then(|| endpoints[0].ready_norm()).transpose()?;
        let mut reporting = match session.rank() {
            0 => {
                let config = config(&self.bench, &endpoints[0], measure.seed);
                let config = CompareConfig { config, rounds: self.rounds, against: entered.facts(), norm };
                let report = Report::start(self.bench.format, config, entered.unavailable())?;
                let cases = if self.bench.is_rms_norm() {
                    self.bench.rows_cases().count()
                } else {
                    self.bench.cases().count()
                };
                Some((report, Progress::new(cases)))
            }
            _ => None,
        };
        if self.bench.is_rms_norm() {
            let is_right = rms_norm::run(self, &mut measure, &contenders, reporting.as_mut())?;
            finish(reporting, page)?;
            return Ok(is_right);
        }
        let mut refused = BTreeSet::new();
        let mut is_right = true;
        for case in self.bench.cases() {
            let (kind, dtype, op) = (case.kind, case.dtype, case.op);
            let mut able = Vec::with_capacity(contenders.len());
            for &contender in &contenders {
                let Some(reason) = contender.refusal(kind, dtype, op) else {
                    able.push(contender);
                    continue;
                };
                let is_news = refused.insert((contender.name(), kind, dtype.name(), op.name()));
                if let Some((report, progress)) = reporting.as_mut().filter(|_| is_news) {
                    progress.clear();
                    report.leave_out(LeftOut::of_case(contender.name(), &case, reason))?;
                }
            }
            if let Some((_, progress)) = &reporting {
                progress.show(&case.to_string());
            }
            let work = Work::of_case(&case, session.rank(), session.world_size());
            let timings = measure.contest(&able, self.rounds, &work)?;
            let rows = rows(&able, &case, &work, timings);
            is_right &= rows.iter().all(|row| row.wrong() == 0);
            if let Some((report, progress)) = &mut reporting {
                progress.clear();
                progress.advance();
                report.add(rows)?;
            }
        }
        finish(reporting, page)?;
        Ok(is_right)
    }
}

/// Writes what comes last.
fn finish(reporting: Option<(Report, Progress)>, page: Option<&Output>) -> Result<(), Failure> {
    if let Some((report, progress)) = reporting {
        drop(progress);
        let results = report.finish()?;
        if let Some(page) = page {
            page.write(&render(&html::page(&results)))?;
        }
    }
    Ok(())
}
