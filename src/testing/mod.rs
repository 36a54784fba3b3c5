//! What unit tests of several modules use: damaged messages and temporary folders.

pub(crate) mod damaged;
pub(crate) mod temporary;
