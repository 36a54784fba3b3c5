//! Ranks that receive signals all the time, from before they meet, by a handler without SA_RESTART: every system call
//! that waits ends with EINTR. Meanwhile forks drop their copies of communicators and buffers.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Algorithm, Buffer, Communicator, Host, ReduceOp};
use nix::errno::Errno;
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::sys::wait::{waitpid, WaitStatus};
use nix::unistd::{alarm, fork, getpid, gettid, ForkResult, Pid};

use crate::fixtures::alone::{is_alone, take};
use crate::fixtures::world::{builder, LIMIT};

/// Set in rank processes: the id, the rank, and the number of ranks.
const RANK: &str = "FAST_ALLREDUCE_TEST_ALARMED_RANK";

/// Time between two alarms. Allocating, meeting and registering take longer.
const INTERVAL_US: u32 = 300;

const ROUNDS: usize = 6;

/// Elements of a buffer: several blocks, and enough for direct reads of messages.
const COUNT: usize = 20_000;

static ALARMS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_alarm(_signal: i32) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

fn set_action(handler: SigHandler) {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler is the default one, or one that only performs an atomic addition.
    unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
}

/// Interrupts this process every `micros` microseconds; 0 stops that.
fn interrupt_every(micros: u32) {
    let interval = libc::timeval { tv_sec: 0, tv_usec: micros.into() };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: the call reads one itimerval, which is valid.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) }, 0);
}

fn meet(id: &UniqueId, rank: usize, size: usize) -> Communicator<Host> {
    let local = Local::connect(id, rank, size, LIMIT).unwrap();
    builder().algorithm(Algorithm::TwoShotPull).max_bytes(64 << 10).build(Host::new(), local).unwrap()
}

/// Registers memory in both ways and makes calls from it, with `interlude` between the two.
fn register_and_call(communicator: &Communicator<Host>, interlude: impl Fn(&Buffer<u32>)) {
    let (rank, size) = (communicator.rank(), communicator.world_size());
    let [left, right] = [size - 1, 1].map(|far| (rank + far) % size);
    for round in 0..ROUNDS {
        let is_symmetric = round % 2 == 1;
        let mut buffer: Buffer<u32> = match is_symmetric {
            true => communicator.symmetric_memory(COUNT).unwrap().register().unwrap(),
            false => communicator.alloc(COUNT).unwrap(),
        };
        interlude(&buffer);
        let value = |rank: usize| (100 * rank + round) as u32;
        buffer.fill(value(rank));
        let mut output = vec![u32::MAX; COUNT];
        communicator.all_reduce(&buffer, &mut output, ReduceOp::Sum).unwrap();
        let sum = (0..size).map(value).sum();
        assert!(output.iter().all(|&element| element == sum), "rank {rank}, round {round}");
        communicator.send_recv(&buffer, right, &mut output, left, 0).unwrap();
        assert!(output.iter().all(|&element| element == value(left)), "rank {rank}, round {round}");
        if is_symmetric {
            buffer.deregister().unwrap().free().unwrap();
        }
    }
}

/// Forks. The child drops its copies of the communicator and the buffer; the parent's remain valid.
fn fork_and_drop(communicator: &Communicator<Host>, buffer: &Buffer<u32>) {
    // The kernel restarts fork after each signal.
    interrupt_every(0);
    // SAFETY: the child only drops values, which takes no lock in a fork, and leaves by _exit; if it waits, the alarm
    // ends it.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            set_action(SigHandler::SigDfl);
            alarm::set(20);
            // SAFETY: the child reads each value once and never uses the originals again. The parent's values are
            // separate copies.
            unsafe {
                drop(std::ptr::read(buffer));
                drop(std::ptr::read(communicator));
                libc::_exit(0)
            }
        }
        ForkResult::Parent { child } => {
            interrupt_every(INTERVAL_US);
            let ended = loop {
                match waitpid(child, None) {
                    Err(Errno::EINTR) => {}
                    ended => break ended,
                }
            };
            assert_eq!(ended, Ok(WaitStatus::Exited(child, 0)));
        }
    }
}

/// Not a test: the main function of a rank process.
#[test]
#[ignore = "a process of other tests"]
fn rank_process() {
    let Ok(text) = std::env::var(RANK) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [id, rank, size] = words[..] else { panic!("{text}") };
    set_action(SigHandler::Handler(count_alarm));
    take(Signal::SIGALRM, true);
    interrupt_every(INTERVAL_US);
    let communicator = meet(&id.parse().unwrap(), rank.parse().unwrap(), size.parse().unwrap());
    register_and_call(&communicator, |buffer| fork_and_drop(&communicator, buffer));
    drop(communicator);
    interrupt_every(0);
    assert!(ALARMS.load(Ordering::Relaxed) > 0);
}

#[test]
fn processes_register_and_call() {
    for size in [2, 3] {
        let id = UniqueId::new().unwrap();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "environment::alarms::rank_process", "--ignored", "--nocapture"]);
            command.env(RANK, format!("{id} {rank} {size}"));
            // The alarms must reach the thread that runs the rank, not the test runner's.
            // SAFETY: the closure only changes a signal mask, which is async-signal-safe.
            unsafe { command.pre_exec(|| Ok(SigSet::from(Signal::SIGALRM).thread_block()?)) };
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
        for (rank, output) in outputs.iter().enumerate() {
            let [said, complained] =
                [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
            let passed = output.status.success() && said.contains("1 passed");
            assert!(passed, "rank {rank} of {size}: {}: {said}{complained}", output.status);
        }
    }
}

/// Interrupts one thread of this process. Returns whether it was still running.
fn interrupt(thread: Pid) -> bool {
    // SAFETY: sends a signal whose handler only performs an atomic addition.
    unsafe { libc::syscall(libc::SYS_tgkill, getpid().as_raw(), thread.as_raw(), libc::SIGALRM) == 0 }
}

#[test]
fn threads_register_and_call() {
    if !is_alone("environment::alarms::threads_register_and_call", []) {
        return;
    }
    set_action(SigHandler::Handler(count_alarm));
    let id = UniqueId::new().unwrap();
    std::thread::scope(|scope| {
        let run = |rank| {
            let (id, (sender, receiver)) = (&id, channel());
            scope.spawn(move || {
                sender.send(gettid()).unwrap();
                register_and_call(&meet(id, rank, 3), |_| ());
            });
            receiver.recv().unwrap()
        };
        let ranks = [0, 1, 2].map(run);
        while ranks.map(interrupt).contains(&true) {
            std::thread::sleep(Duration::from_micros(INTERVAL_US.into()));
        }
    });
    assert!(ALARMS.load(Ordering::Relaxed) > 0);
}
