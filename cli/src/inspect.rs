//! `inspect`: what the ranks of running, hanging or dead processes did last.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use fast_allreduce::flight::{self, FlightRecord, RankRecord, RecordedCall};

use crate::arguments::Inspect;
use crate::failure::Failure;
use crate::output::Output;
use crate::page;

/// Prints the flight records of a process and its peers, or of the ranks that left theirs in a directory.
pub fn run(options: &Inspect) -> Result<ExitCode, Failure> {
    let report = options.report.as_deref().map(Output::check).transpose()?;
    // A number is a process, also if there is a directory of that name: `./17` is the directory.
    let worlds = match options.what.to_str().map(str::parse::<u32>) {
        Some(Ok(process)) => flight::of_process(process)?,
        _ => flight::of_directory(&options.what)?,
    };
    if let Some(report) = report {
        report.write(&page::timeline(&worlds))?;
    }
    let text = if options.json {
        let worlds: Vec<_> = worlds.iter().map(FlightRecord::to_json).collect();
        format!("[{}]\n", worlds.join(",\n"))
    } else if options.metrics {
        flight::metrics(&worlds)
    } else {
        worlds.iter().map(|world| described(world, options.calls)).collect::<Vec<_>>().join("\n")
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Describes a world: a line for each rank, its latest calls, and who was waited for.
fn described(world: &FlightRecord, calls: usize) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut text, world, calls);
    text
}

fn write(out: &mut String, world: &FlightRecord, calls: usize) -> std::fmt::Result {
    let FlightRecord { world: id, world_size, .. } = world;
    writeln!(out, "# world {id}, {world_size} ranks")?;
    writeln!(out, "# {:>4} {:>8} {:>7} {:>9} {:>7}  doing", "rank", "process", "state", "calls", "behind")?;
    for rank in &world.ranks {
        let RankRecord { rank: number, process, begun, behind, .. } = rank;
        let state = rank.state.name();
        writeln!(out, "  {number:4} {process:8} {state:>7} {begun:9} {behind:7}  {}", rank.doing())?;
        rank.reason.iter().try_for_each(|reason| writeln!(out, "       failed: {reason}"))?;
    }
    for unread in &world.unread {
        writeln!(out, "  {:4} {}", unread.rank, unread.reason)?;
    }
    for finding in world.findings() {
        writeln!(out, "# {finding}")?;
    }
    for rank in world.ranks.iter().filter(|_| calls > 0) {
        writeln!(out, "# latest calls of rank {}", rank.rank)?;
        let first = rank.calls.len().saturating_sub(calls);
        rank.calls[first..].iter().try_for_each(|call| writeln!(out, "  {}", line_of(call)))?;
    }
    Ok(())
}

fn line_of(call: &RecordedCall) -> String {
    let mut text = format!("{:9} {}", call.number, call.call);
    if let (Some(begin), Some(end)) = (call.begin_ns, call.end_ns) {
        text += &format!(", took {:.1} us", end.saturating_sub(begin) as f64 / 1e3);
    }
    if let Some(rank) = call.waited_for {
        text += &format!(", waited {:.1} us for rank {rank}", call.waited_ns as f64 / 1e3);
    }
    text
}
