/* Two ranks as threads of one process: all collectives and messages with checks of their results, and expected errors.
 *
 *   cc threads.c $(pkg-config --cflags --libs fast_allreduce) -pthread
 */
#include <fast_allreduce.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, COUNT = 1000 };

static void require(fast_allreduce_status status, const char *what) {
  if (status != FAST_ALLREDUCE_STATUS_OK) {
    fprintf(stderr, "%s: status %u: %s\n", what, (unsigned)status, fast_allreduce_last_error());
    exit(1);
  }
}

static void expect(int holds, const char *what) {
  if (!holds) {
    fprintf(stderr, "%s does not hold; the last error is: %s\n", what, fast_allreduce_last_error());
    exit(1);
  }
}

#define EXPECT(condition) expect(condition, #condition)

static void reductions(const fast_allreduce_communicator *communicator, size_t rank) {
  float input[RANKS * COUNT], output[RANKS * COUNT];
  for (size_t i = 0; i < RANKS * COUNT; i++)
    input[i] = (float)(i + 1000 * rank);
  memset(output, 0xff, sizeof output);
  require(fast_allreduce_all_reduce(communicator, input, output, COUNT, FAST_ALLREDUCE_DTYPE_F32,
                                    FAST_ALLREDUCE_OP_SUM, NULL),
          "all_reduce");
  for (size_t i = 0; i < COUNT; i++)
    EXPECT(output[i] == (float)(2 * i + 1000));
  require(fast_allreduce_reduce_scatter(communicator, input, output, COUNT,
                                        FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_MAX, NULL),
          "reduce_scatter");
  for (size_t i = 0; i < COUNT; i++)
    EXPECT(output[i] == (float)(rank * COUNT + i + 1000));
  size_t counts[RANKS] = {3, 5};
  require(fast_allreduce_reduce_scatter_v(communicator, input, output, counts,
                                          FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_MIN, NULL),
          "reduce_scatter_v");
  for (size_t i = 0; i < counts[rank]; i++)
    EXPECT(output[i] == (float)(3 * rank + i));
  output[0] = -1;
  require(fast_allreduce_reduce(communicator, input, rank == 1 ? output : NULL, COUNT,
                                FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_AVG, 1, NULL),
          "reduce");
  EXPECT(output[0] == (rank == 1 ? 500.0F : -1.0F));
}

static void shares(const fast_allreduce_communicator *communicator, size_t rank) {
  int64_t input[RANKS] = {(int64_t)(10 * rank), (int64_t)(10 * rank + 1)}, output[2 * RANKS] = {-1, -1, -1, -1};
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_I64;
  require(fast_allreduce_all_gather(communicator, input, output, 2, dtype, NULL), "all_gather");
  EXPECT(output[0] == 0 && output[1] == 1 && output[2] == 10 && output[3] == 11);
  size_t counts[RANKS] = {2, 1};
  require(fast_allreduce_all_gather_v(communicator, input, output, counts, dtype, NULL), "all_gather_v");
  EXPECT(output[0] == 0 && output[1] == 1 && output[2] == 10);
  require(fast_allreduce_all_to_all(communicator, input, output, 1, dtype, NULL), "all_to_all");
  EXPECT(output[0] == (int64_t)rank && output[1] == (int64_t)(10 + rank));
  size_t ones[RANKS] = {1, 1};
  output[0] = output[1] = -1;
  require(fast_allreduce_all_to_all_v(communicator, input, ones, output, ones, dtype, NULL), "all_to_all_v");
  EXPECT(output[0] == (int64_t)rank && output[1] == (int64_t)(10 + rank));
  require(fast_allreduce_broadcast(communicator, input, 2, dtype, 1, NULL), "broadcast");
  EXPECT(input[0] == 10 && input[1] == 11);
  require(fast_allreduce_gather(communicator, input, rank == 0 ? output : NULL, 1, dtype, 0, NULL), "gather");
  EXPECT(rank != 0 || (output[0] == 10 && output[1] == 10));
  require(fast_allreduce_scatter(communicator, rank == 0 ? input : NULL, output, 1, dtype, 0, NULL), "scatter");
  EXPECT(output[0] == (int64_t)(10 + rank));
}

/* Two numbers per byte: 6 and -6, with a scale of 3/2 as an e4m3, in a tile of 128 rows and 4 blocks. */
static void nvfp4(const fast_allreduce_communicator *communicator) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32;
  const float global = 9;
  float input[16], residual[16] = {0};
  uint8_t output[8] = {0}, scales[512] = {0};
  for (int i = 0; i < 16; ++i)
    input[i] = i % 2 == 0 ? 1.0f : -1.0f;
  fast_allreduce_fused fused = {.residual = residual,
                                .residual_out = residual,
                                .norm = FAST_ALLREDUCE_NORM_RMS,
                                .hidden = 16,
                                .numbers = output,
                                .numbers_dtype = FAST_ALLREDUCE_DTYPE_U8,
                                .scaling = FAST_ALLREDUCE_SCALING_NVFP4_TILED,
                                .scales = scales,
                                .global_scale = &global};
  require(fast_allreduce_all_reduce_fused(communicator, input, 16, dtype, &fused, NULL), "all_reduce_fused to nvfp4");
  EXPECT(output[0] == 0xF7 && output[7] == 0xF7 && scales[0] == 0x3C && scales[1] == 0);
  fused.global_scale = NULL;
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 16, dtype, &fused, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  fused.numbers_dtype = FAST_ALLREDUCE_DTYPE_I8;
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 16, dtype, &fused, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_SETTING);
}

/* The end of a mixture of experts: rank 0 has three rows of experts, rank 1 has none, and both have a shared expert. */
static void experts(const fast_allreduce_communicator *communicator, size_t rank) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32;
  const float input[6] = {1, -1, 2, -2, 3, -3}, weights[4] = {1, 2, 9, 1}, shared[4] = {1, -1, 1, -1};
  int32_t table[4] = {0, 2, -1, 1};
  if (rank == 1)
    table[0] = table[1] = table[3] = -1;
  float residual[4] = {0}, rows[4] = {0};
  fast_allreduce_experts of_rank = {.table = table,
                                    .top_k = 2,
                                    .rows = rank == 0 ? 3 : 0,
                                    .weights = weights,
                                    .weights_dtype = dtype,
                                    .routed_scale = 2,
                                    .shared = shared};
  const fast_allreduce_fused what = {.residual = residual,
                                     .residual_out = residual,
                                     .norm = FAST_ALLREDUCE_NORM_RMS,
                                     .hidden = 2,
                                     .rows = rows,
                                     .experts = &of_rank};
  require(fast_allreduce_all_reduce_fused(communicator, input, 4, dtype, &what, NULL), "all_reduce_fused of experts");
  EXPECT(residual[0] == 16 && residual[1] == -16 && residual[2] == 6 && residual[3] == -6);
  EXPECT(rows[0] == 1 && rows[1] == -1 && rows[2] == 1 && rows[3] == -1);
  of_rank.routed_scale = 0;
  residual[0] = residual[1] = residual[2] = residual[3] = 0;
  require(fast_allreduce_all_reduce_fused(communicator, input, 4, dtype, &what, NULL), "experts without a factor");
  EXPECT(residual[0] == 9 && residual[1] == -9 && residual[2] == 4 && residual[3] == -4);
  table[3] = 3;
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 4, dtype, &what, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_SETTING);
  EXPECT(strstr(fast_allreduce_last_error(), "entry 3 is 3") != NULL && residual[0] == 9);
}

/* Each rank has one row, or rank 1 has both. */
static void scattered(const fast_allreduce_communicator *communicator, size_t rank) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32;
  const float input[4] = {1, -1, 2, 2};
  float residual[4] = {0}, rows[4] = {0};
  fast_allreduce_fused what = {.residual = residual,
                               .residual_out = residual,
                               .norm = FAST_ALLREDUCE_NORM_RMS,
                               .hidden = 2,
                               .rows = rows};
  require(fast_allreduce_reduce_scatter_fused(communicator, input, 2, dtype, &what, NULL), "reduce_scatter_fused");
  EXPECT(residual[0] == (rank == 0 ? 2 : 4) && rows[0] == 1 && rows[1] == (rank == 0 ? -1 : 1) && rows[2] == 0);
  const size_t counts[RANKS] = {0, 4};
  residual[0] = residual[1] = 0;
  require(fast_allreduce_reduce_scatter_fused_v(communicator, input, counts, dtype, &what, NULL),
          "reduce_scatter_fused_v");
  EXPECT(rank == 0 ? residual[0] == 0 : residual[1] == -2 && residual[3] == 4 && rows[1] == -1 && rows[3] == 1);
  const int8_t numbers[2] = {1, (int8_t)(10 + rank)};
  const float scales[1] = {(float)(2 + rank)};
  int8_t all_numbers[4];
  float all_scales[2];
  const fast_allreduce_gathered_rows gathered = {.scaling = FAST_ALLREDUCE_SCALING_PER_ROW,
                                                 .numbers_dtype = FAST_ALLREDUCE_DTYPE_I8,
                                                 .hidden = 2,
                                                 .numbers = numbers,
                                                 .scales = scales,
                                                 .all_numbers = all_numbers,
                                                 .all_scales = all_scales};
  require(fast_allreduce_all_gather_rows(communicator, &gathered, 2, NULL), "all_gather_rows");
  EXPECT(all_numbers[1] == 10 && all_numbers[3] == 11 && all_scales[0] == 2 && all_scales[1] == 3);
  const size_t rows_of_one[RANKS] = {2, 0};
  all_numbers[1] = 0;
  require(fast_allreduce_all_gather_rows_v(communicator, &gathered, rows_of_one, NULL), "all_gather_rows_v");
  EXPECT(all_numbers[1] == 10 && all_scales[0] == 2);
}

/* The steps after an allreduce in a layer of a model: the residual is added, and rows are normalised. */
static void fused(const fast_allreduce_communicator *communicator, size_t rank) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32;
  float residual[6] = {1, 1, 1, 2, 2, 2}, normed[6], weight[3] = {1, 2, 3}, input[6];
  for (size_t i = 0; i < 6; i++)
    input[i] = rank == 0 ? 1 : 2;
  fast_allreduce_fused what = {.residual = residual, .residual_out = residual};
  require(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL), "all_reduce_fused");
  EXPECT(residual[0] == 4 && residual[5] == 5);
  what.norm = FAST_ALLREDUCE_NORM_RMS;
  what.hidden = 3;
  what.weight = weight;
  what.rows = normed;
  require(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL), "all_reduce_fused with a norm");
  EXPECT(residual[0] == 7 && residual[5] == 8);
  EXPECT(normed[0] == 1 && normed[1] == 2 && normed[2] == 3 && normed[3] == 1 && normed[5] == 3);
  float sum[6];
  what.sum = sum;
  require(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL), "all_reduce_fused with the sum");
  EXPECT(sum[0] == 3 && sum[5] == 3 && residual[0] == 10 && residual[5] == 11 && normed[5] == 3);
  what.sum = NULL;
  what.hidden = 4;
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_SETTING);
  EXPECT(strstr(fast_allreduce_last_error(), "whole rows") != NULL);
  what.hidden = 3;
  int8_t numbers[6];
  float scales[2];
  what.rows = NULL;
  what.numbers = numbers;
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  what.numbers_dtype = FAST_ALLREDUCE_DTYPE_I8;
  what.scaling = FAST_ALLREDUCE_SCALING_PER_ROW;
  what.scales = scales;
  require(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, &what, NULL), "all_reduce_fused to 8 bits");
  EXPECT(numbers[2] == 127 && numbers[5] == 127 && scales[0] == 3.0f / 127.0f && scales[1] == 3.0f / 127.0f);
  nvfp4(communicator);
  EXPECT(fast_allreduce_all_reduce_fused(communicator, input, 6, dtype, NULL, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  experts(communicator, rank);
  scattered(communicator, rank);
}

/* RMSNorm of rows whose elements are divided among the ranks: two rows of two elements on each. */
static void sharded(const fast_allreduce_communicator *communicator) {
  float data[4] = {2, -2, 4, 4}, weight[2] = {1, 3};
  fast_allreduce_sharded_rows part = {.input = data, .output = data, .input_stride = 2, .output_stride = 2};
  part.columns = 2;
  part.total = 2 * RANKS;
  part.weight = weight;
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32;
  require(fast_allreduce_sharded_rms_norm(communicator, &part, 1, 2, dtype, NULL), "sharded_rms_norm");
  EXPECT(data[0] == 1 && data[1] == -3 && data[2] == 1 && data[3] == 3);
  part.total = 1;
  EXPECT(fast_allreduce_sharded_rms_norm(communicator, &part, 1, 2, dtype, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_SETTING);
  EXPECT(fast_allreduce_sharded_rms_norm(communicator, NULL, 1, 2, dtype, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
}

/* About one byte per element. The scales are 1 for each rank and 2 for the sum, so that these numbers are exact. */
static void quantized(const fast_allreduce_communicator *communicator) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_F32, int8 = FAST_ALLREDUCE_TRANSPORT_INT8;
  float data[3] = {127, -3, 0};
  require(fast_allreduce_all_reduce_quantized(communicator, data, data, 3, dtype, int8, 0.01f, NULL),
          "all_reduce_quantized");
  EXPECT(data[0] == 254 && data[1] == -6 && data[2] == 0);
  EXPECT(fast_allreduce_all_reduce_quantized(communicator, data, data, 3, dtype, int8, 0.001f, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_SETTING);
  EXPECT(strstr(fast_allreduce_last_error(), "int8 guarantees") != NULL);
  EXPECT(fast_allreduce_all_reduce_quantized(communicator, data, data, 3, dtype, 2, 1, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
}

static void messages(const fast_allreduce_communicator *communicator, size_t rank) {
  const uint32_t dtype = FAST_ALLREDUCE_DTYPE_I32;
  int32_t mine = (int32_t)rank + 40, theirs = -1, sum = (int32_t)rank;
  require(fast_allreduce_group_begin(communicator), "group_begin");
  EXPECT(fast_allreduce_group_begin(communicator) == FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  require(fast_allreduce_send(communicator, &mine, 1, dtype, 1 - rank, 7, NULL), "send in a group");
  require(fast_allreduce_all_reduce(communicator, &sum, &sum, 1, dtype, FAST_ALLREDUCE_OP_SUM, NULL),
          "all_reduce in a group");
  EXPECT(sum == 1);
  require(fast_allreduce_recv(communicator, &theirs, 1, dtype, 1 - rank, 7, NULL), "recv in a group");
  EXPECT(theirs == -1);
  require(fast_allreduce_group_end(communicator, NULL), "group_end");
  EXPECT(theirs == 41 - (int32_t)rank);
  EXPECT(fast_allreduce_group_end(communicator, NULL) == FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  if (rank == 0)
    require(fast_allreduce_send(communicator, &mine, 1, dtype, 1, 0, NULL), "send");
  else
    require(fast_allreduce_recv(communicator, &theirs, 1, dtype, 0, 0, NULL), "recv");
  EXPECT(rank == 0 || theirs == 40);
  require(fast_allreduce_barrier(communicator, NULL), "barrier");
}

static void memory(const fast_allreduce_communicator *communicator, size_t rank) {
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  require(fast_allreduce_alloc(communicator, COUNT * sizeof(double), &address, &buffer), "alloc");
  double *data = address;
  for (size_t i = 0; i < COUNT; i++)
    data[i] = (double)rank + 1;
  require(fast_allreduce_all_reduce(communicator, data, data, COUNT, FAST_ALLREDUCE_DTYPE_F64,
                                    FAST_ALLREDUCE_OP_PROD, NULL),
          "all_reduce of registered memory");
  EXPECT(data[0] == 2 && data[COUNT - 1] == 2);
  fast_allreduce_buffer_free(buffer);
}

/* Mistakes of a program: each returns a status and a text, on this rank only, and the communicator stays usable. */
static void mistakes(const fast_allreduce_communicator *communicator) {
  float data[4] = {0};
  EXPECT(fast_allreduce_all_reduce(communicator, data, data, 4, 99, FAST_ALLREDUCE_OP_SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  EXPECT(strstr(fast_allreduce_last_error(), "dtype 99") != NULL);
  EXPECT(fast_allreduce_all_reduce(communicator, data, data, 4, FAST_ALLREDUCE_DTYPE_F32, 99, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  EXPECT(fast_allreduce_all_reduce(communicator, data, data, 4, FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_BAND,
                                   NULL) == FAST_ALLREDUCE_STATUS_INVALID_SETTING);
  EXPECT(fast_allreduce_all_reduce(NULL, data, data, 4, FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  EXPECT(fast_allreduce_all_reduce(communicator, data, data, 4, FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_SUM,
                                   data) == FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  EXPECT(fast_allreduce_all_reduce(communicator, NULL, data, 4, FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_SUM,
                                   NULL) == FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  EXPECT(fast_allreduce_all_reduce(communicator, data, data + 1, 3, FAST_ALLREDUCE_DTYPE_F32, FAST_ALLREDUCE_OP_SUM,
                                   NULL) == FAST_ALLREDUCE_STATUS_OVERLAP);
  EXPECT(fast_allreduce_broadcast(communicator, data, 4, FAST_ALLREDUCE_DTYPE_F32, RANKS, NULL) ==
         FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE);
  EXPECT(fast_allreduce_all_gather_v(communicator, data, data, NULL, FAST_ALLREDUCE_DTYPE_F32, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
}

static fast_allreduce_unique_id id;

static void *rank_thread(void *argument) {
  size_t rank = *(size_t *)argument;
  fast_allreduce_settings *settings = NULL;
  require(fast_allreduce_settings_new(&settings), "settings_new");
  require(fast_allreduce_settings_set(settings, "timeout", "20"), "settings_set");
  fast_allreduce_communicator *communicator = NULL, *part = NULL;
  require(fast_allreduce_init(&id, rank, RANKS, settings, &communicator), "init");
  fast_allreduce_settings_free(settings);
  EXPECT(fast_allreduce_rank(communicator) == rank && fast_allreduce_nranks(communicator) == RANKS);
  reductions(communicator, rank);
  shares(communicator, rank);
  fused(communicator, rank);
  sharded(communicator);
  quantized(communicator);
  messages(communicator, rank);
  memory(communicator, rank);
  mistakes(communicator);
  EXPECT(fast_allreduce_survivors(communicator) == 3);
  require(fast_allreduce_split(communicator, rank == 0 ? 1 : -1, 0, &part), "split");
  EXPECT((part != NULL) == (rank == 0) && fast_allreduce_nranks(part) == (rank == 0));
  fast_allreduce_free(part);
  size_t all[RANKS] = {0, 1};
  require(fast_allreduce_shrink(communicator, all, RANKS, &part), "shrink");
  EXPECT(fast_allreduce_rank(part) == rank);
  fast_allreduce_free(part);
  fast_allreduce_counters counters;
  require(fast_allreduce_get_counters(communicator, &counters), "get_counters");
  EXPECT(counters.calls > 10 && counters.bytes > 10 * COUNT && counters.timeouts[0] == 0);
  /* Rank 0 leaves. Rank 1 gets an error that names rank 0; later calls return the same error at once. */
  if (rank == 1) {
    double value = 1;
    fast_allreduce_status status = FAST_ALLREDUCE_STATUS_OK;
    for (int call = 0; call < 2; call++) {
      status = fast_allreduce_all_reduce(communicator, &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64,
                                         FAST_ALLREDUCE_OP_SUM, NULL);
      EXPECT(status == FAST_ALLREDUCE_STATUS_PEER_LOST && fast_allreduce_last_error_ranks() == 1);
    }
    EXPECT(strstr(fast_allreduce_last_error(), "rank 0") != NULL);
  }
  fast_allreduce_free(communicator);
  return NULL;
}

int main(void) {
  EXPECT(fast_allreduce_abi_version() == FAST_ALLREDUCE_ABI_VERSION);
  EXPECT(fast_allreduce_get_unique_id(NULL) == FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  require(fast_allreduce_get_unique_id(&id), "get_unique_id");
  pthread_t threads[RANKS];
  size_t ranks[RANKS];
  for (size_t rank = 0; rank < RANKS; rank++) {
    ranks[rank] = rank;
    if (pthread_create(&threads[rank], NULL, rank_thread, &ranks[rank]) != 0)
      return 1;
  }
  for (size_t rank = 0; rank < RANKS; rank++)
    pthread_join(threads[rank], NULL);
  printf("fast-allreduce %s, %d ranks as threads: passed\n", fast_allreduce_version(), RANKS);
  return 0;
}
