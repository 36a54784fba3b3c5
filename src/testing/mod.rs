//! Fixtures for the unit tests of several modules: damaged messages and temporary folders.

pub(crate) mod damaged;
pub(crate) mod temporary;
