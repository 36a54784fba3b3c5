//! Memory model: data races, late relaxed stores, and multicast addresses.

pub(crate) mod multimem;
pub(crate) mod race;
pub(crate) mod store_buffer;
