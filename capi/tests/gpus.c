/* The library with CUDA on a machine with two GPUs, which the stand-in driver can simulate: the status of a wait for a
 * stream includes the failures of its calls, and no function changes the current context.
 *
 *   cc gpus.c $(pkg-config --cflags --libs fast_allreduce) -lcuda -pthread
 */
#define _GNU_SOURCE
#include <fast_allreduce.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The declarations of cuda.h that are used here. */
typedef void *CUcontext, *CUstream;
typedef unsigned long long CUdeviceptr;
int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(CUcontext *, int);
int cuCtxGetCurrent(CUcontext *), cuCtxSetCurrent(CUcontext), cuCtxSynchronize(void);
int cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemFree_v2(CUdeviceptr), cuMemsetD32_v2(CUdeviceptr, unsigned, size_t);
int cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t), cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
int cuStreamCreate(CUstream *, unsigned), cuStreamDestroy_v2(CUstream);
int cuStreamBeginCapture_v2(CUstream, int), cuStreamEndCapture(CUstream, void **);

enum { COUNT = 1024, GPUS = 2 };

#define F32 FAST_ALLREDUCE_DTYPE_F32
#define SUM FAST_ALLREDUCE_OP_SUM
#define OK FAST_ALLREDUCE_STATUS_OK
#define INVALID FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT

static void expect(int holds, const char *what, int line) {
  if (!holds) {
    fprintf(stderr, "line %d: %s does not hold; the last error is: %s\n", line, what, fast_allreduce_last_error());
    exit(1);
  }
}

#define EXPECT(condition) expect(condition, #condition, __LINE__)
#define DRIVER(call) EXPECT((call) == 0)

static CUcontext context[GPUS];

static void *on_gpu(int gpu) {
  CUdeviceptr address = 0;
  DRIVER(cuCtxSetCurrent(context[gpu]));
  DRIVER(cuMemAlloc_v2(&address, COUNT * sizeof(float)));
  DRIVER(cuMemsetD32_v2(address, 0, COUNT));
  DRIVER(cuCtxSynchronize());
  return (void *)(size_t)address;
}

static CUstream stream_on(int gpu) {
  CUstream stream = NULL;
  DRIVER(cuCtxSetCurrent(context[gpu]));
  DRIVER(cuStreamCreate(&stream, 1));
  return stream;
}

static fast_allreduce_status joined(const fast_allreduce_unique_id *id, size_t rank, size_t nranks, const char *timeout,
                                    fast_allreduce_communicator **communicator) {
  const char *devices[] = {"cuda", "cuda:1"};
  fast_allreduce_settings *settings = NULL;
  EXPECT(fast_allreduce_settings_new(&settings) == OK);
  EXPECT(fast_allreduce_settings_set(settings, "device", devices[rank]) == OK);
  EXPECT(fast_allreduce_settings_set(settings, "timeout", timeout) == OK);
  EXPECT(fast_allreduce_settings_set(settings, "max_blocks", "4") == OK);
  fast_allreduce_status status = fast_allreduce_init(id, rank, nranks, settings, communicator);
  fast_allreduce_settings_free(settings);
  return status;
}

/* The program's context, which must stay current. */
static CUcontext programs;

static void is_still_current(const char *call, int line) {
  const int not_initialized = 3;
  CUcontext now = NULL;
  const int code = cuCtxGetCurrent(&now);
  EXPECT(code == 0 || code == not_initialized);
  if (now != programs) {
    fprintf(stderr, "line %d: %s has changed the current context\n", line, call);
    exit(1);
  }
}

#define CURRENT(call) ((call), is_still_current(#call, __LINE__))
#define IS(call, status) (EXPECT((call) == (status)), is_still_current(#call, __LINE__))

static fast_allreduce_communicator *made_and_checked(void) {
  fast_allreduce_unique_id id;
  fast_allreduce_communicator *made = NULL;
  IS(fast_allreduce_get_unique_id(&id), OK);
  EXPECT(joined(&id, 0, 1, "5", &made) == OK);
  if (programs == NULL) {
    /* In a thread without a context, the context of the GPU becomes current. */
    CUcontext now = NULL;
    DRIVER(cuCtxGetCurrent(&now));
    EXPECT(now != NULL);
    DRIVER(cuCtxSetCurrent(NULL));
  }
  is_still_current("fast_allreduce_init", __LINE__);
  return made;
}

/* All functions, with buffers on the first GPU, in successful and failing calls. */
static void functions(CUcontext current) {
  float *data = on_gpu(0), *other = on_gpu(0), *more = on_gpu(0), *elsewhere = on_gpu(1);
  CUstream stream = stream_on(0), foreign = stream_on(1);
  programs = current;
  DRIVER(cuCtxSetCurrent(programs));
  fast_allreduce_communicator *of = made_and_checked(), *part = NULL;
  const size_t counts[1] = {COUNT}, ranks[1] = {0};
  uint32_t op = 0;
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  fast_allreduce_counters counters;
  fast_allreduce_fused fused = {.residual = other, .residual_out = other};
  const uint32_t int8 = FAST_ALLREDUCE_TRANSPORT_INT8;

  IS(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, stream), OK);
  IS(fast_allreduce_all_reduce(of, elsewhere, data, COUNT, F32, SUM, stream), FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  IS(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, foreign), FAST_ALLREDUCE_STATUS_INVALID_STREAM);
  IS(fast_allreduce_all_reduce(of, data, data, COUNT, 99, SUM, stream), INVALID);
  IS(fast_allreduce_op_create_premul_sum(of, 0.5, &op), OK);
  IS(fast_allreduce_all_reduce(of, data, data, COUNT, F32, op, stream), OK);
  IS(fast_allreduce_op_destroy(of, op), OK);
  IS(fast_allreduce_all_reduce_quantized(of, data, data, COUNT, F32, int8, 1, stream), OK);
  IS(fast_allreduce_all_reduce_fused(of, data, COUNT, F32, &fused, stream), OK);
  fused.norm = FAST_ALLREDUCE_NORM_RMS;
  fused.epsilon = 1;
  fused.hidden = COUNT;
  fused.rows = data;
  IS(fast_allreduce_all_reduce_fused(of, data, COUNT, F32, &fused, stream), OK);
  fused.rows = NULL;
  fused.numbers = elsewhere;
  fused.numbers_dtype = FAST_ALLREDUCE_DTYPE_I8;
  fused.scaling = FAST_ALLREDUCE_SCALING_PER_ROW;
  fused.scales = more;
  IS(fast_allreduce_all_reduce_fused(of, data, COUNT, F32, &fused, stream), FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  IS(fast_allreduce_all_gather(of, data, other, COUNT, F32, stream), OK);
  IS(fast_allreduce_all_gather_v(of, data, other, counts, F32, stream), OK);
  IS(fast_allreduce_reduce_scatter(of, data, other, COUNT, F32, SUM, stream), OK);
  IS(fast_allreduce_reduce_scatter_v(of, data, other, counts, F32, SUM, stream), OK);
  IS(fast_allreduce_broadcast(of, data, COUNT, F32, 0, stream), OK);
  IS(fast_allreduce_reduce(of, data, other, COUNT, F32, SUM, 0, stream), OK);
  IS(fast_allreduce_gather(of, data, other, COUNT, F32, 0, stream), OK);
  IS(fast_allreduce_scatter(of, data, other, COUNT, F32, 0, stream), OK);
  IS(fast_allreduce_all_to_all(of, data, other, COUNT, F32, stream), OK);
  IS(fast_allreduce_all_to_all_v(of, data, counts, other, counts, F32, stream), OK);
  IS(fast_allreduce_barrier(of, stream), OK);
  IS(fast_allreduce_group_begin(of), OK);
  IS(fast_allreduce_send(of, data, COUNT, F32, 0, 0, stream), OK);
  IS(fast_allreduce_recv(of, other, COUNT, F32, 0, 0, stream), OK);
  IS(fast_allreduce_group_end(of, stream), OK);
  IS(fast_allreduce_group_begin(of), OK);
  IS(fast_allreduce_send(of, data, COUNT, F32, 0, 0, foreign), OK);
  IS(fast_allreduce_group_end(of, stream), INVALID);
  EXPECT(strstr(fast_allreduce_last_error(), "a message of the group has the stream") != NULL);
  IS(fast_allreduce_send(of, data, COUNT, F32, 5, 0, stream), FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE);
  IS(fast_allreduce_recv(of, data, COUNT, F32, 5, 0, stream), FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE);
  IS(fast_allreduce_synchronize(of, stream), OK);
  IS(fast_allreduce_synchronize(of, foreign), FAST_ALLREDUCE_STATUS_INVALID_STREAM);
  IS(fast_allreduce_check(of), OK);
  IS(fast_allreduce_alloc(of, 4096, &address, &buffer), OK);
  CURRENT(fast_allreduce_buffer_free(buffer));
  IS(fast_allreduce_alloc(of, SIZE_MAX, &address, &buffer), FAST_ALLREDUCE_STATUS_ALLOCATION);
  IS(fast_allreduce_register(of, data, COUNT * sizeof(float), &buffer), OK);
  CURRENT(fast_allreduce_buffer_free(buffer));
  IS(fast_allreduce_register(of, elsewhere, COUNT * sizeof(float), &buffer), FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  IS(fast_allreduce_split(of, 0, 0, &part), OK);
  CURRENT(fast_allreduce_free(part));
  IS(fast_allreduce_shrink(of, ranks, 1, &part), OK);
  CURRENT(fast_allreduce_free(part));
  IS(fast_allreduce_nvls(of), FAST_ALLREDUCE_STATUS_UNAVAILABLE);
  IS(fast_allreduce_get_counters(of, &counters), OK);
  CURRENT(fast_allreduce_rank(of)), CURRENT(fast_allreduce_nranks(of)), CURRENT(fast_allreduce_survivors(of));
  CURRENT(fast_allreduce_plan_source(of)), CURRENT(fast_allreduce_binding(of));
  IS(fast_allreduce_abort(of), OK);
  IS(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, stream), FAST_ALLREDUCE_STATUS_ABORTED);
  CURRENT(fast_allreduce_free(of));
  /* A communicator that is freed with work on the stream, and one that cannot be created. */
  of = made_and_checked();
  IS(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, stream), OK);
  CURRENT(fast_allreduce_free(of));
  fast_allreduce_unique_id id;
  IS(fast_allreduce_get_unique_id(&id), OK);
  DRIVER(cuCtxSetCurrent(context[1]));
  programs = context[1];
  IS(joined(&id, 1, 2, "0.3", &of), FAST_ALLREDUCE_STATUS_TIMEOUT);

  DRIVER(cuCtxSetCurrent(context[0]));
  DRIVER(cuStreamDestroy_v2(stream));
  DRIVER(cuMemFree_v2((size_t)data)), DRIVER(cuMemFree_v2((size_t)other)), DRIVER(cuMemFree_v2((size_t)more));
  DRIVER(cuCtxSetCurrent(context[1]));
  DRIVER(cuStreamDestroy_v2(foreign));
  DRIVER(cuMemFree_v2((size_t)elsewhere));
}

/* Settings for CPUs are refused. */
static void settings(void) {
  fast_allreduce_unique_id id;
  fast_allreduce_communicator *made = NULL;
  const char *of_cpus[][2] = {{"workers", "2"}, {"wait", "yield"}, {"bind", "core"}};
  for (int index = 0; index < 3; index++) {
    EXPECT(fast_allreduce_get_unique_id(&id) == OK);
    fast_allreduce_settings *settings = NULL;
    EXPECT(fast_allreduce_settings_new(&settings) == OK);
    EXPECT(fast_allreduce_settings_set(settings, "device", "cuda:0") == OK);
    EXPECT(fast_allreduce_settings_set(settings, of_cpus[index][0], of_cpus[index][1]) == OK);
    EXPECT(fast_allreduce_init(&id, 0, 1, settings, &made) == FAST_ALLREDUCE_STATUS_INVALID_SETTING && made == NULL);
    EXPECT(strstr(fast_allreduce_last_error(), "a setting of CPUs") != NULL);
    fast_allreduce_settings_free(settings);
  }
}

struct rank {
  const fast_allreduce_unique_id *id;
  pthread_barrier_t *barrier;
  int rank;
};

/* The second rank makes one call, but not the next: the first rank gets the error when it waits for its stream. */
static void *rank_of_two(void *argument) {
  const struct rank *own = argument;
  float *data = on_gpu(own->rank);
  CUstream stream = stream_on(own->rank);
  fast_allreduce_communicator *of = NULL;
  EXPECT(joined(own->id, (size_t)own->rank, 2, "1", &of) == OK);
  const float value = (float)own->rank + 1;
  float sum = 0;
  DRIVER(cuMemcpyHtoD_v2((size_t)data, &value, sizeof value));
  DRIVER(cuCtxSynchronize());
  EXPECT(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, stream) == OK);
  EXPECT(fast_allreduce_synchronize(of, stream) == OK && fast_allreduce_check(of) == OK);
  DRIVER(cuMemcpyDtoH_v2(&sum, (size_t)data, sizeof sum));
  EXPECT(sum == 3);
  if (own->rank == 0) {
    EXPECT(fast_allreduce_all_reduce(of, data, data, COUNT, F32, SUM, stream) == OK);
    EXPECT(fast_allreduce_synchronize(of, stream) == FAST_ALLREDUCE_STATUS_TIMEOUT);
    EXPECT(fast_allreduce_last_error_ranks() == 2 && fast_allreduce_check(of) == FAST_ALLREDUCE_STATUS_TIMEOUT);
  }
  pthread_barrier_wait(own->barrier);
  fast_allreduce_free(of);
  return NULL;
}

static void results_are_known_after_a_wait(void) {
  fast_allreduce_unique_id id;
  pthread_barrier_t barrier;
  pthread_t threads[2];
  EXPECT(fast_allreduce_get_unique_id(&id) == OK && pthread_barrier_init(&barrier, NULL, 2) == 0);
  struct rank ranks[2] = {{&id, &barrier, 0}, {&id, &barrier, 1}};
  for (int rank = 0; rank < 2; rank++)
    EXPECT(pthread_create(&threads[rank], NULL, rank_of_two, &ranks[rank]) == 0);
  for (int rank = 0; rank < 2; rank++)
    pthread_join(threads[rank], NULL);
  pthread_barrier_destroy(&barrier);
}

/* A wait for a stream that is being captured is refused, and the capture goes on. */
static void captures(void) {
  CUstream stream = stream_on(0);
  void *graph = NULL;
  programs = context[0];
  fast_allreduce_communicator *of = made_and_checked();
  DRIVER(cuStreamBeginCapture_v2(stream, 0));
  EXPECT(fast_allreduce_barrier(of, stream) == OK);
  EXPECT(fast_allreduce_synchronize(of, stream) == FAST_ALLREDUCE_STATUS_UNAVAILABLE);
  DRIVER(cuStreamEndCapture(stream, &graph));
  EXPECT(graph != NULL && fast_allreduce_synchronize(of, stream) == OK);
  fast_allreduce_free(of);
}

int main(void) {
  /* Before the driver has been initialised: there is no context. */
  fast_allreduce_free(made_and_checked());
  int device;
  DRIVER(cuInit(0));
  for (int gpu = 0; gpu < GPUS; gpu++) {
    DRIVER(cuDeviceGet(&device, gpu));
    DRIVER(cuDevicePrimaryCtxRetain(&context[gpu], device));
  }
  functions(NULL);
  functions(context[1]);
  functions(context[0]);
  settings();
  results_are_known_after_a_wait();
  captures();
  printf("GPUs: passed\n");
  return 0;
}
