//! The real program, command by command. One target, so that tests which wait do so beside others.

mod collectives;
mod compare;
mod errors;
mod fused;
mod manual;
mod output;
mod placement;
mod processes;
#[path = "../program/mod.rs"]
mod program;
mod results;
mod soak;
mod tune;
