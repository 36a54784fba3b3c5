//! Models of a registered input whose owner fails after it has signalled the second barrier, where launches
//! run in streams (`revoke` in `csrc/core/barrier.cuh`): the owner's next kernel writes the input, which a
//! peer may still be reading. Here the input is a relaxed atomic, because the read may race with the write.
//! `lab/litmus` shows that the fences must be sequentially consistent where these accesses are weak.

use std::sync::Arc;

use loom::sync::atomic::fence;
use loom::sync::atomic::AtomicU32;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::thread;

use super::explore::{exhaustively, found};

const WRONG: &str = "data that was not the input of the call";

/// Rules in which tests plant bugs.
#[derive(Clone, Copy)]
struct Rules {
    revokes: bool,
    owners_fence: bool,
    peers_fence: bool,
}

const KERNELS: Rules = Rules { revokes: true, owners_fence: true, peers_fence: true };

#[derive(Default)]
struct Words {
    input: AtomicU32,
    /// Signals of the second barrier, of the owner and of the peer.
    owner_is_done: AtomicU32,
    peer_is_done: AtomicU32,
    revoked: AtomicU32,
}

fn gives_up(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let words = Arc::new(Words::default());
        let owner = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                words.owner_is_done.store(1, Release);
                // The peer's signal has not come.
                if rules.revokes {
                    words.revoked.store(1, Relaxed);
                }
                if rules.owners_fence {
                    fence(SeqCst);
                }
                words.input.store(9, Relaxed);
            })
        };
        let read = words.input.load(Relaxed);
        if rules.peers_fence {
            fence(SeqCst);
        }
        words.peer_is_done.store(1, Relaxed);
        // If the owner has not come, the peer eventually fails.
        if words.owner_is_done.load(Acquire) == 1 && words.revoked.load(Relaxed) == 0 {
            assert_eq!(read, 0, "{WRONG}");
        }
        owner.join().unwrap();
    }
}

#[test]
fn reads_of_a_revoked_buffer_are_discarded() {
    exhaustively(gives_up(KERNELS));
}

#[test]
fn an_owner_that_revokes_nothing_is_found() {
    found(&[WRONG], None, gives_up(Rules { revokes: false, ..KERNELS }));
}

#[test]
fn missing_fences_are_found() {
    found(&[WRONG], None, gives_up(Rules { owners_fence: false, ..KERNELS }));
    found(&[WRONG], None, gives_up(Rules { peers_fence: false, ..KERNELS }));
}
