/* Mistakes of a program, and signals and forks: each call returns a status within its limit, and nothing crashes.
 *
 *   cc misuse.c $(pkg-config --cflags --libs fast_allreduce) -pthread
 *
 * Using or freeing a handle that has been freed is not tested: no C library can detect that.
 */
#define _GNU_SOURCE
#include <fast_allreduce.h>

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, THREADS = 8, CALLS = 200 };

#define F32 FAST_ALLREDUCE_DTYPE_F32
#define SUM FAST_ALLREDUCE_OP_SUM
#define OK FAST_ALLREDUCE_STATUS_OK
#define INVALID FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT
#define SETTING FAST_ALLREDUCE_STATUS_INVALID_SETTING

static void expect(int holds, const char *what, int line) {
  if (!holds) {
    fprintf(stderr, "line %d: %s does not hold; the last error is: %s\n", line, what, fast_allreduce_last_error());
    exit(1);
  }
}

#define EXPECT(condition) expect(condition, #condition, __LINE__)

static fast_allreduce_settings *with(const char *name, const char *value) {
  fast_allreduce_settings *settings = NULL;
  EXPECT(fast_allreduce_settings_new(&settings) == OK);
  EXPECT(fast_allreduce_settings_set(settings, name, value) == OK);
  return settings;
}

static fast_allreduce_communicator *joined(const fast_allreduce_unique_id *id, size_t rank, size_t nranks,
                                           const char *timeout) {
  fast_allreduce_settings *settings = with("timeout", timeout);
  fast_allreduce_communicator *communicator = NULL;
  EXPECT(fast_allreduce_init(id, rank, nranks, settings, &communicator) == OK);
  fast_allreduce_settings_free(settings);
  return communicator;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* An engine between machines that fails. */
static int never(void *context, void *data, size_t count, uint32_t dtype, uint32_t op) {
  (void)context, (void)data, (void)count, (void)dtype, (void)op;
  return 7;
}

/* An engine between machines that adds nothing, and makes a nested call. */
static int alone(void *context, void *data, size_t count, uint32_t dtype, uint32_t op) {
  (void)count;
  fast_allreduce_hierarchical *world = *(fast_allreduce_hierarchical **)context;
  if (world) {
    EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data, 1, dtype, op) ==
           FAST_ALLREDUCE_STATUS_UNAVAILABLE);
    fast_allreduce_hierarchical_free(world);
    EXPECT(strstr(fast_allreduce_last_error(), "would wait for itself") != NULL);
  }
  return 0;
}

static fast_allreduce_communicator *of_one_machine(void) {
  fast_allreduce_unique_id id;
  fast_allreduce_communicator *local = NULL;
  size_t node = 7, nodes = 7;
  EXPECT(fast_allreduce_unique_id_over_tcp("127.0.0.1:0", &id) == OK);
  EXPECT(fast_allreduce_init_of_node(&id, 0, 1, NULL, &local, &node, &nodes) == OK && node == 0 &&
         nodes == 1);
  return local;
}

static void machines(void) {
  static float data[5000] = {1, 2, 3, 4, 5};
  fast_allreduce_hierarchical *world = NULL;
  fast_allreduce_communicator *local = of_one_machine();
  fast_allreduce_inter_node engine = {2, 2, &world, never, NULL};
  EXPECT(fast_allreduce_hierarchical_new(&local, NULL, &world) == INVALID && local != NULL);
  EXPECT(fast_allreduce_hierarchical_new(&local, &engine, &world) == INVALID && local != NULL);
  engine.node = 1;
  EXPECT(fast_allreduce_hierarchical_new(&local, &engine, NULL) == INVALID && local != NULL);
  EXPECT(fast_allreduce_hierarchical_new(&local, &engine, &world) == FAST_ALLREDUCE_STATUS_RENDEZVOUS);
  EXPECT(!local && !world && strstr(fast_allreduce_last_error(), "returned 7"));
  local = of_one_machine();
  engine.all_reduce = alone;
  EXPECT(fast_allreduce_hierarchical_new(&local, &engine, &world) == OK && !local);
  EXPECT(fast_allreduce_hierarchical_rank(world) == 1 && fast_allreduce_hierarchical_nranks(world) == 2);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data + 1, 4, F32, SUM) ==
         FAST_ALLREDUCE_STATUS_OVERLAP);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data, 4, 99, SUM) == INVALID);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data, 4, F32, 99) == INVALID);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, NULL, data, 4, F32, SUM) ==
         FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data, 5000, F32, SUM) == OK && data[3] == 4);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, NULL, NULL, 0, F32, SUM) == OK);
  EXPECT(fast_allreduce_hierarchical_abort(world) == OK);
  EXPECT(fast_allreduce_hierarchical_all_reduce(world, data, data, 4, F32, SUM) ==
         FAST_ALLREDUCE_STATUS_ABORTED);
  fast_allreduce_hierarchical_free(world);
}

/* Null for every pointer. */
static void nothing(void) {
  float data[4] = {0};
  size_t counts[1] = {1};
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  fast_allreduce_counters counters;
  fast_allreduce_communicator *made = (fast_allreduce_communicator *)data;
  EXPECT(fast_allreduce_init(NULL, 0, 1, NULL, &made) == INVALID);
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  EXPECT(fast_allreduce_init(&id, 0, 1, NULL, NULL) == INVALID);
  EXPECT(fast_allreduce_init_with_all_gather(NULL, NULL, 0, 1, NULL, &made) == INVALID);
  EXPECT(fast_allreduce_unique_id_from_text(NULL, &id) == INVALID);
  fast_allreduce_hierarchical *world = NULL;
  fast_allreduce_communicator *none = NULL;
  fast_allreduce_inter_node engine = {0, 1, NULL, never, NULL};
  size_t node = 7;
  EXPECT(fast_allreduce_hierarchical_new(&none, &engine, &world) == INVALID && world == NULL);
  EXPECT(fast_allreduce_hierarchical_new(NULL, &engine, &world) == INVALID);
  EXPECT(fast_allreduce_hierarchical_all_reduce(NULL, data, data, 4, F32, SUM) == INVALID);
  EXPECT(fast_allreduce_hierarchical_abort(NULL) == INVALID && fast_allreduce_hierarchical_nranks(NULL) == 0);
  fast_allreduce_hierarchical_free(NULL);
  EXPECT(fast_allreduce_unique_id_over_tcp(NULL, &id) == INVALID);
  EXPECT(fast_allreduce_unique_id_over_tcp("no port", &id) == SETTING);
  EXPECT(fast_allreduce_init_of_node(NULL, 0, 1, NULL, &made, &node, &node) == INVALID);
  EXPECT(fast_allreduce_init_of_node(&id, 0, 1, NULL, &made, NULL, &node) == INVALID && node == 7);
  EXPECT(fast_allreduce_unique_id_from_text("00", NULL) != OK && fast_allreduce_unique_id_from_text("zz", &id) != OK);
  EXPECT(fast_allreduce_rank(NULL) == 0 && fast_allreduce_nranks(NULL) == 0 && fast_allreduce_survivors(NULL) == 0);
  EXPECT(strcmp(fast_allreduce_plan_source(NULL), "") == 0 && strcmp(fast_allreduce_binding(NULL), "") == 0);
  EXPECT(fast_allreduce_all_reduce(NULL, data, data, 4, F32, SUM, NULL) == INVALID);
  EXPECT(fast_allreduce_all_gather(NULL, data, data, 4, F32, NULL) == INVALID);
  EXPECT(fast_allreduce_all_gather_v(NULL, data, data, counts, F32, NULL) == INVALID);
  EXPECT(fast_allreduce_reduce_scatter(NULL, data, data, 4, F32, SUM, NULL) == INVALID);
  EXPECT(fast_allreduce_reduce_scatter_v(NULL, data, data, counts, F32, SUM, NULL) == INVALID);
  EXPECT(fast_allreduce_broadcast(NULL, data, 4, F32, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_reduce(NULL, data, data, 4, F32, SUM, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_gather(NULL, data, data, 4, F32, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_scatter(NULL, data, data, 4, F32, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_all_to_all(NULL, data, data, 4, F32, NULL) == INVALID);
  EXPECT(fast_allreduce_all_to_all_v(NULL, data, counts, data, counts, F32, NULL) == INVALID);
  EXPECT(fast_allreduce_barrier(NULL, NULL) == INVALID && fast_allreduce_abort(NULL) == INVALID);
  EXPECT(fast_allreduce_send(NULL, data, 1, F32, 0, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_recv(NULL, data, 1, F32, 0, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_group_begin(NULL) == INVALID && fast_allreduce_group_end(NULL, NULL) == INVALID);
  EXPECT(fast_allreduce_split(NULL, 0, 0, &made) == INVALID);
  EXPECT(fast_allreduce_shrink(NULL, counts, 1, &made) == INVALID);
  EXPECT(fast_allreduce_alloc(NULL, 8, &address, &buffer) == INVALID);
  EXPECT(fast_allreduce_register(NULL, data, 8, &buffer) == INVALID);
  EXPECT(fast_allreduce_get_counters(NULL, &counters) == INVALID);
  EXPECT(fast_allreduce_check(NULL) == INVALID && fast_allreduce_synchronize(NULL, NULL) == INVALID);
  uint64_t completed;
  EXPECT(fast_allreduce_suspend(NULL, NULL) == INVALID && fast_allreduce_resume(NULL, 1, &completed) == INVALID);
  EXPECT(fast_allreduce_join_id(NULL, &id) == INVALID && fast_allreduce_join(NULL, counts, 1, 1, NULL) == INVALID);
  EXPECT(fast_allreduce_inherit(NULL, 0, counts, &address, &buffer) == INVALID);
  fast_allreduce_free(NULL);
  fast_allreduce_buffer_free(NULL);
}

static int refuses(void *context, const void *input, void *output, size_t bytes, uint64_t timeout) {
  (void)context, (void)input, (void)output, (void)bytes, (void)timeout;
  return 7;
}

/* Returns huge message lengths for all ranks. */
static int lies(void *context, const void *input, void *output, size_t bytes, uint64_t timeout) {
  (void)timeout;
  memset(output, 0xff, bytes * RANKS);
  memcpy(output, input, *(size_t *)context ? 0 : bytes);
  return 0;
}

/* Settings for GPUs are refused on the host, and the last error says why there is no in-switch reduction. */
static void gpu_settings(fast_allreduce_unique_id *id) {
  fast_allreduce_communicator *made = NULL;
  const char *of_gpus[] = {"max_blocks", "one_at_a_time", "programmatic_launch"};
  for (size_t index = 0; index < 3; index++) {
    fast_allreduce_settings *settings = with(of_gpus[index], "1");
    EXPECT(fast_allreduce_get_unique_id(id) == OK);
    EXPECT(fast_allreduce_init(id, 0, 1, settings, &made) == SETTING && made == NULL);
    EXPECT(strstr(fast_allreduce_last_error(), "a setting of GPUs") != NULL);
    fast_allreduce_settings_free(settings);
  }
  const char *orders[] = {"fixed", "any"};
  for (size_t index = 0; index < 2; index++) {
    fast_allreduce_settings *settings = with("order", orders[index]);
    EXPECT(fast_allreduce_settings_set(settings, "direct_reads", "0") == OK);
    EXPECT(fast_allreduce_get_unique_id(id) == OK);
    EXPECT(fast_allreduce_init(id, 0, 1, settings, &made) == OK);
    fast_allreduce_settings_free(settings);
    EXPECT(fast_allreduce_nvls(made) == FAST_ALLREDUCE_STATUS_UNAVAILABLE);
    EXPECT(strstr(fast_allreduce_last_error(), "NVLS") != NULL);
    EXPECT(fast_allreduce_barrier(made, NULL) == OK);
    fast_allreduce_free(made), made = NULL;
  }
  EXPECT(fast_allreduce_nvls(NULL) == INVALID);
}

/* Unknown names, values out of range, ranks out of range. */
static void settings(void) {
  fast_allreduce_unique_id id, zeros = {{0}};
  fast_allreduce_communicator *made = NULL;
  EXPECT(fast_allreduce_settings_new(NULL) == INVALID);
  EXPECT(fast_allreduce_settings_set(NULL, "timeout", "1") == INVALID);
  fast_allreduce_settings_free(NULL);
  fast_allreduce_settings *given = with("timeout", "0.5");
  EXPECT(fast_allreduce_settings_set(given, NULL, "1") == INVALID);
  EXPECT(fast_allreduce_settings_set(given, "timeout", NULL) == INVALID);
  EXPECT(fast_allreduce_settings_set(given, "colour", "red") == SETTING);
  const char *listed[] = {"colour", "device", "timeout", "max_bytes", "order", "sharing"};
  for (size_t index = 0; index < sizeof listed / sizeof *listed; index++)
    EXPECT(strstr(fast_allreduce_last_error(), listed[index]) != NULL);
  const char *wrong[][2] = {{"device", "gpu"},  {"timeout", "-1"},   {"max_bytes", "many"}, {"algorithm", "tree"},
                            {"order", "random"}, {"check", "yes"},    {"calibrate", ""},     {"direct_reads", "2"},
                            {"workers", "65"},   {"wait", "sleep"},   {"bind", "\xff"},      {"max_blocks", "0"},
                            {"sharing", "tcp"},  {"join_timeout", "soon"}};
  for (size_t index = 0; index < sizeof wrong / sizeof *wrong; index++) {
    EXPECT(fast_allreduce_settings_set(given, wrong[index][0], wrong[index][1]) == SETTING);
    EXPECT(strncmp(fast_allreduce_last_error(), wrong[index][0], strlen(wrong[index][0])) == 0);
  }
  EXPECT(fast_allreduce_init(&zeros, 0, 1, given, &made) != OK && made == NULL);
  /* A refused setting has not been set. */
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  EXPECT(fast_allreduce_init(&id, 0, 1, given, &made) == OK);
  EXPECT(strncmp(fast_allreduce_binding(made), "none", 4) == 0 && strlen(fast_allreduce_plan_source(made)) > 0);
  fast_allreduce_free(made), made = NULL;
  EXPECT(fast_allreduce_settings_set(given, "tuning", "/nowhere/plan.toml") == OK);
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  EXPECT(fast_allreduce_init(&id, 0, 1, given, &made) == FAST_ALLREDUCE_STATUS_TUNING);
  EXPECT(strstr(fast_allreduce_last_error(), "/nowhere/plan.toml") != NULL);
  fast_allreduce_settings_free(given);
  gpu_settings(&id);
  given = with("max_bytes", "18446744073709551615");
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  EXPECT(fast_allreduce_init(&id, 0, 1, given, &made) != OK);
  fast_allreduce_settings_free(given);
  given = with("timeout", "0.3");
  EXPECT(fast_allreduce_init(&id, 0, SIZE_MAX, given, &made) == FAST_ALLREDUCE_STATUS_WORLD_SIZE);
  EXPECT(fast_allreduce_init(&id, 0, 0, given, &made) == FAST_ALLREDUCE_STATUS_WORLD_SIZE);
  EXPECT(fast_allreduce_init(&id, SIZE_MAX, 2, given, &made) == FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE);
  double start = seconds();
  EXPECT(fast_allreduce_init(&id, 1, 2, given, &made) != OK && seconds() - start < 20);
  size_t shifted = 0;
  EXPECT(fast_allreduce_init_with_all_gather(refuses, NULL, 0, RANKS, given, &made) != OK);
  EXPECT(strstr(fast_allreduce_last_error(), "returned 7") != NULL);
  EXPECT(fast_allreduce_init_with_all_gather(lies, &shifted, 0, RANKS, given, &made) != OK);
  shifted = 1;
  EXPECT(fast_allreduce_init_with_all_gather(lies, &shifted, 0, RANKS, given, &made) != OK);
  EXPECT(fast_allreduce_init_with_all_gather(refuses, NULL, 0, SIZE_MAX, given, &made) != OK && made == NULL);
  EXPECT(fast_allreduce_init_with_all_gather(refuses, NULL, 9, 1, given, &made) != OK && made == NULL);
  fast_allreduce_settings_free(given);
}

/* Calls of a communicator of one rank that must be refused; it stays usable after each of them. */
static void calls(void) {
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  fast_allreduce_communicator *alone = joined(&id, 0, 1, "2"), *made = NULL;
  float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  size_t huge[1] = {SIZE_MAX}, one[1] = {1}, four[2] = {0, 4};
  const size_t counts[] = {SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 4 + 1, SIZE_MAX / 8 + 1, (size_t)1 << 62};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    EXPECT(fast_allreduce_all_reduce(alone, data, data, counts[i], F32, SUM, NULL) != OK);
    EXPECT(fast_allreduce_all_gather(alone, data, data, counts[i], FAST_ALLREDUCE_DTYPE_F64, NULL) != OK);
    EXPECT(fast_allreduce_reduce_scatter(alone, data, data, counts[i], FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) != OK);
    EXPECT(fast_allreduce_broadcast(alone, data, counts[i], FAST_ALLREDUCE_DTYPE_F64, 0, NULL) != OK);
    EXPECT(fast_allreduce_all_to_all(alone, data, data + 1, counts[i], FAST_ALLREDUCE_DTYPE_F64, NULL) != OK);
    EXPECT(fast_allreduce_gather(alone, data, data, counts[i], FAST_ALLREDUCE_DTYPE_F64, 0, NULL) != OK);
    EXPECT(fast_allreduce_send(alone, data, counts[i], FAST_ALLREDUCE_DTYPE_F64, 0, 0, NULL) != OK);
  }
  EXPECT(fast_allreduce_all_gather_v(alone, data, data, huge, F32, NULL) != OK);
  EXPECT(fast_allreduce_reduce_scatter_v(alone, data, data, huge, F32, SUM, NULL) != OK);
  EXPECT(fast_allreduce_all_to_all_v(alone, data, huge, data, one, F32, NULL) != OK);
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  EXPECT(fast_allreduce_alloc(alone, SIZE_MAX, &address, &buffer) != OK && buffer == NULL);
  EXPECT(fast_allreduce_alloc(alone, (size_t)1 << 50, &address, &buffer) != OK && buffer == NULL);
  EXPECT(fast_allreduce_alloc(alone, 8, NULL, &buffer) == INVALID);
  EXPECT(fast_allreduce_alloc(alone, 8, &address, NULL) == INVALID);
  EXPECT(fast_allreduce_register(alone, data, 8, &buffer) == FAST_ALLREDUCE_STATUS_UNAVAILABLE && buffer == NULL);
  EXPECT(fast_allreduce_register(alone, data, 8, NULL) == INVALID);
  for (uint32_t code = 12; code != 0; code <<= 1)
    EXPECT(fast_allreduce_all_reduce(alone, data, data, 1, code, SUM, NULL) == INVALID &&
           fast_allreduce_all_reduce(alone, data, data, 1, F32, code, NULL) == INVALID);
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 1, F32, FAST_ALLREDUCE_OP_BXOR, NULL) != OK);
  uint32_t scaled = 0;
  EXPECT(fast_allreduce_op_create_premul_sum(alone, 0.5, NULL) == INVALID &&
         fast_allreduce_op_create_premul_sum(NULL, 0.5, &scaled) == INVALID);
  EXPECT(fast_allreduce_op_destroy(alone, SUM) == INVALID && fast_allreduce_op_destroy(alone, UINT32_MAX) == INVALID);
  EXPECT(fast_allreduce_op_create_premul_sum(alone, 0.5, &scaled) == OK);
  float products[2] = {3, 5};
  EXPECT(fast_allreduce_all_reduce(alone, products, products, 2, F32, scaled, NULL) == OK && products[0] == 1.5f &&
         products[1] == 2.5f);
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 1, FAST_ALLREDUCE_DTYPE_I32, scaled, NULL) != OK);
  EXPECT(fast_allreduce_op_destroy(alone, scaled) == OK && fast_allreduce_op_destroy(alone, scaled) == INVALID);
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 1, F32, scaled, NULL) == INVALID);
  EXPECT(fast_allreduce_all_reduce(alone, (char *)data + 1, data + 4, 1, F32, SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  EXPECT(fast_allreduce_all_reduce(alone, data, NULL, 1, F32, SUM, NULL) == FAST_ALLREDUCE_STATUS_INVALID_POINTER);
  EXPECT(fast_allreduce_broadcast(alone, data, 1, F32, SIZE_MAX, NULL) == FAST_ALLREDUCE_STATUS_RANK_OUT_OF_RANGE);
  EXPECT(fast_allreduce_send(alone, data, 1, F32, 1, 0, NULL) != OK);
  EXPECT(fast_allreduce_recv(alone, data, 1, F32, 1, 0, NULL) != OK);
  EXPECT(fast_allreduce_shrink(alone, NULL, 1, &made) == INVALID && fast_allreduce_shrink(alone, four, 2, &made) != OK);
  EXPECT(fast_allreduce_shrink(alone, NULL, 0, &made) != OK && fast_allreduce_split(alone, 0, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_get_counters(alone, NULL) == INVALID);
  size_t needed = 0;
  char text[4];
  EXPECT(fast_allreduce_flight_record(alone, NULL, 0, NULL) == INVALID);
  EXPECT(fast_allreduce_flight_record(alone, NULL, 1, &needed) == INVALID && needed == 0);
  EXPECT(fast_allreduce_flight_record(NULL, text, 4, &needed) == INVALID && needed == 0);
  EXPECT(fast_allreduce_flight_record(alone, NULL, 0, &needed) == INVALID && needed > 100);
  EXPECT(fast_allreduce_flight_record(alone, text, 4, &needed) == INVALID && strcmp(text, "{\"w") == 0);
  EXPECT(fast_allreduce_metrics(alone, text, 4, &needed) == INVALID && strcmp(text, "# H") == 0);
  char *all = malloc(needed);
  EXPECT(all != NULL && fast_allreduce_metrics(alone, all, needed, &needed) == OK);
  EXPECT(strlen(all) + 1 == needed && strstr(all, "fast_allreduce_info{") != NULL);
  free(all);
  /* A stream on the host: in a call, in a message of a group, at the end of the group, and in a wait. */
  void *stream = data;
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 1, F32, SUM, stream) == INVALID);
  EXPECT(fast_allreduce_send(alone, data, 1, F32, 0, 0, stream) == INVALID);
  EXPECT(fast_allreduce_group_begin(alone) == OK && fast_allreduce_send(alone, data, 1, F32, 0, 0, stream) == INVALID);
  EXPECT(fast_allreduce_group_end(alone, stream) == INVALID && fast_allreduce_synchronize(alone, stream) == INVALID);
  EXPECT(fast_allreduce_check(alone) == OK && fast_allreduce_synchronize(alone, NULL) == OK);
  /* Without elements, pointers are not checked. */
  EXPECT(fast_allreduce_all_reduce(alone, NULL, NULL, 0, F32, SUM, NULL) == OK);
  EXPECT(fast_allreduce_all_to_all(alone, NULL, NULL, 0, F32, NULL) == OK);
  /* Too many messages in a group; a group that is never ended; the end of a group that was not begun. */
  EXPECT(fast_allreduce_group_end(alone, NULL) == INVALID);
  EXPECT(fast_allreduce_group_begin(alone) == OK);
  for (int message = 0; message < 100; message++)
    EXPECT(fast_allreduce_send(alone, data, 1, F32, 0, 0, NULL) == OK || message >= 64);
  EXPECT(fast_allreduce_group_end(alone, NULL) != OK);
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 8, F32, SUM, NULL) == OK && data[7] == 8);
  EXPECT(fast_allreduce_group_begin(alone) == OK);
  EXPECT(fast_allreduce_abort(alone) == OK && fast_allreduce_abort(alone) == OK);
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 8, F32, SUM, NULL) == FAST_ALLREDUCE_STATUS_ABORTED);
  EXPECT(fast_allreduce_check(alone) == FAST_ALLREDUCE_STATUS_ABORTED);
  EXPECT(fast_allreduce_synchronize(alone, NULL) == FAST_ALLREDUCE_STATUS_ABORTED);
  EXPECT(fast_allreduce_alloc(alone, 8, &address, &buffer) == FAST_ALLREDUCE_STATUS_ABORTED && buffer == NULL);
  EXPECT(fast_allreduce_split(alone, 0, 0, &made) == FAST_ALLREDUCE_STATUS_ABORTED && made == NULL);
  fast_allreduce_free(alone);
}

struct caller {
  fast_allreduce_communicator *communicator;
  int failed;
};

static void *calls_of_a_thread(void *argument) {
  struct caller *caller = argument;
  for (int call = 0; call < CALLS; call++) {
    double data[3] = {1, 1, 1};
    fast_allreduce_status status =
        fast_allreduce_all_reduce(caller->communicator, data, data, 3, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL);
    caller->failed |= status != OK || data[0] != RANKS || data[2] != RANKS;
  }
  return NULL;
}

static void *rank_of_many_threads(void *argument) {
  struct caller *caller = argument;
  pthread_t threads[THREADS];
  for (int thread = 0; thread < THREADS; thread++)
    EXPECT(pthread_create(&threads[thread], NULL, calls_of_a_thread, caller) == 0);
  for (int thread = 0; thread < THREADS; thread++)
    pthread_join(threads[thread], NULL);
  return NULL;
}

static void *joins(void *argument) {
  const fast_allreduce_unique_id *id = argument;
  return joined(id, 1, RANKS, "10");
}

static void *joins_as_spare(void *argument) {
  const fast_allreduce_unique_id *id = argument;
  fast_allreduce_communicator *third = NULL;
  EXPECT(fast_allreduce_init_spare(id, NULL, &third) == OK && fast_allreduce_rank(third) == 2);
  uint64_t one = 1;
  EXPECT(fast_allreduce_all_reduce(third, &one, &one, 1, FAST_ALLREDUCE_DTYPE_U64, SUM, NULL) == OK && one == 3);
  return third;
}

static void *grows(void *argument) {
  const fast_allreduce_communicator *communicator = argument;
  fast_allreduce_communicator *larger = NULL;
  EXPECT(fast_allreduce_grow(communicator, 3, 0, &larger) == OK && fast_allreduce_nranks(larger) == 3);
  uint64_t one = 1;
  EXPECT(fast_allreduce_all_reduce(larger, &one, &one, 1, FAST_ALLREDUCE_DTYPE_U64, SUM, NULL) == OK && one == 3);
  return larger;
}

/* Two ranks and a new one become three. */
static void grown(void) {
  fast_allreduce_unique_id id, next;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  pthread_t others[2];
  EXPECT(pthread_create(&others[0], NULL, joins, &id) == 0);
  fast_allreduce_communicator *first = joined(&id, 0, RANKS, "10"), *larger[3] = {NULL, NULL, NULL};
  void *second = NULL;
  pthread_join(others[0], &second);
  EXPECT(fast_allreduce_grow(first, 2, 1, larger) == SETTING);
  EXPECT(fast_allreduce_grow(first, 17, 1, larger) == SETTING);
  EXPECT(fast_allreduce_grow(NULL, 3, 1, larger) == INVALID && fast_allreduce_grow(first, 3, 1, NULL) == INVALID);
  EXPECT(fast_allreduce_grow(first, 3, -1, larger) == INVALID && !larger[0]);
  EXPECT(fast_allreduce_init_spare(NULL, NULL, larger) == INVALID);
  EXPECT(fast_allreduce_init_spare(&id, NULL, NULL) == INVALID);
  EXPECT(fast_allreduce_init_spare(&id, NULL, larger) == SETTING && !larger[0]);
  EXPECT(fast_allreduce_join_id(first, &next) == OK);
  EXPECT(pthread_create(&others[0], NULL, grows, second) == 0);
  EXPECT(pthread_create(&others[1], NULL, joins_as_spare, &next) == 0);
  larger[0] = grows(first);
  for (int other = 0; other < 2; other++) {
    void *made = NULL;
    pthread_join(others[other], &made);
    larger[1 + other] = made;
  }
  for (int rank = 0; rank < 3; rank++)
    fast_allreduce_free(larger[rank]);
  fast_allreduce_free(first);
  fast_allreduce_free(second);
}

/* Several threads of each rank call one communicator concurrently. All calls are equal, so that their order does not
 * matter. */
static void threads(void) {
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  pthread_t other, ranks[RANKS];
  EXPECT(pthread_create(&other, NULL, joins, &id) == 0);
  struct caller callers[RANKS] = {{joined(&id, 0, RANKS, "10"), 0}, {NULL, 0}};
  void *theirs = NULL;
  pthread_join(other, &theirs);
  callers[1].communicator = theirs;
  for (int rank = 0; rank < RANKS; rank++)
    EXPECT(pthread_create(&ranks[rank], NULL, rank_of_many_threads, &callers[rank]) == 0);
  for (int rank = 0; rank < RANKS; rank++)
    pthread_join(ranks[rank], NULL);
  EXPECT(!callers[0].failed && !callers[1].failed);
  /* A rank whose peer has been freed gets an error in time. */
  fast_allreduce_free(callers[1].communicator);
  double value = 1, start = seconds();
  EXPECT(fast_allreduce_all_reduce(callers[0].communicator, &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_PEER_LOST);
  EXPECT(fast_allreduce_last_error_ranks() == 2 && seconds() - start < 5);
  fast_allreduce_free(callers[0].communicator);
}

static volatile sig_atomic_t signals;
static void counts(int signal) {
  (void)signal;
  signals++;
}

/* Ranks that get signals all the time, and one that forks: calls go on. */
static int rank_process(const fast_allreduce_unique_id *id, size_t rank) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = counts; /* Without SA_RESTART: system calls are interrupted. */
  sigaction(SIGALRM, &action, NULL);
  fast_allreduce_communicator *communicator = joined(id, rank, RANKS, "20");
  struct itimerspec every = {{0, 300000}, {0, 300000}};
  timer_t timer;
  EXPECT(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0 && timer_settime(timer, 0, &every, NULL) == 0);
  double *data = malloc(sizeof(double) << 16);
  for (int call = 0; call < 5000; call++) {
    size_t count = (size_t)1 << (call % 17);
    for (size_t i = 0; i < count; i++)
      data[i] = (double)rank + 1;
    EXPECT(fast_allreduce_all_reduce(communicator, data, data, count, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) == OK);
    EXPECT(data[0] == 3 && data[count - 1] == 3);
    if (call == 100 && rank == 0) {
      pid_t child = fork();
      if (child == 0) {
        fast_allreduce_status status =
            fast_allreduce_all_reduce(communicator, data, data, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL);
        fast_allreduce_free(communicator);
        _exit(status == FAST_ALLREDUCE_STATUS_FORKED ? 0 : 1);
      }
      int status = -1;
      while (waitpid(child, &status, 0) < 0)
        ;
      EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
  every = (struct itimerspec){{0, 0}, {0, 0}};
  timer_settime(timer, 0, &every, NULL);
  EXPECT(signals > 10);
  free(data);
  fast_allreduce_free(communicator);
  return 0;
}

static void processes(void) {
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  pid_t children[RANKS];
  for (size_t rank = 0; rank < RANKS; rank++) {
    children[rank] = fork();
    if (children[rank] == 0)
      _exit(rank_process(&id, rank));
  }
  for (size_t rank = 0; rank < RANKS; rank++) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

static void *waits(void *argument) {
  struct caller *caller = argument;
  caller->failed = fast_allreduce_barrier(caller->communicator, NULL) != OK;
  return NULL;
}

static double sum_of(fast_allreduce_communicator *communicator, double *data, double value) {
  *data = value;
  EXPECT(fast_allreduce_all_reduce(communicator, data, data, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) == OK);
  return *data;
}

/* A rank that suspends and resumes with the other, then goes; its place is taken by the id that it finds in `id`. */
static void *goes_and_returns(void *argument) {
  fast_allreduce_unique_id *id = argument;
  fast_allreduce_communicator *communicator = joined(id, 1, RANKS, "10");
  fast_allreduce_buffer *buffer = NULL;
  void *address = NULL;
  size_t bytes = 0;
  uint64_t completed = 0;
  EXPECT(fast_allreduce_alloc(communicator, sizeof(double), &address, &buffer) == OK);
  EXPECT(fast_allreduce_suspend(communicator, &bytes) == OK && bytes > 0);
  EXPECT(fast_allreduce_resume(communicator, 10, &completed) == OK && completed == 0);
  EXPECT(sum_of(communicator, address, 2) == 3);
  EXPECT(fast_allreduce_join_id(communicator, id) == OK);
  fast_allreduce_buffer_free(buffer);
  fast_allreduce_free(communicator);
  communicator = joined(id, 1, RANKS, "10");
  EXPECT(fast_allreduce_inherit(communicator, 1, &bytes, &address, &buffer) == SETTING);
  EXPECT(fast_allreduce_inherit(communicator, 0, &bytes, &address, &buffer) == OK && bytes == sizeof(double));
  EXPECT(sum_of(communicator, address, 4) == 9);
  fast_allreduce_buffer_free(buffer);
  fast_allreduce_free(communicator);
  return NULL;
}

static void returning(void) {
  fast_allreduce_unique_id id, own;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  pthread_t other;
  EXPECT(pthread_create(&other, NULL, goes_and_returns, &id) == 0);
  own = id;
  fast_allreduce_communicator *communicator = joined(&own, 0, RANKS, "10");
  fast_allreduce_buffer *buffer = NULL;
  void *address = NULL;
  uint64_t completed = 9;
  double value = 1;
  EXPECT(fast_allreduce_alloc(communicator, sizeof(double), &address, &buffer) == OK);
  EXPECT(fast_allreduce_resume(communicator, 10, NULL) == FAST_ALLREDUCE_STATUS_UNAVAILABLE);
  EXPECT(fast_allreduce_suspend(communicator, NULL) == OK);
  EXPECT(fast_allreduce_all_reduce(communicator, &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_UNAVAILABLE);
  EXPECT(fast_allreduce_resume(communicator, -1, NULL) == INVALID);
  EXPECT(fast_allreduce_resume(communicator, 10, NULL) == OK);
  EXPECT(sum_of(communicator, address, 1) == 3);
  EXPECT(fast_allreduce_all_reduce(communicator, &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL) ==
         FAST_ALLREDUCE_STATUS_PEER_LOST);
  size_t survivors[] = {0};
  EXPECT(fast_allreduce_join(communicator, survivors, 1, 10, &completed) == OK && completed == 1);
  EXPECT(sum_of(communicator, address, 5) == 9);
  pthread_join(other, NULL);
  fast_allreduce_buffer_free(buffer);
  fast_allreduce_free(communicator);
}

/* A process forks while another of its threads is in a call: calls of the fork return an error. */
static void fork_during_a_call(void) {
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  pthread_t other, waiting;
  EXPECT(pthread_create(&other, NULL, joins, &id) == 0);
  struct caller caller = {joined(&id, 0, RANKS, "10"), 0};
  void *theirs = NULL;
  pthread_join(other, &theirs);
  EXPECT(pthread_create(&waiting, NULL, waits, &caller) == 0);
  nanosleep(&(struct timespec){0, 200000000}, NULL);
  pid_t child = fork();
  if (child == 0) {
    alarm(10);
    double value = 1;
    fast_allreduce_status call =
        fast_allreduce_all_reduce(caller.communicator, &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64, SUM, NULL);
    fast_allreduce_status message =
        fast_allreduce_send(caller.communicator, &value, 1, FAST_ALLREDUCE_DTYPE_F64, 1, 0, NULL);
    fast_allreduce_free(caller.communicator);
    _exit(call == FAST_ALLREDUCE_STATUS_FORKED && message == FAST_ALLREDUCE_STATUS_FORKED ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(fast_allreduce_barrier(theirs, NULL) == OK);
  pthread_join(waiting, NULL);
  EXPECT(!caller.failed);
  fast_allreduce_free(caller.communicator);
  fast_allreduce_free(theirs);
}

static int tasks(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/task");
  EXPECT(folder != NULL);
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
    count += entry->d_name[0] != '.';
  closedir(folder);
  return count;
}

/* Waits until no thread is ending. The thread of a rendezvous ends some time after the last rank has left; one of an
 * unused id stays. If the process ended while such a thread is ending, the leak checker would report its memory. */
static void wait_for_ending_threads(void) {
  const struct timespec pause = {0, 100 * 1000 * 1000};
  for (int before = 0, equal = 0, now; equal < 5; before = now) {
    now = tasks();
    equal = now == before ? equal + 1 : 0;
    nanosleep(&pause, NULL);
  }
}

int main(void) {
  nothing();
  settings();
  calls();
  processes();
  machines();
  grown();
  threads();
  returning();
  fork_during_a_call();
  wait_for_ending_threads();
  printf("mistakes of a program: passed\n");
  return 0;
}
