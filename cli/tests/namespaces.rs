//! Ranks in separate PID, user, IPC and network namespaces, like containers: they meet, and notice each other's end.
//! And ranks in mount namespaces with another CPU's description or without /proc.

mod program;
#[macro_use]
#[path = "../../tests/runner/mod.rs"]
mod runner;

use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::UniqueId;
use program::temporary::Folder;
use program::{program, text, wait_until};
use runner::{Found, Missing};

tests! {
    || namespaces(&[PID]) => ranks_of_pid_namespaces;
    || namespaces(&[USER]) => ranks_of_user_namespaces;
    || namespaces(&[IPC]) => ranks_of_ipc_namespaces;
    || namespaces(&[USER, PID, IPC]) => ranks_of_namespaces_of_all_three_kinds;
    || namespaces(&[NET]) => ranks_of_network_namespaces;
    || namespaces(&[USER, PID, IPC, NET]) => ranks_of_namespaces_of_all_four_kinds;
    || mounts("mount --bind /proc/version /proc/cpuinfo") => the_cpus_name_decides_on_a_busy_machine;
    || mounts(NO_PROC) => ranks_without_proc;
}

fn main() -> ExitCode {
    runner::run(tests())
}

const PID: &[&str] = &["--pid", "--fork", "--kill-child"];
const USER: &[&str] = &["--user", "--map-root-user"];
const IPC: &[&str] = &["--ipc"];
const NET: &[&str] = &["--net"];
const MOUNT: &[&str] = &["--mount"];

/// A shell command that removes /proc from a mount namespace.
const NO_PROC: &str = "umount -l /proc";

/// The options of `unshare` for namespaces of these kinds.
type Options = Vec<&'static str>;

fn namespaces(kinds: &[&[&'static str]]) -> Found<Options> {
    namespaces_for(kinds, "true")
}

/// Returns options for a mount namespace in which a shell command succeeds.
fn mounts(line: &str) -> Found<Options> {
    namespaces_for(&[MOUNT], line)
}

/// Returns options for namespaces in which a shell command succeeds.
fn namespaces_for(kinds: &[&[&'static str]], line: &str) -> Found<Options> {
    let kinds = kinds.concat();
    // Without root, other namespaces need a user namespace.
    let candidates = [kinds.clone(), [USER, &kinds].concat()];
    let works = |options: &Options| {
        let mut command = Command::new("unshare");
        let made = command.args(options).args(["sh", "-c", line]).stderr(Stdio::null()).status();
        made.is_ok_and(|status| status.success())
    };
    let missing = || Missing::new("namespaces", format!("unshare {} sh -c '{line}' fails", kinds.join(" ")));
    candidates.into_iter().find(works).ok_or_else(missing)
}

/// Starts the program as ranks: the first in this process's namespaces, each other one in separate ones.
fn start(arguments: &str, options: &[&str], ranks: usize) -> Vec<Child> {
    let id = UniqueId::new().unwrap();
    start_by(arguments, options, ranks, &[("FAST_ALLREDUCE_UNIQUE_ID", &id.to_string())])
}

/// Starts ranks that find each other by these variables.
fn start_by(arguments: &str, options: &[&str], ranks: usize, variables: &[(&str, &str)]) -> Vec<Child> {
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
        command.envs(variables.iter().copied());
        command.env("FAST_ALLREDUCE_RANK", rank.to_string());
        command.env("FAST_ALLREDUCE_WORLD_SIZE", ranks.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // The rendezvous is a thread of this process, which outlives the id.
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

const CALLS: &str = "bench -b 1K -e 64K -f 8 -n 20 --format json";
const ENDLESS: &str = "bench -b 1K -e 1K -n 1000000000000 --timeout 60";

fn ranks_meet(options: &Options) {
    they_meet(options, start(CALLS, options, 3));
}

fn they_meet(options: &Options, ranks: Vec<Child>) {
    let outputs: Vec<_> = ranks.into_iter().map(|rank| finish(rank, Duration::from_secs(60))).collect();
    for output in &outputs {
        assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    }
    let document: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!((&document["config"]["ranks"], &document["wrong"]), (&3.into(), &0.into()));
}

/// Kills a rank in separate namespaces during a call.
fn a_killed_rank_is_noticed(options: &Options) {
    it_is_noticed(options, start(ENDLESS, options, 3));
}

fn it_is_noticed(options: &Options, mut ranks: Vec<Child>) {
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

/// An id cannot be reached from another network namespace, and the error says what to do; a shared directory can.
fn ranks_of_network_namespaces(options: Options) {
    let mut ranks = start(CALLS, &options, 2).into_iter();
    let (mut first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let error = text(&finish(second, Duration::from_secs(30)).stderr);
    assert!(
        error.contains("another network namespace") && error.contains("FAST_ALLREDUCE_SOCKET_DIR"),
        "{error}"
    );
    first.kill().unwrap();
    first.wait().unwrap();
    meet_in_a_directory(&options);
}

fn ranks_of_namespaces_of_all_four_kinds(options: Options) {
    meet_in_a_directory(&options);
}

fn meet_in_a_directory(options: &Options) {
    // Longer than the address of a socket may be.
    let folder = Folder::new();
    let path = folder.path().join("x".repeat(120));
    std::fs::create_dir_all(&path).unwrap();
    let variables = [("FAST_ALLREDUCE_SOCKET_DIR", path.to_str().unwrap())];
    they_meet(options, start_by(CALLS, options, 3, &variables));
    it_is_noticed(options, start_by(ENDLESS, options, 3, &variables));
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "files are left in the directory");
}

/// Returns a command that runs a shell command and then the program, in separate namespaces.
fn after(line: &str, options: &Options, arguments: &str) -> Command {
    let inner = program(arguments);
    let mut command = Command::new("unshare");
    command.args(options).args(["sh", "-c", &format!("{line} && exec \"$0\" \"$@\"")]);
    command.arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Threads that use all cores.
struct Work(Arc<AtomicBool>);

impl Work {
    fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || while !is_over.load(Ordering::Relaxed) {});
        }
        Self(is_over)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The ranks do not measure, because the CPU's name decides.
fn the_cpus_name_decides_on_a_busy_machine(options: Options) {
    let _work = Work::start();
    let folder = Folder::new();
    let cases = [
        ("AMD EPYC 9B45", "AuthenticAMD", "built-in for AMD (by the CPU's name; "),
        ("QEMU Virtual CPU version 2.5+", "AuthenticAMD", "built-in for AMD (by the CPU's name; "),
        ("Intel(R) Xeon(R) Processor", "GenuineIntel", "built-in for Intel (by the CPU's name; "),
        ("Hygon C86 7285 32-core Processor", "HygonGenuine", "the CPU is of a make without a table; "),
    ];
    for (name, vendor, said) in cases {
        let text = format!("processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: {name}\n");
        let description = folder.write("cpuinfo", text);
        let line = format!("mount --bind {} /proc/cpuinfo", description.display());
        for _ in 0..3 {
            let output =
                after(&line, &options, "bench --ranks 2 -b 64K -e 64K -n 2 --bind none --format json");
            let output = { output }.output().unwrap();
            assert!(output.status.success(), "{}", text_of(&output));
            let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let plan = document["config"]["plan"].as_str().unwrap();
            assert!(plan.contains(said), "{name}: {plan}");
        }
    }
}

fn text_of(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

/// Ranks meet by an id, or in a directory with a short path; operations that need `/proc` fail with an error.
fn ranks_without_proc(options: Options) {
    let id = UniqueId::new().unwrap().to_string();
    let start = |rank: &str| {
        let mut command = after(NO_PROC, &options, CALLS);
        command.env("FAST_ALLREDUCE_UNIQUE_ID", &id).env("FAST_ALLREDUCE_RANK", rank);
        command.env("FAST_ALLREDUCE_WORLD_SIZE", "3");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    they_meet(&options, ["0", "1", "2"].map(start).into());
    let folder = Folder::new();
    let long = folder.path().join("x".repeat(120));
    std::fs::create_dir_all(&long).unwrap();
    for rank in ["0", "1"] {
        let mut command = after(NO_PROC, &options, CALLS);
        command.env("FAST_ALLREDUCE_SOCKET_DIR", &long).env("FAST_ALLREDUCE_RANK", rank);
        let output = command.env("FAST_ALLREDUCE_WORLD_SIZE", "2").output().unwrap();
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains("ENAMETOOLONG"), "{error}");
    }
    let output = after(NO_PROC, &options, "bench --ranks 2 -e 1K").output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.lines().count() == 1 && error.contains("/proc"), "{error}");
}
