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

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// By worker: a launch that needs few workers wakes only those.
    started: Vec<Condvar>,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of launches, so that a worker runs each of them once.
    generation: u64,
    launch: Option<Launch>,
    /// Number of workers that have a block of the launch and have not finished it.
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
        let started = (0..count).map(|_| Condvar::new()).collect();
        let shared = Arc::new(Shared { state: Mutex::default(), started, finished: Condvar::new() });
        let mut workers = Self { shared, threads: Vec::with_capacity(count), fork_check: ForkCheck::new() };
        for index in 0..count {
            let shared = Arc::clone(&workers.shared);
            let name = format!("allreduce-{}", index + 1);
            let thread = thread::spawn(name, SMALL_STACK, move || shared.work(index))
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
        let needed = (arguments.blocks as usize).saturating_sub(1).min(self.threads.len());
        {
            let mut state = self.shared.lock();
            state.generation += 1;
            state.launch = Some(Launch { entry, arguments, blocks: arguments.blocks });
            state.running = needed;
        }
        self.shared.started[..needed].iter().for_each(Condvar::notify_one);
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
        self.shared.started.iter().for_each(Condvar::notify_one);
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

    /// Runs the blocks of worker `index`.
    fn work(&self, index: usize) {
        let block = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let mut done = 0;
        loop {
            let launch = {
                let mut state = self.lock();
                while state.generation == done && !state.stop {
                    state = self.started[index].wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if state.stop {
                    return;
                }
                done = state.generation;
                state.launch
            };
            // Without a block this worker is not counted in `running`. It may have woken for no reason.
            let Some(launch) = launch.filter(|launch| block < launch.blocks) else { continue };
            // SAFETY: `run` was called with these arguments under its contract, and has not returned: it waits for
            // `running` to become 0.
            unsafe { (launch.entry)(launch.arguments, block) };
            let mut state = self.lock();
            state.running -= 1;
            if state.running == 0 {
                self.finished.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the calls of each block; `input` is the address of the counters.
    unsafe extern "C" fn count(launch: *const FaLaunch, block: u32) {
        // SAFETY: `launched` passes a launch with the address of counters that outlive it.
        let counters = unsafe { &*((*launch).input as *const [AtomicU32; 6]) };
        counters[block as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Runs launches of a number of blocks, and returns the number of calls of each block.
    fn launched(workers: &Workers, blocks: u32, times: u32) -> [u32; 6] {
        let counters: [AtomicU32; 6] = Default::default();
        // SAFETY: all fields are integers and floats, for which all zeros are valid.
        let zeros: FaLaunch = unsafe { std::mem::zeroed() };
        let arguments = FaLaunch { blocks, input: std::ptr::from_ref(&counters) as u64, ..zeros };
        // SAFETY: `count` needs only the counters, and there are workers for all blocks.
        (0..times).for_each(|_| unsafe { workers.run(count, &arguments) });
        counters.map(AtomicU32::into_inner)
    }

    /// Returns the processor time of a worker in nanoseconds.
    fn processor_time(workers: &Workers, index: usize) -> i64 {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the thread has not been joined, so its handle is valid; both results have a place.
        let codes = unsafe {
            let code = libc::pthread_getcpuclockid(workers.threads[index].as_pthread_t(), &mut clock);
            [code, libc::clock_gettime(clock, &mut time)]
        };
        assert_eq!(codes, [0, 0]);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    }

    #[test]
    fn each_block_of_a_launch_runs_once() {
        let workers = Workers::start(5).unwrap();
        for blocks in [6, 2, 5, 1, 3, 6] {
            let expected = std::array::from_fn(|block| if (block as u32) < blocks { 20 } else { 0 });
            assert_eq!(launched(&workers, blocks, 20), expected, "{blocks} blocks");
        }
    }

    #[test]
    fn workers_without_a_block_sleep() {
        let workers = Workers::start(5).unwrap();
        launched(&workers, 6, 1);
        let sleeps = || {
            let before = processor_time(&workers, 4);
            assert_eq!(launched(&workers, 2, 50), [50, 50, 0, 0, 0, 0]);
            processor_time(&workers, 4) == before
        };
        // The last worker may still be on its way to sleep in the first attempts.
        assert!((0..1000).any(|_| sleeps()), "launches of 2 blocks always woke worker 5");
        assert!((0..20).all(|_| sleeps()), "launches of 2 blocks woke worker 5");
    }
}
