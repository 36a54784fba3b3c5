//! Sizes at which one way to do a call becomes faster than another, with where each comes from. "Predicted" is by the PTX machine's clock
//! (lab/gpu-model.md). The plan tables are in `built_in`.

use crate::abi;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Host: a block is used for every `HOST_BLOCK_BYTES`. Below, waking a worker thread costs more than its share of the work. Measured
/// on AMD EPYC (Zen 4).
pub(crate) const HOST_BLOCK_BYTES: u64 = 64 << 10;

/// Host: the largest piece of a message for each block. It stays in the writer's second-level cache until it is read. Measured
/// on AMD EPYC (Zen 4).
pub(crate) const HOST_PIECE_BYTES: u64 = 256 << 10;

/// Host: `max_bytes` where it is not set. Assumed, not measured.
pub(crate) const HOST_MAX_BYTES: usize = MIB;

/// Host: from here on a line's transfer from core to core speaks for Intel's table, in nanoseconds: between what it takes where AMD's table
/// was measured, 42 to 57, and where Intel's is the faster, 114 to 137.
pub(crate) const MOST_NEAR_LINE_NS: f64 = 80.0;

/// Host: the staging ring of a generation. Both generations are twice the second-level cache of the processors that it was measured
/// on: a smaller ring leaves lines in the caches of their readers, a larger one takes the third level from others.
pub(crate) const STAGING_RING_BYTES: usize = MIB;

/// Host: the least that a slot of the staging ring is used for, which the kernels must agree on.
pub(crate) const STAGING_RING_LEAST_BYTES: usize = abi::FA_SMALL_STAGING_BYTES as usize;

/// Host: the channel to a rank. It is twice the second-level cache of the processors that it was measured on: in a smaller one, a slot
/// that is written is still in the cache of its last reader.
pub(crate) const HOST_CHANNEL_BYTES: usize = 2 * MIB;

/// Host: the most data of a chunk of a channel.
pub(crate) const HOST_CHUNK_BYTES: usize = 16 * KIB;

/// Host: the least message that is read where it is. A shorter one is through the channel before its sender would have heard that it
/// was read.
pub(crate) const HOST_LEAST_POSTED_BYTES: u64 = 16 << 10;

/// GPU: `max_bytes` where it is not set, as of vLLM's custom allreduce (`max_size` of `custom_all_reduce.py`).
#[cfg(feature = "cuda")]
pub(crate) const GPU_MAX_BYTES: usize = 8 * MIB;

/// GPU: blocks of an algorithm that the table has no row of: those of vLLM's custom allreduce (`csrc/custom_all_reduce.cuh`).
pub(crate) const GPU_UNPLANNED_BLOCKS: u32 = 36;

/// The least channel to a rank: what is left of the MiB that a region may have beside multiples of `max_bytes`.
pub(crate) const LEAST_CHANNEL_BYTES: usize = 100 * KIB;

/// The least stripe of a channel: of less, a channel is one ring. Assumed, not measured.
pub(crate) const LEAST_STRIPE_BYTES: usize = 32 * KIB;

/// GPU: the channel to a rank, and the most data of a chunk. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_CHANNEL_BYTES: usize = 16 * MIB;
/// See [`GPU_CHANNEL_BYTES`].
#[cfg(feature = "cuda")]
pub(crate) const GPU_CHUNK_BYTES: usize = 256 * KIB;

/// GPU: the most data of a message part that is sent as packets. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_PACKET_BYTES: usize = 4 * KIB;

/// GPU: the least message that is read where it is. The receiver's reads take a round trip, for which the sender waits. Assumed,
/// not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_LEAST_POSTED_BYTES: u64 = 4 << 20;

/// The least part of a message that is worth another stripe, and so another block.
pub(crate) const LEAST_PART_BYTES: u64 = 4 << 10;

/// GPU: threads of a block that moves a part of a message, whatever else the launch does.
pub(crate) const MESSAGE_THREADS: usize = 256;

/// GPU: from here on a broadcast takes two steps, a slice from the root to each rank, then from each rank to the others: where links
/// are the bound, the root's are not to carry the message once for each rank. Assumed, not measured.
pub(crate) const SCATTERED_BROADCAST_ABOVE_BYTES: usize = 128 * KIB;

/// GPU: up to here rows of one block each are pushed in one shot. Two-shots leave most blocks without a row of their slice. Predicted: a
/// half to a fifth of the time, on NVLink and on PCIe.
pub(crate) const ONE_SHOT_ROWS_MOST_BYTES: usize = 512 * KIB;

/// GPU: up to here rows of teams are pushed where the table pulls; for more nothing is predicted.
pub(crate) const TEAM_ROWS_MOST_BYTES: usize = 8 * MIB;

/// GPU: packets of sums that are not of the hot set have tags, which double their bytes. Above this two ranks pull such a message, if
/// they pull the largest ones. Between more ranks pushes stay ahead as far as the tables have them. Predicted.
pub(crate) const TAGGED_PUSH_MOST_BYTES: usize = MIB;

/// GPU: the grid of in-switch reductions, 16384 threads with a request of 16 bytes each. With more of them
/// outstanding, others have measured less bandwidth.
pub(crate) const NVLS_BLOCKS: u32 = 32;
/// See [`NVLS_BLOCKS`].
pub(crate) const NVLS_THREADS: u32 = 512;

/// GPU: above this an in-switch reduction is not expected to be slower, between [`NVLS_LEAST_RANKS`] or more. Up to here packets are
/// faster, as windows cost two copies. Predicted.
pub(crate) const NVLS_ABOVE_BYTES: u64 = 8 << 20;
/// See [`NVLS_ABOVE_BYTES`].
pub(crate) const NVLS_LEAST_RANKS: usize = 5;
