//! A server that loses no token: three ranks decode a text together, are killed at random and replaced, and the text is
//! that of an undisturbed run, bit for bit.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::record::Recording;
use fast_allreduce::{Buffer, Communicator, Error, Host, ReduceOp, Result};

use crate::fixtures::rank::{say, RANK_PROCESS};
use crate::fixtures::world::{builder, LIMIT};
use crate::random::{seed, Random, SEED};
use crate::temporary::Folder;
use crate::tier;

const RANKS: usize = 3;
const LAYERS: usize = 8;
const HIDDEN: usize = 96;
/// Allreduces of one token.
const CALLS: u64 = 2 * LAYERS as u64;
/// Calls with which the ranks tell a new one the state.
const CALLS_OF_STATE: u64 = 2;
/// Tokens between two kills, on average.
const INTERVAL: usize = 5;
/// Tokens after the last kill. This process may have to wait for a core before it kills or stops a rank, and the ranks
/// must not have ended by then.
const REST: usize = 150;

/// What the next token depends on.
#[derive(Clone, PartialEq)]
struct Sequence {
    hidden: Vec<f32>,
    tokens: Vec<u32>,
}

impl Sequence {
    fn new() -> Self {
        let hidden = (0..HIDDEN).map(|index| 1.0 / (index + 1) as f32).collect();
        Self { hidden, tokens: Vec::new() }
    }

    /// Returns the state as words for a broadcast: always the same number.
    fn words(&self, most: usize) -> Vec<u32> {
        let hidden = self.hidden.iter().map(|value| value.to_bits());
        let mut words: Vec<u32> = [self.tokens.len() as u32].into_iter().chain(hidden).collect();
        words.extend(&self.tokens);
        words.resize(1 + HIDDEN + most, 0);
        words
    }

    fn of_words(words: &[u32]) -> Self {
        let hidden = words[1..=HIDDEN].iter().map(|&bits| f32::from_bits(bits)).collect();
        Self { hidden, tokens: words[1 + HIDDEN..][..words[0] as usize].to_vec() }
    }
}

/// Returns a weight of the model; every rank has its own part of each layer.
fn weight(layer: usize, rank: usize, row: usize, column: usize) -> f32 {
    let word = (layer * 7919 + rank * 104_729 + row * 31 + column * 17 + 5) as u32;
    (word.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5
}

/// A rank of the server.
struct Server {
    communicator: Communicator<Host>,
    /// Registered: peers read it where it is.
    partial: Buffer<f32>,
    /// The state before each token; `None` before a new rank has got it.
    states: Option<Vec<Sequence>>,
    /// The number of calls when the world was formed, and the token that came next.
    formed: (u64, usize),
    tokens: usize,
}

impl Server {
    fn new(id: &UniqueId, rank: usize, tokens: usize) -> Result<Self> {
        let local = Local::connect(id, rank, RANKS, LIMIT)?;
        let communicator = builder().max_bytes(64 << 10).build(Host::new(), local)?;
        let is_new = !communicator.inherited().is_empty();
        let partial = match is_new {
            true => communicator.inherit_buffer(0)?,
            false => communicator.alloc(HIDDEN)?,
        };
        let states = (!is_new).then(|| vec![Sequence::new()]);
        let formed = (communicator.progress().completed, 0);
        let mut server = Self { communicator, partial, states, formed, tokens };
        if is_new {
            server.share_state()?;
        }
        Ok(server)
    }

    /// Tells new ranks the state before the next token.
    fn share_state(&mut self) -> Result<()> {
        const NONE: u64 = u64::MAX;
        let next = self.states.as_ref().map_or(NONE, |_| self.formed.1 as u64);
        let mut all = [0; RANKS];
        self.communicator.all_gather(&[next], &mut all)?;
        let root = all.iter().position(|&next| next != NONE).expect("a rank with the state");
        assert!(all.iter().all(|&next| next == NONE || next == all[root]), "agreed: {all:?}");
        let next = all[root] as usize;
        let mut words = match &self.states {
            Some(states) => states[next].words(self.tokens),
            None => vec![0; 1 + HIDDEN + self.tokens],
        };
        self.communicator.broadcast(&mut words, root)?;
        self.formed.1 = next;
        let state = Sequence::of_words(&words);
        let states = self.states.get_or_insert_with(|| vec![Sequence::new(); next]);
        states.truncate(next);
        states.push(state);
        Ok(())
    }

    /// Decodes the tokens that are left.
    fn serve(&mut self) -> Result<()> {
        loop {
            let Some(states) = &mut self.states else { unreachable!("it has the state") };
            let mut state = states.last().unwrap().clone();
            if state.tokens.len() == self.tokens {
                return Ok(());
            }
            for layer in 0..CALLS as usize {
                let rank = self.communicator.rank();
                for row in 0..HIDDEN {
                    let part = (rank..HIDDEN).step_by(RANKS);
                    self.partial[row] =
                        part.map(|column| weight(layer, rank, row, column) * state.hidden[column]).sum();
                }
                let mut sum = [0.0; HIDDEN];
                self.communicator.all_reduce(&self.partial[..], &mut sum, ReduceOp::Sum)?;
                let largest = sum.iter().fold(1e-6_f32, |largest, value| largest.max(value.abs()));
                for (hidden, value) in state.hidden.iter_mut().zip(sum) {
                    *hidden = 0.25 * *hidden + value / largest;
                }
            }
            let token = (0..HIDDEN).max_by(|&a, &b| state.hidden[a].total_cmp(&state.hidden[b])).unwrap();
            state.tokens.push(token as u32);
            state.hidden[token] -= 1.0;
            say(&format!("token {}", state.tokens.len()));
            states.push(state);
        }
    }

    /// Replaces a rank that has gone.
    fn replace(&mut self, error: &Error) -> Result<()> {
        let waited = Instant::now();
        let gone = match error {
            Error::Timeout { missing, .. } => missing.clone(),
            _ => Vec::new(),
        };
        let survivors = loop {
            let mut survivors = self.communicator.survivors();
            survivors.retain(|rank| !gone.contains(rank));
            if survivors.len() < RANKS || self.communicator.is_suspended() {
                break survivors;
            }
            assert!(waited.elapsed() < LIMIT, "{error}: nobody has gone");
            std::thread::yield_now();
        };
        say(&format!("joining {}", self.communicator.join_id()?));
        let progress = match self.communicator.is_suspended() {
            true => self.communicator.resume(LIMIT / 2)?,
            false => self.communicator.join(&survivors, LIMIT / 2)?,
        };
        if self.states.is_some() {
            let tokens = (progress.completed - self.formed.0).saturating_sub(CALLS_OF_STATE) / CALLS;
            self.formed.1 += tokens as usize;
        }
        self.formed.0 = progress.completed;
        self.share_state()?;
        say("serving");
        Ok(())
    }
}

/// Not a test: a rank of the server, as a process of its own.
#[test]
#[ignore = "a process of other tests"]
fn serving_rank() {
    if std::env::var_os(RANK_PROCESS).is_none() {
        return;
    }
    let line = std::io::stdin().lock().lines().next().unwrap().unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let [id, rank, tokens, limit] = words[..] else { panic!("{line}") };
    let id = id.parse().unwrap();
    let mut served =
        Server::new(&id, rank.parse().unwrap(), tokens.parse().unwrap()).and_then(|mut server| {
            say("serving");
            server.communicator.set_timeout(Duration::from_millis(limit.parse().unwrap()));
            let mut result = server.serve();
            for _ in 0..20 * tokens.parse::<usize>().unwrap() {
                let Err(error) = result else { break };
                result = server.replace(&error).and_then(|()| server.serve());
            }
            result.map(|()| server)
        });
    match &mut served {
        Ok(server) => {
            let last = server.states.as_ref().unwrap().last().unwrap();
            let hidden: Vec<_> = last.hidden.iter().map(|value| value.to_bits()).collect();
            say(&format!("text {:?} {hidden:?}", last.tokens));
            // The others may still need this rank.
            std::io::stdin().lock().lines().next();
        }
        Err(error) => say(&format!("error {error}")),
    }
}

struct Process {
    child: Child,
    orders: ChildStdin,
    /// Distinguishes the processes of one rank.
    number: usize,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ranks' processes, and what they say: rank, number of the process, line.
struct Cluster {
    ranks: Vec<Option<Process>>,
    lines: Receiver<(usize, usize, String)>,
    sender: Sender<(usize, usize, String)>,
    /// The texts of the ranks that have ended.
    texts: Vec<String>,
    started: usize,
    tokens: usize,
    limit: Duration,
    /// Where they record their calls.
    recordings: Option<PathBuf>,
}

impl Cluster {
    fn start(tokens: usize, limit: Duration) -> Self {
        Self::recording(tokens, limit, None)
    }

    fn recording(tokens: usize, limit: Duration, recordings: Option<PathBuf>) -> Self {
        let (sender, lines) = channel();
        let ranks = (0..RANKS).map(|_| None).collect();
        let texts = vec![String::new(); RANKS];
        let mut cluster = Self { ranks, lines, sender, texts, started: 0, tokens, limit, recordings };
        let id = UniqueId::new().unwrap();
        (0..RANKS).for_each(|rank| cluster.add(&id.to_string(), rank));
        cluster
    }

    fn add(&mut self, id: &str, rank: usize) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ranks::server::serving_rank", "--ignored", "--test-threads=1", "--nocapture"])
            .env(RANK_PROCESS, "1")
            .envs(self.recordings.iter().map(|folder| ("FAST_ALLREDUCE_RECORD_DIR", folder)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        self.started += 1;
        let (number, sender) = (self.started, self.sender.clone());
        let mut orders = child.stdin.take().unwrap();
        writeln!(orders, "{id} {rank} {} {}", self.tokens, self.limit.as_millis()).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(|line| line.ok()) {
                let line = line.strip_prefix('@').unwrap_or_default();
                if !line.is_empty() && sender.send((rank, number, line.to_owned())).is_err() {
                    return;
                }
            }
        });
        self.ranks[rank] = Some(Process { child, orders, number });
    }

    fn signal(&self, rank: usize, signal: i32) {
        let id = self.ranks[rank].as_ref().unwrap().child.id();
        // SAFETY: nobody has waited for the child yet, so its process id has not been reused.
        unsafe { libc::kill(id as i32, signal) };
    }

    /// Returns the next line of a process that has not been replaced.
    fn line(&self) -> (usize, String) {
        loop {
            match self.lines.recv_timeout(LIMIT) {
                Ok((rank, number, line)) => {
                    if self.ranks[rank].as_ref().is_some_and(|process| process.number == number) {
                        return (rank, line);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("no rank says anything")
                }
            }
        }
    }

    /// Waits until the text has `tokens` tokens.
    fn await_token(&self, tokens: usize) {
        loop {
            let (rank, line) = self.line();
            match line.split_once(' ') {
                Some(("token", number)) if number.parse::<usize>().unwrap() >= tokens => return,
                Some(("error", error)) => panic!("rank {rank}: {error}"),
                _ => {}
            }
        }
    }

    /// Replaces a rank that has gone, and waits until all ranks serve again. Kills the first replacements after these
    /// times.
    fn replace(&mut self, victim: usize, kill_after: &mut Vec<Duration>) {
        self.ranks[victim] = None;
        let mut serving = [false; RANKS];
        let mut last_id = String::new();
        while !serving.iter().all(|&serving| serving) {
            let (rank, line) = self.line();
            match line.split_once(' ') {
                Some(("joining", id)) => {
                    serving[rank] = false;
                    // After an error the survivors begin again, perhaps with another id.
                    if self.ranks[victim].is_none() || id != last_id {
                        id.clone_into(&mut last_id);
                        self.add(id, victim);
                        serving[victim] = false;
                    }
                    if let Some(after) = kill_after.pop() {
                        std::thread::sleep(after);
                        self.add(id, victim);
                    }
                }
                Some(("error", error)) if rank == victim => {
                    println!("a new rank {rank} gave up: {error}");
                    self.ranks[victim] = None;
                    self.add(&last_id.clone(), victim);
                }
                Some(("error", error)) => panic!("rank {rank}: {error}"),
                None if line == "serving" => serving[rank] = true,
                // It serves: nothing else is said then.
                Some(("token", _)) => {}
                // It has ended before the last line of another rank was read.
                Some(("text", text)) => text.clone_into(&mut self.texts[rank]),
                _ => panic!("rank {rank}: {line}"),
            }
        }
    }

    /// Waits for the texts of all ranks.
    fn texts(mut self) -> Vec<String> {
        while self.texts.iter().any(String::is_empty) {
            let (rank, line) = self.line();
            match line.split_once(' ') {
                Some(("text", text)) => text.clone_into(&mut self.texts[rank]),
                Some(("token", _)) => {}
                None if line == "serving" => {}
                _ => panic!("rank {rank}: {line}"),
            }
        }
        for process in self.ranks.iter_mut().flatten() {
            let _ = writeln!(process.orders);
        }
        self.texts
    }
}

#[test]
fn a_server_loses_no_token() {
    let kills = tier::rounds("a server whose ranks are killed", 100, 12);
    let mut random = Random::new("a server whose ranks are killed");
    let tokens = kills * INTERVAL + REST;
    let undisturbed = Cluster::start(tokens, LIMIT).texts();
    assert!(undisturbed.iter().all(|text| *text == undisturbed[0]), "{undisturbed:?}");

    let mut cluster = Cluster::start(tokens, LIMIT);
    let mut longest = Duration::ZERO;
    for kill in 0..kills {
        cluster.await_token(kill * INTERVAL + 1 + random.below(INTERVAL));
        std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
        let victim = random.below(RANKS);
        // One in four replacements is killed, too, while it joins.
        let mut kill_after: Vec<_> =
            (0..random.below(4) / 3).map(|_| Duration::from_micros(random.below(60_000) as u64)).collect();
        let started = Instant::now();
        cluster.signal(victim, libc::SIGKILL);
        cluster.replace(victim, &mut kill_after);
        longest = longest.max(started.elapsed());
    }
    println!("{kills} ranks killed and replaced; the longest took {longest:.1?}");
    for (rank, text) in cluster.texts().into_iter().enumerate() {
        assert_eq!(text, undisturbed[0], "rank {rank}, {SEED}={}", seed());
    }
}

/// A stopped rank is replaced. When it wakes up, it reaches nothing of the new world.
#[test]
fn a_stopped_rank_that_was_replaced_disturbs_nobody() {
    let tokens = INTERVAL + REST;
    let undisturbed = Cluster::start(tokens, LIMIT).texts();
    let mut cluster = Cluster::start(tokens, Duration::from_secs(3));
    cluster.await_token(INTERVAL);
    let victim = Random::new("a stopped rank").below(RANKS);
    cluster.signal(victim, libc::SIGSTOP);
    let stopped = cluster.ranks[victim].take().unwrap();
    cluster.replace(victim, &mut Vec::new());
    // SAFETY: nobody has waited for the child yet, so its process id has not been reused.
    unsafe { libc::kill(stopped.child.id() as i32, libc::SIGCONT) };
    for text in cluster.texts() {
        assert_eq!(text, undisturbed[0]);
    }
    drop(stopped);
}

/// In the world after a join the survivors record their calls again, not only the new rank.
#[test]
fn survivors_record_their_calls_in_the_next_world() {
    let folder = Folder::new();
    let mut cluster = Cluster::recording(INTERVAL + REST, LIMIT, Some(folder.path().to_owned()));
    cluster.await_token(INTERVAL);
    cluster.signal(1, libc::SIGKILL);
    cluster.replace(1, &mut Vec::new());
    cluster.texts();
    let mut calls: BTreeMap<u64, [usize; RANKS]> = BTreeMap::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let mut recording = Recording::open(&file.unwrap().path()).unwrap();
        let (rank, size) = recording.place();
        assert_eq!(size, RANKS);
        let whole = std::iter::from_fn(|| recording.next_call().ok().flatten());
        let count = whole.filter(|call| call.failure().is_none()).count();
        calls.entry(recording.world()).or_default()[rank] = count;
    }
    // Of the first world, and of the one after the kill.
    let is_whole = |counts: &&[usize; RANKS]| counts.iter().all(|&count| count > 0);
    assert!(calls.values().filter(is_whole).count() >= 2, "{calls:?}");
}
