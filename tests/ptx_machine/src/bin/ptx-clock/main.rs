//! Predicts how long the allreduce kernels take on a GPU, from what nvcc made of them: docs/gpu-model.md.
//!
//!     ptx-clock kernels.ptx --machine h100 --ranks 2,4,8 --sizes 8K,64K,1M
//!     ptx-clock kernels.ptx --ranks 8 --sizes 8K --algorithms one_shot_push --path

#[path = "../../../../../src/abi/bindings.rs"]
#[allow(dead_code, missing_docs, clippy::all)]
mod abi;
mod job;
mod reference;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use fast_allreduce_ptx_machine::clock::{Cause, Machine, Timing, MACHINES};
use fast_allreduce_ptx_machine::Program;

use job::{Call, Dtype, Shape};

/// Predicts the time of allreduce kernels on a GPU, from their PTX.
#[derive(Parser)]
struct Arguments {
    /// What nvcc made of csrc/cuda/kernels.cu, with -lineinfo.
    ptx: PathBuf,
    /// A row of the table of constants.
    #[arg(long, default_value = "h100")]
    machine: String,
    /// Constants measured on a machine: lines of `name = value`.
    #[arg(long)]
    constants: Option<PathBuf>,
    /// Shows the constants, in the form that --constants takes.
    #[arg(long)]
    show_constants: bool,
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    ranks: Vec<usize>,
    #[arg(long, value_delimiter = ',', default_value = "1K,8K,64K,256K,512K,1M,8M", value_parser = size)]
    sizes: Vec<usize>,
    /// one_shot_pull and so on; with `+` behind it, with registered inputs.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "one_shot_push,one_shot_pull,one_shot_pull+,two_shot_push,two_shot_pull,two_shot_pull+"
    )]
    algorithms: Vec<String>,
    /// bf16, f16 or f32.
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Most blocks of a launch, and most threads of a block.
    #[arg(long, default_value_t = 64)]
    blocks: u32,
    #[arg(long, default_value_t = 512)]
    threads: u32,
    /// Calls in a row.
    #[arg(long, default_value_t = 4)]
    turns: usize,
    /// Blocks of each rank that are simulated; 0: all.
    #[arg(long, default_value_t = 2)]
    simulate: u32,
    /// Kernels follow each other in a stream, not in a graph.
    #[arg(long)]
    stream: bool,
    /// Shows where the time goes.
    #[arg(long)]
    causes: bool,
    /// Shows the critical path step by step.
    #[arg(long)]
    path: bool,
}

/// Bytes, with K or M behind them.
fn size(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix(['K', 'k']) {
        Some(number) => (number, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |number| (number, 1 << 20)),
    };
    let number: usize = number.parse().map_err(|_| format!("{text} is no size"))?;
    number.checked_mul(unit).filter(|&bytes| bytes > 0).ok_or_else(|| format!("{text} is no size"))
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let mut machine = Machine::named(&arguments.machine)
        .ok_or_else(|| format!("there is no machine {}: {}", arguments.machine, MACHINES.join(", ")))?;
    if let Some(path) = &arguments.constants {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        machine.put(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if arguments.show_constants {
        print!("{}", machine.text());
        return Ok(());
    }
    let text = std::fs::read_to_string(&arguments.ptx)
        .map_err(|error| format!("{}: {error}", arguments.ptx.display()))?;
    let program = Program::load_timed(&text).map_err(|error| error.to_string())?;
    let dtype = Dtype::named(&arguments.dtype)
        .ok_or_else(|| format!("there is no hot kernel of {}", arguments.dtype))?;
    let shape = Shape {
        blocks: arguments.blocks,
        threads: arguments.threads,
        turns: arguments.turns,
        simulate: arguments.simulate,
        stream: arguments.stream,
    };
    for &ranks in &arguments.ranks {
        for name in &arguments.algorithms {
            for &bytes in &arguments.sizes {
                let call = Call { algorithm: name.clone(), dtype, ranks, bytes };
                let timing = call.predict(&program, &machine, &shape)?;
                show(arguments, name, &call, &timing);
            }
        }
    }
    Ok(())
}

fn show(arguments: &Arguments, name: &str, call: &Call, timing: &Timing) {
    let Timing { call_ns, round_trips, flights, counts, .. } = timing;
    println!(
        "{name:<16} {} ranks {:>9} B  {:>7.2} us  {round_trips} trips {flights} flights  {:>5.0} instr/warp  {} syncs {} fences",
        call.ranks,
        call.bytes,
        call_ns / 1e3,
        counts.instructions / counts.warps.max(1.0),
        counts.syncs,
        counts.fences,
    );
    if arguments.causes {
        let causes =
            Cause::ALL.iter().filter_map(|cause| Some((cause.name(), timing.causes.get(cause)? / 1e3)));
        let texts: Vec<String> = causes.map(|(name, us)| format!("{name} {us:.2}")).collect();
        println!("    {}", texts.join(", "));
    }
    if arguments.path {
        for step in &timing.path {
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
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ptx-clock: {error}");
            ExitCode::FAILURE
        }
    }
}
