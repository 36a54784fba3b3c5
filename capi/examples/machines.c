/* Ranks on several machines: this library inside each machine, MPI between the machines.
 *
 *   mpicc machines.c $(pkg-config --cflags --libs fast_allreduce) -o machines
 *   mpirun --host node0:2,node1:2 ./machines
 *
 * MPI starts the ranks and carries the id. Any other launcher and any other engine do as well.
 */
#include <fast_allreduce.h>
#include <mpi.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 100003 };

static void require(fast_allreduce_status status, const char *what) {
  if (status != FAST_ALLREDUCE_STATUS_OK) {
    fprintf(stderr, "%s: status %u: %s\n", what, (unsigned)status, fast_allreduce_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

/* The engine between machines.
 * MPI's waits have no limit: mpirun ends the job if a rank ends before MPI_Finalize. */
static int all_reduce(void *context, void *data, size_t count, uint32_t dtype, uint32_t op) {
  const MPI_Datatype type = dtype == FAST_ALLREDUCE_DTYPE_F32   ? MPI_FLOAT
                            : dtype == FAST_ALLREDUCE_DTYPE_I64 ? MPI_INT64_T
                                                                : MPI_DATATYPE_NULL;
  const MPI_Op how = op == FAST_ALLREDUCE_OP_SUM   ? MPI_SUM
                     : op == FAST_ALLREDUCE_OP_MIN ? MPI_MIN
                                                   : MPI_OP_NULL;
  if (type == MPI_DATATYPE_NULL || how == MPI_OP_NULL || count > INT_MAX)
    return -1;
  return MPI_Allreduce(MPI_IN_PLACE, data, (int)count, type, how, *(MPI_Comm *)context);
}

/* Messages between two machines, of less than 2^31 bytes. */
static int exchange(void *context, const void *message, size_t bytes, void *space, size_t capacity,
                    size_t *received) {
  const MPI_Comm between = *(MPI_Comm *)context;
  int node, count;
  MPI_Status status;
  MPI_Comm_rank(between, &node);
  const int failed = MPI_Sendrecv(message, (int)bytes, MPI_BYTE, 1 - node, 0, space, (int)capacity, MPI_BYTE,
                                  1 - node, 0, between, &status);
  if (failed || MPI_Get_count(&status, MPI_BYTE, &count))
    return -1;
  *received = (size_t)count;
  return 0;
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
    MPI_Get_processor_name(address, &length); /* The host's name. */
    require(fast_allreduce_unique_id_over_tcp(strcat(address, ":0"), &id), "unique_id_over_tcp");
  }
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  fast_allreduce_communicator *local;
  size_t node, nodes;
  require(fast_allreduce_init_of_node(&id, rank, nranks, NULL, &local, &node, &nodes), "init_of_node");

  MPI_Comm between;
  MPI_Comm_split(MPI_COMM_WORLD, (int)fast_allreduce_rank(local), (int)node, &between);
  fast_allreduce_inter_node engine = {node, nodes, &between, all_reduce, exchange};
  fast_allreduce_hierarchical *world;
  require(fast_allreduce_hierarchical_new(&local, &engine, &world), "hierarchical_new");

  float *data = malloc(COUNT * sizeof *data);
  for (size_t i = 0; i < COUNT; i++)
    data[i] = (float)(rank + i % 1000);
  require(fast_allreduce_hierarchical_all_reduce(world, data, data, COUNT, FAST_ALLREDUCE_DTYPE_F32,
                                                 FAST_ALLREDUCE_OP_SUM),
          "hierarchical_all_reduce");
  for (size_t i = 0; i < COUNT; i++)
    if (data[i] != (float)(nranks * (nranks - 1) / 2 + nranks * (int)(i % 1000))) {
      fprintf(stderr, "element %zu is wrong: %f\n", i, (double)data[i]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  free(data);
  printf("rank %zu of %zu, on machine %zu of %zu: passed\n", fast_allreduce_hierarchical_rank(world),
         fast_allreduce_hierarchical_nranks(world), node, nodes);
  fast_allreduce_hierarchical_free(world);
  MPI_Finalize();
  return 0;
}
