// The plain structs and enums that Rust and the kernels share. `src/abi/bindings.rs` is generated from this
// file.
//
// Layouts hold on every supported target (64-bit, natural alignment); both sides assert them at compile time.
#ifndef FAST_ALLREDUCE_ABI_H
#define FAST_ALLREDUCE_ABI_H

#include <stdint.h>

#include "catalogue.h"

#define FA_MAX_RANKS 16
#define FA_MAX_BLOCKS 64

// What is staged on the host in at most so many bytes is bound by waiting, and its lines come faster from a
// peer's cache than from the one that all share: no ring, and the next pull's lines are asked for.
#define FA_SMALL_STAGING_BYTES 8192

// A signal stands alone on its cache line, so that writers of neighbouring signals do not disturb each other.
#define FA_SIGNAL_BYTES 64

// Payload of a pack, the unit of work: one 128-bit access on a GPU, one cache line on a CPU.
#define FA_CUDA_PACK_BYTES 16
#ifndef FA_HOST_PACK_BYTES
#define FA_HOST_PACK_BYTES 64
#endif

// A packet slot holds one pack and its epoch tags.
#define FA_CUDA_SLOT_BYTES 32
#ifndef FA_HOST_SLOT_BYTES
#define FA_HOST_SLOT_BYTES 72
#endif

// A packet of a sum on a GPU, which has no tags. So many bytes for each slot follow the mailboxes.
#define FA_CUDA_SENTINEL_BYTES 16

// Epochs skip 0, which is what fresh memory holds, and 1, so that parity goes on alternating.
#define FA_FIRST_EPOCH_AFTER_WRAP 2u

#define FA_CODE(code, number, ...) code = number,

enum FaDtype { FA_TYPES(FA_CODE, ) };

enum FaOp { FA_OPS(FA_CODE, ) };

// Kernels: algorithms of an allreduce, then the other collectives.
enum FaAlgorithm {
  FA_REDUCING(FA_CODE, ) FA_MOVING(FA_CODE, ) FA_OTHER(FA_CODE, ) FA_NORMING(FA_CODE, ) FA_NVLS(FA_CODE, )
};

// What quantised transport moves an element as (core/quantized_layout.cuh).
enum FaTransport { FA_TRANSPORT_INT8 = 0, FA_TRANSPORT_F8E4M3 = 1 };

// Elements that have a scale in common, the bytes that they are moved as, and where slices of them begin.
#define FA_QUANTIZED_GROUP 32
#define FA_QUANTIZED_GROUP_BYTES 34
#define FA_QUANTIZED_ALIGNMENT 128

// Why a launch gave up; 0 is success.
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
};

// What a call is, in words that ranks can compare: see `src/call/identity.rs`.
struct FaCall {
  uint64_t what; // less than 2^32
  uint64_t count;
  uint64_t digest; // of the counts by rank, where there are some
};

// A flag word that a peer writes and its owner waits on, and where that peer's input is. On a GPU the first
// 16 bytes are two words of 64 bits instead, each of the epoch above 32 bits of the source: core/signal.cuh.
struct FaSignal {
  uint32_t epoch;
  uint32_t call; // host: the call in a word; stored and loaded together with the epoch
  // 0: the peer's staging of this generation. Otherwise (buffer id << FA_SOURCE_ID_SHIFT) + byte offset
  // into the peer's copy of that registered buffer; ids start at 1.
  uint64_t source;
  uint8_t padding[FA_SIGNAL_BYTES - 16];
};
#define FA_SOURCE_ID_SHIFT 40

// A peer's call, in a launch that is checked.
struct FaAnnouncement {
  uint32_t epoch;
  uint32_t reserved;
  struct FaCall call;
  uint8_t padding[FA_SIGNAL_BYTES - 32];
};

// Messages between two ranks go through a channel. It has stripes, on which parts of a message go side by
// side, each with a ring of slots in the receiver's region. A slot is full from the sender's signal, which
// stands before its data, until the receiver gives credit for it. On a GPU the signal is words that have the
// number above 32 bits of what follows, as it were a packet: core/channel.cuh.
struct FaChunk {
  uint32_t number; // of the stripe's chunks, from 1; set after the rest and after the data
  uint32_t tag;    // of the message that it is of
  uint64_t bytes;  // of that message, in all its chunks and stripes
  // 0: the data is behind this. Otherwise the receiver reads the whole part where it is: as in FaSignal, or
  // on the host at an address in the sender's process with the bit at FA_SOURCE_HERE_SHIFT.
  uint64_t source;
  uint32_t measured; // host, of a message's first chunk: enum Measured of core/direct.cuh
  uint8_t padding[FA_SIGNAL_BYTES - 28];
};
#define FA_SOURCE_HERE_SHIFT 63

// Stripes of a channel at most. The host has one.
#define FA_MAX_STRIPES 16
// What parts of a message begin at multiples of.
#define FA_PART_ALIGNMENT 128

// Host. Messages of at least so many bytes in private memory of another process may be read there directly.
#define FA_LEAST_DIRECT_BYTES 32768

// Host. The choice between channel and direct read is made for each power of two from there on, up to 4 MiB.
#define FA_DIRECT_SIZES 8

// Of the chunks to a receiver, in the sender's region.
struct FaCredit {
  uint32_t taken;   // by the receiver, of all chunks ever
  uint32_t refused; // host: non-zero: it cannot, set before the credit for what it could not read
  uint8_t padding[FA_SIGNAL_BYTES - 8];
};

// Host. On the messages to a receiver that it reads where they are, in the sender's region: see
// core/rendezvous.cuh. On a line of its own, which stays with the receiver.
struct FaClaim {
  uint32_t word;
  uint8_t padding[FA_SIGNAL_BYTES - 4];
};

// Host: what a receiver has measured of messages, by size, in ns for a MiB; 0: nothing yet. In the region of
// their sender.
struct FaCosts {
  uint32_t channel[FA_DIRECT_SIZES];
  uint32_t direct[FA_DIRECT_SIZES];
};

// Host: the ranks in other processes whose memory this rank can read.
struct FaDirect {
  uint64_t life[FA_MAX_RANKS];    // address of a word that the kernel marks when the process of the rank ends
  uint32_t process[FA_MAX_RANKS]; // its id, as this process knows it; 0: cannot be read
  uint32_t always;                // non-zero: costs do not matter
  uint32_t reserved;
};

// A message to or from a peer; of this rank to itself, a copy.
struct FaTransfer {
  uint64_t address;
  uint64_t bytes;
  uint64_t source; // of a copy; of what is sent, as in FaChunk
  uint32_t tag;
  uint32_t part; // stripe s has the s-th so many times FA_PART_ALIGNMENT bytes; 0: the first has all
};
#define FA_MAX_TRANSFERS 64

// What the process tells its waiting kernels, and what they report.
struct FaStatus {
  uint32_t abort;         // non-zero: waiting kernels leave
  uint32_t gone;          // bit r: rank r has left and sends nothing any more; set after all that it sent
  uint32_t failure;       // enum FaFailure: the first of this rank's kernels
  uint32_t missing;       // bit r: rank r had not come, is gone, or makes another call
  uint32_t epoch;         // of the launch that failed
  uint32_t read_directly; // host: messages that this rank has read in other processes
  uint32_t waits[FA_MAX_RANKS]; // waits for each rank that outlasted the first polls
  // FA_MISMATCH: the calls of the ranks that make another, as far as they are known; an empty word else.
  // FA_OTHER_MESSAGE: 2^32 + tag, and bytes, of what the missing rank sent, and at the own rank of what was
  // to come.
  struct FaCall others[FA_MAX_RANKS];
};

// The head of every rank's region; mailboxes and staging follow at the offsets of FaLaunch.
struct FaRegionHead {
  // [first or second barrier of a launch][pulls % 2][block][sending rank]. Parity keeps a fast peer's next
  // signal from overwriting one that is still waited for: it cannot be two pulls ahead.
  struct FaSignal inbox[2][2][FA_MAX_BLOCKS][FA_MAX_RANKS];
  // Launches so far, and the pulls among them, for each block; only this rank's kernels use them.
  uint32_t epoch[FA_MAX_BLOCKS];
  uint32_t pulls[FA_MAX_BLOCKS];
  // Where launches run in streams. [rank]: non-zero when that rank's launch failed after its signal of the
  // second barrier, so that the registered buffer which this rank may have read is no longer as it was.
  uint32_t revoked[FA_MAX_RANKS];
  // Non-zero once a launch of this rank has failed: those that are queued behind it do nothing.
  uint32_t failed;
  uint8_t padding_of_failed[60];
  struct FaStatus status;
  uint8_t padding[40];
  // [epoch % 2][block][sending rank]; used in checked launches only.
  struct FaAnnouncement announced[2][FA_MAX_BLOCKS][FA_MAX_RANKS];
  // Channels, by stripe: credits by receiving rank, and this rank's own counts by peer of chunks sent, of
  // those for which it has seen credit, and of chunks received.
  struct FaCredit credits[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t sent[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t credited[FA_MAX_STRIPES][FA_MAX_RANKS];
  uint32_t received[FA_MAX_STRIPES][FA_MAX_RANKS];
  // Host, by receiver: claims and costs; and this rank's own: messages so far that could have been read
  // directly, by size, and the sizes that are, a bit for each.
  struct FaClaim claims[FA_MAX_RANKS];
  struct FaCosts costs[FA_MAX_RANKS];
  uint32_t offered[FA_MAX_RANKS][FA_DIRECT_SIZES];
  uint32_t direct[FA_MAX_RANKS];
  uint8_t padding_of_direct[64];
};

// A rank's share of the elements that a launch moves or reduces, within all ranks' concatenated.
struct FaShare {
  uint64_t first;
  uint64_t count;
};

// Everything that a kernel knows about one call. Addresses are in the launching process's address space.
struct FaLaunch {
  uint64_t regions[FA_MAX_RANKS];
  uint64_t input;
  uint64_t output;
  uint64_t count;  // elements; of an allreduce at least 1: every launch must hear from every peer
  uint64_t source; // where peers find this rank's input, as in FaSignal; 0: staged
  // [id - 1][rank]: base address of that rank's registered buffer, 0 where it is not mapped.
  uint64_t buffers;
  uint64_t buffer_count;
  uint64_t status;         // address of this rank's FaStatus
  uint64_t mailbox_offset; // of generation 0; generation 1 follows after mailbox_bytes
  uint64_t mailbox_bytes;  // of one generation, a multiple of the slot size
  uint64_t staging_offset;
  uint64_t staging_bytes;      // of one generation
  uint64_t staging_slot_bytes; // of the staging ring of a generation: pull after pull takes the next slot
  uint64_t channel_offset;
  uint64_t channel_bytes; // of all channels to a rank
  uint64_t chunk_bytes;   // most data of a chunk, a multiple of 64
  uint64_t operands;      // address of an FaTransfers or an FaFused, where the launch is of that
  uint64_t launches;      // CUDA: address of all ranks' FaLaunch, where one launch runs a world; else 0
  uint64_t timeout_ns;    // at most half the range
  uint32_t rank;
  uint32_t world;
  uint32_t blocks;
  uint32_t dtype;     // enum FaDtype
  uint32_t op;        // enum FaOp
  uint32_t algorithm; // enum FaAlgorithm
  uint32_t spin;      // host: polls before a waiting thread yields its core
  uint32_t checked;   // non-zero: ranks compare their calls first
  uint32_t root;
  uint32_t staging_last_slot; // of the ring, a power of two less 1; 0: the generation is no ring
  uint32_t swaps_staging;     // 1: two ranks of the host stage in each other's region in every other pull
  uint32_t channel_slots;     // of each stripe, a power of two
  uint32_t threads;           // bit r: rank r is a thread of this process
  uint32_t transport;         // enum FaTransport, of FA_TWO_SHOT_QUANTIZED
  uint32_t channel_stripes;   // of each channel
  uint32_t packet_bytes;      // GPU: parts of a message of at most so many are sent as packets
  uint64_t direct;            // host: address of an FaDirect; 0: nothing is read in other processes
  struct FaCall call;         // the call that this launch is of
  double scale;               // FA_PREMUL_SUM: what this rank's input is multiplied by
  // By rank, of FA_ALL_GATHER and FA_REDUCE_SCATTER.
  struct FaShare shares[FA_MAX_RANKS];
  // Of FA_NVLS: this rank's window of two generations of staging, and the multicast address of all ranks'
  // (core/multicast.cuh).
  uint64_t window;
  uint64_t multicast;
  // Host: address of a function without arguments, which returns a uint32_t. Every look of a wait calls it,
  // and gives up unless it returns 0. 0: there is none.
  uint64_t goes_on;
};

// The messages of one launch: of each channel the ones in [first[c], first[c + 1]), in that order. Channel
// 2 * peer sends, 2 * peer + 1 receives; of this rank itself the second is its copies, and the first is
// empty.
struct FaTransfers {
  uint32_t first[2 * FA_MAX_RANKS + 2];
  // Before channel c, the stripes that channels before it use.
  uint32_t stripes[2 * FA_MAX_RANKS + 2];
  struct FaTransfer transfer[FA_MAX_TRANSFERS];
};

// In which turn a team of a two-shot has a row (cuda/team_rows.cuh): turn / divisor and turn % divisor are
// the slice and the row of the slice, or the row and the slice where `by_slice`; what is no row then is left
// out.
struct FaRowTurns {
  uint32_t slice_rows; // of each rank, but for the last that has any
  uint32_t divisor;
  uint32_t inverse; // (turn * inverse) >> 32 is turn / divisor; 0: turn is
  uint32_t by_slice;
};

// What is done with the sums of a launch: a residual is added, and rows are normalised and quantised
// (sinks/rms_norm_*). Addresses are of the launch's first element.
struct FaFused {
  uint64_t residual;
  uint64_t residual_out; // where the residual's sum goes; 0: to the output, which else has the plain one
  uint64_t normed;       // where normalised rows go, in the launch's type; 0: nowhere
  uint64_t numbers;      // where quantised rows go; 0: nowhere
  uint64_t weight;       // of a row; 0: of ones
  uint64_t bias;         // of a row; 0: of zeros
  uint64_t scales;       // of the message: a given float, or where those of rows, groups or blocks go
  uint64_t global_scale; // of blocks: address of a float
  uint64_t first_row;    // of the launch, in the message: scales go by it
  uint32_t row;          // elements of each
  uint32_t rows;         // of the launch
  uint32_t norm;         // enum FaNorm; FA_NO_NORM: the launch ends with the residual
  uint32_t unit_offset;  // non-zero: 1 is added to each weight
  float epsilon;
  uint32_t scaling; // enum FaScaling
  uint32_t dtype;   // of numbers: FA_I8 or an 8-bit float; FA_U8 of blocks, which have two numbers in a byte
  // On a GPU, where blocks that push have rows in teams (cuda/team_rows.cuh).
  uint32_t team;         // blocks for a row; 0: rows are whole blocks'
  uint32_t team_inverse; // (block * team_inverse) >> 16 is a block's team
  uint32_t share;        // packs that a block has of a row, but for the last of a team: whole chunks
  uint32_t chunks;       // of squares, in a row
  uint32_t reserved;
  struct FaRowTurns turns;
};

// How rows are normalised.
enum FaNorm { FA_NO_NORM = 0, FA_NORMS(FA_CODE, ) };

// What rows are quantised to. Formats of blocks, NVFP4, have numbers of 4 bits.
enum FaScaling { FA_NOT_SCALED = 0, FA_SCALINGS(FA_CODE, ) };

// Elements that have a scale in common.
#define FA_SCALED_GROUP FA_PER_GROUP_ELEMENTS
#define FA_SCALED_BLOCK FA_NVFP4_ELEMENTS
// Elements of a row at most.
#define FA_MAX_ROW 65536
// Elements of a chunk of squares.
#define FA_SQUARES_CHUNK 512
// Packs of a row that a block of a team has at most: what it has shared memory for.
#define FA_TEAM_SHARE_PACKS 1024

#if defined(__cplusplus)
static_assert(sizeof(FaSignal) == FA_SIGNAL_BYTES, "a signal is one cache line");
static_assert(sizeof(FaAnnouncement) == FA_SIGNAL_BYTES, "an announcement likewise");
static_assert(sizeof(FaChunk) == FA_SIGNAL_BYTES, "a chunk's signal likewise");
static_assert(sizeof(FaCredit) == FA_SIGNAL_BYTES, "a credit likewise");
static_assert(sizeof(FaRegionHead) % 128 == 0, "what follows the head is aligned");
static_assert(sizeof(FaLaunch) % 8 == 0, "no padding at the end");
static_assert(sizeof(FaFused) % 8 == 0, "likewise");
#endif

#endif
