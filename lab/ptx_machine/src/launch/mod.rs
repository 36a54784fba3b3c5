//! Launches: checks, the turns of blocks and threads, barriers and warp instructions, and reports of failures.

pub(crate) mod block;
pub(crate) mod cluster;
pub(crate) mod grid;
mod idle;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod together;
