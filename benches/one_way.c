/* The bound of gathers and scatters: one thread writes messages to a ring of slots, another reads them, and
 * nothing else. Each waits only for a flag beside a slot, and for the credit of a quarter of the slots.
 *
 *   cc -O2 -march=native -pthread one_way.c -o one_way && ./one_way
 *
 * It prints the median time of a message over 15 turns, in microseconds, for rings of 64 KiB to 2 MiB.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "times.h"

enum { TURNS = 15, MESSAGES = 20000, HEADER = 128, MOST = 2 << 20 };

static size_t bytes, slots;
static char *ring, *input, *output;
static _Alignas(128) _Atomic unsigned long credit;
static pthread_barrier_t start;

static void bind(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (pthread_setaffinity_np(pthread_self(), sizeof cores, &cores)) {
    fprintf(stderr, "one_way: core %d cannot be used\n", core);
    exit(1);
  }
}

static char *slot_of(unsigned long number) { return ring + number % slots * (HEADER + bytes); }

/* In whole cache lines; not memcpy, which may use other instructions for some lengths. */
static void copy(char *to, const char *from) {
  typedef char line __attribute__((vector_size(64), aligned(64)));
  for (size_t at = 0; at < bytes; at += sizeof(line))
    *(line *)(to + at) = *(const line *)(from + at);
}

static void *send(void *unused) {
  bind(1);
  pthread_barrier_wait(&start);
  unsigned long seen = 0;
  for (unsigned long number = 0; number < MESSAGES; number++) {
    while (number - seen >= slots)
      seen = atomic_load_explicit(&credit, memory_order_acquire);
    char *slot = slot_of(number);
    copy(slot + HEADER, input);
    atomic_store_explicit((_Atomic unsigned long *)slot, number + 1, memory_order_release);
  }
  return unused;
}

static double receive(void) {
  pthread_barrier_wait(&start);
  const double begin = now_us();
  for (unsigned long number = 0; number < MESSAGES; number++) {
    char *slot = slot_of(number);
    while (atomic_load_explicit((_Atomic unsigned long *)slot, memory_order_acquire) != number + 1)
      ;
    copy(output, slot + HEADER);
    if ((number + 1) % (slots / 4) == 0)
      atomic_store_explicit(&credit, number + 1, memory_order_release);
  }
  return (now_us() - begin) / MESSAGES;
}

int main(void) {
  ring = aligned_alloc(4096, MOST), input = aligned_alloc(4096, MOST), output = aligned_alloc(4096, MOST);
  if (!ring || !input || !output || pthread_barrier_init(&start, NULL, 2))
    return 1;
  memset(input, 1, MOST), memset(output, 0, MOST);
  bind(0);
  for (bytes = 512; bytes <= 8192; bytes *= 4) {
    printf("%zu bytes:", bytes);
    for (size_t all = 64 << 10; all <= MOST; all *= 2) {
      slots = all / (HEADER + bytes) / 4 * 4;
      double times[TURNS];
      for (int turn = 0; turn < TURNS; turn++) {
        memset(ring, 0, MOST);
        credit = 0;
        pthread_t sender;
        if (slots < 4 || pthread_create(&sender, NULL, send, NULL))
          return 1;
        times[turn] = receive();
        pthread_join(sender, NULL);
      }
      qsort(times, TURNS, sizeof *times, ascending);
      printf(" %.3f", times[TURNS / 2]);
    }
    printf("\n");
  }
  return 0;
}
