//! Program code that runs during a call: a signal handler that uses the communicator in which its thread waits, and a
//! callback that ends the wait.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::Mutex;
use std::time::Duration;

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::interruption::while_waiting;
use fast_allreduce::{Communicator, Error, Host, ReduceOp, Result};
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};

use crate::fixtures::world::{builder, threads, LIMIT};

static WAITING: AtomicPtr<Communicator<Host>> = AtomicPtr::new(std::ptr::null_mut());
static ERRORS: Mutex<Vec<Error>> = Mutex::new(Vec::new());
static HANDLED: AtomicBool = AtomicBool::new(false);

/// Makes all calls that could wait for the call that this thread is already in.
extern "C" fn calls(_signal: i32) {
    // SAFETY: the communicator in which this handler's thread waits, and which it therefore keeps alive.
    let communicator = unsafe { &*WAITING.load(Ordering::SeqCst) };
    let mut data = [1u8];
    let results = [
        communicator.barrier(),
        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum),
        communicator.send(&data, 1, 0),
        communicator.recv(&mut data, 1, 0),
        communicator.alloc::<u8>(1).map(drop),
        communicator.symmetric_memory::<u8>(1).map(drop),
        communicator.split(Some(0), 0).map(drop),
        communicator.shrink(&[0]).map(drop),
    ];
    *ERRORS.lock().unwrap() = results.into_iter().map(Result::unwrap_err).collect();
    assert!(communicator.check().is_ok() && communicator.counters().calls > 0);
    HANDLED.store(true, Ordering::SeqCst);
}

fn wait_until(holds: impl Fn() -> bool) {
    while !holds() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_signal_handler_cannot_call_what_its_thread_is_in() {
    let action = SigAction::new(SigHandler::Handler(calls), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the thread that receives the signal is in a host kernel, which allocates nothing and holds no lock except
    // the call's.
    unsafe { sigaction(Signal::SIGURG, &action) }.unwrap();
    let waiting = Mutex::new(None);
    let sums = threads(
        2,
        |_| builder(),
        |communicator| {
            let begun = communicator.counters().calls;
            if communicator.rank() == 0 {
                WAITING.store(std::ptr::from_ref(&communicator).cast_mut(), Ordering::SeqCst);
                *waiting.lock().unwrap() = Some(nix::unistd::gettid());
            } else {
                wait_until(|| waiting.lock().unwrap().is_some());
                let thread = waiting.lock().unwrap().unwrap();
                // SAFETY: the other rank's communicator, which lives until this rank has joined the call.
                let theirs = unsafe { &*WAITING.load(Ordering::SeqCst) };
                wait_until(|| theirs.counters().calls > begun);
                // SAFETY: sends a signal to a thread of this process, which lives until this rank joins the call.
                let sent = unsafe {
                    libc::syscall(libc::SYS_tgkill, std::process::id(), thread.as_raw(), libc::SIGURG)
                };
                assert_eq!(sent, 0);
                wait_until(|| HANDLED.load(Ordering::SeqCst));
            }
            let mut data = [communicator.rank() as u32 + 1; 100];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            data[99]
        },
    );
    assert_eq!(sums, [3, 3], "the interrupted call must continue");
    let errors = ERRORS.lock().unwrap();
    assert_eq!(errors.len(), 8);
    for error in &*errors {
        assert!(
            matches!(error, Error::Unavailable { what, .. } if what.contains("from within another")),
            "{error}"
        );
    }
}

/// Runs `call` on rank 0, with a callback during waits that returns `answers(n)` at its n-th run. Rank 1 makes the call
/// after `comes_after` runs, or when rank 0's call has ended.
fn with_callback<T: Send>(
    answers: impl Fn(u32) -> bool + Sync,
    comes_after: u32,
    call: impl Fn(&Communicator<Host>) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let times = std::sync::atomic::AtomicU32::new(0);
    let is_over = AtomicBool::new(false);
    threads(
        2,
        |_| builder(),
        |communicator| {
            if communicator.rank() == 1 {
                wait_until(|| times.load(Ordering::SeqCst) >= comes_after || is_over.load(Ordering::SeqCst));
                return call(&communicator);
            }
            let goes_on = || answers(times.fetch_add(1, Ordering::SeqCst) + 1);
            let result = while_waiting(&goes_on, || call(&communicator));
            is_over.store(true, Ordering::SeqCst);
            result
        },
    )
}

#[test]
fn waits_go_on_or_end_as_the_program_says() {
    type Call = fn(&Communicator<Host>) -> Result<u32>;
    let calls: [(&str, Call); 4] = [
        ("an allreduce", |communicator| {
            let mut data = vec![1; 100_000];
            communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).map(|()| data[99_999])
        }),
        ("a message", |communicator| {
            let (mut data, rank) = ([1], communicator.rank());
            match rank {
                0 => communicator.recv(&mut data, 1, 0)?,
                _ => communicator.send(&[2], 0, 0)?,
            }
            Ok(2)
        }),
        ("memory", |communicator| communicator.alloc::<u8>(10).map(|_| 2)),
        ("a part", |communicator| communicator.split(Some(0), 0).map(|_| 2)),
    ];
    for (what, call) in calls {
        let results = with_callback(|_| true, 3, call);
        assert_eq!(results, [Ok(2), Ok(2)], "{what}");
        let results = with_callback(|times| times < 2, u32::MAX, call);
        assert!(results[0].is_err(), "{what}");
    }
    let aborted = with_callback(|_| false, u32::MAX, |communicator| communicator.barrier());
    assert_eq!(aborted[0], Err(Error::Aborted));
    assert!(matches!(aborted[1], Err(Error::PeerFailed { rank: 0, .. })), "{aborted:?}");
}

#[test]
fn ranks_that_have_not_met_need_not_wait_for_each_other() {
    let id = UniqueId::new().unwrap();
    let times = Cell::new(0);
    let goes_on = || {
        times.set(times.get() + 1);
        times.get() < 3
    };
    assert!(while_waiting(&goes_on, || Local::connect(&id, 0, 2, LIMIT)).is_err());
    assert_eq!(times.get(), 3);
}

#[test]
fn a_call_that_waits_for_another_threads_may_end() {
    let errors = threads(
        2,
        |_| builder(),
        |communicator| {
            if communicator.rank() == 1 {
                let error = communicator.barrier().unwrap_err();
                return vec![error];
            }
            std::thread::scope(|scope| {
                let first = scope.spawn(|| communicator.recv(&mut [0u8], 1, 0));
                // The first call holds the lock once it has begun.
                wait_until(|| communicator.counters().calls > 0);
                let goes_on = || false;
                let second = while_waiting(&goes_on, || communicator.recv(&mut [0u8], 1, 1)).unwrap_err();
                communicator.abort();
                vec![second, first.join().unwrap().unwrap_err()]
            })
        },
    );
    assert_eq!(errors[0], [Error::Aborted, Error::Aborted]);
}
