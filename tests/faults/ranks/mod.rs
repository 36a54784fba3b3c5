//! Ranks that die, leave, fork or stop: the others learn of it in time, and continue without them.

pub mod departures;
pub mod forks;
pub mod growing;
pub mod kills;
pub mod leaving;
pub mod paused;
pub mod recovery;
pub mod returning;
pub mod server;
pub mod watching;
