//! The environment of a rank: signals, limits, sandboxes, closed standard streams, floating-point state.

pub mod alarms;
pub mod descriptors;
pub mod float_state;
pub mod limits;
pub mod memory;
pub mod sandboxes;
pub mod signals;
pub mod streams;
