//! One world, as one of its ranks: measure, choose, and compare with the built-in plan.

use std::path::Path;
use std::time::Duration;

use fast_allreduce::bootstrap::Local;
use fast_allreduce::plan::{Choice, CpuMake, DeviceKind, Machine, Table, Tuning};
use fast_allreduce::Device;

use super::report::Report;
use super::select::{beats, ratio, steps, winners, Size};
use super::{candidates, times};
use crate::arguments::{DeviceName, Tune};
use crate::failure::Failure;
use crate::harness::device::host::Cpu;
use crate::harness::device::Endpoint;
use crate::harness::session::Session;

/// Of the time, how much goes into the comparison with the built-in plan.
const COMPARISON_SHARE: f64 = 0.25;

/// Measures the world that the environment names; its first rank prints what it finds and adds it to the plan at `part`.
pub fn measure(options: &Tune, part: &Path) -> Result<(), Failure> {
    options.validate()?;
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let session = Session::new(bootstrap, options.wait.wait(), options.timeout)?;
    match options.device {
        DeviceName::Host => measure_on(options, part, &session, |plan| Cpu::planned(&session, options, plan)),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            use crate::harness::device::cuda::{gpus, Gpu, Settings};
            let settings = Settings {
                first_gpu: 0,
                gpus: gpus()?,
                sharing: None,
                timeout: options.timeout,
                launch_bytes: None,
                eager: false,
            };
            measure_on(options, part, &session, |plan| Gpu::planned(&session, &settings, plan))
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => crate::harness::device::check(options.device),
    }
}

fn measure_on<E: Endpoint>(
    options: &Tune,
    part: &Path,
    session: &Session,
    make: impl Fn(Table) -> Result<E, Failure>,
) -> Result<(), Failure> {
    let device = options.device.kind();
    let built_in = built_in(device);
    let choices = candidates::of(device, options.workers.unwrap_or(1));
    let mut endpoints = vec![make(built_in.clone())?];
    for &choice in &choices {
        endpoints.push(make(Table::uniform(device, choice)?)?);
    }
    let mut report = Report::start(session, &endpoints[0].facts(), &choices, options.budget)?;

    let sizes = options.sizes();
    let slice = |share: f64| options.budget.mul_f64(share / sizes.len() as f64);
    let mut measured = Vec::with_capacity(sizes.len());
    for &bytes in &sizes {
        report.show(bytes);
        measured.push(times::time(session, &endpoints, bytes, slice(1.0 - COMPARISON_SHARE))?);
    }

    // Candidate 0 is the built-in plan.
    let picked =
        winners(&measured).into_iter().map(|winner| winner.checked_sub(1).map(|index| choices[index]));
    let mut picked: Vec<_> = picked.collect();
    let world = World { session, make: &make, built_in: &endpoints[0], device, sizes: &sizes };
    let ratios = world.compare(&mut picked, slice(COMPARISON_SHARE), &mut report)?;
    let table = world.table(&built_in, &picked)?;
    report.rows(&measured, &choices, &picked, &ratios)?;

    if session.rank() == 0 {
        let before = match std::fs::metadata(part).is_ok_and(|metadata| metadata.len() > 0) {
            true => Tuning::load(part)?.table().clone(),
            false => built_in,
        };
        let link = times::link(&endpoints[0]);
        let plan = before.with_steps(session.world_size(), link, &table.steps(session.world_size(), link))?;
        let machine = endpoints[0].communicator().device().machine()?;
        let text = Tuning::new(machine, plan)?.to_string();
        std::fs::write(part, text).map_err(|error| Failure::File(part.to_owned(), error))?;
    }
    Ok(())
}

/// What communicators use where nothing is tuned, as far as that is known before a measurement.
fn built_in(device: DeviceKind) -> Table {
    match device {
        DeviceKind::Host => Table::of_cpu(CpuMake::of(&Machine::host())),
        DeviceKind::Cuda => Table::built_in(device),
    }
}

/// What the comparison of plans needs.
struct World<'a, E, F> {
    session: &'a Session,
    make: &'a F,
    built_in: &'a E,
    device: DeviceKind,
    sizes: &'a [usize],
}

impl<E: Endpoint, F: Fn(Table) -> Result<E, Failure>> World<'_, E, F> {
    fn table(&self, built_in: &Table, picked: &[Option<Choice>]) -> Result<Table, Failure> {
        let (ranks, link) = (self.session.world_size(), times::link(self.built_in));
        let steps = steps(self.sizes, picked, &built_in.steps(ranks, link));
        Ok(built_in.with_steps(ranks, link, &steps)?)
    }

    /// Times the plan with the built-in one in turns, size by size; takes back what is slower beyond noise. By size: the ratio
    /// of the two, 1 where they do the same. Collective.
    fn compare(
        &self,
        picked: &mut [Option<Choice>],
        budget: Duration,
        report: &mut Report,
    ) -> Result<Vec<f64>, Failure> {
        let built_in = built_in(self.device);
        let both = [(self.make)(built_in.clone())?, (self.make)(self.table(&built_in, picked)?)?];
        let mut ratios = Vec::with_capacity(self.sizes.len());
        for (&bytes, picked) in self.sizes.iter().zip(picked) {
            report.show(bytes);
            if picked.is_none() || times::same_as(&both, bytes / size_of::<f32>())[1] == 0 {
                ratios.push(1.0);
                continue;
            }
            let Size { seconds, .. } = times::time(self.session, &both, bytes, budget)?;
            let is_slower = seconds[1].is_empty() || beats(&seconds[0], &seconds[1]);
            if is_slower {
                *picked = None;
            }
            ratios.push(if is_slower { 1.0 } else { ratio(&seconds[1], &seconds[0]).unwrap_or(1.0) });
        }
        Ok(ratios)
    }
}
