//! A message that is read where it is, and whose sender gives up: `csrc/core/rendezvous.cuh`. In another process the read may race
//! with what the sender's caller writes next, and must then go to nobody; between threads it may not even race.

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use loom::thread;

use super::explore::{exhaustively, found, RACE};

const READING: u32 = 1;
const WITHDRAWN: u32 = 2;
const WRONG: &str = "data that was not sent";

/// What may be planted wrong.
#[derive(Clone, Copy)]
struct Rules {
    withdraws: bool,
    /// The receiver's last look at the claim is a read-modify-write, and not a load.
    claims: bool,
    /// The sender waits for a receiver that is reading.
    waits: bool,
    order: Ordering,
}

const KERNELS: Rules = Rules { withdraws: true, claims: true, waits: true, order: AcqRel };

#[derive(Default)]
struct Words {
    posted: AtomicU32,
    taken: AtomicU32,
    claim: AtomicU32,
}

/// Posts the message, and gives up unless it is taken by now. True: it was sent.
fn post(words: &Words, rules: Rules, threads: bool) -> bool {
    words.posted.store(1, Release);
    if words.taken.load(Acquire) == 1 {
        return true;
    }
    if rules.withdraws {
        words.claim.fetch_or(WITHDRAWN, rules.order);
        while threads && rules.waits && words.claim.load(Acquire) & READING != 0 {
            thread::yield_now();
        }
    }
    false
}

/// Between processes: what is read and written are relaxed atomics, which may race.
fn processes(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (words, message) = (Rc::new(Words::default()), Rc::new(AtomicU32::new(7)));
        let sender = {
            let (words, message) = (Rc::clone(&words), Rc::clone(&message));
            thread::spawn(move || {
                post(&words, rules, false);
                // The caller's again, whatever came of it.
                message.store(9, Relaxed);
            })
        };
        if words.posted.load(Acquire) == 1 {
            let read = message.load(Relaxed);
            let claim = match rules.claims {
                true => words.claim.fetch_or(0, rules.order),
                false => words.claim.load(Acquire),
            };
            if claim & WITHDRAWN == 0 {
                assert_eq!(read, 7, "{WRONG}");
                words.taken.store(1, Release);
            }
        }
        sender.join().unwrap();
    }
}

/// Between threads, in two pieces.
fn threads(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (words, message) = (Rc::new(Words::default()), Rc::new(UnsafeCell::new(7)));
        let sender = {
            let (words, message) = (Rc::clone(&words), Rc::clone(&message));
            thread::spawn(move || {
                post(&words, rules, true);
                // SAFETY: loom's cell panics on an access that nothing orders, which is what is tested.
                message.with_mut(|message| unsafe { *message = 9 });
            })
        };
        let piece = || {
            if words.claim.fetch_or(READING, rules.order) & WITHDRAWN != 0 {
                words.claim.fetch_and(!READING, rules.order);
                return false;
            }
            // SAFETY: as above.
            assert_eq!(message.with(|message| unsafe { *message }), 7, "{WRONG}");
            words.claim.fetch_and(!READING, rules.order);
            true
        };
        if words.posted.load(Acquire) == 1 && piece() && piece() {
            words.taken.store(1, Release);
        }
        sender.join().unwrap();
    }
}

#[test]
fn what_is_withdrawn_goes_to_nobody() {
    exhaustively(processes(KERNELS));
    exhaustively(threads(KERNELS));
}

#[test]
fn a_sender_that_withdraws_nothing_is_found() {
    found(&[WRONG], None, processes(Rules { withdraws: false, ..KERNELS }));
    found(&[RACE, WRONG], None, threads(Rules { withdraws: false, ..KERNELS }));
}

#[test]
fn a_claim_that_is_only_looked_at_is_found() {
    found(&[WRONG], None, processes(Rules { claims: false, ..KERNELS }));
}

#[test]
fn a_sender_that_does_not_wait_is_found() {
    found(&[RACE, WRONG], None, threads(Rules { waits: false, ..KERNELS }));
}

#[test]
fn relaxed_claims_are_found() {
    found(&[RACE, WRONG], None, threads(Rules { order: Relaxed, ..KERNELS }));
}
