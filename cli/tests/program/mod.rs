//! Runs the program and inspects its processes.
#![allow(dead_code)] // Each test target uses a part of it.

#[path = "../../../src/testing/temporary.rs"]
pub mod temporary;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

/// Returns a command with these arguments, split at spaces, and without a world in its environment.
pub fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fast-allreduce"));
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    for variable in
        ["UNIQUE_ID", "RANK", "WORLD_SIZE", "LAUNCHER", "SOCKET_DIR", "JOIN_TIMEOUT", "GENERATION"]
    {
        command.env_remove(format!("FAST_ALLREDUCE_{variable}"));
    }
    // Tests must not use the tuning files of this user.
    command.env_remove("FAST_ALLREDUCE_TUNING").env("XDG_CACHE_HOME", "/nonexistent");
    command
}

pub fn run(arguments: &str) -> Output {
    program(arguments).output().unwrap()
}

/// Returns the standard output of a run that must succeed.
pub fn results(arguments: &str) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments}: {}\n{}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{arguments}");
    text(&output.stdout)
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A run whose ranks make calls for a long time.
pub struct Busy {
    pub launcher: Child,
    /// By rank.
    pub ranks: Vec<Pid>,
}

impl Busy {
    pub fn start(mut command: Command, ranks: usize) -> Self {
        let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut busy = Self { launcher, ranks: Vec::new() };
        let is_up = wait_until(Duration::from_secs(20), || {
            busy.ranks = ranks_of(busy.launcher.id());
            // Once the ranks have met, they have mapped regions.
            busy.ranks.len() == ranks && busy.ranks.iter().all(|pid| maps_regions(*pid, ranks))
        });
        assert!(is_up, "{:?}", busy.ranks);
        // Until the first calls.
        std::thread::sleep(Duration::from_millis(200));
        busy
    }

    pub fn signal(&self, rank: usize, signal: Signal) {
        kill(self.ranks[rank], signal).unwrap();
    }

    /// Returns the output and the time until the end. All processes must have ended.
    pub fn finish(self, limit: Duration) -> (Output, Duration) {
        let Self { mut launcher, ranks } = self;
        let start = Instant::now();
        let has_ended = wait_until(limit, || launcher.try_wait().unwrap().is_some());
        let took = start.elapsed();
        if !has_ended {
            launcher.kill().unwrap();
        }
        let output = launcher.wait_with_output().unwrap();
        assert!(has_ended, "still running after {limit:?}: {}", text(&output.stderr));
        let all_gone = wait_until(Duration::from_secs(5), || ranks.iter().all(|pid| !is_alive(*pid)));
        assert!(all_gone, "ranks are left: {ranks:?}");
        (output, took)
    }
}

pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Returns the state and the parent of a process.
fn stat(pid: Pid) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// Returns whether a process runs. A zombie does not: its new parent may never wait for it.
fn is_alive(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| state != "Z" && state != "X")
}

fn ranks_of(launcher: u32) -> Vec<Pid> {
    let processes =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let pids = processes.filter_map(|name| name.parse().ok()).map(Pid::from_raw);
    let children = pids.filter(|pid| stat(*pid).is_some_and(|(_, parent)| parent == launcher));
    let mut ranks: Vec<_> = children.filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

fn rank_of(pid: Pid) -> Option<usize> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    let value = variables.find_map(|variable| variable.strip_prefix(b"FAST_ALLREDUCE_RANK="))?;
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn maps_regions(pid: Pid, ranks: usize) -> bool {
    let maps =
        std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("maps")).unwrap_or_default();
    // Those of the fence and of the measured communicator.
    maps.lines().filter(|line| line.contains("memfd:fast-allreduce")).count() >= 2 * ranks
}
