//! What goes wrong, on purpose: ranks that disagree, leave, die or fork. Nothing hangs, and nothing wrong is returned as right.

mod alarms;
mod alone;
mod cycles;
mod departures;
mod descriptors;
mod direct;
mod disagreements;
mod events;
mod float_state;
mod forks;
mod handshake;
mod kills;
mod leaving;
mod limits;
mod memory;
mod messages;
mod panics;
mod paused;
mod pool;
mod rank;
mod recovery;
mod reentry;
mod registered;
mod sandboxes;
mod signals;
mod storms;
mod streams;
#[path = "../../src/testing/temporary.rs"]
mod temporary;
#[path = "../conformance/suite/tier.rs"]
mod tier;
mod together;
mod watching;
mod world;

use fast_allreduce_oracle::random;
