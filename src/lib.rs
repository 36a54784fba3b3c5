//! Tensor-parallel allreduce by direct access to the peers' memory, on CUDA GPUs and on CPUs.
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
//! A *rank* is one participant, and a *world* is all of them. A [`bootstrap`] is how ranks find each other. Then they
//! map each other's *region*, and make the same calls in the same order, with the same count, type and operation.
//!
//! Tensor-parallel inference makes two allreduces of some kilobytes to some megabytes per layer. At these sizes kernels
//! that read or write the peers' memory directly have a fraction of the latency of a general collectives library. The
//! kernels of this crate are written once, and run on GPUs, between processes on CPUs, and between threads.
//!
//! # What it guarantees
//!
//! * Any shape: 1 to 16 ranks, any count, any alignment of the element type, in place or out of place.
//! * The same bits on every rank and by each direct [algorithm](Algorithm). The elements of the ranks are added in rank
//!   order, floats of 8 and 16 bits in f32, with one rounding. [`Order::Any`] permits faster algorithms that do not
//!   guarantee this.
//! * No hang: every wait is bounded. If a rank does not come, the call returns an [`Error`] that names it.
//!
//! # Tour
//!
//! ## Start
//!
//! | name | purpose |
//! |---|---|
//! | [`bootstrap`] | how ranks find each other: an id between processes, threads, TCP, MPI, or your own transport |
//! | [`Communicator`] | a rank's handle to its world, with all calls: `all_reduce`, `send`, `split`, ... |
//! | [`Builder`] | the settings of a communicator, as typed methods |
//! | [`Settings`] | the same settings by name, as text |
//! | [`Counters`], [`DirectReads`] | what a rank has done so far; whose memory it reads directly |
//! | [`MAX_RANKS`], [`build_facts`] | the largest world; what this build contains |
//!
//! ## Devices
//!
//! | name | purpose |
//! |---|---|
//! | [`Host`], [`Wait`] | CPUs: kernels run on worker threads; how these wait |
//! | [`Cuda`] | a GPU, with the feature `cuda`: calls are in the order of a stream |
//! | [`Device`], [`DeviceId`] | what both have in common; `cpu` or `cuda:N` as a value |
//! | [`AnyCommunicator`] | one type for both, on addresses: for programs that choose the device at run time |
//! | [`StreamCommunicator`] | an `AnyCommunicator` with its own stream, where two ranks may both send first |
//!
//! ## Memory
//!
//! Calls take slices: `&[T]` on the host, any cudarc `DevicePtr` on a GPU. Private memory is copied
//! once; registered memory is read by the peers where it is.
//!
//! | name | purpose |
//! |---|---|
//! | [`Buffer`] | registered memory that the communicator allocates: [`Communicator::alloc`] |
//! | [`Registered`], [`RegisteredMemory`] | existing memory of a GPU, registered |
//! | [`AnyBuffer`] | registered memory of an [`AnyCommunicator`] |
//! | [`SymmetricMemory`], [`SymmetricView`] | memory that every rank can access, for your own protocols |
//!
//! ## Types and operations
//!
//! | name | purpose |
//! |---|---|
//! | [`Element`], [`DType`] | element types, as a Rust type and as a value |
//! | [`ReduceOp`], [`Scale`] | sum, minimum, average, bitwise operations, ...; the factor of a premultiplied sum |
//! | [`Collective`] | a collective as a value, for calls by address: `collective_raw` |
//! | [`Group`], [`Transfer`], [`Direction`] | messages between pairs of ranks in one launch: typed, or by address |
//! | [`CallKind`] | the kind of a call, without its arguments |
//!
//! ## Fused and quantised sums
//!
//! | name | purpose |
//! |---|---|
//! | [`Fused`], [`Norm`] | a sum with a residual, and a norm of its rows: `all_reduce_fused`, `reduce_scatter_fused` |
//! | [`Experts`] | the input of `all_reduce_fused`, computed from the rows of a mixture of experts |
//! | [`Scaling`] | formats of quantised rows: 8-bit numbers, NVFP4, MXFP8, MXFP4 |
//! | [`GatheredRows`] | quantised rows of all ranks: `all_gather_rows` |
//! | [`ShardedColumns`] | columns of rows that are divided among the ranks: `sharded_rms_norm` |
//! | [`Slices`], [`RawFused`], [`RawQuantizedRows`], [`RawExperts`] | memory of fused calls, by device, by address |
//! | [`RawGatheredRows`], [`RawShardedRows`] | memory of the other two calls, by address |
//! | [`Transport`], [`QuantizedTransport`] | sums with one byte per element on the links: `all_reduce_quantized` |
//!
//! ## Plans
//!
//! | name | purpose |
//! |---|---|
//! | [`Algorithm`], [`Order`] | how a call is carried out; whether the order of additions is fixed |
//! | [`Plan`], [`plan`] | algorithm and grid of a call; tables and tuning files that plans are made from |
//! | [`topology`] | links between GPUs |
//!
//! ## Several nodes
//!
//! | name | purpose |
//! |---|---|
//! | [`Hierarchical`], [`InterNode`] | these kernels inside each node, MPI, NCCL or your own engine between nodes |
//!
//! ## Errors
//!
//! | name | purpose |
//! |---|---|
//! | [`Error`], [`Result`] | the one error type: its text says what happened and what to do |
//! | [errors of every call](Communicator#errors-of-every-call) | which there are, and which end the communicator |
//! | [`Communicator::shrink`] | a communicator of the surviving ranks |
//!
#![cfg_attr(not(feature = "cuda"), doc = "[`Cuda`]: device")]
#![cfg_attr(not(feature = "cuda"), doc = "[`Registered`]: device")]
#![cfg_attr(not(feature = "cuda"), doc = "[`RegisteredMemory`]: device")]
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
pub mod flight;
mod fork;
pub mod hierarchical;
#[doc(hidden)]
pub mod interruption;
mod liveness;
pub mod plan;
mod raw;
pub mod record;
mod region;
mod registry;
mod scale;
mod settings;
mod symmetric;
#[cfg(any(test, fuzzing))]
mod testing;
mod thread;
pub mod topology;
mod trace;

pub use abi::MAX_RANKS;
pub use any::{AnyBuffer, AnyCommunicator};
pub use call::{
    CallKind, Collective, Direction, Group, QuantizedTransport, RawExperts, RawFused, RawGatheredRows,
    RawQuantizedRows, RawShardedRows, Transfer, Transport,
};
pub use catalogue::settings::DeviceId;
pub use catalogue::settings::Flight;
pub use catalogue::{Algorithm, DType, Norm, ReduceOp, Scaling};
pub use communicator::{
    Builder, Communicator, Counters, Experts, Fused, GatheredRows, Inherited, Progress, ShardedColumns,
    Slices, Suspended,
};
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
pub use liveness::{DirectReads, FlightRecord};
pub use plan::{Order, Plan};
pub use raw::StreamCommunicator;
pub use scale::Scale;
pub use settings::Settings;
pub use symmetric::{Buffer, SymmetricMemory, SymmetricView};

/// Returns what this build contains: names and descriptions of the host kernels, the CUDA kernels and MPI.
///
/// ```
/// for (name, description) in fast_allreduce::build_facts() {
///     println!("{name}: {description}");
/// }
/// ```
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

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
