// Streams, and what they do instead while they are captured.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "user_object.h"

namespace stand_in {

using Work = std::function<void()>;

// How many nodes of each stream come before a point: what tells whether a capture's branches were joined
// again.
using Clock = std::map<const CUstream_st *, uint64_t>;

// Work of a graph, and the nodes that come before it: numbers of earlier ones.
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
  std::map<const CUstream_st *, std::set<size_t>> last; // the nodes that a stream's next one comes after
};

// Guards streams, events and captures.
std::mutex &state();

std::shared_ptr<CUstream_st> make_stream(CUcontext context, unsigned flags, int priority);
// NULL and the legacy handle are the context's legacy stream. The per-thread handle is a stream of the
// calling thread and the context: "an implicit stream local to both the thread and the CUcontext" (Driver
// API, Stream synchronization behavior). It is a blocking one: "not a non-blocking stream and will
// synchronize with the legacy default stream".
CUresult find_stream(CUstream handle, std::shared_ptr<CUstream_st> *stream);
// Appends work to a stream, or to the graph that it is captured into.
CUresult submit(CUstream handle, Work work);
// The same with state() held, for a stream that is not captured.
void enqueue(const std::shared_ptr<CUstream_st> &stream, Work work);
// The same with state() held, for a stream that is.
CUresult add_node(CUstream_st &stream, Work work);

void wait_for_stream(const std::shared_ptr<CUstream_st> &stream);
// Work of a stream that is not captured, which has ended when this returns: by the calling thread where
// nothing comes before it.
CUresult submit_and_wait(const std::shared_ptr<CUstream_st> &stream, Work work);
// All of a context's streams.
void wait_for_context(CUcontext context);
// With STAND_IN_SYNCHRONISE, waits for all work of the context and of those that reach its memory or whose
// memory it reaches. A driver may do so: between commands of two streams "a page-locked host memory
// allocation, a device memory allocation" keep them from running concurrently (Programming Guide, versions to
// 12, Implicit Synchronization), and "loading kernels might require context synchronization" (ibid., Lazy
// Loading, Concurrent Execution). Who relies on the driver not to wait hangs here until the kernels give up.
void synchronise_implicitly(CUcontext context);
void close_streams_of(CUcontext context);
void destroy_events_of(CUcontext context);

bool is_capturing(const CUstream_st &stream);
// Invalidates the stream's capture, as an illegal call does, and returns the code.
CUresult refuse_in_capture(CUstream_st &stream, CUresult code);
// For calls that the driver calls potentially unsafe, as they are not observed by a capture: an error while
// one forbids them to this thread, which ends that capture. A thread whose mode is GLOBAL is "prohibited from
// potentially unsafe API calls" if it "has an ongoing capture sequence that was not initiated with
// CU_STREAM_CAPTURE_MODE_RELAXED", or if any other thread has one "initiated with
// CU_STREAM_CAPTURE_MODE_GLOBAL"; in the mode THREAD_LOCAL others' count for nothing, in the mode RELAXED
// nothing is prohibited (Driver API, cuThreadExchangeStreamCaptureMode).
CUresult check_not_capturing();
// With state() held. What uses the legacy stream would depend on these captures, of blocking streams of its
// context; empty for any other stream.
std::vector<Capture *> captures_under_legacy(const CUstream_st &stream);
// With state() held. "When any stream in the same context is being captured that was not created with
// cudaStreamNonBlocking, any attempted use of the legacy stream is invalid": to enqueue there, to query or to
// synchronise it, and the synchronous calls, which do both (Programming Guide, CUDA Graphs, Prohibited and
// Unhandled Operations). "When an invalid operation is attempted during stream capture, any associated
// capture graphs are invalidated" (ibid., Invalidation).
CUresult check_legacy(const CUstream_st &stream);
// An error while any stream of the context is captured.
CUresult check_context_not_captured(CUcontext context);
// Ends a capture's hold on its streams; with state() held.
void detach(Capture &capture);

} // namespace stand_in

struct CUgraph_st {
  std::vector<stand_in::Node> nodes;
  stand_in::UserObjects objects;
};

struct CUstream_st {
  struct Operation {
    stand_in::Work work;
    // Other streams' work that comes first: stream and how much of it.
    std::vector<std::pair<std::shared_ptr<CUstream_st>, uint64_t>> after;
  };

  CUcontext context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  uint64_t awaited = UINT64_MAX; // the least of `completed` that somebody waits for
  bool started = false;
  bool busy = false; // with work that is no longer in the queue
  bool closing = false;
  std::condition_variable has_work; // and is not busy; or is closing
  std::condition_variable moved_on; // to what was awaited
  std::shared_ptr<stand_in::Capture> capture;

  bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
};
