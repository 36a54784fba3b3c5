//! Tensor parallelism for [candle](https://github.com/huggingface/candle) on fast-allreduce.
//!
//! * [`AllReduce`], [`AllGather`] and [`ReduceScatter`] are custom ops: they take tensors where they are, in the memory of CPUs or
//!   (with the feature `cuda`) of GPUs, and run in the order of the device's own stream.
//! * [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are the layers of Megatron-LM
//!   (Shoeybi et al. 2019): a pair of linear layers takes one allreduce.
//! * [`Shards`] is where a rank's part of the weights comes from: a [`Gguf`] or [`Safetensors`] file, of which it reads no more
//!   than its part.
//! * [`share`] and [`HeadShare`] divide what no number of ranks divides evenly.
//! * [`invariant`] has linear layers whose results are the same bits for every number of ranks.
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
//!         // Of six inputs, this rank has three.
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
//! What a communicator reports is the source of a [`candle_core::Error`]: [`failure`] finds it there, so that a server can tell a
//! rank that has gone from a shape that does not fit.
//!
//! # Types
//!
//! Reductions take f8e4m3, f16, bf16, f32, f64, u8, u32, i32 and i64: all that candle and fast-allreduce have in common. candle has
//! no i8 and no u64. Its i16 has no reductions in fast-allreduce, and is gathered as bytes. candle's own conversion to f8e4m3
//! saturates, a reduction that overflows is NaN. What candle keeps packed (f4, f6) is refused.

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
