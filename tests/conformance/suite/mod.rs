//! What every device must do, wherever its ranks run: each case written once.
//!
//! | file | subject |
//! |---|---|
//! | `cases/` | the cases: each writes a scenario for a world and has the world run it |
//! | `scenario.rs` | a scenario: how communicators are made, messages, and which of them is reduced from where, call by call |
//! | `world.rs` | a world under test: how ranks come to be (`Launch`), on which device (`Device`) |
//! | `ranks.rs` | the ranks that one thread drives: their memory, the call, and the comparison of what comes of it |
//! | `launch.rs` | threads and processes |
//! | `tier.rs` | how much of a test is run |
//! | `tests/oracle` | inputs and expected outputs: a crate of its own, which is optimised |
//!
//! **A new world** is a `Launch`, a `Device` or, where one thread drives all ranks, a `Ranks`; and a line
//! `conformance!` that names it. **A new collective** is a `Collective`, its expected outputs in the oracle's
//! `message.rs`, its call in each `Ranks`, and cases.
//!
//! **Nothing is left out.** Each case says how many steps its scenario has, apart from the loops that make them;
//! every rank counts those that it has made. A rank that is a process tells of the world that it has run.
//!
//! Each output is compared with the one that is expected of its message, so equality across ranks, algorithms and
//! devices follows. Inputs come from a seed that every test prints; `FAST_ALLREDUCE_TEST_SEED` sets it.

pub mod cases;
pub mod launch;
pub mod ranks;
pub mod scenario;
pub mod tier;
pub mod world;

#[allow(unused_imports)] // Each target uses a part of it.
pub use fast_allreduce_oracle::{
    collective, message, number, oracle, order, quantized, quantized_rows, random, rows,
};

/// Gives the names of all cases to a macro, behind an expression.
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

/// Makes a test of every case in the module it is used in. The argument takes the name of a test, as the runner knows
/// it, and returns the world to test.
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

/// The same for `tests/runner`: makes `fn tests() -> Vec<Trial>`. The argument returns what is missing where there is
/// no world.
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
