//! Steps that are other programs: compute-sanitizer over a small part of the step `world`, and tests that were carried along.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{killpg, Signal};
use nix::unistd::Pid;

use super::facts::find;
use super::record::{Outcome, Record};
use super::supervise::wait;
use crate::arguments::{GpuCheck, Step};
use crate::failure::Failure;

/// Runs the programs of a step, which have `limit` together.
pub fn run(step: Step, options: &GpuCheck, limit: Duration) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let end = start + limit;
    let mut records = Vec::new();
    match step {
        Step::Tests if options.tests.is_empty() => records.push(Record::skipped("tests", "none was given")),
        Step::Tests => {
            for (index, test) in options.tests.iter().enumerate() {
                let name = test.file_name().unwrap_or(test.as_os_str()).to_string_lossy();
                let mut command = Command::new(in_folder(test));
                command.arg("--test-threads=1").env("FAST_ALLREDUCE_REQUIRE", "cuda");
                let parts = (options.tests.len() - index) as u32;
                let end = Instant::now() + end.saturating_duration_since(Instant::now()) / parts;
                records.push(check(&format!("tests-{name}"), &mut command, end, options)?);
            }
        }
        _ => {
            let name = step.name();
            match find("compute-sanitizer", &["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]) {
                None => records.push(Record::skipped(name, "compute-sanitizer was not found")),
                Some(sanitizer) => {
                    let program = std::env::current_exe();
                    let program = program.map_err(|error| Failure::System("finding this program", error))?;
                    let mut command = Command::new(sanitizer);
                    command.args(["--tool", &name, "--error-exitcode", "9", "--target-processes", "all"]);
                    command.arg(program).args(["gpu-check", "--alone", "--step", "world", "--small"]);
                    command.args(["--gpu", &options.gpu.to_string()]);
                    command.args(["--limit", &limit.as_millis().to_string()]);
                    records.push(check(&name, &mut command, end, options)?);
                }
            }
        }
    }
    Ok(Outcome { step: step.name(), error: None, seconds: start.elapsed().as_secs_f64(), records })
}

/// A file in the working folder is not looked for in PATH.
fn in_folder(file: &Path) -> std::path::PathBuf {
    match file.components().count() {
        1 => Path::new(".").join(file),
        _ => file.to_owned(),
    }
}

/// Runs a program to its end or `end`. Its group is its own, so that what it started ends with it.
fn check(name: &str, command: &mut Command, end: Instant, options: &GpuCheck) -> Result<Record, Failure> {
    const PATIENCE: Duration = Duration::from_secs(3);
    let mut log = log_file(name, options).map_err(|error| Failure::System("a log file", error))?;
    let clone = || log.try_clone().map_err(|error| Failure::System("dup of a log file", error));
    command.stdin(Stdio::null()).stdout(clone()?).stderr(clone()?).process_group(0);
    let mut process = match command.spawn() {
        Ok(process) => process,
        Err(error) => return Ok(Record::check(name, 0, Err(Failure::System("starting it", error)))),
    };
    let status = wait(&mut process, end)?;
    // Those that it has left behind, too. An error means that there are none.
    let _ = killpg(Pid::from_raw(process.id() as i32), Signal::SIGKILL);
    if status.is_none() {
        wait(&mut process, Instant::now() + PATIENCE)?;
    }
    let mut said = Vec::new();
    log.rewind()?;
    log.read_to_end(&mut said)?;
    let said = String::from_utf8_lossy(&said);
    let outcome = match status {
        Some(status) if status.success() => Ok(()),
        None => Err(Failure::Ranks(format!("not done in time; {}", complaint(&said)))),
        Some(status) => Err(Failure::Ranks(format!("{status}; {}", complaint(&said)))),
    };
    Ok(Record::check(name, cases(&said), outcome))
}

/// In the folder for logs, or without a name.
fn log_file(name: &str, options: &GpuCheck) -> std::io::Result<File> {
    let open = |file: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(file);
    if let Some(folder) = &options.logs {
        return open(&folder.join(format!("{name}.log")));
    }
    let file = std::env::temp_dir().join(format!("fast-allreduce-{}-{name}.log", std::process::id()));
    let log = open(&file)?;
    std::fs::remove_file(&file)?;
    Ok(log)
}

/// Tests that passed, by their own count, or cases that a step of this program has checked.
fn cases(said: &str) -> u64 {
    let passed = |line: &str| {
        let rest = line.strip_prefix("test result: ")?.split_once(". ")?.1;
        rest.split(' ').next()?.parse::<u64>().ok()
    };
    let checked = |line: &str| match serde_json::from_str(line) {
        Ok(Record::Check { cases, .. }) => Some(cases),
        _ => None,
    };
    said.lines().filter_map(|line| passed(line).or_else(|| checked(line))).max().unwrap_or(0)
}

/// The tests that failed, or the last that was said.
fn complaint(said: &str) -> String {
    const MOST: usize = 5;
    // What a test has printed may stand between its name and its outcome; the list at the end is whole.
    let listed = said.rsplit_once("\nfailures:\n").map_or("", |(_, list)| list);
    let listed = listed.lines().map_while(|line| line.strip_prefix("    "));
    let told = said.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix("... FAILED"));
    let mut failed: Vec<_> = listed.chain(told).map(str::trim).collect();
    let mut known = std::collections::HashSet::new();
    failed.retain(|name| known.insert(*name));
    failed.truncate(MOST);
    match failed.is_empty() {
        true => {
            said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
        }
        false => format!("failed: {}", failed.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tests_say_is_understood() {
        let said = "running 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\ntest d ... FAILED\n\n\
                    test result: FAILED. 17 passed; 2 failed; 0 ignored\n\n";
        assert_eq!((cases(said), complaint(said)), (17, "failed: a::c, d".into()));
        let said = "test a::b     ... ok\ntest a::c     ... thread 'main' panicked at a.rs:1:\nFAILED\ntest d        \
                    ... FAILED\n\nfailures:\n\n---- a::c ----\nwrong\n\n\nfailures:\n    a::c\n    d\n\n\
                    test result: FAILED. 1 passed; 2 failed; 4 ignored\n\n";
        assert_eq!((cases(said), complaint(said)), (1, "failed: a::c, d".into()));
        assert_eq!((cases("Killed\n\n"), complaint("Killed\n\n")), (0, "Killed".into()));
        assert_eq!(complaint(""), "it said nothing");
        let record = serde_json::to_string(&Record::check("x", 5, Ok(()))).unwrap();
        assert_eq!(cases(&format!("{record}\n========= ERROR SUMMARY: 0 errors\n")), 5);
    }
}
