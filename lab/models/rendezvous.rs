//! Models of messages that the receiver reads from the sender's memory, while the sender fails:
//! `csrc/core/rendezvous.cuh`. Between processes the read may race with what the sender's caller writes next,
//! and its data must then be discarded; between threads it must not race. Also messages that the operating
//! system cannot read, which the receiver refuses and the sender sends through the channel, and reads of a
//! process that is not the sender's any more, which are discarded (`csrc/core/direct.cuh`).

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

/// Rules in which tests plant bugs.
#[derive(Clone, Copy)]
struct Rules {
    withdraws: bool,
    /// The receiver's last check of the claim is a read-modify-write rather than a load.
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

/// Posts the message, and withdraws it unless it has been taken by now. Returns whether it was sent.
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

/// Between processes: the data is a relaxed atomic, because the accesses may race.
fn processes(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (words, message) = (Rc::new(Words::default()), Rc::new(AtomicU32::new(7)));
        let sender = {
            let (words, message) = (Rc::clone(&words), Rc::clone(&message));
            thread::spawn(move || {
                post(&words, rules, false);
                // The memory is the caller's again, whatever the outcome.
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
            // SAFETY: as in `threads`.
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

/// When the receiver checks the sender's exit futex.
#[derive(Clone, Copy, PartialEq)]
enum Look {
    AfterReading,
    BeforeReading,
    Never,
}

/// The sender's process ends and another takes its place: first the mark, then different data at the
/// message's address.
fn ended(look: Look) -> impl Fn() + Send + Sync + 'static {
    move || {
        let (exit_futex, memory) = (Rc::new(AtomicU32::new(1)), Rc::new(AtomicU32::new(7)));
        let kernel = {
            let (exit_futex, memory) = (Rc::clone(&exit_futex), Rc::clone(&memory));
            thread::spawn(move || {
                exit_futex.store(2, Release);
                // In between, the operating system reaps the process, reuses its id, and unmaps its memory.
                fence(SeqCst);
                memory.store(9, Relaxed);
            })
        };
        let before = exit_futex.load(Acquire);
        let read = memory.load(Relaxed);
        fence(SeqCst);
        let seen = match look {
            Look::AfterReading => exit_futex.load(Acquire),
            Look::BeforeReading => before,
            Look::Never => 1,
        };
        assert!(seen != 1 || read == 7, "{WRONG}");
        kernel.join().unwrap();
    }
}

/// A receiver that cannot read refuses and gives the credit; the sender finds the refusal with the credit,
/// and sends again.
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
                // SAFETY: as in `threads`.
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
        // SAFETY: as in `threads`.
        assert_eq!(slot.with(|slot| unsafe { *slot }), 7, "{WRONG}");
        sender.join().unwrap();
    }
}

#[test]
fn reads_of_another_process_are_discarded() {
    exhaustively(ended(Look::AfterReading));
    found(&[WRONG], None, ended(Look::BeforeReading));
    found(&[WRONG], None, ended(Look::Never));
}

#[test]
fn refused_messages_are_sent_again() {
    within(3, refused(Release));
    found(&[LOST], Some(3), refused(Relaxed));
}

#[test]
fn withdrawn_messages_are_discarded() {
    exhaustively(processes(KERNELS));
    exhaustively(threads(KERNELS));
}

#[test]
fn a_sender_that_withdraws_nothing_is_found() {
    found(&[WRONG], None, processes(Rules { withdraws: false, ..KERNELS }));
    found(&[RACE, WRONG], None, threads(Rules { withdraws: false, ..KERNELS }));
}

#[test]
fn a_claim_that_is_only_loaded_is_found() {
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
