//! A message that is read where it is, and whose sender gives up: `csrc/core/rendezvous.cuh`. In another process the read may race
//! with what the sender's caller writes next, and must then go to nobody; between threads it may not even race. What the kernel
//! does not let the receiver read is refused, and comes through the channel (`csrc/core/direct.cuh`); what it reads in another process
//! than the sender's is, too.

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{fence, AtomicU32};
use loom::thread;

use super::explore::{exhaustively, found, within, RACE};

const READING: u32 = 1;
const WITHDRAWN: u32 = 2;
const WRONG: &str = "data that was not sent";
const LOST: &str = "a message that is not sent again";

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

/// How the receiver looks at the sender's life.
#[derive(Clone, Copy, PartialEq)]
enum Look {
    AfterReading,
    BeforeReading,
    Never,
}

/// The sender's process ends, and another takes its place: the mark, then other data where the message was.
fn ended(look: Look) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (life, memory) = (Rc::new(AtomicU32::new(1)), Rc::new(AtomicU32::new(7)));
        let kernel = {
            let (life, memory) = (Rc::clone(&life), Rc::clone(&memory));
            thread::spawn(move || {
                life.store(2, Release);
                // The kernel is in between: the process is reaped, its id given again, its memory unmapped.
                fence(SeqCst);
                memory.store(9, Relaxed);
            })
        };
        let before = life.load(Acquire);
        let read = memory.load(Relaxed);
        fence(SeqCst);
        let seen = match look {
            Look::AfterReading => life.load(Acquire),
            Look::BeforeReading => before,
            Look::Never => 1,
        };
        assert!(seen != 1 || read == 7, "{WRONG}");
        kernel.join().unwrap();
    }
}

/// A receiver that may not read refuses and gives the credit; the sender looks for that with the credit, and sends again.
fn refused(order: Ordering) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (words, refused, slot) =
            (Rc::new(Words::default()), Rc::new(AtomicU32::new(0)), Rc::new(UnsafeCell::new(0)));
        let sender = {
            let (words, refused, slot) = (Rc::clone(&words), Rc::clone(&refused), Rc::clone(&slot));
            thread::spawn(move || {
                words.posted.store(1, Release);
                while words.taken.load(Acquire) != 1 {
                    thread::yield_now();
                }
                assert_eq!(refused.load(Relaxed), 1, "{LOST}");
                // SAFETY: as above.
                slot.with_mut(|slot| unsafe { *slot = 7 });
                words.posted.store(2, Release);
            })
        };
        while words.posted.load(Acquire) != 1 {
            thread::yield_now();
        }
        refused.store(1, Relaxed);
        words.taken.store(1, order);
        while words.posted.load(Acquire) != 2 {
            thread::yield_now();
        }
        // SAFETY: as above.
        assert_eq!(slot.with(|slot| unsafe { *slot }), 7, "{WRONG}");
        sender.join().unwrap();
    }
}

#[test]
fn what_is_read_of_another_process_goes_to_nobody() {
    exhaustively(ended(Look::AfterReading));
    found(&[WRONG], None, ended(Look::BeforeReading));
    found(&[WRONG], None, ended(Look::Never));
}

#[test]
fn what_is_refused_is_sent_again() {
    within(3, refused(Release));
    found(&[LOST], Some(3), refused(Relaxed));
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
