//! Calls that differ between ranks, fail, are aborted or are made at an unusual moment.

pub mod cycles;
pub mod direct;
pub mod disagreements;
pub mod events;
pub mod handshake;
pub mod messages;
pub mod metrics;
pub mod panics;
pub mod reentry;
pub mod registered;
pub mod storms;
pub mod together;
