//! The protocols as loom models: what the kernels of `csrc` do with flags, packets and shared memory, in executions that loom
//! enumerates under its C11-like memory model. Plain accesses that nothing orders, wrong sums and hangs end in a panic.
//!
//! Two ranks are explored exhaustively in CI: every interleaving, every value that a load may return. Three ranks are explored with
//! up to one preemption and one poll in vain for each wait, all values included, and at most some ten thousand executions of a
//! model: each test prints whether that was all (`explore`). A message is one pack for each rank, and a rank has one block, since
//! blocks of different indices meet nowhere but in the status (`gone`). Each test named `.._found` plants one bug in the
//! same model and fails unless loom finds it.
//!
//! `rank` follows the kernels step by step and has to be changed with them. `status_page` is no copy: it is the source itself. What
//! loom does not have: stores that pass each other otherwise than C11 permits, scopes, and 128-bit accesses (`lab/litmus`).

mod barrier;
mod channel;
mod checked;
mod explore;
mod gone;
mod push;
mod rank;
mod region;
mod rendezvous;
mod revoked;
mod status_page;
#[path = "../../tests/conformance/suite/tier.rs"]
#[allow(dead_code)]
mod tier;

use loom::thread;

use self::rank::Rank;
use self::region::{Rules, World};

/// Runs all ranks of a world, each a thread; rank 0 is the model's own.
fn run(size: usize, rules: Rules, program: impl Fn(&mut Rank) + Clone + 'static) {
    let world = World::new(size, rules);
    let others = (1..size).map(|rank| {
        let (mut rank, program) = (Rank::new(&world, rank), program.clone());
        thread::spawn(move || program(&mut rank))
    });
    let others = others.collect::<Vec<_>>();
    program(&mut Rank::new(&world, 0));
    others.into_iter().for_each(|rank| rank.join().unwrap());
}

/// As the sources name it.
mod abi {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct FaCall {
        pub what: u64,
        pub count: u64,
        pub digest: u64,
    }
}
