//! Ranks of several machines meet over TCP, and notice what happens to the network and to each other.

#[macro_use]
#[path = "../../../tests/runner/mod.rs"]
mod runner;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Secret, Tcp};
use fast_allreduce::{Communicator, DType, Error, Hierarchical, Host, InterNode, ReduceOp, Result};
use fast_allreduce_network::{Bed, Link, Wire};
use runner::{Found, Missing};

tests! {
    || bed(2, Wire::Bridge) => the_documented_program, ranks_meet_by_addresses_and_names,
        machines_with_different_numbers_of_ranks,
        another_jobs_ranks_are_refused, a_machine_that_cannot_be_reached, a_killed_rank_is_named;
    || bed(2, Wire::Switch(Link::default())) => ranks_meet_over_a_bad_network, a_short_cut_is_survived,
        a_machine_without_power_is_named, a_paused_machine_is_named, a_machine_gets_another_address;
    || bed(4, Wire::Switch(Link::default())) => halves_of_a_network_get_errors_and_go_on_alone;
}

/// The name of this program's mode that is a rank.
const RANK: &str = "--rank";

/// The name of the mode that is a rank of the program of docs/machines.md.
const DOCUMENTED: &str = "--documented";

/// The limit of each gather of an endless loop.
const LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(RANK) => rank(),
        Some(DOCUMENTED) => documented().map_or_else(|error| panic!("{error}"), |()| ExitCode::SUCCESS),
        _ => runner::run(tests()),
    }
}

fn bed(nodes: usize, wire: Wire) -> Found<Bed> {
    Bed::new(nodes, wire).map_err(|error| Missing::new("network", error))
}

/// A rank: it meets the others as the environment says, calls until something happens, and prints it.
fn rank() -> ExitCode {
    let is_endless = std::env::args().nth(2).as_deref() == Some("endless");
    match meet(is_endless) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::from(3)
        }
    }
}

fn meet(is_endless: bool) -> Result<()> {
    let tcp = Tcp::from_env()?.expect("FAST_ALLREDUCE_ADDRESS");
    println!("nodes {:?} local {}", tcp.nodes(), tcp.local_rank());
    if is_endless {
        loop {
            let all = tcp.all_gather(&[tcp.rank() as u8], LIMIT)?;
            assert!(all.iter().enumerate().all(|(rank, bytes)| *bytes == [rank as u8]));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let limit = Duration::from_secs(30);
    let (rank, size) = (tcp.rank(), tcp.world_size());
    let local = Communicator::builder().build(Host::new(), tcp.of_node(limit)?)?;
    // Calls between machines need as many ranks on each.
    if tcp.nodes().iter().filter(|&&node| node == 0).count() * distinct(&tcp.nodes()).len() == size {
        let world = Hierarchical::new(local, YourEngine::new(tcp))?;
        assert_eq!((world.rank(), world.world_size()), (rank, size));
        for round in 0..3_usize {
            let mut data: Vec<_> = (0..10_000).map(|index| (index * (rank + 1) + round) as i64).collect();
            world.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
            let factor = size * (size + 1) / 2;
            let is_right = |(index, sum): (usize, &i64)| *sum == (index * factor + round * size) as i64;
            assert!(data.iter().enumerate().all(is_right));
        }
        // Rank 0 serves the rendezvous, and leaves last.
        world.engine().tcp.barrier(limit)?;
    }
    println!("right");
    Ok(())
}

fn distinct(nodes: &[usize]) -> Vec<usize> {
    let mut distinct = nodes.to_vec();
    distinct.dedup();
    distinct
}

/// The program of docs/machines.md, between its first and its last two lines.
fn documented() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut data = vec![1_i64; 10_000];
    let tcp = Tcp::from_env()?.ok_or("FAST_ALLREDUCE_ADDRESS is not set")?;
    let local = Communicator::builder().build(Host::new(), tcp.of_node(Duration::from_secs(60))?)?;
    let world = Hierarchical::new(local, YourEngine::new(tcp))?;
    world.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
    println!("all {}: {}", data[0], data.iter().all(|&sum| sum == data[0]));
    Ok(world.engine().tcp.barrier(Duration::from_secs(30))?)
}

/// An engine for tests: it gathers all slices through the bootstrap.
struct YourEngine {
    tcp: Tcp,
    /// Ranks of each node.
    ranks: usize,
    limit: Duration,
}

impl YourEngine {
    fn new(tcp: Tcp) -> Self {
        let ranks = tcp.nodes().iter().filter(|&&node| node == 0).count();
        Self { tcp, ranks, limit: Duration::from_secs(30) }
    }
}

impl InterNode<Host> for YourEngine {
    fn node(&self) -> usize {
        self.tcp.rank() / self.ranks
    }

    fn nodes(&self) -> usize {
        self.tcp.world_size() / self.ranks
    }

    unsafe fn all_reduce(&self, data: u64, count: usize, _: DType, op: ReduceOp, _: ()) -> Result<()> {
        let address = data as *mut i64;
        // SAFETY: the caller guarantees `count` elements at `data`, which are 64-bit integers in this program and
        // when `Hierarchical` compares shapes and calls.
        let data = unsafe { std::slice::from_raw_parts_mut(address, count) };
        let bytes: Vec<_> = data.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.tcp.all_gather(&bytes, self.limit)?;
        let local_rank = self.tcp.rank() % self.ranks;
        let parts: Vec<_> = all.iter().skip(local_rank).step_by(self.ranks).collect();
        for (index, value) in data.iter_mut().enumerate() {
            let of_part = |part: &&Vec<u8>| i64::from_le_bytes(part[8 * index..][..8].try_into().unwrap());
            let values = parts.iter().map(of_part);
            *value = match op {
                ReduceOp::Sum => values.sum(),
                ReduceOp::Min => values.min().unwrap_or_default(),
                _ => return Err(Error::Unavailable { what: op.to_string(), reason: "not in tests".into() }),
            };
        }
        Ok(())
    }
}

/// A running rank, or one that has ended.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    said: String,
}

impl Process {
    /// Waits until the rank says that all have met.
    fn wait_until_met(&mut self) {
        self.output.read_line(&mut self.said).unwrap();
        assert!(self.said.starts_with("nodes "), "{}", self.said);
    }

    /// Waits for the end of the rank, and returns what it printed.
    fn finish(mut self) -> String {
        self.output.read_to_string(&mut self.said).unwrap();
        self.child.wait().unwrap();
        self.said
    }
}

/// How ranks are started.
struct Job<'a> {
    bed: &'a Bed,
    address: String,
    secret: String,
    join_limit: u32,
    mode: &'a str,
}

impl<'a> Job<'a> {
    fn new(bed: &'a Bed, mode: &'a str) -> Self {
        let (address, secret) = ("node0:29600".into(), Secret::random().unwrap().to_string());
        Self { bed, address, secret, join_limit: 60, mode }
    }

    fn start(&self, node: usize, rank: usize, world_size: usize) -> Process {
        let mut command = self.bed.command(node, std::env::current_exe().unwrap());
        command.args([RANK, self.mode]).stdin(Stdio::null()).stdout(Stdio::piped());
        command.env("FAST_ALLREDUCE_ADDRESS", &self.address).env("FAST_ALLREDUCE_SECRET", &self.secret);
        // As torchrun sets them.
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
        command.env("FAST_ALLREDUCE_JOIN_TIMEOUT", self.join_limit.to_string());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, output, said: String::new() }
    }

    /// Starts ranks on the nodes that are given for each rank, and waits until they have met.
    fn meet(&self, nodes: &[usize]) -> Vec<Process> {
        let start = |(rank, &node)| self.start(node, rank, nodes.len());
        let mut ranks: Vec<_> = nodes.iter().enumerate().map(start).collect();
        ranks.iter_mut().for_each(Process::wait_until_met);
        ranks
    }
}

/// Asserts that each rank ends soon with an error that names one of these ranks or the rendezvous.
fn assert_named(ranks: Vec<Process>, since: Instant, named: &[&str]) {
    for rank in ranks {
        let said = rank.finish();
        let is_named = said.contains("error: ") && named.iter().any(|name| said.contains(name));
        assert!(is_named, "none of {named:?} is named: {said}");
    }
    // The limit, two seconds for the rendezvous' answer, and a busy machine.
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
}

/// The commands of docs/machines.md start a program with its lines.
fn the_documented_program(bed: Bed) {
    let (_, section) = include_str!("../../../docs/machines.md").split_once("\n## Rust\n").unwrap();
    let block = |language: &str| {
        let (_, block) = section.split_once(&format!("```{language}\n")).unwrap();
        block.split_once("```").unwrap().0
    };
    for line in block("rust").lines() {
        assert!(include_str!("meeting.rs").contains(&format!("\n    {line}\n")), "{line}");
    }
    let program = format!("{} {DOCUMENTED}", std::env::current_exe().unwrap().display());
    let commands = block("sh").replace("./program", &program);
    assert_ne!(commands, block("sh"));
    let start = |rank: usize| {
        let mut shell = bed.command(rank / 2, "sh");
        shell.args(["-ec", &commands]).env("RANK", rank.to_string()).stdout(Stdio::piped()).spawn().unwrap()
    };
    for rank in (0..4).map(start).collect::<Vec<_>>() {
        let output = rank.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all 4: true\n");
    }
}

fn ranks_meet_by_addresses_and_names(bed: Bed) {
    for host in ["node0".to_owned(), bed.v4(0).to_string(), format!("[{}]", bed.v6(0))] {
        let job = Job { address: format!("{host}:29600"), ..Job::new(&bed, "once") };
        for (rank, process) in job.meet(&[0, 0, 1, 1]).into_iter().enumerate() {
            let said = process.finish();
            assert_eq!(said, format!("nodes [0, 0, 2, 2] local {}\nright\n", rank % 2), "{host}");
        }
    }
}

fn machines_with_different_numbers_of_ranks(bed: Bed) {
    for process in Job::new(&bed, "once").meet(&[0, 1, 1]) {
        assert!(process.finish().ends_with("right\n"));
    }
}

fn another_jobs_ranks_are_refused(bed: Bed) {
    let (job, other) = (Job::new(&bed, "once"), Job::new(&bed, "once"));
    let first = job.start(0, 0, 2);
    // The port is free until the first rank serves there.
    let said = other.start(1, 1, 2).finish();
    assert!(said.contains("is not the rendezvous of this job: it has another secret"), "{said}");
    let said = other.start(0, 0, 2).finish();
    assert!(said.contains("29600 is in use, perhaps by another job"), "{said}");
    let second = job.start(1, 1, 2);
    for process in [first, second] {
        assert!(process.finish().ends_with("right\n"));
    }
}

fn a_machine_that_cannot_be_reached(bed: Bed) {
    let failed = |address: &str, secret: &str| {
        let job = Job::new(&bed, "once");
        let secret = if secret.is_empty() { job.secret.clone() } else { secret.to_owned() };
        let job = Job { address: address.into(), secret, join_limit: 1, ..job };
        let start = Instant::now();
        let said = job.start(1, 1, 2).finish();
        assert!(start.elapsed() < Duration::from_secs(15), "{address}: {:?}", start.elapsed());
        said
    };
    for (address, why) in [
        ("198.18.9.9:29600", "rank 0 (198.18.9.9:29600 cannot be reached"),
        ("203.0.113.1:29600", "203.0.113.1:29600 cannot be reached: Network is unreachable"),
        ("node0:29600", "nobody listens at node0:29600"),
        ("node9:29600", "node9 does not resolve"),
        ("node0", "node0 is not valid"),
    ] {
        let said = failed(address, "");
        assert!(said.contains(why.trim_start_matches("rank 0 (")), "{said}");
        assert!(!why.starts_with("rank 0") || said.contains("rank 0"), "{said}");
    }
    assert!(failed("node0:29600", "1234").contains("32 random hexadecimal digits"));
}

fn a_killed_rank_is_named(bed: Bed) {
    let mut ranks = Job::new(&bed, "endless").meet(&[0, 0, 1, 1]);
    let killed = ranks.remove(3);
    bed.kill(&killed.child);
    assert_named(ranks, Instant::now(), &["rank 3"]);
    killed.finish();
}

fn ranks_meet_over_a_bad_network(bed: Bed) {
    for link in [
        Link { delay: Duration::from_millis(50), ..Link::default() },
        Link { delay: Duration::from_millis(1), loss: 0.05, ..Link::default() },
    ] {
        bed.set(0, 1, link);
        bed.set(1, 0, link);
        for process in Job::new(&bed, "once").meet(&[0, 0, 1, 1]) {
            assert!(process.finish().ends_with("right\n"), "{link:?}");
        }
    }
}

fn a_short_cut_is_survived(bed: Bed) {
    let mut ranks = Job::new(&bed, "endless").meet(&[0, 1]);
    bed.cut(0, 1, true);
    std::thread::sleep(Duration::from_millis(500));
    bed.cut(0, 1, false);
    std::thread::sleep(Duration::from_secs(1));
    for rank in &mut ranks {
        assert!(rank.child.try_wait().unwrap().is_none(), "a rank has ended");
    }
    bed.cut(0, 1, true);
    assert_named(ranks, Instant::now(), &["rank 1", "node0:29600"]);
}

fn a_machine_without_power_is_named(mut bed: Bed) {
    let mut ranks = Job::new(&bed, "endless").meet(&[0, 0, 1, 1]);
    bed.power_off(1);
    let since = Instant::now();
    ranks.drain(2..).for_each(|rank| drop(rank.finish()));
    assert_named(ranks, since, &["ranks 2, 3", "rank 2", "rank 3"]);
}

fn a_paused_machine_is_named(bed: Bed) {
    let mut ranks = Job::new(&bed, "endless").meet(&[0, 0, 1, 1]);
    bed.pause(1).unwrap();
    let paused = ranks.split_off(2);
    assert_named(ranks, Instant::now(), &["rank 2", "ranks 2, 3", "rank 3"]);
    bed.go_on(1).unwrap();
    // Programs are paused one after the other: one may have contributed to a gather that misses only the other.
    assert_named(paused, Instant::now(), &["rank 0", "rank 1", "node0:29600", "rank 2", "rank 3"]);
}

/// The connections of the old IPv4 address end with an error. A new world meets at the new one.
fn a_machine_gets_another_address(mut bed: Bed) {
    for node in [1, 0] {
        let address = format!("{}:29600", bed.v4(0));
        let ranks = Job { address: address.clone(), ..Job::new(&bed, "endless") }.meet(&[0, 1]);
        bed.readdress(node).unwrap();
        assert_named(ranks, Instant::now(), &["rank 1", &address]);
        let again = Job { address: format!("{}:29600", bed.v4(0)), ..Job::new(&bed, "once") };
        for process in again.meet(&[0, 1]) {
            assert!(process.finish().ends_with("right\n"), "after node {node} got another address");
        }
    }
}

/// The ranks of each half can make a new world without the other ones.
fn halves_of_a_network_get_errors_and_go_on_alone(bed: Bed) {
    let mut ranks = Job::new(&bed, "endless").meet(&[0, 1, 2, 3]);
    bed.isolate(&[2, 3]);
    let since = Instant::now();
    let others = ranks.split_off(2);
    assert_named(ranks, since, &["rank 2", "ranks 2, 3", "rank 3"]);
    assert_named(others, since, &["node0:29600"]);
    let again = |first: usize| {
        let job = Job { address: format!("node{first}:29600"), ..Job::new(&bed, "once") };
        job.meet(&[first, first + 1])
    };
    for process in again(0).into_iter().chain(again(2)) {
        assert!(process.finish().ends_with("right\n"));
    }
}
