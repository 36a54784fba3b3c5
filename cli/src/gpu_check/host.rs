//! The steps `host-bench` and `host-tune`: what this machine's CPUs do, by this program's own commands.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::record::{Outcome, Record};
use super::supervise::wait;
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;

/// Runs the commands of a step, which have `limit` together.
pub fn run(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut records = vec![Record::fact("CPUs", cores)];
    let worlds: Vec<usize> =
        [2, 4, 8, 16].into_iter().filter(|&ranks| ranks == 2 || ranks <= cores).collect();
    for (index, ranks) in worlds.iter().enumerate() {
        let left = limit.saturating_sub(start.elapsed()) / (worlds.len() - index) as u32;
        let found = match step {
            Step::HostTune => tune(*ranks, options, left),
            _ => bench(*ranks, options, left),
        };
        match found {
            Ok(found) => records.extend(found),
            Err(failure) => records.push(Record::check(format!("{ranks} ranks"), 0, Err(failure))),
        }
    }
    Ok(Outcome { step: step.name(), error: None, seconds: start.elapsed().as_secs_f64(), records })
}

/// What this program writes to standard output when it is called so.
fn output(arguments: &[&str], limit: Duration) -> Result<Vec<u8>, Failure> {
    let file = tempfile()?;
    let out = file.try_clone().map_err(|error| Failure::System("dup of a file", error))?;
    let mut command = Command::new("/proc/self/exe");
    command.args(arguments).stdin(Stdio::null()).stdout(out).stderr(Stdio::null());
    let mut process = command.spawn().map_err(|error| Failure::System("starting this program", error))?;
    let status = wait(&mut process, Instant::now() + limit)?;
    if status.is_none() {
        // An error means that it has ended. Its ranks end with it.
        let _ = process.kill();
        let _ = wait(&mut process, Instant::now() + Duration::from_secs(3));
    }
    match status {
        None => Err(Failure::Ranks(format!("not done after {:.0} s", limit.as_secs_f64()))),
        Some(status) if !status.success() => Err(Failure::Ranks(format!("{} {status}", arguments[0]))),
        Some(_) => {
            use std::io::{Read as _, Seek as _};
            let (mut file, mut said) = (file, Vec::new());
            file.rewind()?;
            file.read_to_end(&mut said)?;
            Ok(said)
        }
    }
}

/// A file without a name.
fn tempfile() -> Result<std::fs::File, Failure> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = nix::sys::memfd::memfd_create(c"fast-allreduce-output", flags);
    file.map(Into::into).map_err(|errno| Failure::System("memfd_create", errno.into()))
}

fn bench(ranks: usize, options: &GpuCheck, limit: Duration) -> Result<Vec<Record>, Failure> {
    let (ranks, largest) = (ranks.to_string(), if options.small { "4K" } else { "4M" });
    let said = output(
        &["bench", "--ranks", &ranks, "-d", "bf16", "-b", "1K", "-e", largest, "-f", "4", "--format", "json"],
        limit,
    )?;
    let document: Value = serde_json::from_slice(&said).map_err(std::io::Error::from)?;
    let rows = document["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let (mut records, mut wrong) = (Vec::new(), 0);
    for row in rows {
        let (bytes, timing) = (&row["bytes"], &row["out_of_place"]);
        wrong += timing["wrong"].as_u64().unwrap_or(0);
        let time = timing["time_us"].as_f64().unwrap_or(f64::NAN);
        let table = "Microseconds of a call between processes on the CPUs, bf16 sum";
        records.push(Record::figure(table, bytes, format!("{ranks} ranks"), time));
    }
    let outcome = match (rows.len(), wrong) {
        (0, _) => Err(Failure::Ranks("it measured nothing".into())),
        (_, 0) => Ok(()),
        _ => Err(Failure::Ranks(format!("{wrong} wrong elements"))),
    };
    records.push(Record::check(format!("{ranks} ranks"), rows.len() as u64, outcome));
    Ok(records)
}

fn tune(ranks: usize, options: &GpuCheck, limit: Duration) -> Result<Vec<Record>, Failure> {
    // It measures for so long in all, and its ranks need some time to meet.
    let budget = (limit.as_secs_f64() * 0.7).min(if options.small { 0.2 } else { 60.0 });
    let (ranks, budget) = (ranks.to_string(), format!("{budget:.1}"));
    let largest = if options.small { "4K" } else { "4M" };
    let arguments = [
        "tune",
        "--ranks",
        &ranks,
        "--budget",
        &budget,
        "-b",
        "1K",
        "-e",
        largest,
        "--output",
        "/dev/stdout",
    ];
    let said = output(&arguments, limit)?;
    let said = String::from_utf8_lossy(&said);
    let rows = said.lines().filter(|line| line.trim() == "[[plan]]" || line.contains("algorithm")).count();
    Ok(vec![
        Record::fact(format!("tuning file of {ranks} ranks"), said.trim()),
        Record::check(format!("{ranks} ranks"), rows as u64, Ok(())),
    ])
}
