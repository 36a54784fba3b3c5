//! Ranks in PID, user and IPC namespaces of their own, as containers have them: they meet, and hear of each other's
//! end.

mod program;
#[macro_use]
#[path = "../../tests/runner/mod.rs"]
mod runner;

use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::UniqueId;
use program::{program, text, wait_until};
use runner::{Found, Missing};

tests! {
    || namespaces(&[PID]) => ranks_of_pid_namespaces;
    || namespaces(&[USER]) => ranks_of_user_namespaces;
    || namespaces(&[IPC]) => ranks_of_ipc_namespaces;
    || namespaces(&[USER, PID, IPC]) => ranks_of_namespaces_of_all_three_kinds;
}

fn main() -> ExitCode {
    runner::run(tests())
}

const PID: &[&str] = &["--pid", "--fork", "--kill-child"];
const USER: &[&str] = &["--user", "--map-root-user"];
const IPC: &[&str] = &["--ipc"];

/// What `unshare` takes here, to make namespaces of these kinds.
type Options = Vec<&'static str>;

fn namespaces(kinds: &[&[&'static str]]) -> Found<Options> {
    let kinds = kinds.concat();
    // Who is not root may make the others within a user namespace.
    let candidates = [kinds.clone(), [USER, &kinds].concat()];
    let works = |options: &Options| {
        let made = Command::new("unshare").args(options).arg("true").stderr(Stdio::null()).status();
        made.is_ok_and(|status| status.success())
    };
    let missing = || Missing::new("namespaces", format!("unshare {} fails", kinds.join(" ")));
    candidates.into_iter().find(works).ok_or_else(missing)
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

fn ranks_meet(options: &Options) {
    let ranks = start("bench -b 1K -e 1M -f 32 -n 20 --format json", options, 3);
    let outputs: Vec<_> = ranks.into_iter().map(|rank| finish(rank, Duration::from_secs(60))).collect();
    for output in &outputs {
        assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    }
    let document: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!((&document["config"]["ranks"], &document["wrong"]), (&3.into(), &0.into()));
}

/// A rank in namespaces of its own is killed in a call.
fn a_killed_rank_is_noticed(options: &Options) {
    let endless = "bench -b 1K -e 1K -n 1000000000000 --timeout 60";
    let mut ranks = start(endless, options, 3);
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

fn ranks_of_pid_namespaces(options: Options) {
    ranks_meet(&options);
    a_killed_rank_is_noticed(&options);
}

fn ranks_of_user_namespaces(options: Options) {
    ranks_meet(&options);
    a_killed_rank_is_noticed(&options);
}

fn ranks_of_ipc_namespaces(options: Options) {
    ranks_meet(&options);
    a_killed_rank_is_noticed(&options);
}

fn ranks_of_namespaces_of_all_three_kinds(options: Options) {
    ranks_meet(&options);
    a_killed_rank_is_noticed(&options);
}
