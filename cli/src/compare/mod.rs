//! `compare`, as one of its ranks: this crate and others on the same buffers, in turns.

mod field;
mod line;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod report;
mod sheet;
mod summary;

use std::collections::BTreeSet;

use fast_allreduce::{Algorithm, DType};

use self::field::Field;
use self::line::{lines, Contest, LeftOut};
use self::report::Report;
use crate::arguments::{Bench, Compare};
use crate::bench::device::Endpoint;
use crate::bench::progress::Progress;
use crate::bench::session::Session;
use crate::bench::{config, measure, with_number, Job};
use crate::failure::Failure;
use crate::output::Output;
use crate::page::render;

/// Refuses what cannot be, before anything is started, and sets what libraries read from the environment.
pub fn prepare(options: &Compare) -> Result<(), Failure> {
    options.validate()?;
    #[cfg(feature = "cuda")]
    if std::env::var_os(nccl::SHARED_GPU).is_none() {
        // This process has one thread yet.
        std::env::set_var(nccl::SHARED_GPU, "1");
    }
    Ok(())
}

impl Job for Compare {
    fn options(&self) -> &Bench {
        &self.bench
    }

    fn algorithms(&self) -> Vec<Option<Algorithm>> {
        self.bench.algorithms().map_or(vec![None], <[_]>::to_vec)
    }

    fn run<E: Endpoint>(
        &self,
        session: &Session,
        endpoints: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure> {
        let mut measure = measure(&self.bench, session)?;
        let field = Field::new(&self.rivals(), session, &endpoints[0])?;
        let contenders = field.contenders(endpoints);
        let mut voice = match session.rank() {
            0 => {
                let config = config(&self.bench, &endpoints[0], measure.seed);
                let contest = Contest { config, rounds: self.rounds, against: field.facts() };
                let report = Report::start(self.bench.format, contest, field.unavailable())?;
                Some((report, Progress::new(self.bench.cases().count())))
            }
            _ => None,
        };
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
                if let Some((report, progress)) = voice.as_mut().filter(|_| is_news) {
                    progress.clear();
                    report.leave_out(LeftOut::of_case(contender.name(), &case, reason))?;
                }
            }
            if let Some((_, progress)) = &voice {
                progress.show(&case.to_string());
            }
            let work = case.work(session.rank(), session.world_size());
            let timings = with_number!(dtype, T => measure.contest::<T, E>(&able, self.rounds, &work))?;
            let lines = lines(&able, &case, &work, timings);
            is_right &= lines.iter().all(|line| line.wrong() == 0);
            if let Some((report, progress)) = &mut voice {
                progress.clear();
                progress.advance();
                report.add(lines)?;
            }
        }
        if let Some((report, progress)) = voice {
            drop(progress);
            let results = report.finish()?;
            if let Some(page) = page {
                page.write(&render(&sheet::page(&results)))?;
            }
        }
        Ok(is_right)
    }
}
