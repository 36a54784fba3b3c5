//! Tests of the program, command by command. One target, so that tests that wait run at the same time as others.

mod collectives;
mod compare;
mod errors;
mod fused;
mod inspect;
mod manual;
mod output;
mod placement;
mod processes;
#[path = "../program/mod.rs"]
mod program;
mod replay;
mod results;
mod soak;
mod tune;
