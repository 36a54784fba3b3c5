//! A switch in user space: a thread that passes frames between the nodes' TAP devices, and delays, loses, limits and
//! cuts them as told, separately in each direction.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{mpsc, Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{ppoll, PollFd, PollFlags};
use nix::sched::{setns, CloneFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::Pid;

/// What happens to frames from one node to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Time from a frame's departure to its arrival.
    pub delay: Duration,
    /// Share of frames that are lost, 0 to 1.
    pub loss: f64,
    /// Bits per second; `None` if there is no limit.
    pub rate: Option<u64>,
    /// Bytes that wait for the rate. A frame that finds the queue full is lost.
    pub queue: usize,
    /// All frames are lost.
    pub is_cut: bool,
}

impl Default for Link {
    fn default() -> Self {
        Self { delay: Duration::ZERO, loss: 0.0, rate: None, queue: 256 << 10, is_cut: false }
    }
}

/// Length of the largest Ethernet frame that the nodes' devices send.
const FRAME: usize = 1514;

/// Frames that are read from one device before the others get their turn.
const BURST: usize = 64;

/// Seed of the generator that decides which frames are lost.
const SEED: u64 = 0x5eed_0b5e;

/// By sender and receiver.
type Links = Arc<Mutex<Vec<Vec<Link>>>>;

/// A running switch. Dropping it ends the thread and removes the nodes' devices.
pub(crate) struct Switch {
    links: Links,
    /// Closing it ends the thread.
    life: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    /// Makes a device `eth0` in the network of each of these processes, and passes frames between them.
    pub fn start(nodes: Vec<Pid>, link: Link) -> io::Result<Self> {
        let links: Links = Arc::new(Mutex::new(vec![vec![link; nodes.len()]; nodes.len()]));
        let (life, end) = UnixStream::pair()?;
        let (started, is_started) = mpsc::channel();
        let known = Arc::clone(&links);
        // The thread stays in the network of the last node, which nothing else in it uses.
        let thread = std::thread::Builder::new().name("switch".into()).spawn(move || {
            let taps: io::Result<Vec<File>> = nodes.iter().map(|&node| tap(node)).collect();
            match taps {
                Ok(taps) => {
                    // The receiver waits for this message.
                    let _ = started.send(Ok(()));
                    Frames::new(taps, known).pass(&end);
                }
                Err(error) => drop(started.send(Err(error))),
            }
        })?;
        let switch = Self { links, life: Some(life), thread: Some(thread) };
        is_started.recv().map_err(|_| io::Error::other("the switch's thread has panicked"))??;
        Ok(switch)
    }

    /// Changes a link.
    pub fn change(&self, from: usize, to: usize, change: impl FnOnce(&mut Link)) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut links[from][to]);
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        drop(self.life.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// Makes a TAP device in the network of a process. This thread is in that network afterwards.
fn tap(node: Pid) -> io::Result<File> {
    setns(File::open(format!("/proc/{node}/ns/net"))?, CloneFlags::CLONE_NEWNET)?;
    let tun =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: all-zero bytes are a valid `ifreq`, which has integers and unions of integers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"eth0") {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which is this one; the descriptor is open.
    match unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } {
        0 => Ok(tun),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A frame under way. The earliest is first, and of those the one that was sent first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Flight {
    arrival: Instant,
    number: u64,
    to: usize,
    frame: Vec<u8>,
}

struct Frames {
    taps: Vec<File>,
    links: Links,
    flights: BinaryHeap<Reverse<Flight>>,
    /// When the last frame of each direction has left, at its rate.
    free: Vec<Vec<Instant>>,
    number: u64,
    random: u64,
}

impl Frames {
    fn new(taps: Vec<File>, links: Links) -> Self {
        let free = vec![vec![Instant::now(); taps.len()]; taps.len()];
        Self { taps, links, flights: BinaryHeap::new(), free, number: 0, random: SEED }
    }

    /// Passes frames until the other end of `end` closes.
    fn pass(mut self, end: &UnixStream) {
        let mut buffer = [0; FRAME];
        loop {
            let next = self.flights.peek().map(|Reverse(flight)| flight.arrival);
            let wait = next.map(|arrival| TimeSpec::from(arrival.saturating_duration_since(Instant::now())));
            let mut polled: Vec<_> =
                self.taps.iter().map(|tap| PollFd::new(tap.as_fd(), PollFlags::POLLIN)).collect();
            polled.push(PollFd::new(end.as_fd(), PollFlags::POLLIN));
            // An interruption is as good as an event: what is ready is looked at again.
            if ppoll(&mut polled, wait, None).is_ok() && polled[self.taps.len()].any() == Some(true) {
                return;
            }
            let ready: Vec<_> = (0..self.taps.len()).filter(|&tap| polled[tap].any() == Some(true)).collect();
            for from in ready {
                for _ in 0..BURST {
                    // An error means that there are no more frames, or that the node has ended.
                    let Ok(length) = (&self.taps[from]).read(&mut buffer) else { break };
                    self.accept(from, &buffer[..length]);
                }
            }
            self.deliver();
        }
    }

    /// Sends a frame on its way, to one node or to all others.
    fn accept(&mut self, from: usize, frame: &[u8]) {
        let Some(destination) = frame.first_chunk::<6>() else { return };
        let is_for_all = destination[0] & 1 == 1;
        let links = Arc::clone(&self.links);
        let links = links.lock().unwrap_or_else(PoisonError::into_inner);
        for to in (0..self.taps.len()).filter(|&to| to != from) {
            if is_for_all || usize::from(destination[5]) == to {
                self.depart(from, to, &links[from][to], frame);
            }
        }
    }

    fn depart(&mut self, from: usize, to: usize, link: &Link, frame: &[u8]) {
        if link.is_cut || self.draw() < link.loss {
            return;
        }
        let now = Instant::now();
        let mut departure = now;
        if let Some(rate) = link.rate {
            let time = |bytes: usize| Duration::from_secs_f64(bytes as f64 * 8.0 / rate as f64);
            let begin = self.free[from][to].max(now);
            if begin - now > time(link.queue) {
                return;
            }
            departure = begin + time(frame.len());
            self.free[from][to] = departure;
        }
        self.number += 1;
        let flight = Flight { arrival: departure + link.delay, number: self.number, to, frame: frame.into() };
        self.flights.push(Reverse(flight));
    }

    /// Hands over the frames that have arrived.
    fn deliver(&mut self) {
        let now = Instant::now();
        while self.flights.peek().is_some_and(|Reverse(flight)| flight.arrival <= now) {
            if let Some(Reverse(Flight { to, frame, .. })) = self.flights.pop() {
                // An error means that the node has ended or its queue is full: the frame is lost.
                let _ = (&self.taps[to]).write(&frame);
            }
        }
    }

    /// Returns a random number in 0..1, by SplitMix64 (Steele, Lea and Flood, 2014).
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
