//! `bench`, as one of its ranks: every collective, size, type, operation and algorithm asked for.

pub mod html;
pub mod report;
mod rms_norm;

use fast_allreduce::Algorithm;

use self::report::Report;
use crate::arguments::Bench;
use crate::failure::Failure;
use crate::harness::device::Endpoint;
use crate::harness::progress::Progress;
use crate::harness::session::Session;
use crate::harness::work::Work;
use crate::harness::{config, measure, Job};
use crate::output::Output;
use crate::page::render;

impl Job for Bench {
    fn options(&self) -> &Bench {
        self
    }

    fn algorithms(&self) -> Vec<Option<Algorithm>> {
        match self.algorithms() {
            _ if self.is_rms_norm() => self.rows_algorithms(),
            Some(algorithms) => algorithms.to_vec(),
            None if self.report.is_some() && self.is_all_reduce() => Algorithm::DIRECT.map(Some).to_vec(),
            None => vec![None],
        }
    }

    fn run<E: Endpoint>(
        &self,
        session: &Session,
        endpoints: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure> {
        if self.is_rms_norm() {
            return rms_norm::run(self, session, endpoints, page);
        }
        let mut measure = measure(self, session)?;
        let rows = self.cases().count() * endpoints.len();
        let mut reporting = match session.rank() {
            0 => Some((
                Report::start(self.format, config(self, &endpoints[0], measure.seed))?,
                Progress::new(rows),
            )),
            _ => None,
        };
        let mut is_right = true;
        let cases = self.cases().flat_map(|case| endpoints.iter().map(move |endpoint| (case, endpoint)));
        for (case, endpoint) in cases {
            if let Some((_, progress)) = &reporting {
                progress.show(&case.to_string());
            }
            let work = Work::of_case(&case, session.rank(), session.world_size());
            let row = measure.row(endpoint, &work)?;
            is_right &= row.wrong() == 0;
            if let Some((report, progress)) = &mut reporting {
                progress.clear();
                progress.advance();
                report.add(row)?;
            }
        }
        if let Some((report, progress)) = reporting {
            drop(progress);
            let (config, rows) = report.finish()?;
            if let Some(page) = page {
                page.write(&render(&html::page(&config, &rows)))?;
            }
        }
        Ok(is_right)
    }
}
