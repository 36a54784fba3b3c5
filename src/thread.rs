//! The crate's own threads, and sleeping in a thread.

use std::io;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{poll, PollTimeout};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Stack size of a thread without deep calls.
pub(crate) const SMALL_STACK: usize = 128 << 10;

/// Stack size of a thread that calls another library: the default of the standard library.
pub(crate) const DEEP_STACK: usize = 2 << 20;

/// Signals of faults that a thread causes itself. They stay unblocked: the kernel ends the process if such a signal is
/// blocked, without calling the handler of the program or of a sanitizer.
const OWN_FAULTS: [Signal; 6] =
    [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGSYS];

/// Starts a thread with a stack of `stack_bytes`.
///
/// The thread blocks all signals sent to the process, so that their handlers run in the program's own threads, with the
/// stacks and the locks that they were written for. If memory is short, this returns an error; the standard library
/// would end the process when a new thread cannot allocate its signal stack.
pub(crate) fn spawn(
    name: String,
    stack_bytes: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // Memory that threads allocate at their start in addition to their stacks, for several that start at the same time.
    const ROOM: usize = 4 << 20;
    // Writable: only writable memory counts towards RLIMIT_DATA.
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: creates a new mapping, to which nothing refers, and unmaps it at once.
    unsafe {
        let room = libc::mmap(std::ptr::null_mut(), stack_bytes + ROOM, protection, flags, -1, 0);
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(room, stack_bytes + ROOM);
    }
    let faults = SigSet::from_iter(OWN_FAULTS);
    let mut others = SigSet::all();
    OWN_FAULTS.into_iter().for_each(|fault| others.remove(fault));
    // A thread inherits the mask, so that the new one never handles a signal. A signal that arrives in the meantime
    // stays pending for the calling thread.
    let mask = others.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let spawned = Builder::new().name(name).stack_size(stack_bytes).spawn(move || {
        // The calling thread may have blocked them. This cannot fail: the set contains only signals.
        let unblocked = faults.thread_unblock();
        debug_assert_eq!(unblocked, Ok(()));
        body()
    });
    mask.thread_set_mask()?;
    spawned
}

/// Sleeps for `duration`, or less if a signal arrives.
///
/// `std::thread::sleep` panics if a sandbox refuses the system call. This function then waits by `poll`, in whole
/// milliseconds; if that is refused as well, it only yields.
pub(crate) fn pause(duration: Duration) {
    let seconds = libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX);
    let request = libc::timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() };
    // SAFETY: reads `request`, which outlives the call, and writes no remainder, since its pointer is null.
    if unsafe { libc::nanosleep(&request, std::ptr::null_mut()) } == 0 || Errno::last() == Errno::EINTR {
        return;
    }
    let whole = duration.as_nanos().div_ceil(1_000_000);
    if let Err(errno) = poll(&mut [], PollTimeout::try_from(whole).unwrap_or(PollTimeout::MAX)) {
        if errno != Errno::EINTR {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Instant;

    /// Makes the kernel refuse a system call of this thread, with `EPERM`.
    pub(crate) fn forbid(call: i64) {
        let step =
            |code: u32, value: u32, no: u8| libc::sock_filter { code: code as u16, jt: 0, jf: no, k: value };
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let mut steps = [
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 1),
            step(libc::BPF_RET | libc::BPF_K, refused, 0),
            step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        ];
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the filter and its steps outlive the calls, which copy them.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
        }
    }

    #[test]
    fn a_sandbox_that_refuses_sleep_does_not_end_a_thread() {
        const TIME: Duration = Duration::from_millis(20);
        let timed = || {
            let started = Instant::now();
            pause(TIME);
            started.elapsed()
        };
        assert!(timed() >= TIME);
        // The filter applies to the new thread only.
        let sandboxed = std::thread::spawn(move || {
            forbid(libc::SYS_nanosleep);
            forbid(libc::SYS_clock_nanosleep);
            assert!(timed() >= TIME);
            #[cfg(target_arch = "x86_64")]
            forbid(libc::SYS_poll);
            forbid(libc::SYS_ppoll);
            // It returns, after any time.
            pause(TIME);
        });
        sandboxed.join().unwrap();
    }
}
