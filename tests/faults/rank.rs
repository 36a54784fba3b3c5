//! A rank as a process of its own, which takes part in one world after the other as its parent says, until the parent kills it.
//!
//! It reads a line for each world and answers with lines that begin with `@`.

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Algorithm, Buffer, Communicator, Error, Host, ReduceOp, Result};

use crate::direct::{receive_long, send_long};
use crate::random::Random;
use crate::world::LIMIT;

/// Set in a process that is a rank.
pub const RANK_PROCESS: &str = "FAST_ALLREDUCE_TEST_RANK_PROCESS";

/// Elements of a call: one launch and several, one pack and many.
const COUNTS: [usize; 6] = [1, 7, 500, 1000, 5000, 40_000];

/// The clock that all processes share.
pub fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What a rank does in a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Calls until one fails.
    Endless,
    /// So many calls.
    Calls(usize),
    /// Ends its process normally after so many calls, with its communicator open.
    Exit(usize),
    /// Forks after so many calls and kills itself, not the fork.
    Fork(usize),
    /// Forks after so many calls and closes its communicator; the fork lives on.
    ForkThenClose(usize),
    /// Forks after so many calls and aborts; the fork lives on.
    ForkThenAbort(usize),
    /// Comes late to the making of its communicator, then so many calls.
    Late(usize),
    /// Closes what all descriptors but the standard ones stand for after so many calls, then its communicator.
    Shut(usize),
    /// Twice so many calls, of which it tells that half are done.
    Half(usize),
    /// The same, but it comes late to the second half.
    LateHalf(usize),
    /// So many calls, and as many in a communicator that it then shrinks this one to, of all ranks.
    Shrink(usize),
    /// The same, but it comes late to the shrinking.
    LateShrink(usize),
    /// May open so many more descriptors while it makes its communicator, then calls.
    Starve(usize),
    /// Twice so many calls; after half of them it may no longer read other processes.
    Blinded(usize),
    /// Sends long private messages to rank 1, and aborts after so many microseconds; 0: never.
    Sends(usize),
    /// Receives them, from rank 0.
    Receives(usize),
}

impl Part {
    pub fn line(self) -> String {
        match self {
            Self::Endless => "endless 0".into(),
            Self::Calls(number) => format!("calls {number}"),
            Self::Exit(number) => format!("exit {number}"),
            Self::Fork(number) => format!("fork {number}"),
            Self::ForkThenClose(number) => format!("fork-close {number}"),
            Self::ForkThenAbort(number) => format!("fork-abort {number}"),
            Self::Starve(number) => format!("starve {number}"),
            Self::Blinded(number) => format!("blinded {number}"),
            Self::Sends(number) => format!("sends {number}"),
            Self::Receives(number) => format!("receives {number}"),
            Self::Late(number) => format!("late {number}"),
            Self::Shut(number) => format!("shut {number}"),
            Self::Half(number) => format!("half {number}"),
            Self::LateHalf(number) => format!("late-half {number}"),
            Self::Shrink(number) => format!("shrink {number}"),
            Self::LateShrink(number) => format!("late-shrink {number}"),
        }
    }

    fn of(name: &str, number: usize) -> Self {
        match name {
            "calls" => Self::Calls(number),
            "exit" => Self::Exit(number),
            "fork" => Self::Fork(number),
            "fork-close" => Self::ForkThenClose(number),
            "fork-abort" => Self::ForkThenAbort(number),
            "starve" => Self::Starve(number),
            "blinded" => Self::Blinded(number),
            "sends" => Self::Sends(number),
            "receives" => Self::Receives(number),
            "late" => Self::Late(number),
            "shut" => Self::Shut(number),
            "half" => Self::Half(number),
            "late-half" => Self::LateHalf(number),
            "shrink" => Self::Shrink(number),
            "late-shrink" => Self::LateShrink(number),
            _ => Self::Endless,
        }
    }
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("\n@{line}\n").as_bytes()).and_then(|()| out.flush()).unwrap();
}

/// Not a test: what a process that is a rank runs.
#[test]
#[ignore = "a process of other tests"]
fn rank_process() {
    if std::env::var_os(RANK_PROCESS).is_none() {
        return;
    }
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["resources"] => say(&format!("resources {}", resources())),
            ["forbid", call, errno] => forbid(call.parse().unwrap(), errno.parse().unwrap()),
            [id, rank, size, algorithm, seed, timeout, part, times] => {
                let number = |text: &str| text.parse::<usize>().unwrap();
                let world = World {
                    id: id.parse().unwrap(),
                    rank: number(rank),
                    size: number(size),
                    algorithm: algorithm.parse().unwrap(),
                    seed: number(seed),
                    timeout: Duration::from_millis(number(timeout) as u64),
                    part: Part::of(part, number(times)),
                };
                world.take_part();
            }
            _ => panic!("{line}"),
        }
    }
}

/// Descriptors, threads and mappings of this crate's memory, once threads that end have ended.
fn resources() -> String {
    std::thread::sleep(Duration::from_millis(100));
    let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:fast-allreduce")).count();
    format!("{} {} {mapped}", entries("/proc/self/fd"), entries("/proc/self/task"))
}

struct World {
    id: UniqueId,
    rank: usize,
    size: usize,
    algorithm: Algorithm,
    seed: usize,
    timeout: Duration,
    part: Part,
}

impl World {
    fn take_part(&self) {
        let mut calls = 0;
        let built = self.build().and_then(|communicator| {
            let buffer = communicator.alloc(COUNTS[COUNTS.len() - 1])?;
            Ok((communicator, buffer))
        });
        let (communicator, mut buffer) = match built {
            Ok(built) => built,
            Err(error) => return say(&end(false, calls, now_ns(), 0, &Err(error))),
        };
        say("ready");
        let result = match self.part {
            Part::Sends(abort_after) => send_long(&communicator, abort_after, &mut calls),
            Part::Receives(_) => receive_long(&communicator, &mut calls),
            _ => self.call(&communicator, Some(&mut buffer), &mut calls),
        };
        let at = now_ns();
        let (survivors, read) = (communicator.survivors(), communicator.counters().direct_reads);
        let direct = communicator.direct_reads().map(ToString::to_string).unwrap_or_default();
        let left = format!("survivors {survivors:?}; {read} read; {direct}");
        let started = Instant::now();
        drop(buffer);
        drop(communicator);
        say(&(end(true, calls, at, started.elapsed().as_micros(), &result) + &left));
    }

    fn build(&self) -> Result<Communicator<Host>> {
        let local = Local::connect(&self.id, self.rank, self.size, LIMIT)?;
        say("met");
        if let Part::Late(_) = self.part {
            come_late();
        }
        let limit = match self.part {
            Part::Starve(spare) => Some(limit_descriptors(spare)),
            _ => None,
        };
        let built = Communicator::builder()
            .algorithm(self.algorithm)
            .max_bytes(64 << 10)
            .timeout(self.timeout)
            .check(false)
            .build(Host::new(), local);
        if let Some(limit) = limit {
            set_descriptor_limit(limit);
        }
        built
    }

    /// The same calls on every rank, checked. Wrong data ends the process.
    fn call(
        &self,
        communicator: &Communicator<Host>,
        mut buffer: Option<&mut Buffer<u32>>,
        calls: &mut usize,
    ) -> Result<()> {
        let mut random = Random::fixed(self.seed as u64);
        loop {
            match self.part {
                Part::Calls(number) | Part::Starve(number) | Part::Late(number) if *calls == number => {
                    return Ok(())
                }
                Part::Shrink(number) | Part::LateShrink(number) if *calls == number => {
                    say("shrinking");
                    if let Part::LateShrink(_) = self.part {
                        come_late();
                    }
                    let all: Vec<_> = (0..self.size).collect();
                    let smaller = communicator.shrink(&all)?;
                    return World { part: Part::Calls(2 * number), id: self.id, ..*self }
                        .call(&smaller, None, calls);
                }
                Part::Shut(number) if *calls == number => {
                    shut_descriptors();
                    return Ok(());
                }
                Part::Half(number) | Part::LateHalf(number) | Part::Blinded(number)
                    if *calls == 2 * number =>
                {
                    return Ok(())
                }
                Part::Blinded(number) if *calls == number => {
                    forbid(libc::SYS_process_vm_readv, libc::EPERM as u32);
                }
                Part::Half(number) | Part::LateHalf(number) if *calls == number => {
                    say("half");
                    if let Part::LateHalf(_) = self.part {
                        come_late();
                    }
                }
                Part::Exit(number) if *calls == number => std::process::exit(0),
                Part::Fork(number) if *calls == number => {
                    fork_and_live();
                    // SAFETY: ends this process.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                    unreachable!("killed");
                }
                Part::ForkThenClose(number) if *calls == number => {
                    fork_and_live();
                    return Ok(());
                }
                Part::ForkThenAbort(number) if *calls == number => {
                    fork_and_live();
                    communicator.abort();
                }
                _ => {}
            }
            let (count, salt) = (random.pick(&COUNTS), random.below(1000) as u32);
            let kind = random.below(12);
            let root = random.below(self.size);
            let data = |rank: usize| (0..count).map(|i| i as u32 * salt + rank as u32).collect::<Vec<_>>();
            let buffer = buffer.as_deref_mut().filter(|_| salt % 2 == 0);
            let (output, expected) = self.collective(communicator, buffer, kind, root, &data)?;
            if let Some(index) = (0..expected.len()).find(|&index| output[index] != expected[index]) {
                let is = output[index];
                say(&format!("wrong call {calls}, {kind}: element {index} of {count} is {is}"));
                std::process::exit(1);
            }
            *calls += 1;
        }
    }
}

impl World {
    /// One call, an allreduce half of the time; what came of it and what must.
    fn collective(
        &self,
        communicator: &Communicator<Host>,
        buffer: Option<&mut Buffer<u32>>,
        kind: usize,
        root: usize,
        data: &dyn Fn(usize) -> Vec<u32>,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        let (rank, size) = (self.rank, self.size);
        let mut own = data(rank);
        let count = own.len();
        let sum = || {
            let (first, size) = (data(0), size as u32);
            first.into_iter().map(|element| element * size + size * (size - 1) / 2).collect()
        };
        let all = || (0..size).flat_map(data).collect::<Vec<_>>();
        Ok(match kind {
            0 => {
                let mut output = vec![0; count * size];
                communicator.all_gather(&own, &mut output)?;
                (output, all())
            }
            1 => {
                communicator.broadcast(&mut own, root)?;
                (own, data(root))
            }
            2 | 10 | 11 => {
                let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
                let mut output = vec![0; count];
                let input = match buffer {
                    // A long message is read from there.
                    Some(buffer) => {
                        buffer[..count].copy_from_slice(&own);
                        &buffer[..count]
                    }
                    None => &own,
                };
                communicator.send_recv(input, right, &mut output, left, count as u32)?;
                (output, data(left))
            }
            3 => {
                let mut output = vec![0; count * size];
                communicator.all_to_all(&own.repeat(size), &mut output)?;
                (output, all())
            }
            4 => {
                let mut output = vec![0; count];
                communicator.reduce_scatter(&own.repeat(size), &mut output, ReduceOp::Sum)?;
                (output, sum())
            }
            _ => {
                communicator.all_reduce_in_place(&mut own, ReduceOp::Sum)?;
                (own, sum())
            }
        })
    }
}

fn end(built: bool, calls: usize, at: u64, drop_us: u128, result: &Result<()>) -> String {
    let named = match result {
        Ok(()) => "ok -".to_owned(),
        Err(Error::PeerLost { rank, .. }) => format!("lost {rank}"),
        Err(Error::PeerFailed { rank, .. }) => format!("failed {rank}"),
        Err(Error::Timeout { missing, .. }) => {
            let missing: Vec<_> = missing.iter().map(usize::to_string).collect();
            format!("timeout {}", missing.join(","))
        }
        Err(_) => "other -".to_owned(),
    };
    let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default().replace('\n', " ");
    format!("end {} {calls} {at} {drop_us} {named} {text}", u8::from(built))
}

/// The child keeps all that the rank had open, until the parent's parent ends it, or its own clock.
fn fork_and_live() {
    // SAFETY: the child calls only what is safe after a fork: alarm and pause.
    match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: ends this process in 30 s, and sleeps.
            unsafe {
                libc::alarm(30);
                libc::pause();
            }
        },
        child => say(&format!("child {child} {}", now_ns())),
    }
}

/// Half a second of this process's own time.
fn come_late() {
    (0..50).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
}

/// Has the kernel answer a system call with an error in this thread from now on, as older ones and strict sandboxes do.
fn forbid(call: i64, errno: u32) {
    let step =
        |code: u32, value: u32, no: u8| libc::sock_filter { code: code as u16, jt: 0, jf: no, k: value };
    let mut steps = [
        // The number of the system call, which stands first in what the filter sees.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 1),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the filter and its steps live for the calls, which copy them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
        assert_eq!(libc::syscall(call, 0, 0, 0, 0, 0, 0), -1);
    }
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(errno as i32));
}

/// Puts /dev/null in the place of all descriptors but the standard ones. Not closed, as the standard library's debug builds look
/// for that.
fn shut_descriptors() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let numbers: Vec<i32> = numbers.map(|name| name.to_string_lossy().parse().unwrap()).collect();
    for number in numbers.into_iter().filter(|&number| number > 2 && number != null.as_raw_fd()) {
        // SAFETY: asks for the flags of a number; what it is of is used no more, but for what the test is about.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
            // SAFETY: as above.
            unsafe { libc::dup2(null.as_raw_fd(), number) };
        }
    }
}

/// Leaves room for `spare` more descriptors. Returns the old limit.
pub fn limit_descriptors(spare: usize) -> libc::rlim_t {
    let number = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().into_string().unwrap().parse::<usize>().unwrap()
    };
    let listed: Vec<usize> = std::fs::read_dir("/proc/self/fd").unwrap().map(number).collect();
    // The one through which they were listed is closed again.
    let is_open = |number: usize| {
        // SAFETY: asks for the flags of a number that may be no descriptor.
        listed.contains(&number) && unsafe { libc::fcntl(number as i32, libc::F_GETFD) } >= 0
    };
    // New ones take the lowest numbers that are free.
    let last_free = (0..).filter(|&number| !is_open(number)).nth(spare).unwrap();
    set_descriptor_limit(last_free as libc::rlim_t)
}

/// Returns the old limit.
pub fn set_descriptor_limit(limit: libc::rlim_t) -> libc::rlim_t {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads into and from the structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits), 0);
        let old = std::mem::replace(&mut limits.rlim_cur, limit);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limits), 0);
        old
    }
}
