//! The shared part of the commands that measure: ranks that meet, one interface to devices and other libraries, and
//! calls that are timed and checked.

pub mod check;
pub mod contender;
pub mod device;
pub mod elements;
pub mod forms;
pub mod fused;
pub mod inputs;
pub mod measure;
pub mod memory;
pub mod norm;
pub mod populations;
pub mod progress;
pub mod reference;
pub mod rivals;
pub mod row;
pub mod session;
pub mod suspension;
pub mod work;

use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::{Algorithm, Order};

use self::device::host::Cpu;
use self::device::MeasuredRank;
use self::measure::{Effort, Measure};
use self::rivals::Compared;
use self::row::Config;
use self::session::Session;
use crate::arguments::{Bench, DeviceName};
use crate::failure::Failure;
use crate::output::Output;

/// A measurement with one [`MeasuredRank`] for each algorithm.
pub trait Job {
    /// Returns the options from which measured ranks are created.
    fn options(&self) -> &Bench;

    /// Returns the algorithms, each of which has a measured rank; `None` is the plan's choice.
    fn algorithms(&self) -> Vec<Option<Algorithm>>;

    /// Measures, and writes the results on the first rank, also to `page` if there is one. Returns whether every
    /// checked element is right.
    fn run<E: Compared>(
        &self,
        session: &Session,
        measured_ranks: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure>;
}

/// Runs as the rank that the environment names, like [`run_in`].
pub fn run(job: &impl Job) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    run_in(job, bootstrap)
}

/// Runs as a rank of `bootstrap`. Returns whether every checked element is right.
pub fn run_in(job: &impl Job, bootstrap: impl Bootstrap + 'static) -> Result<bool, Failure> {
    let options = job.options();
    run_with(job, Session::new(bootstrap, options.communicator.wait(), options.communicator.timeout)?)
}

/// Runs as a rank of a session, like [`run_in`].
pub fn run_with(job: &impl Job, session: Session) -> Result<bool, Failure> {
    let options = job.options();
    let page = options.report.as_deref().map(Output::check).transpose()?;
    let page = page.as_ref();
    options.check_world(session.world_size())?;
    let algorithms = job.algorithms().into_iter();
    match options.device {
        DeviceName::Host => {
            let measured_ranks = algorithms.map(|algorithm| Cpu::new(&session, options, algorithm));
            job.run(&session, &measured_ranks.collect::<Result<Vec<_>, _>>()?, page)
        }
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            use device::cuda::{gpus, Gpu, GpuOptions};
            let (eager, settings) = (options.eager, options.settings()?);
            let gpu_options = GpuOptions { first_gpu: 0, gpus: gpus()?, eager, settings };
            let measured_ranks = algorithms.map(|algorithm| Gpu::new(&session, &gpu_options, algorithm));
            job.run(&session, &measured_ranks.collect::<Result<Vec<_>, _>>()?, page)
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => device::check(options.device).map(|()| true),
    }
}

/// Starts the measurements of a run. Collective.
pub fn measure<'a>(options: &Bench, session: &'a Session) -> Result<Measure<'a>, Failure> {
    let seed = session.of_first(options.seed.map_or_else(random_seed, Ok)?)?;
    let effort = Effort {
        iterations: options.iterations,
        warmup: options.warmup,
        checks: options.checks,
        registered: options.registered,
    };
    Ok(Measure { session, effort, seed, round: 0 })
}

/// Returns what the numbers of a run depend on.
pub fn config(options: &Bench, measured: &impl MeasuredRank, seed: u64) -> Config {
    let communicator = measured.communicator();
    Config {
        version: env!("CARGO_PKG_VERSION"),
        ranks: measured.nodes() * communicator.world_size(),
        nodes: (measured.nodes() > 1).then(|| measured.nodes()),
        device: measured.facts(),
        registered: options.registered,
        seed,
        iters: options.iterations,
        warmup_iters: options.warmup,
        check: options.checks,
        collective: options.collective(),
        timeout_s: options.communicator.timeout.as_secs_f64(),
        region_bytes: communicator.region_bytes(),
        plan: communicator.plan_source().to_string(),
        order: communicator.order().name(),
        nvls_refused: match communicator.order() {
            Order::Any => communicator.nvls().err().map(|error| error.to_string()),
            _ => None,
        },
        ranks_of_socket: communicator.ranks_of_socket(),
        direct_reads: communicator.direct_reads().map(|reads| reads.to_string()),
    }
}

/// Returns a random seed that is short enough to type.
pub fn random_seed() -> Result<u64, Failure> {
    let seed = getrandom::u32().map_err(|error| Failure::System("getrandom", error.into()))?;
    Ok(seed.into())
}
