//! Worker threads, which run the blocks of a launch from 1 on; the calling thread runs block 0.

use std::mem::offset_of;
use std::os::unix::thread::JoinHandleExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::CpuSet;

use super::cores;
use super::isa::Entry;
use crate::abi::{FaLaunch, FaStatus};
use crate::error::{Error, Result};
use crate::fork::ForkCheck;
use crate::interruption;
use crate::thread::{self, SMALL_STACK};

/// Interval in which the waiting caller checks whether its program wants to interrupt the call.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// Worker threads: parked between launches, joined on drop.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    fork_check: ForkCheck,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    started: Condvar,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of launches, so that a worker runs each of them once.
    generation: u64,
    launch: Option<Launch>,
    running: usize,
    stop: bool,
}

#[derive(Debug, Clone, Copy)]
struct Launch {
    entry: Entry,
    arguments: *const FaLaunch,
    blocks: u32,
}

// SAFETY: `run` keeps the arguments alive until no worker uses them any more.
unsafe impl Send for Launch {}

impl Workers {
    /// Starts `count` threads.
    pub(super) fn start(count: usize) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut workers = Self { shared, threads: Vec::with_capacity(count), fork_check: ForkCheck::new() };
        for index in 0..count {
            let shared = Arc::clone(&workers.shared);
            let block = u32::try_from(index + 1).unwrap_or(u32::MAX);
            let name = format!("allreduce-{block}");
            let thread = thread::spawn(name, SMALL_STACK, move || shared.work(block))
                .map_err(Error::io("starting a worker thread"))?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Returns the number of workers.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Binds one worker to these cores.
    pub(super) fn bind(&self, index: usize, own: &[usize]) -> nix::Result<()> {
        let set = cores::cpu_set(own)?;
        let thread = self.threads[index].as_pthread_t();
        // SAFETY: the thread has not been joined, so its handle is valid; a `CpuSet` is a `cpu_set_t` of that size.
        let code = unsafe {
            libc::pthread_setaffinity_np(
                thread,
                size_of::<CpuSet>(),
                std::ptr::from_ref(&set).cast::<libc::cpu_set_t>(),
            )
        };
        if code == 0 {
            Ok(())
        } else {
            Err(Errno::from_raw(code))
        }
    }

    /// Runs all blocks of a launch and returns after all have ended.
    ///
    /// # Safety
    ///
    /// As for `entry`, with every block in `0..arguments.blocks`; there are workers for blocks 1 and up.
    pub(super) unsafe fn run(&self, entry: Entry, arguments: &FaLaunch) {
        {
            let mut state = self.shared.lock();
            state.generation += 1;
            state.launch = Some(Launch { entry, arguments, blocks: arguments.blocks });
            state.running = self.threads.len();
        }
        self.shared.started.notify_all();
        // SAFETY: by the caller's contract.
        unsafe { entry(arguments, 0) };
        let mut state = self.shared.lock();
        while state.running > 0 {
            if interruption::has_callback() {
                // The other blocks may still wait for peers.
                let waited = self.shared.finished.wait_timeout(state, LONGEST_WAIT);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
                if !interruption::goes_on() {
                    let abort = arguments.status + offset_of!(FaStatus, abort) as u64;
                    // SAFETY: a word of the launch's status, which lives as long as the launch and is accessed only
                    // atomically.
                    unsafe { AtomicU32::from_ptr(abort as *mut u32) }.store(1, Ordering::Release);
                }
                state = self.shared.lock();
            } else {
                state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.launch = None;
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.fork_check.in_fork() {
            // A forked child does not have the threads, and a thread may have held the lock at the fork.
            return self.threads.drain(..).for_each(std::mem::forget);
        }
        self.shared.lock().stop = true;
        self.shared.started.notify_all();
        for thread in self.threads.drain(..) {
            // Workers run no code that panics. If one did, the peers of its block have timed out and reported that.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, block: u32) {
        let mut done = 0;
        loop {
            let launch = {
                let mut state = self.lock();
                while state.generation == done && !state.stop {
                    state = self.started.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if state.stop {
                    return;
                }
                done = state.generation;
                state.launch
            };
            if let Some(launch) = launch.filter(|launch| block < launch.blocks) {
                // SAFETY: `run` was called with these arguments under its contract, and has not returned: it waits
                // for `running` to become 0.
                unsafe { (launch.entry)(launch.arguments, block) };
            }
            let mut state = self.lock();
            state.running -= 1;
            if state.running == 0 {
                self.finished.notify_one();
            }
        }
    }
}
