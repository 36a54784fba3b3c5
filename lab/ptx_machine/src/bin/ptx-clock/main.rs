//! Predicts how long the allreduce kernels take on a GPU, from their PTX: see lab/gpu-model.md.
//!
//!     ptx-clock kernels.ptx --machine h100 --ranks 2,4,8 --sizes 8K,64K,1M
//!     ptx-clock kernels.ptx --ranks 8 --sizes 8K --algorithms one_shot_push --path
//!     ptx-clock --foreign others.ptx --kernel NAME --grid 8 --block 128 --buffer in=8K --arg in

#[path = "../../../../../src/abi/bindings.rs"]
#[allow(dead_code, missing_docs, clippy::all)]
mod abi;
mod elf;
mod export;
mod foreign;
mod job;
mod messages;
mod page;
mod plan;
mod published;
mod reference;
mod results;
#[path = "../../../../../src/plan/row_turns.rs"]
mod row_turns;
mod rows;
mod world;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use clap::Parser;
use fast_allreduce_ptx_machine::clock::{Cause, Machine, Timing, MACHINES};
use fast_allreduce_ptx_machine::Program;

use job::{Call, Dtype, Op, Shape};
use published::PUBLISHED;
use results::{cold_us, size, Compared, Predicted, Results};

/// Predicts the time of allreduce kernels on a GPU, from their PTX.
#[derive(Parser)]
struct Arguments {
    /// PTX of csrc/cuda/kernels.cu, compiled with -lineinfo.
    ptx: PathBuf,
    #[command(flatten)]
    machine: MachineArguments,
    /// Prints the constants in the format of --constants, and exits.
    #[arg(long)]
    show_constants: bool,
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    ranks: Vec<usize>,
    #[arg(long, value_delimiter = ',', default_value = "1K,8K,32K,64K,128K,256K,512K,1M,8M", value_parser = bytes)]
    sizes: Vec<usize>,
    /// Algorithms: one_shot_pull and so on, with the suffix `+` for registered inputs; one_shot_pull_norm
    /// and so on, with a residual and normalised rows; sharded_rms_norm, of rows that the ranks have parts of;
    /// shares: reduce_scatter, reduce_scatter_norm, all_gather, all_gather_rows (8-bit numbers and their scales),
    /// whose sizes are those of all shares; messages: send, send_recv, all_to_all, gather; or a protocol of the
    /// reference kernels.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "one_shot_push,one_shot_pull,one_shot_pull+,two_shot_push,two_shot_pull,two_shot_pull+"
    )]
    algorithms: Vec<String>,
    /// Element type: bf16, f16 or f32; or i8, i32 or i64 (kernels for any world size).
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Reduction: sum; or prod, min, max, and avg of i8 and i32 (kernels for any world size). Prod of i64
    /// is not supported.
    #[arg(long, default_value = "sum")]
    op: String,
    /// Uses the kernels for any world size, as checked calls do.
    #[arg(long)]
    any: bool,
    /// Elements of each normalised row.
    #[arg(long, default_value_t = 5120, value_parser = clap::value_parser!(u32).range(8..=i64::from(abi::FA_MAX_ROW)))]
    row: u32,
    /// Norm of the rows: rms, or layer with a bias.
    #[arg(long, default_value = "rms", value_parser = ["rms", "layer"])]
    norm: String,
    /// Also writes the rows as 8-bit floats with a scale for this number of elements: 32 (powers of two) or 128; 0
    /// stands for a row.
    #[arg(long, value_parser = group)]
    group: Option<u32>,
    /// Computes the input of fused allreduces from rows of this number of experts for each row; 0: none.
    #[arg(long, default_value = "0", value_parser = experts)]
    experts: u32,
    /// Maximum number of blocks of a launch. Default: the plan's.
    #[arg(long)]
    blocks: Option<u32>,
    /// Maximum number of threads of a block. Default: the plan's.
    #[arg(long)]
    threads: Option<u32>,
    /// Number of consecutive calls.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Number of simulated blocks of each rank; 0: all. Default: a number that runs quickly.
    #[arg(long)]
    simulate: Option<u32>,
    /// Launches kernels in a stream instead of a graph.
    #[arg(long)]
    stream: bool,
    /// Launches with the attribute for programmatic dependent launch.
    #[arg(long)]
    programmatic: bool,
    /// PTX of tests/references/references.cu: compares predictions for the reference kernels with published
    /// figures.
    #[arg(long)]
    references: Option<PathBuf>,
    /// Fails if the prediction for a reference is off by more than this percentage.
    #[arg(long)]
    most_off: Option<f64>,
    /// Cubin of the kernels, for the size of their code.
    #[arg(long)]
    cubin: Option<PathBuf>,
    /// Shows how the time of each call is spent.
    #[arg(long)]
    causes: bool,
    /// Shows the critical path of each call, step by step.
    #[arg(long)]
    path: bool,
    /// Writes each call to ALGORITHM.RANKS.SIZE.json in this folder, for replay.py (allreduces, without integer
    /// transport and in-switch reduction).
    #[arg(long)]
    export: Option<PathBuf>,
    /// Writes all results as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Writes an HTML page with charts.
    #[arg(long)]
    html: Option<PathBuf>,
}

/// The GPU whose time is predicted.
#[derive(clap::Args)]
struct MachineArguments {
    /// Row of the table of constants.
    #[arg(long = "machine", default_value = "h100")]
    name: String,
    /// File of measured constants: lines of `name = value`, or the JSON report of `fast-allreduce
    /// gpu-check`.
    #[arg(long)]
    constants: Option<PathBuf>,
    /// All ranks share one GPU, as in replay.py: the memory of peers is the same second-level cache.
    #[arg(long)]
    one_gpu: bool,
}

/// Number of simulated threads of all ranks, unless the number of blocks is given.
const THREADS: u32 = 8 << 10;
/// Number of simulated threads for references.
const REFERENCE_THREADS: u32 = 16 << 10;

/// Parses a number of bytes with an optional suffix K or M.
fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix(['K', 'k']) {
        Some(number) => (number, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |number| (number, 1 << 20)),
    };
    let number: usize = number.parse().map_err(|_| format!("{text} is not a size"))?;
    number
        .checked_mul(unit)
        .filter(|&bytes| bytes > 0 && bytes % 16 == 0)
        .ok_or_else(|| format!("{text} is not a size"))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn program(path: &Path) -> Result<Program, String> {
    let text = String::from_utf8(read(path)?).map_err(|_| format!("{}: no text", path.display()))?;
    Program::load_timed(&text).map_err(|error| format!("{}: {error}", path.display()))
}

impl MachineArguments {
    /// Returns the GPU that a call of this number of ranks has for each of them.
    fn machine_of(&self, ranks: usize) -> Result<Machine, String> {
        let machine = self.machine()?;
        Ok(if self.one_gpu { machine.shared_by(ranks) } else { machine })
    }

    fn machine(&self) -> Result<Machine, String> {
        let name = &self.name;
        let unknown = || format!("there is no machine {name}: {}", MACHINES.join(", "));
        let mut machine = Machine::named(name).ok_or_else(unknown)?;
        if let Some(path) = &self.constants {
            let text = String::from_utf8_lossy(&read(path)?).into_owned();
            machine.put(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(machine)
    }
}

/// Returns the launch parameters of a call, with at most the given blocks and threads.
fn shape(arguments: &Arguments, (blocks, threads): (u32, u32), ranks: usize, simulated: u32) -> Shape {
    let quick = (simulated / (ranks as u32 * threads)).max(1);
    Shape {
        blocks,
        threads,
        turns: arguments.turns,
        simulate: arguments.simulate.unwrap_or(quick),
        stream: arguments.stream,
        programmatic: arguments.programmatic,
    }
}

/// Runs `one` for each index, on one thread per CPU, and returns the results in order.
fn all<T: Send>(count: usize, one: impl Fn(usize) -> Result<T, String> + Sync) -> Result<Vec<T>, String> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        if i >= count {
            return;
        }
        let result = one(i);
        if result.is_err() {
            next.store(count, Ordering::Relaxed);
        }
        results.lock().unwrap_or_else(|error| error.into_inner()).push((i, result));
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count);
        (0..threads).for_each(|_| _ = scope.spawn(work));
    });
    let mut results = results.into_inner().unwrap_or_else(|error| error.into_inner());
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

fn ours(arguments: &Arguments, rows: &[plan::Row]) -> Result<Vec<Predicted>, String> {
    let dtype = Dtype::named(&arguments.dtype)
        .ok_or_else(|| format!("there is no prediction of {}", arguments.dtype))?;
    let op = Op::named(&arguments.op).ok_or_else(|| format!("there is no prediction of {}", arguments.op))?;
    let any = arguments.any || arguments.op != "sum" || dtype.is_integer();
    let program = program(&arguments.ptx)?;
    let sizes = match &arguments.cubin {
        Some(path) => {
            elf::code_sizes(&read(path)?).map_err(|error| format!("{}: {error}", path.display()))?
        }
        None => Vec::new(),
    };
    let row = arguments.row;
    let mut calls = Vec::new();
    for &ranks in &arguments.ranks {
        for algorithm in &arguments.algorithms {
            let each = arguments.sizes.iter();
            calls.extend(each.map(|&bytes| Call {
                algorithm: algorithm.clone(),
                dtype,
                ranks,
                bytes,
                row,
                layer: arguments.norm == "layer",
                group: arguments.group,
                experts: arguments.experts,
                op,
                any,
            }));
        }
    }
    all(calls.len(), |i| {
        let call = calls[i].clone();
        let planned_as = match call.algorithm.trim_end_matches('+') {
            "two_shot_quantized" => "two_shot_pull",
            algorithm => algorithm.trim_end_matches("_norm"),
        };
        let (blocks, threads) = match call.has_shares() {
            true => plan::shape_of_shares(rows, call.ranks),
            false => plan::shape(rows, planned_as, call.ranks),
        };
        let most = (arguments.blocks.unwrap_or(blocks), arguments.threads.unwrap_or(threads));
        let shape = shape(arguments, most, call.ranks, THREADS);
        let machine = &arguments.machine.machine_of(call.ranks)?;
        let (blocks, threads) = call.grid(&shape, machine);
        let name = |folder: &PathBuf| {
            let launches = if shape.programmatic { ".pdl" } else { "" };
            folder.join(format!("{}.{}.{}{launches}.json", call.algorithm, call.ranks, size(call.bytes)))
        };
        let to = arguments.export.as_ref().map(name);
        let timing =
            call.predict(&program, machine, &shape, to.as_deref().map(|to| (&*arguments.ptx, to)))?;
        let code = sizes.iter().find(|(name, _)| *name == call.kernel());
        let code = code.map(|&(_, bytes)| (bytes, bytes as f64 * timing.code_executed));
        Ok(Predicted { call, blocks, threads, timing, code })
    })
}

fn group(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|group| [0, 32, 128].contains(group)).ok_or_else(|| "0, 32 or 128".to_owned())
}

fn experts(text: &str) -> Result<u32, String> {
    text.parse()
        .ok()
        .filter(|each| [0, 1, 2, 4, 8].contains(each))
        .ok_or_else(|| "0, 1, 2, 4 or 8".to_owned())
}

fn compared(arguments: &Arguments, machine: &Machine, path: &Path) -> Result<Vec<Compared>, String> {
    let program = program(path)?;
    let of_machine = PUBLISHED.iter().filter(|published| published.machine == machine.name);
    let points =
        of_machine.flat_map(|published| published.points.iter().map(move |point| (published, point)));
    let points: Vec<_> = points
        .filter_map(|(published, &(bytes, us))| Some((published, bytes, us, published.reference(bytes)?)))
        .collect();
    let dtype = Dtype::named("bf16").ok_or("no bf16")?;
    let op = Op::named("sum").ok_or("no sum")?;
    all(points.len(), |i| {
        let (published, bytes, us, reference) = points[i];
        let (algorithm, ranks) = (reference.to_owned(), published.ranks);
        let (row, layer, group, experts, any) = (8, false, None, 0, false);
        let call = Call { algorithm, dtype, ranks, bytes, row, layer, group, experts, op, any };
        let shape = shape(arguments, published::shape_of(reference), call.ranks, REFERENCE_THREADS);
        let predicted_us = call.predict(&program, machine, &shape, None)?.call_ns / 1e3;
        Ok(Compared { published, bytes, us, reference, predicted_us })
    })
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let machine = arguments.machine.machine()?;
    if arguments.show_constants {
        print!("{}", machine.text());
        return Ok(());
    }
    let rows = plan::rows(&machine);
    let ours = ours(arguments, &rows)?;
    let compared = match &arguments.references {
        Some(path) => compared(arguments, &machine, path)?,
        None => Vec::new(),
    };
    let dtype = Dtype::named(&arguments.dtype).map_or("", |dtype| dtype.name);
    let results = Results { machine, dtype, rows, ours, compared };
    if arguments.causes || arguments.path {
        results.ours.iter().for_each(|result| show(arguments, &results.machine, result));
    }
    print!("{}", results.table());
    let write = |path: &Option<PathBuf>, text: &dyn Fn() -> Result<String, String>| match path {
        Some(path) => std::fs::write(path, text()?).map_err(|error| format!("{}: {error}", path.display())),
        None => Ok(()),
    };
    write(&arguments.json, &|| Ok(results.json()))?;
    write(&arguments.html, &|| page::page(&results).map_err(|error| error.to_string()))?;
    let most = arguments.most_off.unwrap_or(f64::MAX);
    match results.compared.iter().find(|one| one.off().abs() > most) {
        Some(one) => Err(format!("{} at {} bytes: off by {:+.0} %", one.reference, one.bytes, one.off())),
        None => Ok(()),
    }
}

fn show(arguments: &Arguments, machine: &Machine, result: &Predicted) {
    let Predicted { call, blocks, threads, timing, code } = result;
    let Timing { round_trips, flights, counts, .. } = timing;
    println!(
        "{} {} ranks {}: {:.2} us, {blocks} x {threads} threads, {round_trips} remote loads and {flights} \
            flights in a row, \
         {:.0} instructions a warp, {} syncs, {} fences",
        call.algorithm,
        call.ranks,
        size(call.bytes),
        result.us(),
        counts.instructions / counts.warps.max(1.0),
        counts.syncs,
        counts.fences,
    );
    if let Some((bytes, executed)) = code {
        let cold = cold_us(machine, *executed);
        println!("    {executed:.0} of {bytes} bytes of code; {cold:.2} us more where no cache has them");
    }
    detail(timing, arguments.path);
}

/// Shows traffic and causes of a call, and its critical path.
fn detail(timing: &Timing, path: bool) {
    for (what, all) in [("loads from", &timing.counts.loads), ("stores to", &timing.counts.stores)] {
        for (device, traffic) in all {
            let (bytes, sectors, partial) = (traffic.bytes, traffic.sectors, traffic.partial);
            println!(
                "    {what} {device}: {bytes:.0} bytes, {sectors:.0} sectors, {partial:.0} of them in part"
            );
        }
    }
    let causes = Cause::ALL.iter().filter_map(|cause| Some((cause.name(), timing.causes.get(cause)? / 1e3)));
    let texts: Vec<String> = causes.map(|(name, us)| format!("{name} {us:.2}")).collect();
    println!("    {}", texts.join(", "));
    for step in timing.path.iter().filter(|_| path) {
        let (block, warp) = step.warp;
        println!(
            "    {:>8.1} {:>7.1} ns  rank {} block {block} warp {warp:<2} {:<12} {}",
            step.start_ns,
            step.end_ns - step.start_ns,
            step.rank,
            step.cause.name(),
            step.place
        );
    }
}

fn main() -> ExitCode {
    // SAFETY: no other thread runs yet. The program ends if the reader of its results has closed the pipe.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let mut line: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let is_foreign = line.get(1).is_some_and(|word| word == "--foreign");
    let result = match is_foreign {
        true => {
            line.remove(1);
            foreign::run(line.into_iter())
        }
        false => run(&Arguments::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ptx-clock: {error}");
            ExitCode::FAILURE
        }
    }
}
