//! The machine inside a driver: C interface, settings from the environment, and the images that the driver loads.

mod capi;
pub(crate) mod environment;
pub mod fatbin;
