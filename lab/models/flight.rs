//! A model of a flight record: the source `src/liveness/flight.rs` itself, on loom's atomics, with a ring of three
//! entries.

use super::explore::{exhaustively, found};

/// The path that the included source uses.
mod totals {
    #[allow(dead_code)]
    pub struct Totals;
}

/// Includes a generated source, and adds the scenario: a rank makes calls while a peer reads its record.
macro_rules! model {
    ($name:ident, $file:literal) => {
        #[allow(dead_code)]
        mod $name {
            use std::sync::Arc;

            use loom::thread;

            include!(concat!(env!("OUT_DIR"), "/", $file));

            const CALLS: u64 = 5;

            pub fn a_peer_reads() {
                let ring: Arc<Ring<2>> = Arc::new(Ring {
                    count: AtomicU64::new(0),
                    entries: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
                });
                let calling = {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || {
                        for number in 1..=CALLS {
                            // Not `push`: loom does not explore what precedes the owner's load of its own count.
                            ring.put(number, [number; 2]);
                        }
                    })
                };
                let number = ring.count();
                if let Some(entry) = ring.get(number) {
                    assert_eq!(entry, [number; 2], "half an entry, or another");
                }
                calling.join().unwrap();
                assert_eq!(ring.latest(), Some((CALLS, [CALLS; 2])));
                assert_eq!(ring.get(CALLS - 1), Some([CALLS - 1; 2]));
            }
        }
    };
}

model!(right, "flight.rs");
model!(relaxed_store, "flight_store.rs");
model!(relaxed_load, "flight_load.rs");
model!(without_the_owners_fence, "flight_fence_of_owner.rs");
model!(without_the_readers_fence, "flight_fence_of_reader.rs");
model!(an_entry_too_many, "flight_overwritten.rs");

#[test]
fn a_flight_record_is_read_in_whole_entries() {
    exhaustively(right::a_peer_reads);
}

#[test]
fn torn_entries_of_a_flight_record_are_found() {
    let torn = ["half an entry, or another"];
    found(&torn, None, relaxed_store::a_peer_reads);
    found(&torn, None, relaxed_load::a_peer_reads);
    found(&torn, None, without_the_owners_fence::a_peer_reads);
    found(&torn, None, without_the_readers_fence::a_peer_reads);
    found(&torn, None, an_entry_too_many::a_peer_reads);
}
