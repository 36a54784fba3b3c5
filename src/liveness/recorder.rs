//! Writes a rank's flight record: it decides which calls are timed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::flight::{FlightPage, Times, Waits};
use crate::abi::FaCall;
use crate::catalogue::settings::Flight;

/// Calls between two that are timed by default. It is a prime number, so that the timed calls are not always the same
/// ones of a program that repeats a sequence of calls.
const SAMPLED: u64 = 127;

/// State of the owner of a flight record. Its methods are called by one thread at a time, which holds the endpoint's
/// lock: so all accesses are relaxed.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Calls between two that are timed; `None`: no call is timed.
    interval: Option<u64>,
    /// The next call that is timed.
    next: AtomicU64,
    /// When the current call began; 0 if it is not timed.
    begin: AtomicU64,
    /// `FaStatus.slow` after the last call: a call has waited for long if it changes.
    slow: AtomicU32,
    /// The waits after the last call that has waited for long.
    before: Mutex<Waits>,
}

impl Recorder {
    pub fn new(level: Flight) -> Self {
        let interval = match level {
            Flight::Off => None,
            Flight::Sampled => Some(SAMPLED),
            Flight::All => Some(1),
        };
        let next = interval.unwrap_or(u64::MAX).into();
        Self { interval, next, begin: 0.into(), slow: 0.into(), before: Mutex::default() }
    }

    /// Records the start of a call, and returns its number.
    pub fn begin(&self, flight: &FlightPage, call: FaCall) -> u64 {
        let number = flight.begin(call);
        if number == self.next.load(Ordering::Relaxed) {
            self.begin_timed(number);
        }
        number
    }

    /// Counts a call that has been carried out, by the first word of its identity.
    pub fn count(&self, flight: &FlightPage, what: u64, bytes: u64) {
        if self.interval.is_some() {
            flight.totals.count(what, bytes);
        }
    }

    /// Records the end of the call. `slow` is `FaStatus.slow`; `waits` returns the waits so far.
    pub fn end(&self, flight: &FlightPage, slow: u32, waits: impl FnOnce() -> Waits) {
        let number = flight.end();
        if self.begin.load(Ordering::Relaxed) != 0 || slow != self.slow.load(Ordering::Relaxed) {
            self.end_timed(flight, number, slow, waits());
        }
    }

    #[cold]
    fn begin_timed(&self, number: u64) {
        self.next.store(number + self.interval.unwrap_or(0), Ordering::Relaxed);
        self.begin.store(now(), Ordering::Relaxed);
    }

    #[cold]
    fn end_timed(&self, flight: &FlightPage, number: u64, slow: u32, waits: Waits) {
        self.slow.store(slow, Ordering::Relaxed);
        flight.set_waits(&Waits { waiting: 0, ..waits });
        let begin = self.begin.swap(0, Ordering::Relaxed);
        let before =
            std::mem::replace(&mut *self.before.lock().unwrap_or_else(PoisonError::into_inner), waits);
        if self.interval.is_some() {
            let waited = waits.ns.iter().zip(before.ns).map(|(after, before)| after.saturating_sub(before));
            let longest = waited.zip(0..).max_by_key(|&(waited, _)| waited);
            let (waited, rank) = longest.unwrap_or_default();
            let end = now();
            flight.set_times(Times { number, begin, end, waited, rank });
            if begin != 0 {
                flight.totals.time(flight.activity().call.what, end.saturating_sub(begin));
            }
        }
    }
}

/// Returns the time of CLOCK_MONOTONIC in ns, which all processes of the machine share.
pub(super) fn now() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
