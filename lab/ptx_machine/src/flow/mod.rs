//! Analyses of functions before they are compiled: control flow, unreachable blocks, and the registers of instructions.

pub(crate) mod analysis;
pub(crate) mod dead;
mod effects;
