//! Runs a command in a test bed of several nodes, and ends the bed with it. In the command, `on NODE COMMAND` runs a
//! command on a node, and `$ON` is the path of `on`, which launchers such as `mpirun` take instead of `ssh`.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use fast_allreduce_network::{Bed, Link, Wire};

/// Runs a command beside two to four nodes with a network between them. Needs root.
#[derive(Parser)]
struct Options {
    /// Number of nodes: node0, node1, ...
    #[arg(long, default_value_t = 2)]
    nodes: usize,
    /// Delay of each frame in milliseconds.
    #[arg(long)]
    delay: Option<f64>,
    /// Percentage of frames that are lost.
    #[arg(long)]
    loss: Option<f64>,
    /// Megabits per second from a node to another.
    #[arg(long)]
    rate: Option<f64>,
    /// KiB that may wait for the rate; what comes then is lost.
    #[arg(long)]
    queue: Option<usize>,
    /// Let the command have the network and the host name of node0, as a launcher such as mpirun needs.
    #[arg(long)]
    launcher: bool,
    /// The command, and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("network: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(options: &Options) -> io::Result<ExitCode> {
    let usual = Link::default();
    let wire = match (options.delay, options.loss, options.rate, options.queue) {
        (None, None, None, None) => Wire::Bridge,
        (delay, loss, rate, queue) => Wire::Switch(Link {
            delay: Duration::try_from_secs_f64(delay.unwrap_or(0.0) / 1e3).map_err(io::Error::other)?,
            loss: loss.unwrap_or(0.0) / 100.0,
            rate: rate.map(|rate| (rate * 1e6) as u64),
            queue: queue.map_or(usual.queue, |queue| queue << 10),
            ..usual
        }),
    };
    let bed = Bed::new(options.nodes, wire)?;
    let (program, arguments) = options.command.split_first().ok_or_else(|| io::Error::other("no command"))?;
    let mut command = match options.launcher {
        true => bed.launcher(0, program),
        false => std::process::Command::new(program),
    };
    let folder = bed.agent().parent().into_iter().map(|folder| folder.to_owned());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(folder.chain(std::env::split_paths(&path))).map_err(io::Error::other)?;
    let status = command.args(arguments).env("PATH", path).env("ON", bed.agent()).status()?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}
