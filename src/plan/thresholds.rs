//! Thresholds: sizes at which another algorithm or path is faster, each with its source. "Predicted" means by the PTX
//! machine's clock (`lab/gpu-model.md`). `built_in` has the plan tables.

use std::ops::Range;

use crate::abi;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Host: bytes of a message for each block. With less, waking a worker thread costs more than its share of the work.
/// Measured on AMD EPYC (Zen 4).
pub(crate) const HOST_BLOCK_BYTES: u64 = 64 << 10;

/// Host: largest piece of a message for each block. It stays in the writer's second-level cache until it is read.
/// Measured on AMD EPYC (Zen 4).
pub(crate) const HOST_PIECE_BYTES: u64 = 256 << 10;

/// Host: default of `max_bytes`. Assumed, not measured.
pub(crate) const HOST_MAX_BYTES: usize = MIB;

/// Host: if a cache line takes more nanoseconds than this from core to core, Intel's table is used, else AMD's. A line
/// took 42 to 57 ns where AMD's table was measured, and 114 to 137 ns where Intel's is faster.
pub(crate) const MOST_NEAR_LINE_NS: f64 = 80.0;

/// Host: staging ring of one generation. The rings of both generations together are twice the second-level cache of
/// the CPUs that were measured. In a smaller ring, lines are still in the caches of their readers when they are
/// written again. A larger ring takes third-level cache from other data.
pub(crate) const STAGING_RING_BYTES: usize = MIB;

/// Host: smallest launch that uses a slot of the staging ring. The kernels use the same constant.
pub(crate) const STAGING_RING_LEAST_BYTES: usize = abi::FA_SMALL_STAGING_BYTES as usize;

/// Host: smallest allreduce between sockets that has two levels. It has two barriers more. Assumed, not measured:
/// `docs/scaling.md` has the model.
pub(crate) const TWO_LEVEL_LEAST_BYTES: usize = 256 * KIB;

/// Host: smallest allreduce out of place whose results bypass the caches of an Intel CPU. Measured on a Xeon with AMX:
/// with ordinary stores calls take 1.12 to 1.30 times as long from here on. If the results are read afterwards, sums
/// take 0.87 to 0.94 of the time.
pub(crate) const INTEL_STREAM_FROM_BYTES: usize = MIB;

/// Host: shares of an all-gather of 2 ranks that each reads from the other's process on an Intel CPU. Measured on a
/// Xeon with AMX: through shared memory calls out of place take 1.09, 1.28, 1.44 and 1.07 times as long with shares of
/// 64, 128, 256 and 512 KiB, and 0.91 times with 1 MiB, since a rank also copies its own share; in place 1.27 to 2.08
/// times, and 1.43 times with 1 MiB.
pub(crate) const INTEL_SHARES_READ: Range<u64> = 64 << 10..1 << 20;

/// Host: as [`INTEL_STREAM_FROM_BYTES`], on other CPUs. On AMD EPYC (Zen 4) they took 1.4 times as long at 1 MiB, 1.1
/// times at 4 MiB, and 0.89 times at 16 MiB.
pub(crate) const STREAM_FROM_BYTES: usize = 16 * MIB;

/// Host: memory of all channels to one rank. It is twice the second-level cache of the CPUs that were measured. With
/// less, a slot is still in the cache of its last reader when it is written again.
pub(crate) const HOST_CHANNEL_BYTES: usize = 2 * MIB;

/// Host: largest chunk of a channel.
pub(crate) const HOST_CHUNK_BYTES: usize = 16 * KIB;

/// Host: smallest message that the receiver reads directly from the sender's buffer. A shorter one passes through the
/// channel before the sender would learn that it was read.
pub(crate) const HOST_LEAST_POSTED_BYTES: u64 = 16 << 10;

/// GPU: default of `max_bytes`, that of vLLM's custom allreduce (`max_size` in `custom_all_reduce.py`).
#[cfg(feature = "cuda")]
pub(crate) const GPU_MAX_BYTES: usize = 8 * MIB;

/// GPU: largest number of blocks of an algorithm that the table has no row for, that of vLLM's custom allreduce
/// (`csrc/custom_all_reduce.cuh`).
pub(crate) const GPU_UNPLANNED_BLOCKS: u32 = 36;

/// Least memory of all channels to one rank. A region may have 1 MiB in addition to multiples of `max_bytes`; this
/// much of it is left for channels.
pub(crate) const LEAST_CHANNEL_BYTES: usize = 100 * KIB;

/// Smallest stripe of a channel. A channel that is too small for two stripes is one ring. Assumed, not measured.
pub(crate) const LEAST_STRIPE_BYTES: usize = 32 * KIB;

/// GPU: memory of all channels to one rank. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_CHANNEL_BYTES: usize = 16 * MIB;
/// GPU: largest chunk of a channel. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_CHUNK_BYTES: usize = 256 * KIB;

/// GPU: largest part of a message that is sent as packets. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_PACKET_BYTES: usize = 4 * KIB;

/// GPU: smallest message that the receiver reads directly from the sender's buffer. The reads take a round trip, and
/// the sender waits for it. Assumed, not measured.
#[cfg(feature = "cuda")]
pub(crate) const GPU_LEAST_POSTED_BYTES: u64 = 4 << 20;

/// Smallest part of a message that is worth another stripe, and so another block.
pub(crate) const LEAST_PART_BYTES: u64 = 4 << 10;

/// GPU: number of threads of each block that moves messages.
pub(crate) const MESSAGE_THREADS: usize = 256;

/// GPU: above this size a broadcast takes two steps: the root scatters slices, then all ranks gather them. So the
/// root's links do not carry the message once for each rank. Assumed, not measured.
pub(crate) const SCATTERED_BROADCAST_ABOVE_BYTES: usize = 128 * KIB;

/// GPU: up to this size, rows that belong to one block each are pushed in one shot. In a two-shot most blocks have no
/// row of their slice. Predicted: half to a fifth of the time, on NVLink and on PCIe.
pub(crate) const ONE_SHOT_ROWS_MOST_BYTES: usize = 512 * KIB;

/// GPU: up to this size, rows of teams are pushed although the table pulls. Above it nothing is predicted.
pub(crate) const TEAM_ROWS_MOST_BYTES: usize = 8 * MIB;

/// GPU: most threads of a block of a sharded norm. A row that a rank has is short, and each thread takes several packs
/// rather than more threads meet at each of the row's synchronisations. Assumed, not measured.
pub(crate) const SHARDED_ROWS_MOST_THREADS: usize = 256;

/// GPU: packets of calls outside of the hot set have tags, which double their bytes. Above this size two ranks pull
/// such a message, if the table pulls the largest messages. Between more ranks pushes win at all sizes at which the
/// tables push. Predicted.
pub(crate) const TAGGED_PUSH_MOST_BYTES: usize = MIB;

/// GPU: number of blocks of an in-switch reduction. The grid has 16,384 threads with a request of 16 bytes each.
/// Others have measured less bandwidth with more requests outstanding.
pub(crate) const NVLS_BLOCKS: u32 = 32;
/// GPU: number of threads of a block of an in-switch reduction. See [`NVLS_BLOCKS`].
pub(crate) const NVLS_THREADS: u32 = 512;

/// GPU: above this size, between [`NVLS_LEAST_RANKS`] or more ranks, an in-switch reduction is expected to be at least
/// as fast. Up to it packets are faster, because windows cost two copies. Predicted.
pub(crate) const NVLS_ABOVE_BYTES: u64 = 8 << 20;
/// GPU: smallest world for in-switch reductions. See [`NVLS_ABOVE_BYTES`].
pub(crate) const NVLS_LEAST_RANKS: usize = 5;
