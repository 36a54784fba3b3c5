//! Tensor parallelism for [candle](https://github.com/huggingface/candle) on fast-allreduce.
//!
//! * [`AllReduce`], [`AllGather`] and [`ReduceScatter`] are custom ops. They work on tensors in the memory of CPUs or
//!   (with the feature `cuda`) of GPUs, in the order of the device's stream.
//! * [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are the layers of Megatron-LM
//!   (Shoeybi et al. 2019): a pair of linear layers takes one allreduce.
//! * [`Shards`] is a source of weights, a [`Gguf`] or [`Safetensors`] file, of which a rank reads only its part.
//! * [`share`] and [`HeadShare`] divide channels and heads unevenly among any number of ranks.
//! * [`invariant`] has linear layers whose results have the same bits for every number of ranks.
//!
//! ```
//! use candle_core::{Device, Module, Tensor};
//! use fast_allreduce::{bootstrap::Threads, Communicator, Host};
//! use fast_allreduce_candle::{share, AllReduce, Comm, RowParallelLinear};
//!
//! # fn main() -> candle_core::Result<()> {
//! let weight = Tensor::arange(0f32, 12., &Device::Cpu)?.reshape((2, 6))?;
//! let ranks = Threads::world(2).map_err(candle_core::Error::wrap)?.into_iter().map(|bootstrap| {
//!     let weight = weight.clone();
//!     std::thread::spawn(move || -> candle_core::Result<Vec<f32>> {
//!         let communicator = Communicator::builder().build(Host::new(), bootstrap);
//!         let comm = Comm::new(communicator.map_err(candle_core::Error::wrap)?);
//!         // Three of the six inputs.
//!         let own = share(6, comm.rank(), comm.world_size());
//!         let weight = weight.narrow(1, own.start, own.len())?.contiguous()?;
//!         let layer = RowParallelLinear::new(weight, None, AllReduce::sum(&comm));
//!         layer.forward(&Tensor::ones((1, own.len()), candle_core::DType::F32, &Device::Cpu)?)?.squeeze(0)?.to_vec1()
//!     })
//! });
//! for rank in ranks.collect::<Vec<_>>() {
//!     assert_eq!(rank.join().unwrap()?, [15., 51.]);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! An error of the communicator is the source of a [`candle_core::Error`]. [`failure`] returns it, so that a server can
//! distinguish a lost rank from a wrong shape.
//!
//! # Types
//!
//! Reductions take the types that candle and fast-allreduce have in common: f8e4m3, f16, bf16, f32, f64, u8, u32, i32
//! and i64. candle has no i8 and no u64. fast-allreduce cannot reduce i16, which is gathered as bytes. candle's
//! conversion to f8e4m3 saturates, and a reduction that overflows is NaN. candle's packed types (f4, f6) are refused.

mod comm;
mod dtype;
mod embedding;
mod gguf;
pub mod invariant;
mod linear;
mod ops;
mod safetensors;
mod shards;
mod split;

pub use comm::{failure, Collectives, Comm};
pub use embedding::VocabParallelEmbedding;
pub use gguf::Gguf;
pub use linear::{ColumnParallelLinear, RowParallelLinear};
pub use ops::{AllGather, AllReduce, AllReduceRmsNorm, ReduceScatter};
pub use safetensors::Safetensors;
pub use shards::Shards;
pub use split::{share, HeadShare};
