// Streams: each has a queue, and a thread that runs the work in it.
#include "stream.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "../thread_variable.h"

namespace stand_in {
namespace {

Handles<CUstream_st> &streams() {
  static auto *streams = new Handles<CUstream_st>;
  return *streams;
}

// Every stream that may still have work, including closed ones.
std::set<std::shared_ptr<CUstream_st>> &live() {
  static auto *live = new std::set<std::shared_ptr<CUstream_st>>;
  return *live;
}

// Waits until this number of a stream's operations has ended.
void wait_until(std::unique_lock<std::mutex> &guard, CUstream_st &stream, uint64_t count) {
  stream.moved_on.wait(guard, [&] {
    if (stream.completed < count)
      stream.awaited = std::min(stream.awaited, count);
    return stream.completed >= count;
  });
}

// Runs work of a stream that is marked as busy.
void perform(std::unique_lock<std::mutex> &guard, CUstream_st &stream, Work work) {
  guard.unlock();
  work();
  work = {};
  guard.lock();
  stream.busy = false;
  if (++stream.completed < stream.awaited)
    return;
  stream.awaited = UINT64_MAX;
  stream.moved_on.notify_all();
}

void serve(std::shared_ptr<CUstream_st> stream) {
  std::unique_lock<std::mutex> guard(state());
  for (;;) {
    const auto has_work = [&] { return !stream->queue.empty() && !stream->busy; };
    stream->has_work.wait(guard, [&] { return has_work() || (stream->closing && stream->queue.empty()); });
    if (stream->queue.empty())
      break;
    CUstream_st::Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    for (auto &[other, count] : operation.after)
      wait_until(guard, *other, count);
    perform(guard, *stream, std::move(operation.work));
  }
  live().erase(stream);
}

// With state() held.
void close(const std::shared_ptr<CUstream_st> &stream) {
  stream->closing = true;
  if (!stream->started)
    live().erase(stream);
  stream->has_work.notify_all();
}

void wait_for(std::unique_lock<std::mutex> &guard, const std::shared_ptr<CUstream_st> &stream) {
  wait_until(guard, *stream, stream->submitted);
}

// The calling thread's default streams. Work on them still runs after the thread has ended.
class PerThreadStreams {
public:
  ~PerThreadStreams() {
    std::lock_guard<std::mutex> guard(state());
    for (auto &[context, stream] : streams_)
      close(stream);
  }

  std::shared_ptr<CUstream_st> of(CUcontext context) {
    std::shared_ptr<CUstream_st> &stream = streams_[context];
    bool closed = !stream;
    if (stream) {
      std::lock_guard<std::mutex> guard(state());
      closed = stream->closing; // with its context, which was retained again
    }
    if (closed)
      stream = make_stream(context, 0, 0);
    return stream;
  }

private:
  std::map<CUcontext, std::shared_ptr<CUstream_st>> streams_;
};

std::vector<std::shared_ptr<CUstream_st>> live_streams_of(CUcontext context) {
  std::vector<std::shared_ptr<CUstream_st>> streams;
  for (auto &stream : live()) {
    if (stream->context == context)
      streams.push_back(stream);
  }
  return streams;
}

} // namespace

uint64_t live_streams() { return streams().size(); }

std::mutex &state() {
  static auto *state = new std::mutex;
  return *state;
}

std::shared_ptr<CUstream_st> make_stream(CUcontext context, unsigned flags, int priority) {
  auto stream = std::make_shared<CUstream_st>();
  stream->context = context;
  stream->flags = flags;
  stream->priority = priority;
  std::lock_guard<std::mutex> guard(state());
  live().insert(stream);
  return stream;
}

CUresult find_stream(CUstream handle, std::shared_ptr<CUstream_st> *stream) {
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!handle || handle == CU_STREAM_LEGACY) {
    *stream = context->legacy;
  } else if (handle == CU_STREAM_PER_THREAD) {
    *stream = ThreadVariable<PerThreadStreams>::get().of(context);
  } else {
    *stream = streams().find(handle);
    if (!*stream) {
      // Driver 580 reads the memory of a destroyed stream, and the process ends by a segmentation fault.
      fprintf(stderr, "stand-in driver: a stream that does not exist, or no longer\n");
      abort();
    }
  }
  return CUresult((*stream)->context->error.load());
}

// Dependencies of the next work of a stream: the legacy stream waits for all blocking streams of its context,
// and they wait for it.
static auto work_before(const std::shared_ptr<CUstream_st> &stream) {
  decltype(CUstream_st::Operation::after) after;
  const std::shared_ptr<CUstream_st> &legacy = stream->context->legacy;
  if (stream == legacy) {
    for (auto &other : live_streams_of(stream->context)) {
      if (other != stream && other->blocking())
        after.emplace_back(other, other->submitted);
    }
  } else if (stream->blocking()) {
    after.emplace_back(legacy, legacy->submitted);
  }
  return after;
}

void enqueue(const std::shared_ptr<CUstream_st> &stream, Work work) {
  stream->queue.push_back({std::move(work), work_before(stream)});
  ++stream->submitted;
  if (!stream->started) {
    stream->started = true;
    std::thread(serve, stream).detach();
  }
  stream->has_work.notify_all();
}

std::vector<Capture *> captures_under_legacy(const CUstream_st &stream) {
  std::vector<Capture *> captures;
  if (&stream != stream.context->legacy.get())
    return captures;
  for (auto &other : live_streams_of(stream.context)) {
    if (other->blocking() && other->capture)
      captures.push_back(other->capture.get());
  }
  return captures;
}

CUresult check_legacy(const CUstream_st &stream) {
  const auto captures = captures_under_legacy(stream);
  for (Capture *capture : captures)
    capture->invalid = true;
  return captures.empty() ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult submit(CUstream handle, Work work) {
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  std::lock_guard<std::mutex> guard(state());
  if (stream->capture)
    return add_node(*stream, std::move(work));
  STAND_IN_CHECK(check_legacy(*stream));
  enqueue(stream, std::move(work));
  return CUDA_SUCCESS;
}

CUresult submit_and_wait(const std::shared_ptr<CUstream_st> &stream, Work work) {
  std::unique_lock<std::mutex> guard(state());
  STAND_IN_CHECK(check_legacy(*stream));
  bool idle = stream->completed == stream->submitted;
  for (auto &[other, count] : work_before(stream))
    idle = idle && other->completed >= count;
  if (!idle) {
    enqueue(stream, std::move(work));
    wait_for(guard, stream);
    return CUDA_SUCCESS;
  }
  ++stream->submitted;
  stream->busy = true;
  perform(guard, *stream, std::move(work));
  stream->has_work.notify_all();
  return CUDA_SUCCESS;
}

void wait_for_stream(const std::shared_ptr<CUstream_st> &stream) {
  std::unique_lock<std::mutex> guard(state());
  wait_for(guard, stream);
}

void wait_for_context(CUcontext context) {
  std::unique_lock<std::mutex> guard(state());
  for (auto &stream : live_streams_of(context))
    wait_for(guard, stream);
}

void close_streams_of(CUcontext context) {
  std::vector<std::shared_ptr<Capture>> captures; // destroyed after the lock is released
  std::lock_guard<std::mutex> guard(state());
  for (auto &stream : live_streams_of(context)) {
    if (stream->capture) {
      captures.push_back(stream->capture);
      detach(*captures.back());
    }
    streams().take(stream.get());
    close(stream);
  }
}

CUresult check_context_not_captured(CUcontext context) {
  std::lock_guard<std::mutex> guard(state());
  for (auto &stream : live_streams_of(context)) {
    if (!stream->capture)
      continue;
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

} // namespace stand_in

using namespace stand_in;

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!handle || flags > CU_STREAM_NON_BLOCKING)
    return CUDA_ERROR_INVALID_VALUE;
  *handle = streams().insert(make_stream(context, flags, priority));
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
  STAND_IN_CALL();
  return cuStreamCreateWithPriority(handle, flags, 0);
}

// Queued work still runs.
CUresult cuStreamDestroy_v2(CUstream handle) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  auto stream = streams().take(handle);
  if (!stream)
    return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Capture>
      capture; // destroyed after the lock is released, with the user objects of its graph
  std::lock_guard<std::mutex> guard(state());
  capture = stream->capture;
  if (capture) {
    capture->invalid = true;
    capture->streams.erase(stream.get());
    stream->capture = nullptr;
    if (capture->origin == stream.get())
      detach(*capture);
  }
  close(stream);
  return CUDA_SUCCESS;
}

// Check of cuStreamQuery and cuStreamSynchronize. "It is invalid to synchronize or query the execution status
// of a stream which is being captured or a captured event" (Programming Guide, CUDA Graphs, Prohibited and
// Unhandled Operations). For other streams it is potentially unsafe, because a capture does not observe it.
static CUresult check_waitable(const std::shared_ptr<CUstream_st> &stream) {
  if (is_capturing(*stream))
    return refuse_in_capture(*stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  {
    std::lock_guard<std::mutex> guard(state());
    STAND_IN_CHECK(check_legacy(*stream));
  }
  return check_not_capturing();
}

CUresult cuStreamSynchronize(CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  STAND_IN_CHECK(check_waitable(stream));
  wait_for_stream(stream);
  // The wait above covers the blocking streams only if the legacy stream has work.
  if (stream == stream->context->legacy) {
    std::unique_lock<std::mutex> guard(state());
    for (auto &other : live_streams_of(stream->context)) {
      if (other->blocking())
        wait_for(guard, other);
    }
  }
  return CUresult(stream->context->error.load());
}

CUresult cuStreamQuery(CUstream handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  STAND_IN_CHECK(check_waitable(stream));
  std::lock_guard<std::mutex> guard(state());
  const auto done = [](const CUstream_st &stream) { return stream.completed == stream.submitted; };
  bool all = done(*stream);
  // The legacy stream encompasses the blocking ones: querying it queries them (ibid.).
  if (stream == stream->context->legacy) {
    for (auto &other : live_streams_of(stream->context))
      all = all && (!other->blocking() || done(*other));
  }
  return all ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  *context = stream->context;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!device)
    return CUDA_ERROR_INVALID_VALUE;
  *device = stream->context->device;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!flags)
    return CUDA_ERROR_INVALID_VALUE;
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!priority)
    return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!id)
    return CUDA_ERROR_INVALID_VALUE;
  *id = reinterpret_cast<uint64_t>(stream.get());
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
  STAND_IN_CALL();
  if (!function)
    return CUDA_ERROR_INVALID_VALUE;
  return submit(handle, [function, data] { function(data); });
}
