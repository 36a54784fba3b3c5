//! `bench`, as one of its ranks: every requested collective, size, type, operation and algorithm.

pub mod report;

use fast_allreduce::Algorithm;

use crate::arguments::{Bench, Case};
use crate::failure::Failure;
use crate::harness::device::MeasuredRank;
use crate::harness::session::Session;
use crate::harness::suspension::Suspension;
use crate::harness::work::Work;
use crate::harness::{config, measure, Job};
use crate::output::Output;
use crate::results::Reporting;

impl Job for Bench {
    fn options(&self) -> &Bench {
        self
    }

    fn algorithms(&self) -> Vec<Option<Algorithm>> {
        match self.algorithms() {
            Some(algorithms) => algorithms.to_vec(),
            None if self.report.is_some() && self.is_all_reduce() => Algorithm::DIRECT.map(Some).to_vec(),
            None => vec![None],
        }
    }

    fn run<E: MeasuredRank>(
        &self,
        session: &Session,
        measured_ranks: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure> {
        let mut measure = measure(self, session)?;
        let steps = self.cases().count() * measured_ranks.len();
        let seed = measure.seed;
        let mut reporting =
            Reporting::start(session, self.format, steps, || config(self, &measured_ranks[0], seed))?;
        let mut cases =
            self.cases().flat_map(|case| measured_ranks.iter().map(move |measured| (case, measured)));
        let mut is_right = true;
        let outcome = cases.try_for_each(|(case, measured): (Case, &E)| {
            reporting.show(&case);
            let work = Work::of_case(&case, session.rank(), session.world_size());
            let row = measure.row(measured, &work)?;
            is_right &= row.wrong() == 0;
            Ok(reporting.add([row])?)
        });
        let outcome = outcome.and_then(|()| {
            if self.suspend {
                let call_bytes = self.sizes().last().unwrap_or_default();
                reporting.set_suspension(Suspension::measure(session, &measured_ranks[0], call_bytes)?);
            }
            Ok(is_right)
        });
        reporting.finish(page, outcome)
    }
}
