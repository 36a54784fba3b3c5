//! The process of a step: started, read, and killed when its time is over.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::record::{Outcome, Record};
use crate::arguments::{GpuCheck, Step};
use crate::failure::{Failure, EXIT_WRONG};

/// Runs a step in its own process, to its end or its limit.
pub fn run(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let mut command = Command::new("/proc/self/exe");
    command.args(options.step_arguments(step, limit));
    // Streams that share a hardware queue would wait for each other; the default is 8 queues.
    command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(|error| Failure::System("starting a step's process", error))?;
    let records = process.stdout.take().map(|out| std::thread::spawn(move || records(out)));
    let errors = process.stderr.take().map(|err| std::thread::spawn(move || last_line(err)));

    let status = wait(&mut process, start + limit)?;
    let ended = status.is_some() || kill(&mut process);
    // A process that the driver keeps from ending may hold the pipes open: do not join their readers.
    let records = records.filter(|_| ended).and_then(|reader| reader.join().ok()).unwrap_or_default();
    let last_error = errors.filter(|_| ended).and_then(|reader| reader.join().ok()).unwrap_or_default();
    let is_done = records.last() == Some(&Record::Done);
    let error = match status {
        None if !ended => Some("its process does not end; its findings are lost".into()),
        None => Some(format!("not done after {:.0} s", limit.as_secs_f64())),
        // Failed checks are among the records.
        Some(status) if is_done && [Some(0), Some(EXIT_WRONG.into())].contains(&status.code()) => None,
        Some(_) if !last_error.is_empty() => Some(last_error),
        Some(status) => Some(format!("ended with {status}")),
    };
    Ok(Outcome {
        step: step.name(),
        error,
        seconds: start.elapsed().as_secs_f64(),
        records: last_answers(records),
    })
}

/// Returns the records of the report: those of a step without its earlier answers to a question.
fn last_answers(mut records: Vec<Record>) -> Vec<Record> {
    let mut answered = BTreeSet::new();
    records.reverse();
    records.retain(|record| match record {
        Record::Answer { question, .. } => answered.insert(question.clone()),
        record => *record != Record::Done,
    });
    records.reverse();
    records
}

/// Waits until the process ends or the deadline passes; returns `None` in the latter case.
fn wait(process: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>, Failure> {
    loop {
        let status = process.try_wait().map_err(|error| Failure::System("wait", error))?;
        if status.is_some() || Instant::now() > deadline {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kills the process; its ranks die with it. Returns whether it has ended.
fn kill(process: &mut Child) -> bool {
    const KILL_TIMEOUT: Duration = Duration::from_secs(3);
    // An error means that it has already ended.
    let _ = process.kill();
    matches!(wait(process, Instant::now() + KILL_TIMEOUT), Ok(Some(_)))
}

/// Reads all records; other lines are printed by libraries.
fn records(out: impl Read) -> Vec<Record> {
    let lines = BufReader::new(out).lines().map_while(Result::ok);
    lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

/// Returns the last line that is not empty, without the prefix `error: `.
fn last_line(err: impl Read) -> String {
    let lines = BufReader::new(err).lines().map_while(Result::ok);
    let line = lines.filter(|line| !line.trim().is_empty()).last().unwrap_or_default();
    line.strip_prefix("error: ").map_or(line.clone(), str::to_owned)
}
