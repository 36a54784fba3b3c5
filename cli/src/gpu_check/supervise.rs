//! A step's process: started, listened to, and ended when its time is over.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::record::{Outcome, Record};
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;

const WRONG: i32 = crate::failure::WRONG as i32;

/// Runs a step in a process of its own, to its end or its limit.
pub fn run(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let mut command = Command::new("/proc/self/exe");
    command.args(["gpu-check", "--alone", "--step", &step.name(), "--gpu", &options.gpu.to_string()]);
    command.args(["--limit", &limit.as_millis().to_string()]);
    if options.small {
        command.arg("--small");
    }
    // Streams that share a hardware queue would wait for each other; the default is 8 queues.
    command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(|error| Failure::System("starting a step's process", error))?;
    let records = process.stdout.take().map(|out| std::thread::spawn(move || records(out)));
    let complaints = process.stderr.take().map(|err| std::thread::spawn(move || last_line(err)));

    let status = wait(&mut process, start + limit)?;
    let ended = status.is_some() || stop(&mut process);
    // A process that the driver keeps from ending may hold the pipes open: its readers are not waited for.
    let records = records.filter(|_| ended).and_then(|reader| reader.join().ok()).unwrap_or_default();
    let complaint = complaints.filter(|_| ended).and_then(|reader| reader.join().ok()).unwrap_or_default();
    let is_done = records.last() == Some(&Record::Done);
    let error = match status {
        None if !ended => Some("its process cannot be ended; what it found is lost".into()),
        None => Some(format!("not done after {:.0} s", limit.as_secs_f64())),
        // What is wrong is in the records.
        Some(status) if is_done && matches!(status.code(), Some(0 | WRONG)) => None,
        Some(_) if !complaint.is_empty() => Some(complaint),
        Some(status) => Some(format!("ended with {status}")),
    };
    let records = records.into_iter().filter(|record| *record != Record::Done).collect();
    Ok(Outcome { step: step.name(), error, seconds: start.elapsed().as_secs_f64(), records })
}

/// `None` if it has not ended by then.
pub fn wait(process: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>, Failure> {
    loop {
        let status = process.try_wait().map_err(|error| Failure::System("wait", error))?;
        if status.is_some() || Instant::now() > deadline {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kills it; its ranks die with it. True if that has worked.
fn stop(process: &mut Child) -> bool {
    const PATIENCE: Duration = Duration::from_secs(3);
    // An error means that it has ended.
    let _ = process.kill();
    matches!(wait(process, Instant::now() + PATIENCE), Ok(Some(_)))
}

/// Lines that are no records are not ours: a library's.
fn records(out: impl Read) -> Vec<Record> {
    let lines = BufReader::new(out).lines().map_while(Result::ok);
    lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

/// The last that was said, without its prefix.
fn last_line(err: impl Read) -> String {
    let lines = BufReader::new(err).lines().map_while(Result::ok);
    let line = lines.filter(|line| !line.trim().is_empty()).last().unwrap_or_default();
    line.strip_prefix("error: ").map_or(line.clone(), str::to_owned)
}
