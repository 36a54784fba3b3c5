//! A model of an exit record on a status page: the source `src/liveness/status_page.rs` itself, on loom's
//! atomics.

use super::explore::{exhaustively, found};

/// Includes a generated source, and adds the common scenario: a rank leaves while a peer looks.
macro_rules! model {
    ($name:ident, $file:literal) => {
        #[allow(dead_code)]
        mod $name {
            use std::sync::Arc;

            use loom::thread;

            include!(concat!(env!("OUT_DIR"), "/", $file));

            impl StatusPage {
                fn zeroed() -> Self {
                    Self {
                        left: AtomicU32::new(0),
                        ranks: AtomicU32::new(0),
                        length: AtomicU32::new(0),
                        later: AtomicU32::new(0),
                        process: std::array::from_fn(|_| AtomicU8::new(0)),
                        read_probe: AtomicU64::new(0),
                        text: std::array::from_fn(|_| AtomicU8::new(0)),
                    }
                }
            }

            pub fn a_rank_leaves() {
                let page = Arc::new(StatusPage::zeroed());
                let written = ExitRecord { cause: Cause::Lost, ranks: 1 << 2, text: "lost".into() };
                let leaving = {
                    let (page, written) = (Arc::clone(&page), written.clone());
                    thread::spawn(move || {
                        page.set_absent();
                        page.leave(&written);
                    })
                };
                if let Some(read) = page.exit_record() {
                    assert_eq!(read, written, "half an exit record");
                    // What the rank did before it left is visible as well.
                    assert!(page.is_absent(), "half an exit record");
                }
                leaving.join().unwrap();
                assert_eq!(page.exit_record(), Some(written));
            }
        }
    };
}

model!(right, "status_page.rs");
model!(relaxed_store, "status_page_store.rs");
model!(relaxed_load, "status_page_load.rs");

#[test]
fn an_exit_record_is_read_whole() {
    exhaustively(right::a_rank_leaves);
}

#[test]
fn relaxed_exit_records_are_found() {
    found(&["half an exit record"], None, relaxed_store::a_rank_leaves);
    found(&["half an exit record"], None, relaxed_load::a_rank_leaves);
}
