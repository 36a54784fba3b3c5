//! Tensor-parallel allreduce by direct access to the peers' memory.
//!
//! Tensor-parallel inference does two allreduces of some kilobytes to some megabytes for each layer. Kernels that read or
//! write the peers' memory directly have a fraction of the latency of general collectives libraries there. This crate is
//! those kernels, written once and run on CUDA GPUs and, between processes or threads, on CPUs.
//!
//! A *rank* is one participant, a *world* all of them. Ranks find each other through a [`bootstrap`], map each other's
//! *region*, and then call [`Communicator::all_reduce`] in the same order with the same count, type and operation:
//!
//! ```
//! use fast_allreduce::{bootstrap::Threads, Communicator, Host, ReduceOp};
//!
//! # fn main() -> fast_allreduce::Result<()> {
//! let ranks = Threads::world(2)?.into_iter().map(|bootstrap| {
//!     std::thread::spawn(move || -> fast_allreduce::Result<Vec<f32>> {
//!         let communicator = Communicator::builder().build(Host::new(), bootstrap)?;
//!         let input = vec![communicator.rank() as f32 + 1.0; 1000];
//!         let mut output = vec![0.0; 1000];
//!         communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
//!         Ok(output)
//!     })
//! });
//! for rank in ranks.collect::<Vec<_>>() {
//!     assert_eq!(rank.join().unwrap()?, vec![3.0; 1000]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises
//!
//! * Any shape: 1 to 16 ranks, any count, any alignment of the element type, in place or out of place.
//! * The same bits on every rank and from each of the direct [algorithms](Algorithm): ranks are added in order, floats of 8 and
//!   16 bits in f32, rounded once. Others are taken only where GPUs have no full mesh of NVLinks, for more than 2 ranks and large messages.
//! * No hang: every wait is bounded, and a rank that does not come is an [`Error`] that names it.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod abi;
mod any;
pub mod bootstrap;
mod call;
mod catalogue;
mod communicator;
mod deadline;
mod descriptor;
pub mod device;
mod element;
mod endpoint;
mod error;
mod exclusive;
mod fork;
pub mod hierarchical;
#[doc(hidden)]
pub mod interruption;
mod liveness;
pub mod plan;
mod raw;
mod region;
mod registry;
mod scale;
mod settings;
mod symmetric;
#[cfg(test)]
mod testing;
mod thread;
pub mod topology;
mod trace;

pub use abi::MAX_RANKS;
pub use any::{AnyBuffer, AnyCommunicator};
pub use call::{
    CallKind, Collective, Direction, Group, QuantizedTransport, RawFused, RawQuantizedRows, Transfer,
    Transport,
};
pub use catalogue::settings::DeviceId;
pub use catalogue::{Algorithm, DType, Norm, ReduceOp, Scaling};
pub use communicator::{Builder, Communicator, Counters, Fused, Slices};
#[cfg(feature = "cuda")]
pub use communicator::{Registered, RegisteredMemory};
#[cfg(feature = "cuda")]
pub use device::cuda::Cuda;
pub use device::host::{Host, Wait};
pub use device::Device;
pub use element::Element;
pub use error::{Error, Result};
#[doc(hidden)]
pub use exclusive::{this_thread, Exclusive, Held};
pub use hierarchical::{Hierarchical, InterNode};
pub use liveness::DirectReads;
pub use plan::{Order, Plan};
pub use raw::StreamCommunicator;
pub use scale::Scale;
pub use settings::Settings;
pub use symmetric::{Buffer, SymmetricMemory, SymmetricView};

/// What this build was made with: a line on the kernels for the host, one on those for CUDA, and one on MPI.
pub fn build_facts() -> [(&'static str, String); 3] {
    #[cfg(feature = "mpi")]
    let mpi = bootstrap::Mpi::library();
    #[cfg(not(feature = "mpi"))]
    let mpi = "no: without the feature `mpi`".to_owned();
    [
        ("host kernels", device::host::Isa::all_names().join(", ")),
        ("CUDA kernels", env!("FAST_ALLREDUCE_CUDA_BUILD").to_owned()),
        ("MPI", mpi),
    ]
}

/// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
