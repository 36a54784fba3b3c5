//! The tests for every device, with every way to start ranks: each case is written once.
//!
//! | file | subject |
//! |---|---|
//! | `cases/` | the cases: each writes a scenario for a world and has the world run it |
//! | `scenario.rs` | a scenario: the communicators' settings, the messages, and the steps with their placements |
//! | `world.rs` | a world under test: how ranks are started (`Launch`), and on which device (`Device`) |
//! | `ranks.rs` | the ranks that one thread drives: their memory, the call, and the check of its result |
//! | `launch.rs` | threads and processes |
//! | `tier.rs` | how much of a test runs |
//! | `tests/oracle` | inputs and expected outputs: a separate crate, which is compiled with optimisations |
//!
//! **To add a world**, write a `Launch` and a `Device`, or a `Ranks` if one thread drives all ranks, and a line
//! `conformance!` that names it. **To add a collective**, write a `Collective`, its expected outputs in the oracle's
//! `message.rs`, its call in each `Ranks`, and cases.
//!
//! **Skipped work is detected.** Each case states the number of steps of its scenario independently of the loops that
//! generate them, and every rank counts its steps. A rank that is a process reports that it has run its world.
//!
//! Each output is compared with the expected one of its message, so outputs are also equal across ranks, algorithms and
//! devices. Inputs derive from a seed that every test prints; `FAST_ALLREDUCE_TEST_SEED` sets it.

pub mod cases;
pub mod launch;
pub mod ranks;
pub mod scenario;
pub mod tier;
pub mod world;

#[allow(unused_imports)] // Each target uses a part of it.
pub use fast_allreduce_oracle::{
    collective, message, number, oracle, order, quantized, quantized_rows, random, rows, sharded,
};

/// Passes the names of all cases to a macro, after an expression.
#[macro_export]
macro_rules! every_case {
    ($macro:ident, $world:expr) => {
        $crate::$macro! { $world;
            every_type_operation_and_algorithm
            every_small_count
            every_boundary
            every_placement
            buffers_dropped_and_allocated_again
            epochs_that_wrap_around
            grids_that_change
            communicators_in_turn
            calls_at_random
            every_collective
            every_small_count_of_collectives
            every_boundary_of_collectives
            every_placement_of_collectives
            every_order
            every_order_in_little_room
            all_collectives_at_random
        }
    };
}

/// Makes a test of every case in the module that uses it. The argument is a function from the name of a test, as the
/// runner knows it, to the world to test.
#[macro_export]
macro_rules! conformance {
    ($world:expr) => { $crate::every_case! { conformance, $world } };
    ($world:expr; $($case:ident)*) => {$(
        #[test]
        fn $case() {
            let path = concat!(module_path!(), "::", stringify!($case));
            let (_crate_name, test) = path.split_once("::").expect("a test is in a module");
            $crate::suite::cases::$case(&($world)(test));
        }
    )*};
}

/// Makes `fn tests() -> Vec<Trial>` for `tests/runner`. The argument is a function like that of `conformance!`, which
/// returns the missing requirement if there is no world.
#[macro_export]
macro_rules! conformance_where_found {
    ($world:expr) => { $crate::every_case! { conformance_where_found, $world } };
    ($world:expr; $($case:ident)*) => {
        pub(crate) fn tests() -> Vec<$crate::runner::Trial> {
            vec![$({
                let path = concat!(module_path!(), "::", stringify!($case));
                let (_crate_name, test) = path.split_once("::").expect("a test is in a module");
                $crate::runner::test(path, move || ($world)(test), |world| $crate::suite::cases::$case(&world))
            }),*]
        }
    };
}
