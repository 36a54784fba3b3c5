//! Rank processes for many worlds: only those that a test kills are started anew.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};

use fast_allreduce::bootstrap::UniqueId;
use fast_allreduce::Algorithm;

use crate::rank::{Part, RANK_PROCESS};
use crate::world::LIMIT;

/// One process; it does not outlive its test.
pub struct Process {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
    /// What it held after its first world.
    held: Option<String>,
}

/// How a rank came out of a world.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub built: bool,
    pub calls: usize,
    pub at_ns: u64,
    pub drop_us: u64,
    /// `ok`, `lost`, `failed`, `timeout`, `other`.
    pub kind: String,
    pub named: Vec<usize>,
    pub text: String,
}

impl Process {
    fn start(environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank::rank_process", "--ignored", "--test-threads=1", "--nocapture"])
            .env(RANK_PROCESS, "1")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let told = line.strip_prefix('@').map(|line| sender.send(line.to_owned()));
                if matches!(told, Some(Err(_))) {
                    return;
                }
            }
        });
        Self { child, orders, lines, held: None }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so that its id is no other process's.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// The next line that begins with `word`, without it. Lines of how far it has come are passed over.
    pub fn told(&self, word: &str) -> String {
        loop {
            let line =
                self.lines.recv_timeout(LIMIT / 2).unwrap_or_else(|error| panic!("no {word}: {error}"));
            match line.split_once(' ').unwrap_or((&line, "")) {
                (first, rest) if first == word => return rest.to_owned(),
                ("met" | "ready" | "shrinking", _) => {}
                _ => panic!("{line}"),
            }
        }
    }

    /// How it came out, once it has.
    pub fn outcome(&self) -> Outcome {
        let line = self.told("end");
        let words: Vec<&str> = line.splitn(7, ' ').collect();
        let [built, calls, at_ns, drop_us, kind, named, text] = words[..] else { panic!("{line}") };
        Outcome {
            built: built == "1",
            calls: calls.parse().unwrap(),
            at_ns: at_ns.parse().unwrap(),
            drop_us: drop_us.parse().unwrap(),
            kind: kind.into(),
            named: named.split(',').filter_map(|rank| rank.parse().ok()).collect(),
            text: text.into(),
        }
    }

    fn resources(&mut self) -> String {
        writeln!(self.orders, "resources").unwrap();
        self.told("resources")
    }

    /// Killed, or ended by itself.
    fn gone(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Default)]
pub struct Pool {
    processes: Vec<Process>,
    /// Of processes that are started from now on.
    pub environment: Vec<(&'static str, &'static str)>,
}

impl Pool {
    /// Starts a world; the parts by rank. Its processes by rank.
    pub fn start(
        &mut self,
        algorithm: Algorithm,
        seed: usize,
        timeout_ms: u64,
        parts: &[Part],
    ) -> &[Process] {
        while self.processes.len() < parts.len() {
            self.add();
        }
        let id = UniqueId::new().unwrap().to_string();
        let size = parts.len();
        for (rank, part) in parts.iter().enumerate() {
            let orders = &mut self.processes[rank].orders;
            let part = part.line();
            writeln!(orders, "{id} {rank} {size} {algorithm} {seed} {timeout_ms} {part}").unwrap();
        }
        &self.processes[..size]
    }

    /// Starts the process of the next rank.
    pub fn add(&mut self) {
        self.processes.push(Process::start(&self.environment));
    }

    /// A system call is refused to the rank with this error from now on.
    pub fn forbid(&mut self, rank: usize, call: i64, errno: i32) {
        while self.processes.len() <= rank {
            self.add();
        }
        writeln!(self.processes[rank].orders, "forbid {call} {errno}").unwrap();
    }

    /// Puts away a process that has been killed or has ended.
    pub fn bury(&mut self, rank: usize) {
        let mut process = self.processes.remove(rank);
        process.child.wait().unwrap();
    }

    /// What each process holds is what it held the first time that this was called.
    pub fn check_resources(&mut self) {
        for process in &mut self.processes {
            assert!(!process.gone(), "a rank process ended by itself");
            let now = process.resources();
            match &process.held {
                Some(before) => assert_eq!(&now, before, "descriptors, threads, mappings"),
                None => process.held = Some(now),
            }
        }
    }
}
