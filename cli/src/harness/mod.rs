//! What the commands that measure share: ranks that meet, devices and other libraries behind one interface, calls that are timed
//! and checked.

pub mod check;
pub mod contender;
pub mod device;
pub mod elements;
pub mod inputs;
pub mod measure;
pub mod memory;
pub mod norm;
pub mod populations;
pub mod progress;
pub mod reference;
pub mod rivals;
pub mod rms_norm;
pub mod row;
pub mod session;
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

/// What is measured on endpoints that are made alike.
pub trait Job {
    /// What they are made from.
    fn options(&self) -> &Bench;

    /// An endpoint for each; `None` is the plan's choice.
    fn algorithms(&self) -> Vec<Option<Algorithm>>;

    /// Measures, and writes the results on the first rank: to `page` too, if one is asked for. True if every checked element is
    /// right.
    fn run<E: Compared>(
        &self,
        session: &Session,
        endpoints: &[E],
        page: Option<&Output>,
    ) -> Result<bool, Failure>;
}

/// Runs as the rank that the environment names, as [`run_in`].
pub fn run(job: &impl Job) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    run_in(job, bootstrap)
}

/// Runs as a rank of `bootstrap`. True if every checked element is right.
pub fn run_in(job: &impl Job, bootstrap: impl Bootstrap + 'static) -> Result<bool, Failure> {
    let options = job.options();
    let page = options.report.as_deref().map(Output::check).transpose()?;
    let page = page.as_ref();
    let session = Session::new(bootstrap, options.given.wait(), options.given.timeout)?;
    options.check_world(session.world_size())?;
    let algorithms = job.algorithms().into_iter();
    match options.device {
        DeviceName::Host => {
            let endpoints = algorithms.map(|algorithm| Cpu::new(&session, options, algorithm));
            job.run(&session, &endpoints.collect::<Result<Vec<_>, _>>()?, page)
        }
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            let settings = device::cuda::Settings {
                first_gpu: 0,
                gpus: device::cuda::gpus()?,
                eager: options.eager,
                given: options.settings()?,
            };
            let endpoints =
                algorithms.map(|algorithm| device::cuda::Gpu::new(&session, &settings, algorithm));
            job.run(&session, &endpoints.collect::<Result<Vec<_>, _>>()?, page)
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => device::check(options.device).map(|()| true),
    }
}

/// The measurements of a run. Collective.
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

/// What the numbers of a run depend on.
pub fn config(options: &Bench, endpoint: &impl MeasuredRank, seed: u64) -> Config {
    let communicator = endpoint.communicator();
    Config {
        version: env!("CARGO_PKG_VERSION"),
        ranks: communicator.world_size(),
        device: endpoint.facts(),
        registered: options.registered,
        seed,
        iters: options.iterations,
        warmup_iters: options.warmup,
        check: options.checks,
        collective: options.collective(),
        timeout_s: options.given.timeout.as_secs_f64(),
        region_bytes: communicator.region_bytes(),
        plan: communicator.plan_source().to_string(),
        order: communicator.order().name(),
        nvls_refused: match communicator.order() {
            Order::Any => communicator.nvls().err().map(|error| error.to_string()),
            _ => None,
        },
        direct_reads: communicator.direct_reads().map(ToString::to_string),
    }
}

/// Short enough to type again.
pub fn random_seed() -> Result<u64, Failure> {
    let seed = getrandom::u32().map_err(|error| Failure::System("getrandom", error.into()))?;
    Ok(seed.into())
}
