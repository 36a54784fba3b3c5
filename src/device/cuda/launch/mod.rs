//! Launches: the kernels of a context, the order of a communicator's calls on streams, and what captured calls need.

pub(crate) mod graph_rows;
pub(crate) mod helper_streams;
pub(crate) mod kernels;
pub(crate) mod order;
pub(crate) mod programmatic;
mod progress;
