//! Rank processes: none survives the run, whatever ends it, and the cause is reported.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::program::{program, text, Busy};
use fast_allreduce::bootstrap::UniqueId;
use nix::sys::signal::{kill, killpg, signal, SigHandler, Signal};
use nix::unistd::Pid;

/// A run that does not end by itself.
const ENDLESS: &str = "bench --ranks 3 -b 1K -e 1K -n 1000000000000 --timeout 2";

const LIMIT: Duration = Duration::from_secs(20);

fn error(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn a_killed_rank_is_named_and_ends_the_others() {
    for rank in [0, 2] {
        let busy = Busy::start(program(ENDLESS), 3);
        busy.signal(rank, Signal::SIGKILL);
        let (output, took) = busy.finish(LIMIT);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(error(&output), format!("error: rank {rank} was killed by signal 9 (SIGKILL)\n"));
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout() {
    let busy = Busy::start(program(ENDLESS), 3);
    busy.signal(1, Signal::SIGSTOP);
    let (output, _) = busy.finish(LIMIT);
    assert_eq!(output.status.code(), Some(2));
    let error = error(&output);
    assert!(error.contains("timed out") && error.contains("waiting for rank 1"), "{error}");
    assert!(error.contains("SIGSTOP") && error.contains("--timeout SECONDS"), "{error}");
}

#[test]
fn ranks_end_with_their_launcher() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let busy = Busy::start(program(ENDLESS), 3);
        kill(Pid::from_raw(busy.launcher.id() as i32), signal).unwrap();
        let (output, _) = busy.finish(LIMIT);
        assert_eq!(output.status.signal(), Some(signal as i32));
    }
}

#[test]
fn an_interrupt_from_the_terminal_ends_all() {
    let mut command = program(ENDLESS);
    command.process_group(0);
    // A shell that runs the tests in the background ignores SIGINT, which children inherit.
    // SAFETY: setting a signal to its default is async-signal-safe, and no handler of this process is involved.
    unsafe { command.pre_exec(|| Ok(signal(Signal::SIGINT, SigHandler::SigDfl).map(drop)?)) };
    let busy = Busy::start(command, 3);
    killpg(Pid::from_raw(busy.launcher.id() as i32), Signal::SIGINT).unwrap();
    let (output, _) = busy.finish(LIMIT);
    assert_eq!(output.status.signal(), Some(Signal::SIGINT as i32));
}

#[test]
fn a_closed_pipe_ends_the_run_silently() {
    let mut command = program("bench --ranks 2 -b 8 -e 1K -f 2 -n 2");
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    launcher.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(128 + Signal::SIGPIPE as i32));
}

#[test]
fn results_that_cannot_be_written_are_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = program("bench --ranks 2 -b 8 -e 8 -n 2").stdout(full).stderr(Stdio::piped()).spawn();
    let output = output.unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(error(&output).contains("No space left"), "{}", text(&output.stderr));
}

/// Starts the program as ranks of another launcher.
fn as_ranks(arguments: &str, world_size: usize) -> Vec<Output> {
    let id = UniqueId::new().unwrap();
    let start = |rank: usize| {
        let mut command: Command = program(arguments);
        command.env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string());
        command.env("FAST_ALLREDUCE_RANK", rank.to_string());
        command.env("FAST_ALLREDUCE_WORLD_SIZE", world_size.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..world_size).map(start).collect();
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

#[test]
fn ranks_of_another_launcher_join_its_world() {
    let outputs = as_ranks("bench -b 64 -e 64 -n 2 --format json", 3);
    let document: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!((&document["config"]["ranks"], &document["wrong"]), (&3.into(), &0.into()));
    for output in &outputs {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()));
}

#[test]
fn only_the_first_rank_reports_a_common_failure() {
    for (arguments, fact) in [
        ("bench --ranks 2", "a world of 3"),
        ("bench --set max_bytes=1", "max_bytes = 1"),
        ("bench -b 2 -e 1", "--minbytes"),
        ("bench --nonsense", "--nonsense"),
    ] {
        let outputs = as_ranks(arguments, 3);
        assert!(error(&outputs[0]).contains(fact), "{}", text(&outputs[0].stderr));
        for output in &outputs {
            assert_eq!(output.status.code(), Some(2), "{arguments}");
        }
        assert!(outputs[1..].iter().all(|output| output.stderr.is_empty()), "{arguments}");
    }
}

#[test]
fn an_environment_that_names_no_world_is_refused() {
    let mut command = program("bench");
    let output = command.env("FAST_ALLREDUCE_UNIQUE_ID", "nonsense").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(error(&output).contains("FAST_ALLREDUCE_UNIQUE_ID"), "{}", text(&output.stderr));
}
