//! The crate's threads receive none of the signals that are sent to the process.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Communicator, Host, ReduceOp};
use nix::sys::signal::{kill, sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::unistd::{getpid, gettid};

use crate::fixtures::alone::{is_alone, take};
use crate::fixtures::world::{builder, LIMIT};

static TAKEN_BY: AtomicI32 = AtomicI32::new(0);

extern "C" fn handler(_signal: i32) {
    // SAFETY: gettid only returns a number, and is safe in a handler.
    TAKEN_BY.store(unsafe { libc::gettid() }, Ordering::SeqCst);
}

/// Returns this process's threads: the name, and the blocked signals as a mask whose lowest bit is signal 1.
fn threads() -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let read = |file: std::path::PathBuf| std::fs::read_to_string(file).unwrap_or_default();
    let status = tasks.map(|task| read(task.unwrap().path().join("status")));
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    let thread = |status: String| {
        (field(&status, "Name:"), u64::from_str_radix(&field(&status, "SigBlk:"), 16).unwrap_or(0))
    };
    status.map(thread).collect()
}

fn blocks(mask: u64, signal: Signal) -> bool {
    mask >> (signal as i32 - 1) & 1 == 1
}

/// Builds two ranks whose workers, watchers and rendezvous are threads of this process.
fn world() -> Vec<Communicator<Host>> {
    let id = UniqueId::new().unwrap();
    std::thread::scope(|scope| {
        let build = |rank| {
            let id = &id;
            scope.spawn(move || {
                let local = Local::connect(id, rank, 2, LIMIT).unwrap();
                builder().build(Host::new().workers(3).unwrap(), local).unwrap()
            })
        };
        let running = [0, 1].map(build);
        running.map(|rank| rank.join().unwrap()).into()
    })
}

#[test]
fn a_signal_to_the_process_waits_for_its_own_threads() {
    let own_faults = [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL];
    let blocked = own_faults.into_iter().chain([Signal::SIGUSR1]);
    if !is_alone("environment::signals::a_signal_to_the_process_waits_for_its_own_threads", blocked) {
        return;
    }
    let action = SigAction::new(SigHandler::Handler(handler), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler only stores the thread's number in an atomic.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    // This thread does not block the signal, like a server's thread, while it creates the crate's threads.
    take(Signal::SIGUSR1, true);
    let ranks = world();
    take(Signal::SIGUSR1, false);

    // Two workers and a watcher for each rank, and the rendezvous. A new thread sets its name and mask soon after it
    // starts.
    let names = ["allreduce-", "fast-allreduce", "rendezvous"];
    let started = Instant::now();
    let threads = loop {
        let is_the_crates = |(name, _): &(String, u64)| names.iter().any(|start| name.starts_with(start));
        let threads: Vec<_> = threads().into_iter().filter(is_the_crates).collect();
        // The thread that created them blocks these.
        let ready = threads.iter().all(|(_, mask)| !own_faults.iter().any(|signal| blocks(*mask, *signal)));
        if threads.len() == 7 && ready {
            break threads;
        }
        assert!(started.elapsed() < LIMIT, "{threads:?}");
        std::thread::sleep(Duration::from_millis(1));
    };
    for (name, mask) in threads {
        for signal in [Signal::SIGUSR1, Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD, Signal::SIGALRM] {
            assert!(blocks(mask, signal), "{name} takes {signal}");
        }
    }

    kill(getpid(), Signal::SIGUSR1).unwrap();
    // Calls continue meanwhile, and no thread of the crate receives the signal.
    std::thread::scope(|scope| {
        for communicator in &ranks {
            scope.spawn(move || {
                let started = Instant::now();
                let mut data = vec![1u32; 200_000];
                loop {
                    data.fill(1);
                    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                    assert!(data.iter().all(|&element| element == 2));
                    let mut done = [u8::from(started.elapsed() >= Duration::from_millis(200))];
                    communicator.all_reduce_in_place(&mut done, ReduceOp::Max).unwrap();
                    if done == [1] {
                        break;
                    }
                }
            });
        }
    });
    assert_eq!(TAKEN_BY.load(Ordering::SeqCst), 0, "a thread of the crate received the signal");
    take(Signal::SIGUSR1, true);
    assert_eq!(TAKEN_BY.load(Ordering::SeqCst), gettid().as_raw());
}
