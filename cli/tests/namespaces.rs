//! Ranks in PID, user and IPC namespaces of their own, as containers have them: they meet, and hear of each other's
//! end.
//!
//! Where `unshare` is not allowed to make one, or is not there, a line on standard error says what was not run.

mod program;

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::UniqueId;
use program::{program, text, wait_until};

const PID: &[&str] = &["--pid", "--fork", "--kill-child"];
const USER: &[&str] = &["--user", "--map-root-user"];
const IPC: &[&str] = &["--ipc"];

/// What it takes to make namespaces of these kinds here; `None`, and a word of it, where nothing does.
fn options(kinds: &[&'static str]) -> Option<Vec<&'static str>> {
    // Who is not root may make the others within a user namespace.
    let candidates = [kinds.to_vec(), [USER, kinds].concat()];
    let works = |options: &Vec<&str>| {
        let made = Command::new("unshare").args(options).arg("true").stderr(Stdio::null()).status();
        made.is_ok_and(|status| status.success())
    };
    let found = candidates.into_iter().find(works);
    if found.is_none() {
        // Past the harness, which keeps what a test that passes prints.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "skipped: ranks in namespaces: unshare {} fails", kinds.join(" ")).unwrap();
    }
    found
}

/// The program as ranks, of which the first is in this process's namespaces and each other one in some of its own.
fn start(arguments: &str, options: &[&str], ranks: usize) -> Vec<Child> {
    let id = UniqueId::new().unwrap();
    let start = |rank: usize| {
        let inner = program(arguments);
        let mut command = match rank {
            0 => inner,
            _ => {
                let mut command = Command::new("unshare");
                command.args(options).arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
                for (name, value) in inner.get_envs() {
                    match value {
                        Some(value) => command.env(name, value),
                        None => command.env_remove(name),
                    };
                }
                command
            }
        };
        command.env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string());
        command.env("FAST_ALLREDUCE_RANK", rank.to_string());
        command.env("FAST_ALLREDUCE_WORLD_SIZE", ranks.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // The rendezvous is a thread of this process, which lives for longer than the id.
    (0..ranks).map(start).collect()
}

fn finish(mut rank: Child, limit: Duration) -> Output {
    let has_ended = wait_until(limit, || rank.try_wait().unwrap().is_some());
    if !has_ended {
        rank.kill().unwrap();
    }
    let output = rank.wait_with_output().unwrap();
    assert!(has_ended, "still running after {limit:?}: {}", text(&output.stderr));
    output
}

fn ranks_meet(kinds: &[&'static str]) {
    let Some(options) = options(kinds) else { return };
    let ranks = start("bench -b 1K -e 1M -f 32 -n 20 --format json", &options, 3);
    let outputs: Vec<_> = ranks.into_iter().map(|rank| finish(rank, Duration::from_secs(60))).collect();
    for output in &outputs {
        assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    }
    let document: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!((&document["config"]["ranks"], &document["wrong"]), (&3.into(), &0.into()));
}

/// A rank in namespaces of its own is killed in a call.
fn a_killed_rank_is_noticed(kinds: &[&'static str]) {
    let Some(options) = options(kinds) else { return };
    let endless = "bench -b 1K -e 1K -n 1000000000000 --timeout 60";
    let mut ranks = start(endless, &options, 3);
    std::thread::sleep(Duration::from_secs(2));
    ranks
        .iter_mut()
        .for_each(|rank| assert!(rank.try_wait().unwrap().is_none(), "a rank has ended by itself"));
    let mut victim = ranks.remove(1);
    let killed = Instant::now();
    victim.kill().unwrap();
    victim.wait().unwrap();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| finish(rank, Duration::from_secs(30))).collect();
    assert!(killed.elapsed() < Duration::from_secs(20), "{options:?}: {:?}", killed.elapsed());
    for output in outputs {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {error}");
        assert!(error.contains("rank 1"), "{options:?}: {error}");
    }
}

#[test]
fn ranks_of_pid_namespaces() {
    ranks_meet(PID);
    a_killed_rank_is_noticed(PID);
}

#[test]
fn ranks_of_user_namespaces() {
    ranks_meet(USER);
    a_killed_rank_is_noticed(USER);
}

#[test]
fn ranks_of_ipc_namespaces() {
    ranks_meet(IPC);
    a_killed_rank_is_noticed(IPC);
}

#[test]
fn ranks_of_namespaces_of_all_three_kinds() {
    let all = [USER, PID, IPC].concat();
    ranks_meet(&all);
    a_killed_rank_is_noticed(&all);
}
