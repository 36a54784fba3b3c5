//! `bench`, as one of its ranks: every size, type, operation and algorithm asked for.

mod check;
mod inputs;
mod measure;
mod memory;
mod progress;
mod reference;
mod report;
mod row;
mod session;

use std::hash::{BuildHasher, RandomState};

use fast_allreduce::bootstrap::Local;
use fast_allreduce::{Communicator, DType, Device, Host, ReduceOp};
use half::{bf16, f16};

use self::measure::Measure;
use self::progress::Progress;
use self::report::Report;
use self::row::{Config, Row};
use self::session::Session;
use crate::arguments::Bench;
use crate::failure::Failure;

/// Runs as the rank that the environment names; the first one writes the results. True if every checked element is right.
pub fn run(options: &Bench) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let session = Session::new(bootstrap, options)?;
    options.check_world(session.world_size())?;
    let seed = session.of_first(options.seed.unwrap_or_else(random_seed))?;
    let make = |algorithm: &Option<_>| session.communicator(options, *algorithm);
    let communicators = options.algorithms.0.iter().map(make).collect::<Result<Vec<_>, _>>()?;

    let mut voice = match session.rank() {
        0 => Some((
            Report::start(options.format, config(options, &communicators[0], seed))?,
            progress(options),
        )),
        _ => None,
    };
    let mut measure = Measure { session: &session, options, seed, round: 0 };
    let mut is_right = true;
    for (dtype, op, bytes, communicator) in cases(options, &communicators) {
        if let Some((_, progress)) = &voice {
            progress.show(&format!("{bytes} B {dtype} {op}"));
        }
        let row = typed_row(&mut measure, dtype, communicator, bytes, op)?;
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
fn cases<'a>(
    options: &'a Bench,
    communicators: &'a [Communicator<Host>],
) -> impl Iterator<Item = (DType, ReduceOp, usize, &'a Communicator<Host>)> + 'a {
    options.dtypes.0.iter().flat_map(move |&dtype| {
        options.ops.0.iter().flat_map(move |&op| {
            options.sizes().flat_map(move |bytes| {
                communicators.iter().map(move |communicator| (dtype, op, bytes, communicator))
            })
        })
    })
}

fn progress(options: &Bench) -> Progress {
    let kinds = options.dtypes.0.len() * options.ops.0.len() * options.algorithms.0.len();
    Progress::new(kinds * options.sizes().count())
}

fn typed_row(
    measure: &mut Measure<'_>,
    dtype: DType,
    communicator: &Communicator<Host>,
    bytes: usize,
    op: ReduceOp,
) -> Result<Row, Failure> {
    let count = bytes / dtype.size();
    match dtype {
        DType::F16 => measure.row::<f16>(communicator, count, op),
        DType::Bf16 => measure.row::<bf16>(communicator, count, op),
        DType::F32 => measure.row::<f32>(communicator, count, op),
        DType::F64 => measure.row::<f64>(communicator, count, op),
        DType::I8 => measure.row::<i8>(communicator, count, op),
        DType::U8 => measure.row::<u8>(communicator, count, op),
        DType::I32 => measure.row::<i32>(communicator, count, op),
        DType::U32 => measure.row::<u32>(communicator, count, op),
        DType::I64 => measure.row::<i64>(communicator, count, op),
        DType::U64 => measure.row::<u64>(communicator, count, op),
        other => Err(Failure::Usage(format!("bench has no reference for {other}"))),
    }
}

fn config(options: &Bench, communicator: &Communicator<Host>, seed: u64) -> Config {
    Config {
        version: env!("CARGO_PKG_VERSION"),
        ranks: communicator.world_size(),
        device: Host::NAME,
        instruction_set: communicator.device().instruction_set().name(),
        cores: crate::facts::cores(),
        wait: options.wait.name(),
        workers: options.workers,
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
