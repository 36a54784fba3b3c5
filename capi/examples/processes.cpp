// Ranks as processes, which meet by the program's own all-gather function, here over sockets to the parent. Then one
// rank is killed, and the others go on without it.
//
//   c++ -std=c++17 processes.cpp $(pkg-config --cflags --libs fast_allreduce)
#include <fast_allreduce.h>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr std::size_t ranks = 3;

struct Free {
  void operator()(fast_allreduce_communicator *communicator) const { fast_allreduce_free(communicator); }
};
using Communicator = std::unique_ptr<fast_allreduce_communicator, Free>;

[[noreturn]] void fail(const std::string &what) {
  std::fprintf(stderr, "%s; the last error is: %s\n", what.c_str(), fast_allreduce_last_error());
  std::exit(1);
}

void require(fast_allreduce_status status, const char *what) {
  if (status != FAST_ALLREDUCE_STATUS_OK)
    fail(std::string(what) + ": status " + std::to_string(status));
}

bool read_all(int from, void *data, std::size_t bytes) {
  for (auto at = static_cast<char *>(data); bytes > 0;) {
    ssize_t got = read(from, at, bytes);
    if (got <= 0)
      return false;
    at += got, bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(int to, const void *data, std::size_t bytes) {
  for (auto at = static_cast<const char *>(data); bytes > 0;) {
    ssize_t put = send(to, at, bytes, MSG_NOSIGNAL);
    if (put <= 0)
      return false;
    at += put, bytes -= static_cast<std::size_t>(put);
  }
  return true;
}

// The function that fast_allreduce_init_with_all_gather calls. MPI_Allgather could be used as well.
int all_gather(void *context, const void *input, void *output, std::size_t bytes, std::uint64_t) {
  int parent = *static_cast<int *>(context);
  std::uint64_t length = bytes;
  bool done = write_all(parent, &length, sizeof length) && write_all(parent, input, bytes) &&
              read_all(parent, output, bytes * ranks);
  return done ? 0 : 1;
}

// The parent's side: gathers from all ranks until one closes its connection.
void serve(const std::vector<int> &children) {
  for (;;) {
    std::vector<char> gathered;
    for (int child : children) {
      std::uint64_t length = 0;
      if (!read_all(child, &length, sizeof length) || length > 1 << 20)
        return;
      std::vector<char> part(length);
      if (!read_all(child, part.data(), length))
        return;
      gathered.insert(gathered.end(), part.begin(), part.end());
    }
    for (int child : children)
      if (!write_all(child, gathered.data(), gathered.size()))
        return;
  }
}

void sums(const Communicator &communicator, std::size_t count) {
  std::vector<double> data(count, static_cast<double>(fast_allreduce_rank(communicator.get()) + 1));
  require(fast_allreduce_all_reduce(communicator.get(), data.data(), data.data(), count, FAST_ALLREDUCE_DTYPE_F64,
                                    FAST_ALLREDUCE_OP_SUM, nullptr),
          "all_reduce");
  std::size_t size = fast_allreduce_nranks(communicator.get());
  for (double value : data)
    if (value != static_cast<double>(size * (size + 1) / 2))
      fail("a wrong sum");
}

int rank_process(std::size_t rank, int parent) {
  fast_allreduce_settings *settings = nullptr;
  require(fast_allreduce_settings_new(&settings), "settings_new");
  require(fast_allreduce_settings_set(settings, "timeout", "20"), "settings_set");
  fast_allreduce_communicator *made = nullptr;
  require(fast_allreduce_init_with_all_gather(all_gather, &parent, rank, ranks, settings, &made), "init");
  fast_allreduce_settings_free(settings);
  Communicator all(made);
  for (std::size_t count : {1, 1000, 300000})
    sums(all, count);
  if (rank == 1) {
    // The other ranks are, or soon will be, in a call that waits for this rank.
    raise(SIGKILL);
  }
  double value = 1;
  fast_allreduce_status status = FAST_ALLREDUCE_STATUS_OK;
  status = fast_allreduce_all_reduce(all.get(), &value, &value, 1, FAST_ALLREDUCE_DTYPE_F64, FAST_ALLREDUCE_OP_SUM,
                                     nullptr);
  if (status != FAST_ALLREDUCE_STATUS_PEER_LOST || fast_allreduce_last_error_ranks() != 1 << 1)
    fail("the killed rank is not reported: status " + std::to_string(status));
  std::vector<std::size_t> survivors{0, 2};
  require(fast_allreduce_shrink(all.get(), survivors.data(), survivors.size(), &made), "shrink");
  Communicator left(made);
  sums(left, 1000);
  return 0;
}

} // namespace

int main() {
  std::vector<int> children;
  std::vector<pid_t> processes;
  for (std::size_t rank = 0; rank < ranks; rank++) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
      return 1;
    pid_t process = fork();
    if (process == 0) {
      for (int other : children)
        close(other);
      close(pair[0]);
      return rank_process(rank, pair[1]);
    }
    close(pair[1]);
    children.push_back(pair[0]);
    processes.push_back(process);
  }
  serve(children);
  bool right = true;
  for (std::size_t rank = 0; rank < ranks; rank++) {
    int status = 0;
    waitpid(processes[rank], &status, 0);
    right &= rank == 1 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                       : WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  std::printf("%zu ranks as processes, one of them killed: %s\n", ranks, right ? "passed" : "FAILED");
  return right ? 0 : 1;
}
