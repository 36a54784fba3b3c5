// A rank that measures MPI_Allreduce; see rank.hpp.
// C interface only: the C++ interface of Open MPI 4 does not compile without warnings.
#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>

#include "rank.hpp"

int main(int argc, char **argv) {
  int number = 0, world = 0, length = 0;
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &number);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Get_library_version(version, &length);
  peers::Rank rank(number);
  if (world != rank.ranks)
    peers::fail(std::to_string(rank.ranks) + " ranks are compared, not " + std::to_string(world));
  std::string name = std::string(version).substr(0, strcspn(version, ",\n"));
  std::replace(name.begin(), name.end(), '\t', ' ');
  rank.say("ready " + name);
  rank.serve([](const float *in, float *out, size_t count) {
    MPI_Allreduce(in == out ? MPI_IN_PLACE : in, out, int(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
  MPI_Finalize();
}
