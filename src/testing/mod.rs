//! Fixtures for the unit tests of several modules: damaged messages, machines and temporary folders.

pub(crate) mod damaged;
pub(crate) mod machines;
pub(crate) mod temporary;
