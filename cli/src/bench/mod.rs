//! `bench`, as one of its ranks: every size, type, operation and algorithm asked for.

pub mod check;
pub mod device;
pub mod inputs;
pub mod measure;
pub mod progress;
pub mod reference;
mod report;
pub mod row;
pub mod session;

use std::hash::{BuildHasher, RandomState};

use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::{DType, ReduceOp};

use self::device::host::Cpu;
use self::device::Endpoint;
use self::measure::{Effort, Measure};
use self::progress::Progress;
use self::report::Report;
use self::row::{Config, Row};
use self::session::Session;
use crate::arguments::{Bench, DeviceName};
use crate::failure::Failure;

/// Evaluates an expression for the Rust type of a [`DType`].
macro_rules! with_number {
    ($dtype:expr, $type:ident => $value:expr) => {{
        use half::{bf16, f16};
        match $dtype {
            DType::F16 => with_number!(@ $type = f16, $value),
            DType::Bf16 => with_number!(@ $type = bf16, $value),
            DType::F32 => with_number!(@ $type = f32, $value),
            DType::F64 => with_number!(@ $type = f64, $value),
            DType::I8 => with_number!(@ $type = i8, $value),
            DType::U8 => with_number!(@ $type = u8, $value),
            DType::I32 => with_number!(@ $type = i32, $value),
            DType::U32 => with_number!(@ $type = u32, $value),
            DType::I64 => with_number!(@ $type = i64, $value),
            DType::U64 => with_number!(@ $type = u64, $value),
            other => Err(Failure::Usage(format!("there is no reference for {other}"))),
        }
    }};
    (@ $type:ident = $rust:ty, $value:expr) => {{
        type $type = $rust;
        $value
    }};
}
pub(crate) use with_number;

/// Runs as the rank that the environment names, as [`run_in`].
pub fn run(options: &Bench) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    run_in(options, bootstrap)
}

/// Runs as a rank of `bootstrap`; the first one writes the results. True if every checked element is right.
pub fn run_in(options: &Bench, bootstrap: impl Bootstrap + 'static) -> Result<bool, Failure> {
    let session = Session::new(bootstrap, options.wait.wait(), options.timeout)?;
    options.check_world(session.world_size())?;
    let algorithms = options.algorithms.0.iter();
    match options.device {
        DeviceName::Host => {
            let endpoints = algorithms.map(|algorithm| Cpu::new(&session, options, *algorithm));
            run_on(options, &session, &endpoints.collect::<Result<Vec<_>, _>>()?)
        }
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => {
            let settings = device::cuda::Settings {
                first_gpu: 0,
                gpus: device::cuda::gpus()?,
                sharing: None,
                timeout: options.timeout,
                launch_bytes: options.launch_bytes,
                eager: options.eager,
            };
            let endpoints =
                algorithms.map(|algorithm| device::cuda::Gpu::new(&session, &settings, *algorithm));
            run_on(options, &session, &endpoints.collect::<Result<Vec<_>, _>>()?)
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda => options.check_device().map(|()| true),
    }
}

/// One endpoint for each algorithm.
fn run_on<E: Endpoint>(options: &Bench, session: &Session, endpoints: &[E]) -> Result<bool, Failure> {
    let seed = session.of_first(options.seed.unwrap_or_else(random_seed))?;
    let mut voice = match session.rank() {
        0 => Some((Report::start(options.format, config(options, &endpoints[0], seed))?, progress(options))),
        _ => None,
    };
    let effort = Effort {
        iterations: options.iterations,
        warmup: options.warmup,
        checks: options.checks,
        registered: options.registered,
    };
    let mut measure = Measure { session, effort, seed, round: 0 };
    let mut is_right = true;
    for (dtype, op, bytes, endpoint) in cases(options, endpoints) {
        if let Some((_, progress)) = &voice {
            progress.show(&format!("{bytes} B {dtype} {op}"));
        }
        let count = bytes / dtype.size();
        let row: Row = with_number!(dtype, T => measure.row::<T>(endpoint, count, op))?;
        is_right &= row.wrong() == 0;
        if let Some((report, progress)) = &mut voice {
            progress.clear();
            progress.advance();
            report.add(row)?;
        }
    }
    if let Some((report, progress)) = voice {
        drop(progress);
        report.finish()?;
    }
    Ok(is_right)
}

/// All rows of a run, in order.
fn cases<'a, E>(
    options: &'a Bench,
    endpoints: &'a [E],
) -> impl Iterator<Item = (DType, ReduceOp, usize, &'a E)> + 'a {
    options.dtypes.0.iter().flat_map(move |&dtype| {
        options.ops.0.iter().flat_map(move |&op| {
            options
                .sizes()
                .flat_map(move |bytes| endpoints.iter().map(move |endpoint| (dtype, op, bytes, endpoint)))
        })
    })
}

fn progress(options: &Bench) -> Progress {
    let kinds = options.dtypes.0.len() * options.ops.0.len() * options.algorithms.0.len();
    Progress::new(kinds * options.sizes().count())
}

fn config(options: &Bench, endpoint: &impl Endpoint, seed: u64) -> Config {
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
        timeout_s: options.timeout.as_secs_f64(),
        region_bytes: communicator.region_bytes(),
    }
}

/// Short enough to type again.
fn random_seed() -> u64 {
    RandomState::new().hash_one(()) >> 32
}
