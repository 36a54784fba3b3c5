//! Models of a membership that is replaced: what uses it without the endpoint's lock, and the number of completed calls
//! that ranks tell each other (`src/endpoint/mod.rs`, `src/communicator/returning.rs`).

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::explore::{exhaustively, found, RACE};

const WRONG: &str = "calls that were not counted";

/// A membership: its region is unmapped when the last reference is dropped.
struct Membership {
    region: Rc<UnsafeCell<bool>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        // SAFETY: loom's cell panics on an access that nothing orders, which is what is tested.
        self.region.with_mut(|is_mapped| unsafe { *is_mapped = false });
    }
}

/// How a thread that aborts finds the region.
#[derive(Clone, Copy, PartialEq)]
enum Abort {
    /// By a reference to the membership, which it takes under the lock.
    Counted,
    /// By what it has seen under the lock.
    Seen,
}

/// One thread replaces the membership while another aborts.
fn replaced(abort: Abort) -> impl Fn() + Send + Sync + 'static {
    move || {
        let region = Rc::new(UnsafeCell::new(true));
        let current = Rc::new(Mutex::new(Some(Arc::new(Membership { region: Rc::clone(&region) }))));
        let aborting = {
            let (current, region) = (Rc::clone(&current), Rc::clone(&region));
            thread::spawn(move || {
                let taken = current.lock().unwrap().clone();
                let has_any = taken.is_some();
                let kept = match abort {
                    Abort::Counted => taken,
                    Abort::Seen => {
                        drop(taken);
                        None
                    }
                };
                if has_any {
                    // SAFETY: as in `drop`.
                    assert!(region.with(|is_mapped| unsafe { *is_mapped }), "{RACE}");
                }
                drop(kept);
            })
        };
        let before = current.lock().unwrap().take();
        drop(before);
        aborting.join().unwrap();
    }
}

/// A thread makes a call while another reads the number of completed calls for the next world.
fn counted(reads_under_the_lock: bool) -> impl Fn() + Send + Sync + 'static {
    move || {
        // The number, and whether the world is over.
        let state = Rc::new(Mutex::new((0, false)));
        let calling = {
            let state = Rc::clone(&state);
            thread::spawn(move || {
                let mut state = state.lock().unwrap();
                if !state.1 {
                    state.0 += 1;
                }
            })
        };
        let early = state.lock().unwrap().0;
        let mut held = state.lock().unwrap();
        let told = if reads_under_the_lock { held.0 } else { early };
        held.1 = true;
        drop(held);
        calling.join().unwrap();
        assert_eq!(state.lock().unwrap().0, told, "{WRONG}");
    }
}

#[test]
fn an_abort_finds_a_region_that_is_mapped() {
    exhaustively(replaced(Abort::Counted));
}

#[test]
fn an_abort_without_a_reference_is_found() {
    found(&[RACE], None, replaced(Abort::Seen));
}

#[test]
fn the_number_of_calls_is_final() {
    exhaustively(counted(true));
}

#[test]
fn a_number_that_is_read_before_the_lock_is_found() {
    found(&[WRONG], None, counted(false));
}
