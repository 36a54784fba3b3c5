// Plain structs and enums that Rust and the kernels share. `src/abi/bindings.rs` is generated from this file.
//
// Layouts are the same on every supported target (64-bit, natural alignment); both sides assert them at
// compile time.
#ifndef FAST_ALLREDUCE_ABI_H
#define FAST_ALLREDUCE_ABI_H

#include <stdint.h>

#include "catalogue.h"

#define FA_MAX_RANKS 16
#define FA_MAX_BLOCKS 64

// Host. Up to this many staged bytes a call is bound by latency, and a cache line comes faster from the
// peer's own cache than from the shared one. Such calls do not use the staging ring, and they prefetch the
// staging of the next pull.
#define FA_SMALL_STAGING_BYTES 8192

// Each signal has its own cache line, to avoid false sharing between writers of neighbouring signals.
#define FA_SIGNAL_BYTES 64

// Payload of a pack, the unit of work: one 128-bit access on a GPU, one cache line on a CPU.
#define FA_CUDA_PACK_BYTES 16
#ifndef FA_HOST_PACK_BYTES
#define FA_HOST_PACK_BYTES 64
#endif

// A packet slot: one pack and its epoch tags.
#define FA_CUDA_SLOT_BYTES 32
#ifndef FA_HOST_SLOT_BYTES
#define FA_HOST_SLOT_BYTES 72
#endif

// GPU. A sentinel packet: one pack of a sum, without tags. After the mailboxes there is this much memory for
// each of their slots.
#define FA_CUDA_SENTINEL_BYTES 16

// Epochs skip 0, which fresh memory holds, and 1, so that the parity keeps alternating.
#define FA_FIRST_EPOCH_AFTER_WRAP 2u

#define FA_CODE(code, number, ...) code = number,

enum FaDtype { FA_TYPES(FA_CODE, ) };

enum FaOp { FA_OPS(FA_CODE, ) };

// Kernels: the algorithms of allreduce, then the other collectives.
enum FaAlgorithm {
  FA_REDUCING(FA_CODE, ) FA_MOVING(FA_CODE, ) FA_OTHER(FA_CODE, ) FA_NORMING(FA_CODE, ) FA_NVLS(FA_CODE, )
      FA_SHARDED(FA_CODE, )
};

// The type to which quantised transport converts an element (core/quantized_layout.cuh).
enum FaTransport { FA_TRANSPORT_INT8 = 0, FA_TRANSPORT_F8E4M3 = 1 };

// Quantised transport: the elements that share a scale, the bytes that they become, and the alignment of
// slices.
#define FA_QUANTIZED_GROUP 32
#define FA_QUANTIZED_GROUP_BYTES 34
#define FA_QUANTIZED_ALIGNMENT 128

// Why a launch failed; 0 is success.
enum FaFailure {
  FA_OK = 0,
  FA_TIMED_OUT = 1,
  FA_ABORTED = 2,
  FA_UNKNOWN_BUFFER = 3,
  FA_UNSUPPORTED = 4,
  FA_PEER_GONE = 5,
  FA_MISMATCH = 6,
  FA_OTHER_MESSAGE = 7,
  FA_REVOKED = 8,
  FA_NO_EXPERT = 9, // FaStatus.epoch is the index of an entry of the table
};

// The identity of a call, in words that ranks compare: see `src/call/identity.rs`.
struct FaCall {
  uint64_t what; // less than 2^32
  uint64_t count;
  uint64_t digest; // of counts by rank, fused operands or transport, where the call has them
};

// A flag that a peer writes and its owner waits on, and where that peer's input is. On a GPU the first 16
// bytes are two 64-bit words instead, each with the epoch above 32 bits of the source: core/signal.cuh.
struct FaSignal {
  uint32_t epoch;
  uint32_t call; // host: hash of the call; stored and loaded together with the epoch
  // 0: the input is in the peer's staging of this generation. Otherwise (buffer id << FA_SOURCE_ID_SHIFT) +
  // byte offset into the peer's copy of that registered buffer; ids start at 1.
  uint64_t source;
  uint8_t padding[FA_SIGNAL_BYTES - 16];
};
#define FA_SOURCE_ID_SHIFT 40

// A peer's call, in a checked launch.
struct FaAnnouncement {
  uint32_t epoch;
  uint32_t reserved;
  struct FaCall call;
  uint8_t padding[FA_SIGNAL_BYTES - 32];
};

// The header of a slot in a channel: the signal that a chunk has come.
//
// Messages between two ranks go through a channel. It has stripes, which move parts of a message in parallel.
// Each stripe is a ring of slots in the receiver's region. A slot is full from the sender's signal, which
// precedes the data in memory, until the receiver gives credit for it. On a GPU the signal is 64-bit words,
// each with the chunk's number above 32 bits of the fields below, like a packet: core/channel.cuh.
struct FaChunk {
  uint32_t number; // of the chunk in its stripe, from 1; stored after the other fields and after the data
  uint32_t tag;    // of the message
  uint64_t bytes;  // of the whole message, in all chunks and stripes
  // 0: the data follows this header. Otherwise the receiver reads the stripe's part at this source: as in
  // FaSignal, or, on the host, at an address in the sender's process, marked by bit FA_SOURCE_PRIVATE_SHIFT.
  uint64_t source;
  uint32_t measured; // host, in a message's first chunk: enum Measured of core/direct.cuh
  uint8_t padding[FA_SIGNAL_BYTES - 28];
};
#define FA_SOURCE_PRIVATE_SHIFT 63

// Most stripes of a channel. On the host there is one.
#define FA_MAX_STRIPES 16
// Parts of a message begin at multiples of this many bytes.
#define FA_PART_ALIGNMENT 128

// Host. Messages of at least this many bytes in private memory of another process may be read directly.
#define FA_LEAST_DIRECT_BYTES 16384

// Host. Channel or direct read is chosen for each power of two from that size on, up to 2 MiB.
#define FA_DIRECT_SIZES 8

// Credit for chunks, by receiver, in the sender's region.
struct FaCredit {
  uint32_t taken; // number of chunks that the receiver has taken since the region was made
  // host: non-zero: the receiver cannot read directly; set before the credit for the message
  uint32_t refused;
  uint8_t padding[FA_SIGNAL_BYTES - 8];
};

// Host. The claim on messages that a receiver reads from the sender's memory, in the sender's region:
// core/rendezvous.cuh. It has its own cache line, which stays with the receiver.
struct FaClaim {
  uint32_t word;
  uint8_t padding[FA_SIGNAL_BYTES - 4];
};

// Host. Costs of messages as their receiver has measured them, by size, in ns per MiB; 0: not measured yet.
// In the sender's region.
struct FaCosts {
  uint32_t channel[FA_DIRECT_SIZES];
  uint32_t direct[FA_DIRECT_SIZES];
};

// Host: the ranks in other processes whose memory this rank can read.
struct FaDirect {
  // Address of a word that the operating system marks when the rank's process ends
  uint64_t exit_futex[FA_MAX_RANKS];
  uint32_t process[FA_MAX_RANKS]; // process id, in this process's namespace; 0: cannot be read
  uint32_t always;                // non-zero: always read directly, whatever it costs
  uint32_t reserved;
};

// A message to or from a peer, or a copy from this rank to itself.
struct FaTransfer {
  uint64_t address;
  uint64_t bytes;
  uint64_t source; // of a copy: its address; of a message that is sent: as in FaChunk
  uint32_t tag;
  uint32_t part; // size of a stripe's part, in units of FA_PART_ALIGNMENT; 0: stripe 0 has all
};
#define FA_MAX_TRANSFERS 64

// State that a process and its kernels share: requests to waiting kernels, and the failures that kernels
// report.
struct FaStatus {
  uint32_t abort;   // non-zero: waiting kernels leave
  uint32_t gone;    // bit r: rank r has left and sends nothing any more; set after everything that it sent
  uint32_t failure; // enum FaFailure: the first failure of this rank's kernels
  uint32_t missing; // bit r: rank r did not come, is gone, or makes another call
  uint32_t epoch;   // of the launch that failed; FA_NO_EXPERT: an entry
  uint32_t read_directly;           // host: number of messages that this rank has read in other processes
  uint32_t slow;                    // host: number of waits that outlasted the first polls
  uint32_t waiting;                 // host: bit r: such a wait, for rank r, was the last to check its limits
  uint32_t waits[FA_MAX_RANKS];     // by rank: number of waits that outlasted the first polls
  uint64_t waited_ns[FA_MAX_RANKS]; // host, by rank: time in these waits, after the first polls
  // FA_MISMATCH: the calls of ranks that make a different one, where known; zeros otherwise.
  // FA_OTHER_MESSAGE: 2^32 + tag, and the bytes, of the message that the missing rank sent, and, at this
  // rank's index, of the expected one.
  struct FaCall others[FA_MAX_RANKS];
};

// The head of every rank's region; mailboxes and staging follow at the offsets of FaLaunch.
struct FaRegionHead {
  // [first or second barrier of a launch][pulls % 2][block][sending rank]. The parity keeps a fast peer's
  // next signal from overwriting one that is still waited for: the peer cannot be two pulls ahead.
  struct FaSignal inbox[2][2][FA_MAX_BLOCKS][FA_MAX_RANKS];
  // By block: the number of launches so far, and of the pulls among them; only this rank's kernels use them.
  uint32_t epoch[FA_MAX_BLOCKS];
  uint32_t pulls[FA_MAX_BLOCKS];
  // Where launches run in streams. [rank]: non-zero when that rank's launch failed after it signalled the
  // second barrier, so that its registered buffer, which this rank may have read, may have changed.
  uint32_t revoked[FA_MAX_RANKS];
  // Non-zero once a launch of this rank has failed: launches queued behind it do nothing.
  uint32_t failed;
  uint8_t padding_of_failed[60];
  struct FaStatus status;
  uint8_t padding[32];
  // [epoch % 2][block][sending rank]; used in checked launches only.
  struct FaAnnouncement announced[2][FA_MAX_BLOCKS][FA_MAX_RANKS];
  // Channels, by stripe: credits by receiving rank; then this rank's own counts by peer: chunks sent, chunks
  // for which it has seen credit, and chunks received.
  struct FaCredit credits[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t sent[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t credited[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t received[FA_MAX_STRIPES][FA_MAX_RANKS];
  // Host, by receiver: claims and costs. Then this rank's own state: by size, the messages so far that could
  // have been read directly; and the sizes that are read directly, one bit each.
  struct FaClaim claims[FA_MAX_RANKS];
  struct FaCosts costs[FA_MAX_RANKS];
  uint32_t offered[FA_MAX_RANKS][FA_DIRECT_SIZES];
  uint32_t direct[FA_MAX_RANKS];
  uint8_t padding_of_direct[64];
};

// A rank's share of the elements that a launch moves or reduces, within the concatenation of all ranks'
// shares.
struct FaShare {
  uint64_t first;
  uint64_t count;
};

// Everything that a kernel knows about a call. Addresses are in the launching process's address space.
struct FaLaunch {
  uint64_t regions[FA_MAX_RANKS];
  uint64_t input;
  uint64_t output;
  uint64_t count;  // elements; of an allreduce at least 1: every launch must hear from every peer
  uint64_t source; // where peers find this rank's input, as in FaSignal; 0: staged
  // A kernel stalls at the first access to each line of its parameters: what a push reads first is in one
  // line, if the parameters begin at one.
  uint64_t own;            // regions[rank], without an index
  uint64_t mailbox_offset; // of generation 0; generation 1 follows after mailbox_bytes
  uint64_t mailbox_bytes;  // of one generation, a multiple of the slot size
  uint32_t rank;
  uint32_t world;
  // [id - 1][rank]: base address of that rank's registered buffer, 0 where it is not mapped.
  uint64_t buffers;
  uint64_t buffer_count;
  uint64_t status; // address of this rank's FaStatus
  uint64_t staging_offset;
  uint64_t staging_bytes; // of one generation
  // Size of a slot of the staging ring; each pull of a generation uses the next slot
  uint64_t staging_slot_bytes;
  uint64_t channel_offset;
  uint64_t channel_bytes; // of all channels to a rank
  uint64_t chunk_bytes;   // most data of a chunk, a multiple of 64
  uint64_t operands;      // address of the FaTransfers, FaFused, FaGatheredRows or FaShardedNorm, if any
  uint64_t launches;      // CUDA: address of all ranks' FaLaunch, where one launch runs all ranks; else 0
  uint64_t timeout_ns;    // at most half the range
  uint32_t blocks;
  uint32_t dtype;     // enum FaDtype
  uint32_t op;        // enum FaOp
  uint32_t algorithm; // enum FaAlgorithm
  uint32_t spin;      // host: polls before a waiting thread yields its core
  uint32_t checked;   // non-zero: ranks compare their calls first
  uint32_t root;
  // Index of the ring's last slot: a power of two minus 1; 0: the generation is not a ring
  uint32_t staging_last_slot;
  uint32_t swaps_staging;   // 1: the two ranks stage in each other's region in every other pull (host)
  uint32_t channel_slots;   // slots of each stripe, a power of two
  uint32_t threads;         // bit r: rank r is a thread of this process
  uint32_t transport;       // enum FaTransport, of FA_TWO_SHOT_QUANTIZED
  uint32_t channel_stripes; // of each channel
  uint32_t packet_bytes;    // GPU: largest part of a message that is sent as packets
  uint64_t direct;          // host: address of an FaDirect; 0: nothing is read in other processes
  struct FaCall call;       // the call that this launch belongs to
  double scale;             // FA_PREMUL_SUM: the factor of this rank's input
  // By rank, of the launches of gathers and reduce-scatters.
  struct FaShare shares[FA_MAX_RANKS];
  // FA_NVLS: this rank's window (two generations of staging), and the multicast address of all ranks' windows
  // (core/multicast.cuh).
  uint64_t window;
  uint64_t multicast;
  // Host: address of a `uint32_t (*)(void)` that every check of a wait's limits calls; the wait ends unless
  // it returns 0. 0: no function.
  uint64_t goes_on;
  // Host: ranks of each socket, if an FA_TWO_SHOT_PULL has two levels (two_level_pull.cuh); 0: it has one.
  uint32_t socket_ranks;
  // Host: non-zero: this rank's threads share cores with other ranks' threads, which a waiting thread lets
  // run.
  uint16_t shares_core;
  // Host: non-zero: an FA_TWO_SHOT_PULL stores results by streaming stores (sinks/streaming.hpp).
  uint16_t streams_output;
};

// The messages of one launch: those of channel c are at [first[c], first[c + 1]), in order. Channel 2 * peer
// sends to the peer, channel 2 * peer + 1 receives from it. For this rank itself the first is empty, and the
// second has its copies.
struct FaTransfers {
  uint32_t first[2 * FA_MAX_RANKS + 2];
  // Number of stripes that the channels before c use.
  uint32_t stripes[2 * FA_MAX_RANKS + 2];
  struct FaTransfer transfer[FA_MAX_TRANSFERS];
};

// The order in which teams process rows (cuda/team_rows.cuh). In a two-shot, turn t is row t % divisor of
// slice t / divisor, or with `by_slice` row t / divisor of slice t % divisor. Turns beyond the last row are
// skipped.
struct FaRowTurns {
  // Rows of each rank's slice; the last slice with any may have fewer. 0: a one-shot, where turn t is row t.
  uint32_t slice_rows;
  uint32_t divisor;
  uint32_t inverse; // (turn * inverse) >> 32 is turn / divisor; 0: divisor is 1
  uint32_t by_slice;
};

// Scales of quantised rows: where they are, and how they are computed (reduce/quantized_rows.cuh).
struct FaScales {
  uint64_t scales;    // address of those of the whole message
  uint64_t stride;    // FA_LAYOUT_COLUMNS: floats, or words of four bytes, from a column to the next; else 0
  uint64_t first_row; // index in the message of the launch's first row
  uint32_t group;     // elements that share a scale; 0: a row, or all
  uint32_t groups;    // of a row
  uint32_t rule;      // enum FaScaleRule
  uint32_t layout;    // enum FaScaleLayout
};

// An input that is computed from experts' rows, in a mixture of experts (readers/experts.cuh): row t is the
// sum over k of experts' row table[t * top_k + k] times the weight with this index. Addresses are of the
// launch's first row.
struct FaExperts {
  uint32_t top_k;         // entries for each row; 0: FaLaunch.input is the input
  uint32_t rows;          // number of experts' rows, which are at FaLaunch.input
  uint32_t weights_dtype; // FA_F32 or the launch's type
  float routed_scale;     // of the sum, before the shared row is added
  uint64_t table;         // int32; negative: no row
  uint64_t weights;       // one for each entry of the table; 0: all ones
  uint64_t shared;        // rows that are added; 0: none
  uint64_t first_entry;   // index of the launch's first entry in the table of the message
};

// Quantised rows of an FA_ALL_GATHER_ROWS, whose input and output are the numbers.
struct FaGatheredRows {
  struct FaScales from; // of the rank's own rows
  struct FaScales to;   // of all ranks' rows; first_row is 0
  uint32_t row_bytes;   // of the numbers of a row
  uint32_t words;       // of four bytes that the scales of a row take in staging
};

// Alignment of staged scales, which follow the numbers.
#define FA_SCALES_ALIGNMENT 128

// What is done with the sums of a launch: a residual is added, and rows are normalised and quantised
// (sinks/rms_norm_*). Addresses are of the launch's first element.
struct FaFused {
  // A kernel stalls at the first access to each line of its parameters: what teams need before they send is
  // in the first one. GPU: rows that teams of blocks push (cuda/team_rows.cuh).
  struct FaRowTurns turns;
  uint32_t team;         // blocks for each row; 0: each row belongs to one block
  uint32_t team_inverse; // (block * team_inverse) >> 16 is a block's team
  uint32_t block_packs;  // packs of a row for each block: whole chunks; the last block may have fewer
  uint32_t chunks;       // chunks of squares in a row
  uint32_t row;          // elements of a row
  uint32_t rows;         // rows of the launch
  uint32_t checked;      // FaLaunch.checked
  uint32_t number_bits;  // bits of a quantised number: 8, or 4 (two in a byte); 0: not quantised
  struct FaExperts experts;
  uint64_t residual;
  // Where the sum with the residual goes, while the output gets the plain sum; 0: to the output.
  uint64_t residual_out;
  uint64_t normed; // normalised rows, in the launch's type; 0: none
  uint64_t weight; // of a row; 0: all ones
  uint64_t bias;   // of a row; 0: all zeros
  uint32_t norm;   // enum FaNorm; FA_NO_NORM: only the residual is added
  float epsilon;
  uint32_t total;         // elements that a mean is over: `row`, or more where ranks have parts of rows
  uint32_t unit_offset;   // non-zero: 1 is added to each weight
  uint32_t scaling;       // enum FaScaling
  uint32_t dtype;         // of `numbers`: FA_I8 or an 8-bit float; FA_U8 where a byte holds two 4-bit numbers
  uint64_t numbers;       // quantised rows; 0: none
  uint64_t global_scale;  // FA_RULE_E4M3: address of a float
  struct FaScales scales; // of `numbers`: a given scale is read, others are written
};

// A part of the rows of FA_SHARDED_RMS_NORM: the columns that this rank has of a norm's rows.
struct FaShardedRows {
  uint64_t from; // address of the launch's first row
  uint64_t to;
  uint64_t weight;      // of this rank's columns; 0: all ones
  uint64_t from_stride; // bytes from a row to the next
  uint64_t to_stride;
  uint32_t row;   // elements of a row that this rank has
  uint32_t total; // elements of a row on all ranks
  float epsilon;
  uint32_t unit_offset; // non-zero: 1 is added to each weight
};

// Norms of rows that are divided among ranks (algorithms/sharded_norm.cuh).
#define FA_SHARDED_PARTS 2
struct FaShardedNorm {
  struct FaShardedRows part[FA_SHARDED_PARTS];
  uint32_t parts;
  uint32_t rows; // of the launch
};

// How rows are normalised.
enum FaNorm { FA_NO_NORM = 0, FA_NORMS(FA_CODE, ) };

// Formats of quantised rows. Kernels know them by the facts in FaScales, except whether there is one at all,
// and whether its scale is given.
enum FaScaling { FA_NOT_SCALED = 0, FA_SCALINGS(FA_CODE, ) };

// How a scale is computed from the greatest magnitude: a float; an e4m3 with a global scale; or an E8M0, that
// is, a power of two, which is rounded up, or is OCP's.
enum FaScaleRule { FA_RULE_F32, FA_RULE_E4M3, FA_RULE_E8M0_UP, FA_RULE_E8M0_FLOOR };

// How the scales of a message are ordered.
enum FaScaleLayout { FA_LAYOUT_ROWS, FA_LAYOUT_COLUMNS, FA_LAYOUT_128X4, FA_LAYOUT_8X4 };

// Most elements of a row.
#define FA_MAX_ROW 65536
// Most experts of a row.
#define FA_MOST_EXPERTS 64
// Elements in a chunk of squares.
#define FA_SQUARES_CHUNK 512
// Most packs of a row for a block of a team: what fits in its shared memory.
#define FA_TEAM_BLOCK_PACKS 1024

#if defined(__cplusplus)
static_assert(sizeof(FaSignal) == FA_SIGNAL_BYTES, "a signal is one cache line");
static_assert(sizeof(FaAnnouncement) == FA_SIGNAL_BYTES, "an announcement is one cache line");
static_assert(sizeof(FaChunk) == FA_SIGNAL_BYTES, "a chunk header is one cache line");
static_assert(sizeof(FaCredit) == FA_SIGNAL_BYTES, "a credit is one cache line");
static_assert(sizeof(FaRegionHead) % 128 == 0, "the memory after the head is aligned");
static_assert(sizeof(FaLaunch) % 8 == 0, "no padding at the end");
static_assert(sizeof(FaFused) % 8 == 0, "no padding at the end");
static_assert(sizeof(FaShardedNorm) % 8 == 0, "no padding at the end");
#endif

#endif
