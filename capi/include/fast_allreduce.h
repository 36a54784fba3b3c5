/* Allreduce and other collectives between the ranks of one machine: CPU processes or threads, or CUDA GPUs.
 *
 * Made by cbindgen from capi/src; scripts/test-capi.sh compares. docs/c.md has a guide.
 *
 * Every function that can fail returns a status. The text of the last error of a thread is fast_allreduce_last_error().
 * Every rank makes the same calls in the same order. Unless a function says otherwise, any thread may call it at any
 * time; calls of one communicator run one after the other.
 */

#ifndef FAST_ALLREDUCE_H
#define FAST_ALLREDUCE_H

#include <stddef.h>
#include <stdint.h>

// Version of the ABI that this header describes. It is increased when a program that was compiled against an older
// header would not work any more.
#define FAST_ALLREDUCE_ABI_VERSION 1

// Most ranks of a communicator.
#define FAST_ALLREDUCE_MAX_RANKS 16

// How a call ended.
enum fast_allreduce_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // It succeeded.
  FAST_ALLREDUCE_STATUS_OK = 0,
  // A pointer that must not be null is, or a code is none of its enum.
  FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT = 1,
  // More ranks than are supported, or none.
  FAST_ALLREDUCE_STATUS_WORLD_SIZE = 2,
  // A rank is not below the number of ranks.
  FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE = 3,
  // Input and output have different lengths.
  FAST_ALLREDUCE_STATUS_LENGTH_MISMATCH = 4,
  // A buffer is null, misaligned, or of another device.
  FAST_ALLREDUCE_STATUS_INVALID_POINTER = 5,
  // Buffers overlap in another way than in place.
  FAST_ALLREDUCE_STATUS_OVERLAP = 6,
  // A setting is out of its range.
  FAST_ALLREDUCE_STATUS_INVALID_SETTING = 7,
  // A tuning file cannot be used.
  FAST_ALLREDUCE_STATUS_TUNING = 8,
  // Shared memory could not be allocated.
  FAST_ALLREDUCE_STATUS_ALLOCATION = 9,
  // Ranks did not come in time.
  FAST_ALLREDUCE_STATUS_TIMEOUT = 10,
  // A rank's process has ended, or its communicator was freed.
  FAST_ALLREDUCE_STATUS_PEER_LOST = 11,
  // A step failed on another rank.
  FAST_ALLREDUCE_STATUS_PEER_FAILED = 12,
  // This process is a fork of the one that made the communicator.
  FAST_ALLREDUCE_STATUS_FORKED = 13,
  // fast_allreduce_abort was called.
  FAST_ALLREDUCE_STATUS_ABORTED = 14,
  // The ranks could not meet.
  FAST_ALLREDUCE_STATUS_RENDEZVOUS = 15,
  // The rendezvous refused this process.
  FAST_ALLREDUCE_STATUS_REFUSED = 16,
  // A rank sent something that does not decode.
  FAST_ALLREDUCE_STATUS_MALFORMED = 17,
  // Ranks make different calls, or have different settings.
  FAST_ALLREDUCE_STATUS_DISAGREEMENT = 18,
  // This library or this machine cannot do it.
  FAST_ALLREDUCE_STATUS_UNAVAILABLE = 19,
  // The stream is of another device than the communicator.
  FAST_ALLREDUCE_STATUS_INVALID_STREAM = 20,
  // The CUDA driver refused a call.
  FAST_ALLREDUCE_STATUS_DRIVER = 21,
  // A system call failed.
  FAST_ALLREDUCE_STATUS_SYSTEM = 22,
  // An error that this header has no name for.
  FAST_ALLREDUCE_STATUS_OTHER = 23,
  // A fault of the library; the communicator must not be used any more.
  FAST_ALLREDUCE_STATUS_INTERNAL = 24,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_status fast_allreduce_status;
#else
typedef uint32_t fast_allreduce_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Element types.
enum fast_allreduce_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // IEEE binary16; sums accumulate in f32.
  FAST_ALLREDUCE_DTYPE_F16 = 0,
  // bfloat16; sums accumulate in f32.
  FAST_ALLREDUCE_DTYPE_BF16 = 1,
  // float.
  FAST_ALLREDUCE_DTYPE_F32 = 2,
  // double.
  FAST_ALLREDUCE_DTYPE_F64 = 3,
  // int8_t.
  FAST_ALLREDUCE_DTYPE_I8 = 4,
  // uint8_t.
  FAST_ALLREDUCE_DTYPE_U8 = 5,
  // int32_t.
  FAST_ALLREDUCE_DTYPE_I32 = 6,
  // uint32_t.
  FAST_ALLREDUCE_DTYPE_U32 = 7,
  // int64_t.
  FAST_ALLREDUCE_DTYPE_I64 = 8,
  // uint64_t.
  FAST_ALLREDUCE_DTYPE_U64 = 9,
  // 8-bit float e4m3 of OCP's OFP8, without infinities; sums accumulate in f32.
  FAST_ALLREDUCE_DTYPE_F8E4M3 = 10,
  // 8-bit float e5m2 of OCP's OFP8; sums accumulate in f32.
  FAST_ALLREDUCE_DTYPE_F8E5M2 = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_dtype fast_allreduce_dtype;
#else
typedef uint32_t fast_allreduce_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Reduction operations. Elements are combined in rank order.
enum fast_allreduce_op
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Sum. Integers wrap.
  FAST_ALLREDUCE_OP_SUM = 0,
  // Product. Integers wrap.
  FAST_ALLREDUCE_OP_PROD = 1,
  // IEEE 754-2019 minimum.
  FAST_ALLREDUCE_OP_MIN = 2,
  // IEEE 754-2019 maximum.
  FAST_ALLREDUCE_OP_MAX = 3,
  // Sum divided by the number of ranks; integers are rounded toward zero.
  FAST_ALLREDUCE_OP_AVG = 4,
  // Bitwise and; integers only.
  FAST_ALLREDUCE_OP_BAND = 5,
  // Bitwise or; integers only.
  FAST_ALLREDUCE_OP_BOR = 6,
  // Bitwise exclusive or; integers only.
  FAST_ALLREDUCE_OP_BXOR = 7,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_op fast_allreduce_op;
#else
typedef uint32_t fast_allreduce_op;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What an allreduce with quantised transport moves instead of elements.
enum fast_allreduce_transport
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // 8-bit integers in groups of 32 with a scale.
  FAST_ALLREDUCE_TRANSPORT_INT8 = 0,
  // 8-bit floats e4m3 in such groups.
  FAST_ALLREDUCE_TRANSPORT_F8E4M3 = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_transport fast_allreduce_transport;
#else
typedef uint32_t fast_allreduce_transport;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Norms of rows.
enum fast_allreduce_norm
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // No norm.
  FAST_ALLREDUCE_NORM_NONE = 0,
  // RMSNorm: `x / sqrt(mean(x * x) + epsilon) * weight`.
  FAST_ALLREDUCE_NORM_RMS = 1,
  // LayerNorm: `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias`.
  FAST_ALLREDUCE_NORM_LAYER = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_norm fast_allreduce_norm;
#else
typedef uint32_t fast_allreduce_norm;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Formats of quantised rows.
enum fast_allreduce_scaling
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Rows are not quantised.
  FAST_ALLREDUCE_SCALING_NONE = 0,
  // 8-bit numbers; one scale for all elements, an f32 that is given and equal on all ranks.
  FAST_ALLREDUCE_SCALING_GIVEN = 1,
  // 8-bit numbers; one f32 scale for each row.
  FAST_ALLREDUCE_SCALING_PER_ROW = 2,
  // 8-bit numbers; one f32 scale for each 128 elements of a row; the last group may be shorter.
  FAST_ALLREDUCE_SCALING_PER_GROUP = 3,
  // NVFP4: e2m1 numbers, two in a byte; one e4m3 scale for each 16 elements of a row, row after row.
  FAST_ALLREDUCE_SCALING_NVFP4 = 4,
  // NVFP4 with scales in tiles of 128 rows and 4 blocks, as matrix products read them (cuBLAS: 1D block scaling
  // factors layout; CUTLASS, TensorRT-LLM: 128x4).
  FAST_ALLREDUCE_SCALING_NVFP4_TILED = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fast_allreduce_scaling fast_allreduce_scaling;
#else
typedef uint32_t fast_allreduce_scaling;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Memory that is registered with a communicator. It is ended by fast_allreduce_buffer_free.
typedef struct fast_allreduce_buffer fast_allreduce_buffer;

// One rank of a world. It is made by fast_allreduce_init and freed by fast_allreduce_free.
typedef struct fast_allreduce_communicator fast_allreduce_communicator;

// Settings of a communicator, by name: docs/tuning.md has the table of all.
typedef struct fast_allreduce_settings fast_allreduce_settings;

// What a rank has done so far.
typedef struct fast_allreduce_counters {
  // Collective calls begun.
  uint64_t calls;
  // Bytes of this rank's messages.
  uint64_t bytes;
  // Waits for each rank that outlasted the first polls.
  uint64_t waits[FAST_ALLREDUCE_MAX_RANKS];
  // Waits for each rank that ended in a timeout.
  uint64_t timeouts[FAST_ALLREDUCE_MAX_RANKS];
} fast_allreduce_counters;

// What an allreduce does with its sum. What is zero is not done, except that there has to be a residual. Memory is disjoint, except
// that residual_out may be residual, and rows the input of the call.
typedef struct fast_allreduce_fused {
  // As many elements as the call has, which are added to the sum. The same on all ranks, unless there is `sum`.
  const void *residual;
  // Where the sum with the residual goes.
  void *residual_out;
  // Where the sum of the ranks' inputs alone goes; null: nowhere.
  void *sum;
  // How rows of residual_out are normalised, a fast_allreduce_norm; 0: not at all.
  uint32_t norm;
  // Non-zero: rows are multiplied by 1 + weight.
  uint32_t unit_offset;
  // What is added before the square root.
  float epsilon;
  // Elements of a row, 1 to 65536. Messages are whole rows.
  size_t hidden;
  // An element for each of a row, of the type of the call; null: rows are not multiplied.
  const void *weight;
  // An element for each of a row, which is added, where the norm takes that; null: nothing is added.
  const void *bias;
  // Where normalised rows go, in the type of the call; null: nowhere.
  void *rows;
  // Where quantised rows go: a byte for each element, or for two of 4 bits; null: nowhere.
  void *numbers;
  // FAST_ALLREDUCE_DTYPE_I8, _F8E4M3 or _F8E5M2; _U8 of numbers of 4 bits.
  uint32_t numbers_dtype;
  // The format of quantised rows, a fast_allreduce_scaling.
  uint32_t scaling;
  // The scales of the format: the float that is given, or where the call writes floats; bytes, with numbers of 4 bits.
  void *scales;
  // Of numbers of 4 bits, by what their scales are multiplied: a positive number.
  const float *global_scale;
} fast_allreduce_fused;

// Names a world: one rank makes it, all are given it. It is plain bytes, which may be sent in any way.
typedef struct fast_allreduce_unique_id {
  // Of no meaning to the program. They let whoever knows them, of the same user, join the world.
  uint8_t bytes[128];
} fast_allreduce_unique_id;

// Gives `bytes` bytes at `input` to all ranks, and has those of all, in the order of the ranks, at `output`. Returns 0, or
// anything else if that failed or took longer than `timeout_ms`. It is called by the threads that call the communicator,
// one at a time, until fast_allreduce_free has returned.
typedef int (*fast_allreduce_all_gather_function)(void *context,
                                                  const void *input,
                                                  void *output,
                                                  size_t bytes,
                                                  uint64_t timeout_ms);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Version of the ABI of the library that is loaded: compare it with FAST_ALLREDUCE_ABI_VERSION.
uint32_t fast_allreduce_abi_version(void);

// Version of the library, such as "0.1.0".
const char *fast_allreduce_version(void);

// Reduces the ranks' inputs of `count` elements, element by element, into every rank's output. In place: the same pointer
// twice. On the host `stream` is null, in this and all calls, and the call has ended when it returns. On a GPU it is a
// CUstream of the GPU's primary context, on which the call is put: fast_allreduce_synchronize waits for it and says whether it
// succeeded.
//
// # Safety
//
// `communicator` is live, `input` valid for reads and `output` for writes of that many elements of `dtype`, until the call
// has ended; nobody else writes the one or accesses the other meanwhile. So too for all calls.
fast_allreduce_status fast_allreduce_all_reduce(const struct fast_allreduce_communicator *communicator,
                                                const void *input,
                                                void *output,
                                                size_t count,
                                                uint32_t dtype,
                                                uint32_t op,
                                                void *stream);

// Sums the ranks' inputs of `count` elements into every rank's output, moving about a byte for each element: for links that are
// slow. `transport` is a fast_allreduce_transport; types are f16, bf16 and f32. No element is further from the exact sum than
// `tolerance` times the sum over the ranks of the largest magnitude among the 32 elements of its group; a tolerance that the
// transport cannot keep is refused, with what it can. The result is the same on all ranks. In place: the same pointer twice.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_all_reduce_quantized(const struct fast_allreduce_communicator *communicator,
                                                          const void *input,
                                                          void *output,
                                                          size_t count,
                                                          uint32_t dtype,
                                                          uint32_t transport,
                                                          float tolerance,
                                                          void *stream);

// Brings the ranks' inputs of `count` elements, one after the other, into every rank's output. In place: the input is this
// rank's share of the output.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_all_gather(const struct fast_allreduce_communicator *communicator,
                                                const void *input,
                                                void *output,
                                                size_t count,
                                                uint32_t dtype,
                                                void *stream);

// The same with `counts[r]` elements from rank r.
//
// # Safety
//
// As fast_allreduce_all_reduce; `counts` is valid for reads of a number for each rank.
fast_allreduce_status fast_allreduce_all_gather_v(const struct fast_allreduce_communicator *communicator,
                                                  const void *input,
                                                  void *output,
                                                  const size_t *counts,
                                                  uint32_t dtype,
                                                  void *stream);

// Reduces the ranks' inputs, which have a share of `count` elements for each rank, and brings share r to rank r. In place:
// the output is this rank's share of the input.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_reduce_scatter(const struct fast_allreduce_communicator *communicator,
                                                    const void *input,
                                                    void *output,
                                                    size_t count,
                                                    uint32_t dtype,
                                                    uint32_t op,
                                                    void *stream);

// The same with `counts[r]` elements for rank r.
//
// # Safety
//
// As fast_allreduce_all_gather_v.
fast_allreduce_status fast_allreduce_reduce_scatter_v(const struct fast_allreduce_communicator *communicator,
                                                      const void *input,
                                                      void *output,
                                                      const size_t *counts,
                                                      uint32_t dtype,
                                                      uint32_t op,
                                                      void *stream);

// Copies `count` elements at the root's `data` to that of all ranks.
//
// # Safety
//
// As fast_allreduce_all_reduce, for reads and writes of `data`.
fast_allreduce_status fast_allreduce_broadcast(const struct fast_allreduce_communicator *communicator,
                                               void *data,
                                               size_t count,
                                               uint32_t dtype,
                                               size_t root,
                                               void *stream);

// Reduces the ranks' inputs of `count` elements into the root's output. That of others may be null.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_reduce(const struct fast_allreduce_communicator *communicator,
                                            const void *input,
                                            void *output,
                                            size_t count,
                                            uint32_t dtype,
                                            uint32_t op,
                                            size_t root,
                                            void *stream);

// Brings the ranks' inputs of `count` elements, one after the other, into the root's output. That of others may be null.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_gather(const struct fast_allreduce_communicator *communicator,
                                            const void *input,
                                            void *output,
                                            size_t count,
                                            uint32_t dtype,
                                            size_t root,
                                            void *stream);

// Brings share r of the root's input, of `count` elements, to rank r. The input of others may be null.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_scatter(const struct fast_allreduce_communicator *communicator,
                                             const void *input,
                                             void *output,
                                             size_t count,
                                             uint32_t dtype,
                                             size_t root,
                                             void *stream);

// Brings share r of every rank's input, of `count` elements, to rank r, in the order of the ranks. Not in place.
//
// # Safety
//
// As fast_allreduce_all_reduce.
fast_allreduce_status fast_allreduce_all_to_all(const struct fast_allreduce_communicator *communicator,
                                                const void *input,
                                                void *output,
                                                size_t count,
                                                uint32_t dtype,
                                                void *stream);

// The same with `send_counts[r]` elements for rank r, and `receive_counts[r]` from it.
//
// # Safety
//
// As fast_allreduce_all_reduce; both lists are valid for reads of a number for each rank.
fast_allreduce_status fast_allreduce_all_to_all_v(const struct fast_allreduce_communicator *communicator,
                                                  const void *input,
                                                  const size_t *send_counts,
                                                  void *output,
                                                  const size_t *receive_counts,
                                                  uint32_t dtype,
                                                  void *stream);

// No rank comes back before all have called it; on a GPU what is on the stream after it waits so long.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_barrier(const struct fast_allreduce_communicator *communicator,
                                             void *stream);

// Says whether the calls so far succeeded, also those on streams that nobody has waited for, as far as is known by now. It waits for
// nothing.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_check(const struct fast_allreduce_communicator *communicator);

// Waits for the work on `stream`, and says whether the calls so far succeeded: after it the results of those on the stream may be used.
// FAST_ALLREDUCE_STATUS_UNAVAILABLE for a stream that is being captured, which goes on. On the host it is fast_allreduce_check.
//
// # Safety
//
// `communicator` is live, and `stream` as for the calls.
fast_allreduce_status fast_allreduce_synchronize(const struct fast_allreduce_communicator *communicator,
                                                 void *stream);

// This rank; 0 for a null communicator.
//
// # Safety
//
// `communicator` is null or live.
size_t fast_allreduce_rank(const struct fast_allreduce_communicator *communicator);

// Number of ranks; 0 for a null communicator.
//
// # Safety
//
// `communicator` is null or live.
size_t fast_allreduce_nranks(const struct fast_allreduce_communicator *communicator);

// Where its plans come from, in words: a tuning file, or a built-in table, and why. It is valid until the communicator is
// freed; "" for a null one.
//
// # Safety
//
// `communicator` is null or live.
const char *fast_allreduce_plan_source(const struct fast_allreduce_communicator *communicator);

// What the ranks' threads are bound to, in words, such as "core (0, 1)". It is valid until the communicator is freed; "" for a
// null one.
//
// # Safety
//
// `communicator` is null or live.
const char *fast_allreduce_binding(const struct fast_allreduce_communicator *communicator);

// Whether the switch between the GPUs can add up for this communicator (NVLS). FAST_ALLREDUCE_STATUS_UNAVAILABLE where it does
// not, and fast_allreduce_last_error() says why: nothing asked for it (the order, the algorithm), or GPUs, driver or links have no
// such thing, or ranks share a GPU, or there are none. The communicator goes on.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_nvls(const struct fast_allreduce_communicator *communicator);

// Tells what this rank has done so far.
//
// # Safety
//
// `communicator` is live, and `counters` valid for a write.
fast_allreduce_status fast_allreduce_get_counters(const struct fast_allreduce_communicator *communicator,
                                                  struct fast_allreduce_counters *counters);

// Adds the sum of the ranks' inputs of `count` elements to a residual, and does what else `fused` says: one call in place of an
// allreduce, an addition, a norm and a quantisation, with the bits of these. Types are f16, bf16 and f32.
//
// # Safety
//
// As fast_allreduce_all_reduce; `fused` is valid for reads, and what it has the addresses of, for reads or writes, until the call
// has ended.
fast_allreduce_status fast_allreduce_all_reduce_fused(const struct fast_allreduce_communicator *communicator,
                                                      const void *input,
                                                      size_t count,
                                                      uint32_t dtype,
                                                      const struct fast_allreduce_fused *fused,
                                                      void *stream);

// Makes an id, once for each world. The process that made it must run until all ranks have met.
//
// # Safety
//
// `id` is valid for a write.
fast_allreduce_status fast_allreduce_get_unique_id(struct fast_allreduce_unique_id *id);

// Makes an id of the 256 hexadecimal digits that fast-allreduce prints ids as, such as those of the environment
// variable FAST_ALLREDUCE_UNIQUE_ID.
//
// # Safety
//
// `text` is a string that ends with a zero byte, and `id` is valid for a write.
fast_allreduce_status fast_allreduce_unique_id_from_text(const char *text,
                                                         struct fast_allreduce_unique_id *id);

// Joins the world of `id` as `rank`, and makes its communicator when all `nranks` ranks have come. Ranks are processes or
// threads of one user on one machine. `settings` may be null: the defaults. Like all functions it leaves the CUDA context
// current that is; in a thread that has none, that of the communicator's GPU becomes current.
//
// # Safety
//
// `id` is valid for reads, `settings` null or live, `communicator` valid for a write.
fast_allreduce_status fast_allreduce_init(const struct fast_allreduce_unique_id *id,
                                          size_t rank,
                                          size_t nranks,
                                          const struct fast_allreduce_settings *settings,
                                          struct fast_allreduce_communicator **communicator);

// The same for ranks that meet by a function of the caller's instead of an id: one over MPI, a key-value store, or whatever
// started the ranks.
//
// # Safety
//
// As fast_allreduce_init; `all_gather` is as its type says, with this `context`.
fast_allreduce_status fast_allreduce_init_with_all_gather(fast_allreduce_all_gather_function all_gather,
                                                          void *context,
                                                          size_t rank,
                                                          size_t nranks,
                                                          const struct fast_allreduce_settings *settings,
                                                          struct fast_allreduce_communicator **communicator);

// Makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank. Collective: every rank
// calls it. A color below 0 gives none: `part` is set to null.
//
// # Safety
//
// `communicator` is live, and `part` valid for a write.
fast_allreduce_status fast_allreduce_split(const struct fast_allreduce_communicator *communicator,
                                           int32_t color,
                                           int64_t key,
                                           struct fast_allreduce_communicator **part);

// Makes a communicator of the `count` ranks in `survivors`, in ascending order, after others have died or left; this rank
// is among them. Collective among them. The old communicator may have failed; it is freed as any other.
//
// # Safety
//
// `communicator` is live, `survivors` valid for reads of `count` numbers, and `part` valid for a write.
fast_allreduce_status fast_allreduce_shrink(const struct fast_allreduce_communicator *communicator,
                                            const size_t *survivors,
                                            size_t count,
                                            struct fast_allreduce_communicator **part);

// The ranks that are left, bit r for rank r: whose processes run and whose communicators have not been freed, as far as this
// rank has noticed. 0 for a null communicator.
//
// # Safety
//
// `communicator` is null or live.
uint32_t fast_allreduce_survivors(const struct fast_allreduce_communicator *communicator);

// Frees a communicator; null is nothing. No other thread may be in a call of it: fast_allreduce_abort ends those. Buffers
// may be freed before or after it. It does nothing where the calling thread is in a call of the communicator, as in a signal handler
// or a callback: fast_allreduce_last_error says so then.
//
// # Safety
//
// `communicator` is null, or live and not used any more.
void fast_allreduce_free(struct fast_allreduce_communicator *communicator);

// Makes a call that waits in another thread give up with FAST_ALLREDUCE_STATUS_ABORTED. The communicator fails each later
// call, and ranks that wait for this one have an error at once.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_abort(const struct fast_allreduce_communicator *communicator);

// Allocates `bytes` bytes of zeros on every rank, on its device, registered: calls from within pull without a copy.
// Collective: every rank calls it with the same number. The memory lives until fast_allreduce_buffer_free.
//
// # Safety
//
// `communicator` is live; `address` and `buffer` are valid for writes.
fast_allreduce_status fast_allreduce_alloc(const struct fast_allreduce_communicator *communicator,
                                           size_t bytes,
                                           void **address,
                                           struct fast_allreduce_buffer **buffer);

// Registers `bytes` bytes of a GPU's memory that the program allocated, by cuMemAlloc or as a caching allocator does: calls
// from within pull without a copy. Collective: every rank calls it with the same number. Memory of the host cannot be
// registered: allocate it by fast_allreduce_alloc. The memory must outlive fast_allreduce_buffer_free on every rank: meet in
// fast_allreduce_barrier before it goes.
//
// # Safety
//
// `communicator` is live, `buffer` valid for a write, and there are so many bytes at `address`, which stay as long as it says.
fast_allreduce_status fast_allreduce_register(const struct fast_allreduce_communicator *communicator,
                                              void *address,
                                              size_t bytes,
                                              struct fast_allreduce_buffer **buffer);

// Ends a registration, and frees memory that fast_allreduce_alloc allocated; null is nothing. Not while a call uses it.
//
// # Safety
//
// `buffer` is null, or live and not used any more.
void fast_allreduce_buffer_free(struct fast_allreduce_buffer *buffer);

// Sends `count` elements to a rank, which receives them with the same tag. Between fast_allreduce_group_begin and
// fast_allreduce_group_end of the same thread it is carried out by the latter, on the stream of that: `stream` is the same, or null.
//
// # Safety
//
// `communicator` is live, and `data` valid for reads of that many elements until the call, or the group's end, has ended.
fast_allreduce_status fast_allreduce_send(const struct fast_allreduce_communicator *communicator,
                                          const void *data,
                                          size_t count,
                                          uint32_t dtype,
                                          size_t to,
                                          uint32_t tag,
                                          void *stream);

// Receives `count` elements from a rank, as fast_allreduce_send.
//
// # Safety
//
// As fast_allreduce_send, for writes.
fast_allreduce_status fast_allreduce_recv(const struct fast_allreduce_communicator *communicator,
                                          void *data,
                                          size_t count,
                                          uint32_t dtype,
                                          size_t from,
                                          uint32_t tag,
                                          void *stream);

// Begins a group of this thread: messages that it sends and receives from here on are carried out together, side by side,
// by fast_allreduce_group_end; at most 64. Collectives are carried out at once, also within a group.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_group_begin(const struct fast_allreduce_communicator *communicator);

// Carries out the messages of this thread's group.
//
// # Safety
//
// `communicator` is live, and the messages' buffers are as fast_allreduce_send and fast_allreduce_recv say.
fast_allreduce_status fast_allreduce_group_end(const struct fast_allreduce_communicator *communicator,
                                               void *stream);

// Makes an operation of this rank, for this communicator: a sum of the ranks' inputs, of which this rank's is multiplied by
// `scale` first. The product is computed as sums are accumulated, and rounded to the type. The other ranks take such an operation
// for the same call, each with a scale of its own; elements are floats.
//
// # Safety
//
// `communicator` is live; `op` is valid for writes.
fast_allreduce_status fast_allreduce_op_create_premul_sum(const struct fast_allreduce_communicator *communicator,
                                                          double scale,
                                                          uint32_t *op);

// Ends an operation that fast_allreduce_op_create_premul_sum has made. Calls that are under way are not affected; what is not
// destroyed ends with its communicator.
//
// # Safety
//
// `communicator` is live.
fast_allreduce_status fast_allreduce_op_destroy(const struct fast_allreduce_communicator *communicator,
                                                uint32_t op);

// Makes settings of which none is set: the environment sets them, or they have defaults.
//
// # Safety
//
// `settings` is valid for a write.
fast_allreduce_status fast_allreduce_settings_new(struct fast_allreduce_settings **settings);

// Sets one: ("device", "cuda:1"), ("timeout", "2.5"), ("order", "any"), ... FAST_ALLREDUCE_STATUS_INVALID_SETTING for a name that there
// is not, and for a value that the setting does not take: fast_allreduce_last_error lists what there is. Values that the device does not
// take are refused by fast_allreduce_init.
//
// # Safety
//
// `settings` is live, and no other thread uses it. `name` and `value` are strings that end with a zero byte.
fast_allreduce_status fast_allreduce_settings_set(struct fast_allreduce_settings *settings,
                                                  const char *name,
                                                  const char *value);

// Frees settings, of which communicators keep nothing; null is nothing.
//
// # Safety
//
// `settings` is null, or live and not used any more.
void fast_allreduce_settings_free(struct fast_allreduce_settings *settings);

// What went wrong in the last call of this thread that failed, in words; "" if none has. It is valid until the next one
// fails, and belongs to the library.
const char *fast_allreduce_last_error(void);

// The ranks that are to blame for the last error of this thread, bit r for rank r: those that did not come, the one that
// has gone or failed, the one that makes another call. 0 where no rank is.
uint32_t fast_allreduce_last_error_ranks(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FAST_ALLREDUCE_H */
