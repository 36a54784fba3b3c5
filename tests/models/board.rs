//! A farewell on a board: `src/presence/board.rs` itself, on loom's atomics.

use super::explore::{exhaustively, found};

/// The source in a file of the build, and what is the same for all: a rank leaves while a peer looks.
macro_rules! model {
    ($name:ident, $file:literal) => {
        #[allow(dead_code)]
        mod $name {
            use std::sync::Arc;

            use loom::thread;

            include!(concat!(env!("OUT_DIR"), "/", $file));

            impl Board {
                fn zeroed() -> Self {
                    Self {
                        begun: AtomicU64::new(0),
                        ended: AtomicU64::new(0),
                        what: AtomicU64::new(0),
                        count: AtomicU64::new(0),
                        digest: AtomicU64::new(0),
                        padding: [0; 3],
                        left: AtomicU32::new(0),
                        ranks: AtomicU32::new(0),
                        length: AtomicU32::new(0),
                        process: std::array::from_fn(|_| AtomicU8::new(0)),
                        text: std::array::from_fn(|_| AtomicU8::new(0)),
                    }
                }
            }

            pub fn a_rank_leaves() {
                let board = Arc::new(Board::zeroed());
                let said = Farewell { cause: Cause::Lost, ranks: 1 << 2, text: "lost".into() };
                let leaving = {
                    let (board, said) = (Arc::clone(&board), said.clone());
                    thread::spawn(move || {
                        board.begin(FaCall { what: 1, count: 7, digest: 0 });
                        board.leave(&said);
                    })
                };
                if let Some(heard) = board.farewell() {
                    assert_eq!(heard, said, "half a farewell");
                    // What it did before it left is there as well.
                    let Activity { begun, ended, call } = board.activity();
                    let activity = (begun, ended, call);
                    assert_eq!(activity, (1, 0, FaCall { what: 1, count: 7, digest: 0 }), "half a farewell");
                }
                leaving.join().unwrap();
                assert_eq!(board.farewell(), Some(said));
            }
        }
    };
}

model!(right, "board.rs");
model!(relaxed_store, "board_store.rs");
model!(relaxed_load, "board_load.rs");

#[test]
fn a_farewell_is_heard_whole() {
    exhaustively(right::a_rank_leaves);
}

#[test]
fn relaxed_farewells_are_found() {
    found(&["half a farewell"], None, relaxed_store::a_rank_leaves);
    found(&["half a farewell"], None, relaxed_load::a_rank_leaves);
}
