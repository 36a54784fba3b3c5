/* Hierarchical allreduce with MPI between machines, against MPI_Allreduce of all ranks, in turns.
 *
 *   mpicc -O2 benches/machines.c $(pkg-config --cflags --libs fast_allreduce) -o machines
 *   mpirun --host node0:2,node1:2 ./machines
 *
 * Of f32, out of place; every element is checked. A ratio is that of medians; the time of a turn is that of the slowest
 * rank. benches/machines.sh runs it on two nodes of the test bed.
 */
#include <fast_allreduce.h>
#include <mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 21, LARGEST = 16 << 20 };

static void require(fast_allreduce_status status, const char *what) {
  if (status != FAST_ALLREDUCE_STATUS_OK) {
    fprintf(stderr, "%s: status %u: %s\n", what, (unsigned)status, fast_allreduce_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

/* Between machines: f32 sums, and i64 minima in which calls are compared. */
static int between_machines(void *context, void *data, size_t count, uint32_t dtype, uint32_t op) {
  const MPI_Datatype type = dtype == FAST_ALLREDUCE_DTYPE_F32 ? MPI_FLOAT : MPI_INT64_T;
  return MPI_Allreduce(MPI_IN_PLACE, data, (int)count, type, op == FAST_ALLREDUCE_OP_SUM ? MPI_SUM : MPI_MIN,
                       *(MPI_Comm *)context);
}

/* Between two machines. Lengths are below 2^31. */
static int exchange(void *context, const void *message, size_t bytes, void *space, size_t capacity, size_t *received) {
  const MPI_Comm between = *(MPI_Comm *)context;
  int node, count;
  MPI_Status status;
  MPI_Comm_rank(between, &node);
  const int failed = MPI_Sendrecv(message, (int)bytes, MPI_BYTE, 1 - node, 0, space, (int)capacity, MPI_BYTE, 1 - node,
                                  0, between, &status);
  if (failed || MPI_Get_count(&status, MPI_BYTE, &count))
    return 1;
  *received = (size_t)count;
  return 0;
}

static int by_time(const void *one, const void *other) {
  const double difference = *(const double *)one - *(const double *)other;
  return (difference > 0) - (difference < 0);
}

static void compare(fast_allreduce_hierarchical *world, int rank, int nranks, size_t bytes) {
  const size_t count = bytes / sizeof(float);
  const int calls = bytes < 1 << 16 ? 40 : bytes < 1 << 20 ? 10 : 3;
  float *input = malloc(bytes), *output = malloc(bytes);
  double times[2][TURNS];
  for (size_t i = 0; i < count; i++)
    input[i] = (float)(rank + (int)(i % 7));
  for (int turn = -1; turn < TURNS; turn++)
    for (int flat = 0; flat < 2; flat++) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double start = MPI_Wtime();
      for (int call = 0; call < calls; call++)
        if (flat)
          MPI_Allreduce(input, output, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        else
          require(fast_allreduce_hierarchical_all_reduce(world, input, output, count, FAST_ALLREDUCE_DTYPE_F32,
                                                         FAST_ALLREDUCE_OP_SUM),
                  "hierarchical_all_reduce");
      const double own = (MPI_Wtime() - start) / calls;
      double slowest;
      MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      for (size_t i = 0; i < count; i++)
        if (output[i] != (float)(nranks * (nranks - 1) / 2 + nranks * (int)(i % 7))) {
          fprintf(stderr, "element %zu is wrong\n", i);
          MPI_Abort(MPI_COMM_WORLD, 1);
        }
      if (turn >= 0)
        times[flat][turn] = 1e6 * slowest;
    }
  for (int flat = 0; flat < 2; flat++)
    qsort(times[flat], TURNS, sizeof(double), by_time);
  const double ours = times[0][TURNS / 2], theirs = times[1][TURNS / 2];
  if (rank == 0)
    printf("%9zu B  hierarchical over MPI %9.1f us  MPI of all ranks %9.1f us  ratio %5.2f\n", bytes, ours, theirs,
           theirs / ours);
  fflush(stdout);
  free(input);
  free(output);
}

int main(int argc, char **argv) {
  int rank, nranks;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &nranks);
  fast_allreduce_unique_id id;
  if (rank == 0) {
    char address[MPI_MAX_PROCESSOR_NAME + 2];
    int length;
    MPI_Get_processor_name(address, &length);
    require(fast_allreduce_unique_id_over_tcp(strcat(address, ":0"), &id), "unique_id_over_tcp");
  }
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  fast_allreduce_communicator *local;
  size_t node, nodes;
  require(fast_allreduce_init_of_node(&id, rank, nranks, NULL, &local, &node, &nodes), "init_of_node");
  MPI_Comm between;
  MPI_Comm_split(MPI_COMM_WORLD, (int)fast_allreduce_rank(local), (int)node, &between);
  fast_allreduce_inter_node engine = {node, nodes, &between, between_machines, exchange};
  fast_allreduce_hierarchical *world;
  require(fast_allreduce_hierarchical_new(&local, &engine, &world), "hierarchical_new");
  for (size_t bytes = 1 << 10; bytes <= LARGEST; bytes *= 4)
    compare(world, rank, nranks, bytes);
  fast_allreduce_hierarchical_free(world);
  MPI_Finalize();
  return 0;
}
