//! The test bed itself: what its network does is what it was told to do, and nothing of it is left.

#[macro_use]
#[path = "../../../tests/runner/mod.rs"]
mod runner;

use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fast_allreduce_network::{Bed, Link, Wire};
use runner::{always, Found, Missing};

tests! {
    bridge => nodes_have_their_own_names_memory_and_processes, a_node_ends_at_once, the_agent_runs_commands,
        an_address_changes;
    switch => delays_are_kept, frames_are_lost_at_the_rate_given, a_cut_and_its_end, the_rate_is_kept;
    always => other_numbers_of_nodes_are_refused;
}

/// The name of this program's mode that returns datagrams to their sender.
const ECHO: &str = "--echo";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(ECHO) => echo(),
        _ => runner::run(tests()),
    }
}

fn found(wire: Wire) -> Found<Bed> {
    Bed::new(2, wire).map_err(|error| Missing::new("network", error))
}

fn bridge() -> Found<Bed> {
    found(Wire::Bridge)
}

fn switch() -> Found<Bed> {
    found(Wire::Switch(Link::default()))
}

const PORT: u16 = 7;

/// Returns each datagram to its sender, in the namespaces where this runs.
fn echo() -> ExitCode {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
    println!("ready");
    let mut buffer = [0; 2048];
    loop {
        let (length, sender) = socket.recv_from(&mut buffer).unwrap();
        // An error is that of an earlier datagram.
        let _ = socket.send_to(&buffer[..length], sender);
    }
}

/// An echo on node 1, and a socket on node 0 that is connected to it.
struct Pair {
    socket: UdpSocket,
    _echo: Child,
}

impl Pair {
    fn new(bed: &Bed) -> Self {
        use std::io::BufRead as _;
        let mut command = bed.command(1, std::env::current_exe().unwrap());
        let mut echo = command.arg(ECHO).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(echo.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let peer = bed.v4(1);
        // A thread can be in another network namespace than the rest of its process, and so is its socket.
        let network = std::fs::File::open(format!("/proc/{}/ns/net", holder(bed, 0))).unwrap();
        let socket = std::thread::spawn(move || {
            nix::sched::setns(network, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.connect((peer, PORT)).unwrap();
            socket
        });
        let socket = socket.join().unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let pair = Self { socket, _echo: echo };
        // The addresses are resolved.
        assert!((0..20).any(|_| pair.ask(0).is_some()), "no answer");
        pair
    }

    /// Sends a number, and returns how long it takes to come back.
    fn ask(&self, number: u32) -> Option<Duration> {
        let start = Instant::now();
        self.socket.send(&number.to_le_bytes()).unwrap();
        let mut buffer = [0; 2048];
        while let Ok(length) = self.socket.recv(&mut buffer) {
            if buffer[..length] == number.to_le_bytes() {
                return Some(start.elapsed());
            }
        }
        None
    }

    /// Sends datagrams whose frames have 1,000 bytes.
    fn send_100(&self) {
        for _ in 0..100 {
            self.socket.send(&[1; 958]).unwrap();
        }
    }

    /// Returns how many of these datagrams come back.
    fn count(&self, datagrams: u32) -> u32 {
        self.socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut buffer = [0; 2048];
        let mut received = 0;
        for number in 0..datagrams {
            self.socket.send(&number.to_le_bytes()).unwrap();
            received += u32::from(self.socket.recv(&mut buffer).is_ok());
        }
        received
    }
}

/// Returns the process that holds a node, from the agent's script.
fn holder(bed: &Bed, node: usize) -> u32 {
    let script = std::fs::read_to_string(bed.agent()).unwrap();
    let (_, rest) = script.split_once(&format!("node{node} ")).unwrap();
    rest.split_once("pid=").unwrap().1.split(' ').next().unwrap().parse().unwrap()
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn nodes_have_their_own_names_memory_and_processes(bed: Bed) {
    let script = "hostname; ls -A /dev/shm | wc -l; ls -d /proc/[0-9]* | wc -l; echo $$; cat /etc/hosts";
    let own = format!("/dev/shm/fast-allreduce-network-test-{}", std::process::id());
    std::fs::write(&own, "x").unwrap();
    let output = bed.command(1, "sh").args(["-c", script]).output().unwrap();
    std::fs::remove_file(own).unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines[..2], ["node1", "0"], "{output}");
    assert!(lines[2].parse::<u32>().unwrap() < 10, "processes of other nodes are seen: {output}");
    assert!(lines.contains(&"198.18.0.1 node0") && lines.contains(&"fd00:5a::2 node1"), "{output}");
}

fn a_node_ends_at_once(mut bed: Bed) {
    let mut sleeper = bed.command(1, "sleep").arg("1000").spawn().unwrap();
    while bed.processes(1).unwrap() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.power_off(1);
    assert!(!sleeper.wait().unwrap().success());
    assert!(bed.command(1, "true").stderr(Stdio::null()).status().is_ok_and(|status| !status.success()));
    let folder = bed.agent().parent().unwrap().to_owned();
    let other = format!("/proc/{}", holder(&bed, 0));
    let mut left = bed.command(0, "sleep").arg("1000").spawn().unwrap();
    drop(bed);
    // Its process ends with the bed.
    assert!(!left.wait().unwrap().success());
    assert!(!folder.exists() && !std::path::Path::new(&other).exists());
}

fn the_agent_runs_commands(bed: Bed) {
    let agent = |arguments: &[&str]| said(Command::new(bed.agent()).args(arguments));
    assert_eq!(agent(&["-x", "node1", "hostname", "&&", "echo", "$((1 + 1))"]), "node1\n2\n");
    assert_eq!(agent(&["198.18.0.1", "hostname"]), "node0\n");
    let unknown = Command::new(bed.agent()).args(["node7", "hostname"]).output().unwrap();
    assert_eq!((unknown.status.code(), &*unknown.stderr), (Some(1), &b"no node is named node7\n"[..]));
}

fn an_address_changes(mut bed: Bed) {
    let before = bed.v4(1);
    bed.readdress(1).unwrap();
    assert_ne!(bed.v4(1), before);
    let listed = said(bed.command(1, "ip").args(["-4", "address", "show", "eth0"]));
    assert!(listed.contains(&format!("inet {}/16", bed.v4(1))), "{listed}");
    assert!(!listed.contains(&format!("inet {before}/16")), "{listed}");
    assert!(Pair::new(&bed).ask(1).is_some());
}

fn delays_are_kept(bed: Bed) {
    let pair = Pair::new(&bed);
    for milliseconds in [5, 50] {
        let delay = Duration::from_millis(milliseconds);
        bed.set(0, 1, Link { delay, ..Link::default() });
        bed.set(1, 0, Link { delay: 2 * delay, ..Link::default() });
        let times = (0..7).map(|number| pair.ask(number).unwrap());
        let shortest = times.min().unwrap();
        // This machine may be busy: a frame is late then, but never early.
        assert!(
            (3 * delay..3 * delay + Duration::from_millis(60)).contains(&shortest),
            "{delay:?}: {shortest:?}"
        );
    }
}

fn frames_are_lost_at_the_rate_given(bed: Bed) {
    let pair = Pair::new(&bed);
    bed.set(0, 1, Link { loss: 1.0, ..Link::default() });
    assert_eq!(pair.count(1), 0);
    bed.set(0, 1, Link { loss: 0.1, ..Link::default() });
    pair.socket.set_nonblocking(true).unwrap();
    let (datagrams, mut received) = (2000, 0);
    let mut buffer = [0; 2048];
    for number in 0..datagrams {
        pair.socket.send(&u32::to_le_bytes(number)).unwrap();
        // A queue on the way may not hold all.
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(200) {
            received += u32::from(pair.socket.recv(&mut buffer).is_ok());
        }
    }
    pair.socket.set_nonblocking(false).unwrap();
    while pair.socket.recv(&mut buffer).is_ok() {
        received += 1;
    }
    // Four standard deviations of a binomial distribution. A busy machine loses more, in queues that are full.
    let mean = f64::from(datagrams) * 0.1;
    let least = mean - 4.0 * (mean * 0.9).sqrt();
    let lost = f64::from(datagrams - received);
    assert!((least..3.0 * mean).contains(&lost), "{received} of {datagrams}");
}

fn a_cut_and_its_end(bed: Bed) {
    let pair = Pair::new(&bed);
    bed.cut(0, 1, true);
    assert_eq!(pair.count(2), 0);
    bed.cut(0, 1, false);
    pair.socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert!((0..10).any(|number| pair.ask(number).is_some()));
    bed.isolate(&[1]);
    assert_eq!(pair.count(2), 0);
}

/// 100 datagrams of 1,000 bytes take 0.8 s at 1 Mbit/s, and those beyond the queue are lost.
fn the_rate_is_kept(bed: Bed) {
    let pair = Pair::new(&bed);
    let link = Link { rate: Some(1_000_000), ..Link::default() };
    bed.set(0, 1, link);
    let start = Instant::now();
    pair.send_100();
    let mut buffer = [0; 2048];
    for _ in 0..100 {
        pair.socket.recv(&mut buffer).unwrap();
    }
    let took = start.elapsed();
    assert!((780..2500).contains(&took.as_millis()), "{took:?}");
    bed.set(0, 1, Link { queue: 5000, ..link });
    pair.send_100();
    pair.socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let received = (0..100).take_while(|_| pair.socket.recv(&mut buffer).is_ok()).count();
    // Five, and those that the rate lets pass while this machine is busy with others.
    assert!((5..60).contains(&received), "{received}");
}

fn other_numbers_of_nodes_are_refused() {
    for nodes in [0, 1, 5] {
        assert!(Bed::new(nodes, Wire::Bridge).is_err());
    }
}
