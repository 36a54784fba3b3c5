/* Nested and late calls: in a signal handler while its thread is in a call of the same communicator, in the all-gather
 * function, and in ending threads and processes, whose thread-local variables have been destroyed. Each returns a
 * status.
 *
 *   cc reentry.c $(pkg-config --cflags --libs fast_allreduce) -pthread
 */
#define _GNU_SOURCE
#include <fast_allreduce.h>

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define F32 FAST_ALLREDUCE_DTYPE_F32
#define SUM FAST_ALLREDUCE_OP_SUM
#define OK FAST_ALLREDUCE_STATUS_OK
#define UNAVAILABLE FAST_ALLREDUCE_STATUS_UNAVAILABLE

static void expect(int holds, const char *what, int line) {
  if (!holds) {
    fprintf(stderr, "line %d: %s does not hold; the last error is: %s\n", line, what, fast_allreduce_last_error());
    _exit(1);
  }
}

#define EXPECT(condition) expect(condition, #condition, __LINE__)

static fast_allreduce_communicator *joined(const fast_allreduce_unique_id *id, size_t rank, size_t nranks) {
  fast_allreduce_settings *settings = NULL;
  EXPECT(fast_allreduce_settings_new(&settings) == OK);
  EXPECT(fast_allreduce_settings_set(settings, "timeout", "60") == OK);
  fast_allreduce_communicator *communicator = NULL;
  EXPECT(fast_allreduce_init(id, rank, nranks, settings, &communicator) == OK);
  fast_allreduce_settings_free(settings);
  return communicator;
}

enum { FUNCTIONS = 24 };

/* Calls every function that may wait, and counts refusals. Functions that do not wait must work. */
static int refusals(fast_allreduce_communicator *of) {
  float data[4] = {0};
  size_t counts[2] = {1, 1};
  uint32_t op = 0;
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  fast_allreduce_communicator *made = NULL;
  const fast_allreduce_fused fused = {.residual = data, .residual_out = data};
  const fast_allreduce_status statuses[FUNCTIONS] = {
      fast_allreduce_all_reduce(of, data, data, 4, F32, SUM, NULL),
      fast_allreduce_all_reduce_quantized(of, data, data, 4, F32, FAST_ALLREDUCE_TRANSPORT_INT8, 1, NULL),
      fast_allreduce_all_reduce_fused(of, data, 4, F32, &fused, NULL),
      fast_allreduce_all_gather(of, data, data, 1, F32, NULL),
      fast_allreduce_all_gather_v(of, data, data, counts, F32, NULL),
      fast_allreduce_reduce_scatter(of, data, data, 1, F32, SUM, NULL),
      fast_allreduce_reduce_scatter_v(of, data, data, counts, F32, SUM, NULL),
      fast_allreduce_broadcast(of, data, 1, F32, 0, NULL),
      fast_allreduce_reduce(of, data, data, 1, F32, SUM, 0, NULL),
      fast_allreduce_gather(of, data, data, 1, F32, 0, NULL),
      fast_allreduce_scatter(of, data, data, 1, F32, 0, NULL),
      fast_allreduce_all_to_all(of, data, data, 1, F32, NULL),
      fast_allreduce_all_to_all_v(of, data, counts, data, counts, F32, NULL),
      fast_allreduce_barrier(of, NULL),
      fast_allreduce_send(of, data, 1, F32, 0, 0, NULL),
      fast_allreduce_recv(of, data, 1, F32, 0, 0, NULL),
      fast_allreduce_group_begin(of),
      fast_allreduce_group_end(of, NULL),
      fast_allreduce_split(of, 0, 0, &made),
      fast_allreduce_shrink(of, counts, 1, &made),
      fast_allreduce_alloc(of, 8, &address, &buffer),
      fast_allreduce_register(of, data, 8, &buffer),
      fast_allreduce_synchronize(of, NULL),
      fast_allreduce_op_create_premul_sum(of, 0.5, &op),
  };
  int refused = 0;
  for (int function = 0; function < FUNCTIONS; function++)
    refused += statuses[function] == UNAVAILABLE;
  const char *said = fast_allreduce_last_error();
  refused += strstr(said, "this thread is in a call of the communicator") != NULL;
  fast_allreduce_free(of); /* Does nothing, since the communicator is in use. */
  fast_allreduce_counters counters;
  refused += fast_allreduce_get_counters(of, &counters) == OK && fast_allreduce_check(of) == OK;
  refused += fast_allreduce_rank(of) == 0 && fast_allreduce_survivors(of) != 0;
  return refused;
}

static fast_allreduce_communicator *waiting;
static volatile sig_atomic_t refused, aborts;
static sem_t handled, is_made;

static void handler(int signal) {
  (void)signal;
  if (aborts)
    refused = fast_allreduce_abort(waiting) == OK;
  else
    refused = refusals(waiting);
  sem_post(&handled);
}

struct peer {
  fast_allreduce_unique_id id;
  pthread_t main;
};

static void until_called(uint64_t calls) {
  fast_allreduce_counters counters = {0};
  while (counters.calls < calls) {
    EXPECT(fast_allreduce_get_counters(waiting, &counters) == OK);
    usleep(1000);
  }
}

/* Rank 1 makes each call after rank 0's handler has run. */
static void *rank_1(void *argument) {
  struct peer *peer = argument;
  fast_allreduce_communicator *own = joined(&peer->id, 1, 2);
  float data[3] = {1, 2, 3};
  EXPECT(sem_wait(&is_made) == 0);
  until_called(1);
  EXPECT(pthread_kill(peer->main, SIGUSR1) == 0 && sem_wait(&handled) == 0);
  EXPECT(fast_allreduce_all_reduce(own, data, data, 3, F32, SUM, NULL) == OK && data[2] == 6);
  until_called(2);
  aborts = 1;
  EXPECT(pthread_kill(peer->main, SIGUSR1) == 0 && sem_wait(&handled) == 0);
  fast_allreduce_free(own);
  return NULL;
}

static void in_a_signal_handler(void) {
  struct peer peer;
  peer.main = pthread_self();
  EXPECT(fast_allreduce_get_unique_id(&peer.id) == OK && sem_init(&handled, 0, 0) == 0 &&
         sem_init(&is_made, 0, 0) == 0);
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  sigaction(SIGUSR1, &action, NULL);
  pthread_t thread;
  EXPECT(pthread_create(&thread, NULL, rank_1, &peer) == 0);
  waiting = joined(&peer.id, 0, 2);
  EXPECT(sem_post(&is_made) == 0);
  float data[3] = {1, 2, 3};
  EXPECT(fast_allreduce_all_reduce(waiting, data, data, 3, F32, SUM, NULL) == OK && data[0] == 2 && data[2] == 6);
  EXPECT(refused == FUNCTIONS + 3);
  EXPECT(fast_allreduce_all_reduce(waiting, data, data, 3, F32, SUM, NULL) == FAST_ALLREDUCE_STATUS_ABORTED);
  EXPECT(refused == 1);
  pthread_join(thread, NULL);
  fast_allreduce_free(waiting);
}

struct meeting {
  fast_allreduce_communicator *made;
  int calls, wrong;
};

/* All-gather function of a world of one rank. It makes nested calls of its communicator. */
static int meets(void *context, const void *input, void *output, size_t bytes, uint64_t timeout) {
  (void)timeout;
  struct meeting *meeting = context;
  memcpy(output, input, bytes);
  if (meeting->made != NULL) {
    float data = 1;
    meeting->calls++;
    meeting->wrong += fast_allreduce_all_reduce(meeting->made, &data, &data, 1, F32, SUM, NULL) != UNAVAILABLE;
    meeting->wrong += fast_allreduce_split(meeting->made, 0, 0, NULL) == OK;
    fast_allreduce_free(meeting->made);
  }
  return 0;
}

static void in_a_callback(void) {
  struct meeting meeting = {NULL, 0, 0};
  fast_allreduce_communicator *made = NULL;
  EXPECT(fast_allreduce_init_with_all_gather(meets, &meeting, 0, 1, NULL, &made) == OK);
  meeting.made = made;
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  EXPECT(fast_allreduce_alloc(made, 64, &address, &buffer) == OK);
  EXPECT(meeting.calls > 0 && meeting.wrong == 0);
  meeting.made = NULL;
  float data = 3;
  EXPECT(fast_allreduce_all_reduce(made, &data, &data, 1, F32, SUM, NULL) == OK && data == 3);
  fast_allreduce_buffer_free(buffer);
  fast_allreduce_free(made);
}

/* Uses a communicator of one rank. */
static void use_communicator(void) {
  fast_allreduce_unique_id id;
  EXPECT(fast_allreduce_get_unique_id(&id) == OK);
  fast_allreduce_communicator *alone = joined(&id, 0, 1), *part = NULL;
  float data[2] = {1, 2}, got[2] = {0};
  EXPECT(fast_allreduce_all_reduce(alone, data, data, 2, F32, SUM, NULL) == OK && data[1] == 2);
  EXPECT(fast_allreduce_group_begin(alone) == OK);
  EXPECT(fast_allreduce_send(alone, data, 2, F32, 0, 0, NULL) == OK);
  EXPECT(fast_allreduce_recv(alone, got, 2, F32, 0, 0, NULL) == OK);
  EXPECT(fast_allreduce_group_end(alone, NULL) == OK && got[1] == 2);
  void *address = NULL;
  fast_allreduce_buffer *buffer = NULL;
  EXPECT(fast_allreduce_alloc(alone, 64, &address, &buffer) == OK);
  fast_allreduce_buffer_free(buffer);
  EXPECT(fast_allreduce_split(alone, 0, 0, &part) == OK);
  fast_allreduce_free(part);
  EXPECT(fast_allreduce_check(alone) == OK && fast_allreduce_synchronize(alone, NULL) == OK);
  EXPECT(fast_allreduce_group_end(alone, NULL) == FAST_ALLREDUCE_STATUS_INVALID_ARGUMENT);
  EXPECT(strstr(fast_allreduce_last_error(), "no open group") != NULL);
  fast_allreduce_free(alone);
}

static pthread_key_t key;
static int destructions;

/* Runs three times: in the first, thread-local variables of the thread may still exist. */
static void destructor(void *value) {
  if (++destructions < 3)
    pthread_setspecific(key, value);
  use_communicator();
}

static void *ends(void *argument) {
  EXPECT(pthread_setspecific(key, argument) == 0);
  use_communicator();
  return NULL;
}

static void in_a_thread_that_ends(void) {
  pthread_t thread;
  EXPECT(pthread_key_create(&key, destructor) == 0 && pthread_create(&thread, NULL, ends, &key) == 0);
  pthread_join(thread, NULL);
  EXPECT(destructions == 3);
}

static void at_exit(void) {
  use_communicator();
  printf("nested and late calls: passed\n");
}

int main(void) {
  /* Registered before the library's first call, so that it runs after all exit handlers of the library. */
  EXPECT(atexit(at_exit) == 0);
  in_a_signal_handler();
  in_a_callback();
  in_a_thread_that_ends();
  return 0;
}
