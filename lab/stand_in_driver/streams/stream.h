// Streams, events, captures and graphs. This header declares streams, which are queues of work, and captures,
// which record work into a graph instead.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "user_object.h"

namespace stand_in {

using Work = std::function<void()>;

// Vector clock: the number of nodes of each stream before a point. It shows whether a capture's branches were
// joined.
using Clock = std::map<const CUstream_st *, uint64_t>;

// Work of a graph, and the numbers of the nodes that it depends on, which are earlier ones.
struct Node {
  Work work;
  std::set<size_t> after;
};

struct Capture {
  uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  CUstream_st *origin = nullptr;
  bool invalid = false;
  bool ended = false;
  std::shared_ptr<CUgraph_st> graph;
  std::map<CUstream_st *, Clock> streams;
  std::map<const CUstream_st *, std::set<size_t>> last; // dependencies of a stream's next node
};

// Guards streams, events and captures.
std::mutex &state();

std::shared_ptr<CUstream_st> make_stream(CUcontext context, unsigned flags, int priority);
// Finds a stream. NULL and the legacy handle are the context's legacy stream. The per-thread handle is a
// stream of the calling thread and the context: "an implicit stream local to both the thread and the
// CUcontext" (Driver API, Stream synchronization behavior). It is a blocking stream: "not a non-blocking
// stream and will synchronize with the legacy default stream".
CUresult find_stream(CUstream handle, std::shared_ptr<CUstream_st> *stream);
// Appends work to a stream, or to the graph that it is captured into.
CUresult submit(CUstream handle, Work work);
// Appends work to a stream that is not captured, with state() held.
void enqueue(const std::shared_ptr<CUstream_st> &stream, Work work);
// Appends work to the graph of a captured stream, with state() held.
CUresult add_node(CUstream_st &stream, Work work);

void wait_for_stream(const std::shared_ptr<CUstream_st> &stream);
// Runs work on a stream that is not captured, and returns when it has ended. The calling thread runs it if no
// earlier work is left.
CUresult submit_and_wait(const std::shared_ptr<CUstream_st> &stream, Work work);
// Waits for all streams of a context.
void wait_for_context(CUcontext context);
// Waits for all work of the context, of the contexts that can access its memory by peer access, and of those
// whose memory it can access.
void wait_for_neighbours(CUcontext context);
// With STAND_IN_SYNCHRONISE, does so. A driver may: between commands of two streams "a page-locked
// host memory allocation, a device memory allocation" keep them from running concurrently (Programming Guide,
// versions to 12, Implicit Synchronization), and "loading kernels might require context synchronization"
// (ibid., Lazy Loading, Concurrent Execution). Code that relies on the driver not to wait hangs here until
// the kernels time out.
void synchronise_implicitly(CUcontext context);
void close_streams_of(CUcontext context);
void destroy_events_of(CUcontext context);

bool is_capturing(const CUstream_st &stream);
// Invalidates the stream's capture, as an illegal call does, and returns `code`.
CUresult refuse_in_capture(CUstream_st &stream, CUresult code);
// Check of calls that the driver calls potentially unsafe, because a capture does not observe them. Returns
// an error if a capture forbids them to this thread, and invalidates that capture. A thread whose mode is
// GLOBAL is "prohibited from potentially unsafe API calls" if it "has an ongoing capture sequence that was
// not initiated with CU_STREAM_CAPTURE_MODE_RELAXED", or if any other thread has one "initiated with
// CU_STREAM_CAPTURE_MODE_GLOBAL". In the mode THREAD_LOCAL captures of other threads have no effect; in the
// mode RELAXED nothing is prohibited (Driver API, cuThreadExchangeStreamCaptureMode).
CUresult check_not_capturing();
// The captures of blocking streams of the context, on which any use of the legacy stream would depend; empty
// for any other stream. With state() held.
std::vector<Capture *> captures_under_legacy(const CUstream_st &stream);
// Check of uses of the legacy stream, with state() held. "When any stream in the same context is being
// captured that was not created with cudaStreamNonBlocking, any attempted use of the legacy stream is
// invalid": to enqueue work, to query or to synchronise it, and the synchronous calls, which do both
// (Programming Guide, CUDA Graphs, Prohibited and Unhandled Operations). "When an invalid operation is
// attempted during stream capture, any associated capture graphs are invalidated" (ibid., Invalidation).
CUresult check_legacy(const CUstream_st &stream);
// Returns an error if any stream of the context is captured.
CUresult check_context_not_captured(CUcontext context);
// Detaches a capture from its streams; with state() held.
void detach(Capture &capture);

} // namespace stand_in

struct CUgraph_st {
  std::vector<stand_in::Node> nodes;
  stand_in::UserObjects objects;
};

struct CUstream_st {
  struct Operation {
    stand_in::Work work;
    // Work of other streams that comes first: streams, and how many operations of each.
    std::vector<std::pair<std::shared_ptr<CUstream_st>, uint64_t>> after;
  };

  CUcontext context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  uint64_t awaited = UINT64_MAX; // the lowest value of `completed` that a thread waits for
  bool started = false;
  bool busy = false; // running work that is no longer in the queue
  bool closing = false;
  std::condition_variable has_work; // the queue has work and the stream is not busy, or it is closing
  std::condition_variable moved_on; // `completed` has reached `awaited`
  std::shared_ptr<stand_in::Capture> capture;

  bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
};
