/* Products by OpenMP between allreduces: what waiting threads of both cost each other. Each rank, a process,
 * computes half of a layer with its team of threads, then sums 4 KiB with the other ranks.
 *
 *   cc -O3 -march=native -ffast-math -fopenmp openmp.c $(pkg-config --cflags --libs fast_allreduce) -o openmp
 *   OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive ./openmp RANKS WAIT BIND TIMES
 *
 * It prints rank 0's median and p99 of an iteration and of the call in it, in microseconds.
 */
#include <fast_allreduce.h>

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "times.h"

enum { SIDE = 1024 };

static void require(fast_allreduce_status status) {
  if (status == FAST_ALLREDUCE_STATUS_OK)
    return;
  fprintf(stderr, "%s\n", fast_allreduce_last_error());
  exit(1);
}

static void print(const char *what, double *times, int count) {
  qsort(times, (size_t)count, sizeof *times, ascending);
  printf("%s %.2f (p99 %.1f)  ", what, times[count / 2], times[count * 99 / 100]);
}

int main(int argc, char **argv) {
  const int ranks = argc == 5 ? atoi(argv[1]) : 0, count = argc == 5 ? atoi(argv[4]) : 0;
  if (ranks < 2 || count < 1) {
    fprintf(stderr, "usage: openmp RANKS WAIT BIND TIMES\n");
    return 2;
  }
  fast_allreduce_unique_id id;
  require(fast_allreduce_get_unique_id(&id));
  int rank = 0;
  while (rank + 1 < ranks && fork() == 0)
    rank++;
  fast_allreduce_settings *settings = NULL;
  require(fast_allreduce_settings_new(&settings));
  require(fast_allreduce_settings_set(settings, "wait", argv[2]));
  require(fast_allreduce_settings_set(settings, "bind", argv[3]));
  fast_allreduce_communicator *communicator = NULL;
  require(fast_allreduce_init(&id, (size_t)rank, (size_t)ranks, settings, &communicator));
  fast_allreduce_settings_free(settings);
  float *matrix = calloc(SIDE * SIDE, sizeof *matrix), *input = calloc(SIDE, sizeof *input),
        *sums = calloc(SIDE, sizeof *sums);
  double *iterations = calloc((size_t)count, sizeof *iterations),
         *calls = calloc((size_t)count, sizeof *calls);
  if (!matrix || !input || !sums || !iterations || !calls)
    return 1;
  for (int i = 0; i < SIDE * SIDE; i++)
    matrix[i] = (float)(i % 7);
  for (int i = 0; i < SIDE; i++)
    input[i] = 1;
  for (int time = -count / 15; time < count; time++) {
    const double start = now_us();
#pragma omp parallel for schedule(static)
    for (int row = 0; row < SIDE; row++) {
      float sum = 0;
      for (int i = 0; i < SIDE; i++)
        sum += matrix[row * SIDE + i] * input[i];
      sums[row] = sum;
    }
    const double computed = now_us();
    require(fast_allreduce_all_reduce(communicator, sums, sums, SIDE, FAST_ALLREDUCE_DTYPE_F32,
                                      FAST_ALLREDUCE_OP_SUM, NULL));
    if (time >= 0)
      iterations[time] = now_us() - start, calls[time] = now_us() - computed;
  }
  if (rank == 0) {
    printf("%d ranks of %d threads, wait %s, bind %s: ", ranks, omp_get_max_threads(), argv[2], argv[3]);
    print("iteration", iterations, count);
    print("call", calls, count);
    printf("\n");
  }
  fast_allreduce_free(communicator);
  while (wait(NULL) > 0)
    ;
  return 0;
}
