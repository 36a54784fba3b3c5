//! Tunes one world, as one of its ranks: measures, chooses, and compares with the built-in plan.

use std::path::Path;
use std::time::Duration;

use fast_allreduce::bootstrap::Local;
use fast_allreduce::plan::{Choice, PlannedCall, Step, Table, Tuning};
use fast_allreduce::topology::LinkClass;
use fast_allreduce::Algorithm;

use super::report::Report;
use super::select::{beats, ratio, steps, winners, Size};
use super::times::Subject;
use super::{candidates, times};
use crate::arguments::{DeviceName, Tune};
use crate::failure::Failure;
use crate::harness::device::host::Cpu;
use crate::harness::device::MeasuredRank;
use crate::harness::session::Session;

/// The share of the time for the comparison with the built-in plan.
const COMPARISON_SHARE: f64 = 0.25;

/// Measures the world that the environment names. The first rank prints the results and adds them to the plan at
/// `part`.
pub fn measure(options: &Tune, part: &Path) -> Result<(), Failure> {
    options.validate()?;
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let session = Session::new(bootstrap, options.communicator.wait(), options.communicator.timeout)?;
    match options.device {
        DeviceName::Host => measure_on(options, part, &session, |plan| Cpu::planned(&session, options, plan)),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            use crate::harness::device::cuda::{gpus, Gpu, GpuOptions};
            let settings = options.settings()?;
            let gpu_options = GpuOptions { first_gpu: 0, gpus: gpus()?, eager: false, settings };
            measure_on(options, part, &session, |plan| Gpu::planned(&session, &gpu_options, plan))
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => crate::harness::device::check(options.device),
    }
}

fn measure_on<E: MeasuredRank>(
    options: &Tune,
    part: &Path,
    session: &Session,
    make: impl Fn(Table) -> Result<E, Failure>,
) -> Result<(), Failure> {
    let device = options.device.kind();
    let workers = options.communicator.workers();
    let subjects: Vec<_> = options
        .calls()
        .into_iter()
        .map(|calls| (calls, candidates::of(calls, device, workers)))
        .filter(|(_, choices)| !choices.is_empty())
        .collect();
    // The plan of untuned communicators, as far as it is known without a measurement.
    let all = Table::built_in_for(&crate::harness::device::machine(options.device)?);
    let reference = make(all.clone())?;
    let candidates = subjects.iter().map(|(_, choices)| choices.len()).sum();
    let mut report = Report::start(session, &reference.facts(), candidates, options.budget)?;
    let link = times::link(&reference);
    drop(reference);
    let mut found = Vec::new();
    for (calls, choices) in &subjects {
        let budget = options.budget.mul_f64(share(*calls, subjects.len()));
        let tuner = Tuner {
            session,
            make: &make,
            calls: *calls,
            link,
            sizes: options.sizes(),
            built_in: all.clone(),
        };
        found.push((*calls, tuner.measure(choices, budget, &mut report)?));
    }
    if session.rank() == 0 {
        let before = match std::fs::metadata(part).is_ok_and(|metadata| metadata.len() > 0) {
            true => Tuning::load(part)?.table().clone(),
            false => all,
        };
        let add = |table: Table, (calls, steps): &(_, Vec<Step>)| {
            table.with_steps_of(*calls, session.world_size(), link, steps)
        };
        let plan = found.iter().try_fold(before, add)?;
        let machine = crate::harness::device::machine(options.device)?;
        let text = Tuning::new(machine, plan)?.to_string();
        std::fs::write(part, text).map_err(|error| Failure::File(part.to_owned(), error))?;
    }
    Ok(())
}

/// Returns the share of the time for a kind of call: half of it for allreduces, which have the most candidates.
fn share(calls: PlannedCall, subjects: usize) -> f64 {
    match (calls, subjects) {
        (_, 1) => 1.0,
        (PlannedCall::AllReduce, _) => 0.5,
        // Equal shares for the others, whether allreduces are tuned or not.
        _ => 0.5 / (subjects - 1) as f64,
    }
}

/// Tunes one kind of call of one world.
struct Tuner<'a, F> {
    session: &'a Session,
    make: &'a F,
    calls: PlannedCall,
    link: LinkClass,
    sizes: Vec<usize>,
    built_in: Table,
}

impl<E: MeasuredRank, F: Fn(Table) -> Result<E, Failure>> Tuner<'_, F> {
    /// Measures the candidates and returns the steps of the plan; none for calls that keep the plan of allreduces.
    /// Collective.
    fn measure(
        &self,
        choices: &[Choice],
        budget: Duration,
        report: &mut Report,
    ) -> Result<Vec<Step>, Failure> {
        let mut measured_ranks = vec![(self.make)(self.built_in.clone())?];
        for &choice in choices {
            let step = Step { max_bytes: u64::MAX, choice };
            measured_ranks.push((self.make)(self.with(&[step])?)?);
        }
        let slice = |share: f64| budget.mul_f64(share / self.sizes.len() as f64);
        let mut measured = Vec::with_capacity(self.sizes.len());
        for &bytes in &self.sizes {
            report.show(bytes);
            let subject = Subject { calls: self.calls, bytes };
            measured.push(times::time(
                self.session,
                &measured_ranks,
                subject,
                slice(1.0 - COMPARISON_SHARE),
            )?);
        }
        // Candidate 0 is the built-in plan.
        let picked =
            winners(&measured).into_iter().map(|winner| winner.checked_sub(1).map(|index| choices[index]));
        let mut picked: Vec<_> = picked.collect();
        let ratios = self.compare(&mut picked, slice(COMPARISON_SHARE), report)?;
        report.rows(self.calls, &measured, choices, &picked, &ratios)?;
        Ok(self.steps(&picked))
    }

    /// Returns the built-in plan with these steps for the calls.
    fn with(&self, steps: &[Step]) -> Result<Table, Failure> {
        Ok(self.built_in.with_steps_of(self.calls, self.session.world_size(), self.link, steps)?)
    }

    fn steps(&self, picked: &[Option<Choice>]) -> Vec<Step> {
        let ranks = self.session.world_size();
        let own = self.built_in.steps(ranks, self.link);
        let built_in = match self.calls {
            PlannedCall::AllReduce => own,
            _ if picked.iter().all(Option::is_none) => return Vec::new(),
            // These calls use the grid of a one-shot, of which the host's tables have one.
            _ => {
                let one_shot = own.iter().find(|step| step.choice.algorithm == Algorithm::OneShotPull);
                one_shot.map(|step| Step { max_bytes: u64::MAX, ..*step }).into_iter().collect()
            }
        };
        let subject = |&bytes: &usize| Subject { calls: self.calls, bytes }.planned_bytes(ranks);
        steps(&self.sizes.iter().map(subject).collect::<Vec<_>>(), picked, &built_in)
    }

    /// Times the plan and the built-in one in turns for each size, and takes back choices that are slower beyond
    /// noise. Returns the ratio of the two for each size: 1 if they are the same. Collective.
    fn compare(
        &self,
        picked: &mut [Option<Choice>],
        budget: Duration,
        report: &mut Report,
    ) -> Result<Vec<f64>, Failure> {
        let plan = self.with(&self.steps(picked))?;
        let both = [(self.make)(self.built_in.clone())?, (self.make)(plan)?];
        let mut ratios = Vec::with_capacity(self.sizes.len());
        for (&bytes, picked) in self.sizes.iter().zip(picked) {
            report.show(bytes);
            let subject = Subject { calls: self.calls, bytes };
            if picked.is_none() || times::same_as(&both, subject)[1] == 0 {
                ratios.push(1.0);
                continue;
            }
            let Size { seconds, .. } = times::time(self.session, &both, subject, budget)?;
            let is_slower = seconds[1].is_empty() || beats(&seconds[0], &seconds[1]);
            if is_slower {
                *picked = None;
            }
            ratios.push(if is_slower { 1.0 } else { ratio(&seconds[1], &seconds[0]).unwrap_or(1.0) });
        }
        Ok(ratios)
    }
}
