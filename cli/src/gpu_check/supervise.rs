//! A step's process: started, listened to, and ended when its time is over.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::record::Record;
use super::{host, programs};
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;

const WRONG: i32 = crate::failure::WRONG as i32;

/// What became of a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub step: String,
    /// `None`: nothing.
    pub error: Option<String>,
    pub seconds: f64,
    pub records: Vec<Record>,
}

impl Outcome {
    /// True if it came to its end and no check failed.
    pub fn is_right(&self) -> bool {
        self.error.is_none() && self.failures() == 0
    }

    /// Checks that failed.
    pub fn failures(&self) -> usize {
        let failed = |record: &&Record| matches!(record, Record::Check { error: Some(_), .. });
        self.records.iter().filter(failed).count()
    }

    /// Cases that were checked.
    pub fn cases(&self) -> u64 {
        let cases = |record: &Record| if let Record::Check { cases, .. } = record { *cases } else { 0 };
        self.records.iter().map(cases).sum()
    }

    /// In a few words.
    pub fn verdict(&self) -> String {
        let is_skipped = |record: &Record| matches!(record, Record::Skipped { .. });
        match (&self.error, self.failures()) {
            (None, 0) if !self.records.is_empty() && self.records.iter().all(is_skipped) => "skipped".into(),
            (None, 0) => "passed".into(),
            (None, failures) => format!("FAILED ({failures} checks)"),
            (Some(error), 0) => format!("FAILED: {error}"),
            (Some(error), failures) => format!("FAILED ({failures} checks): {error}"),
        }
    }

    /// On one line.
    pub fn line(&self) -> String {
        format!("{:15} {:6.1} s  {} cases  {}", self.step, self.seconds, self.cases(), self.verdict())
    }
}

/// Runs a step to its end or its limit.
pub fn run(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    const LEAST: Duration = Duration::from_secs(1);
    if limit < LEAST {
        let error = Some("not run: the time for all steps is over".into());
        return Ok(Outcome { step: step.name(), error, seconds: 0.0, records: Vec::new() });
    }
    match step {
        Step::Memcheck | Step::Synccheck | Step::Tests => programs::run(step, options, limit),
        Step::HostBench | Step::HostTune => host::run(step, options, limit),
        _ => run_alone(step, options, limit),
    }
}

fn run_alone(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
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
