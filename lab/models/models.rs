//! Models of the protocols for loom: what the kernels of `csrc` do with flags, packets and shared memory.
//! loom enumerates their executions under its C11-like memory model; unordered plain accesses, wrong sums and
//! hangs end in a panic.
//!
//! Two ranks are explored exhaustively in CI: every interleaving, and every value that a load may return.
//! Three ranks are explored with up to one preemption and one failed poll for each wait, with all values, and
//! with at most some ten thousand executions of a model; each test prints whether those were all (`explore`).
//! A message is one pack for each rank, and a rank has one block, because blocks of different indices share
//! nothing but the status (`gone`). Each test named `.._found` plants one bug in the same model and fails
//! unless loom finds it.
//!
//! `rank` follows the kernels step by step and must be changed with them. `status_page` and `flight` include the
//! sources themselves. Not modelled by loom: reorderings of stores that C11 does not permit, scopes, and 128-bit
//! accesses (for these see `lab/litmus`).

mod barrier;
mod channel;
mod checked;
mod explore;
mod flight;
mod gone;
mod meeting;
mod membership;
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

/// Runs all ranks of a world, one thread each; rank 0 runs on the model's own thread.
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

/// The path that the included sources use.
#[allow(dead_code)]
mod abi {
    pub const MAX_RANKS: usize = 16;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct FaCall {
        pub what: u64,
        pub count: u64,
        pub digest: u64,
    }
}
