//! The CUDA device, against the same oracle as the host: on a GPU, or with `tests/stand_in_driver` without one.
//!
//! Without a driver or a device every test prints `skipped: why` and passes. `FAST_ALLREDUCE_REQUIRE`, a list of `cuda`,
//! `two-gpus`, `stand-in` and `no-kernels`, names what must be there. `scripts/test-cuda-stand-in.sh` runs it all with the stand-in.
#![cfg(feature = "cuda")]

mod closing;
mod concurrency;
mod cost;
mod errors;
mod gpu;
mod graphs;
mod mixed;
#[path = "../conformance/oracle.rs"]
mod oracle;
mod pointers;
mod processes;
#[path = "../conformance/random.rs"]
#[allow(dead_code)]
mod random;
mod registration;
mod seat;
mod settings;
mod threads;
mod typed;
mod world;
