// Events: points in a stream or in a capture.
#include "stream.h"

struct CUevent_st {
  // A recorded point. Waits refer to the point, so that the event can be recorded again.
  struct Mark {
    bool done = false;
    std::condition_variable reached;
    std::chrono::steady_clock::time_point at;
  };

  CUcontext context = nullptr;
  unsigned flags = 0;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<stand_in::Capture> capture; // capture in which it was last recorded
  stand_in::Clock clock;
  std::set<size_t> last; // nodes of the capture directly before it
};

namespace stand_in {
namespace {

using Mark = CUevent_st::Mark;

Handles<CUevent_st> &events() {
  static auto *events = new Handles<CUevent_st>;
  return *events;
}

CUresult find_event(CUevent handle, std::shared_ptr<CUevent_st> *event) {
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  *event = events().find(handle);
  if (!*event)
    return CUDA_ERROR_INVALID_HANDLE;
  return CUresult((*event)->context->error.load());
}

void reach(Mark &mark) {
  std::lock_guard<std::mutex> guard(state());
  mark.at = std::chrono::steady_clock::now();
  mark.done = true;
  mark.reached.notify_all();
}

void await(Mark &mark) {
  std::unique_lock<std::mutex> guard(state());
  mark.reached.wait(guard, [&] { return mark.done; });
}

// Adds the stream to the event's capture, or adds the event's dependencies to the stream; with state() held.
CUresult join(CUstream_st &stream, const CUevent_st &event) {
  if (event.capture->ended)
    return CUDA_ERROR_CAPTURED_EVENT;
  if (event.capture->invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream.capture && stream.capture != event.capture) {
    stream.capture->invalid = event.capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (&stream == stream.context->legacy.get()) {
    event.capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  stream.capture = event.capture;
  Clock &clock = event.capture->streams[&stream];
  for (auto &[other, count] : event.clock) {
    if (clock[other] < count)
      clock[other] = count;
  }
  event.capture->last[&stream].insert(event.last.begin(), event.last.end());
  return CUDA_SUCCESS;
}

} // namespace

uint64_t live_events() { return events().size(); }

void destroy_events_of(CUcontext context) {
  for (auto &event : events().all()) {
    if (event->context == context)
      events().take(event.get());
  }
}

} // namespace stand_in

using namespace stand_in;

CUresult cuEventCreate(CUevent *handle, unsigned flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!handle || flags > 7)
    return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<CUevent_st>();
  event->context = context;
  event->flags = flags;
  *handle = events().insert(std::move(event));
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent handle) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  return events().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned flags) {
  STAND_IN_CALL();
  std::shared_ptr<CUevent_st> event;
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_event(handle, &event));
  STAND_IN_CHECK(find_stream(stream_handle, &stream));
  if (flags > CU_EVENT_RECORD_EXTERNAL)
    return CUDA_ERROR_INVALID_VALUE;
  if (event->context != stream->context)
    return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard<std::mutex> guard(state());
  STAND_IN_CHECK(check_legacy(*stream));
  if (!stream->capture) {
    auto mark = std::make_shared<Mark>();
    event->mark = mark;
    event->capture = nullptr;
    enqueue(stream, [mark] { reach(*mark); });
    return CUDA_SUCCESS;
  }
  if (flags == CU_EVENT_RECORD_EXTERNAL) {
    return add_node(*stream, [event] {
      auto mark = std::make_shared<Mark>();
      reach(*mark);
      std::lock_guard<std::mutex> guard(state());
      event->mark = mark;
    });
  }
  if (stream->capture->invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  event->mark = nullptr;
  event->capture = stream->capture;
  event->clock = stream->capture->streams[stream.get()];
  event->last = stream->capture->last[stream.get()];
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
  STAND_IN_CALL();
  return cuEventRecordWithFlags(handle, stream, 0);
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  STAND_IN_CALL();
  std::shared_ptr<CUevent_st> event;
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_event(handle, &event));
  STAND_IN_CHECK(find_stream(stream_handle, &stream));
  if (flags > CU_EVENT_WAIT_EXTERNAL)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(state());
  STAND_IN_CHECK(check_legacy(*stream));
  if (event->capture)
    return join(*stream, *event);
  std::shared_ptr<Mark> mark = event->mark;
  if (!stream->capture) {
    if (mark)
      enqueue(stream, [mark] { await(*mark); });
    return CUDA_SUCCESS;
  }
  if (flags == CU_EVENT_WAIT_EXTERNAL) {
    return add_node(*stream, [event] {
      std::unique_lock<std::mutex> guard(state());
      std::shared_ptr<Mark> mark = event->mark;
      guard.unlock();
      if (mark)
        await(*mark);
    });
  }
  if (stream->capture->invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!mark)
    return CUDA_SUCCESS;
  stream->capture->invalid = true;
  return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

// Check of queries of an event. Events that were last recorded in a capture must not be queried: even a
// thread in relaxed mode "is still prohibited from API calls which necessarily conflict with stream capture,
// for example, attempting cuEventQuery on an event that was last recorded inside a capture sequence" (Driver
// API, cuThreadExchangeStreamCaptureMode). For other events it is potentially unsafe.
static CUresult check_askable(const CUevent_st &event) {
  {
    std::lock_guard<std::mutex> guard(state());
    if (event.capture) {
      event.capture->invalid = true;
      return CUDA_ERROR_CAPTURED_EVENT;
    }
  }
  return check_not_capturing();
}

CUresult cuEventQuery(CUevent handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUevent_st> event;
  STAND_IN_CHECK(find_event(handle, &event));
  STAND_IN_CHECK(check_askable(*event));
  std::lock_guard<std::mutex> guard(state());
  return !event->mark || event->mark->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUevent_st> event;
  STAND_IN_CHECK(find_event(handle, &event));
  STAND_IN_CHECK(check_askable(*event));
  std::unique_lock<std::mutex> guard(state());
  const std::shared_ptr<Mark> mark = event->mark;
  if (mark)
    mark->reached.wait(guard, [&] { return mark->done; });
  return CUresult(event->context->error.load());
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from_handle, CUevent to_handle) {
  STAND_IN_CALL();
  std::shared_ptr<CUevent_st> from, to;
  STAND_IN_CHECK(find_event(from_handle, &from));
  STAND_IN_CHECK(find_event(to_handle, &to));
  if (!milliseconds)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(state());
  if ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!from->mark || !to->mark)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!from->mark->done || !to->mark->done)
    return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(to->mark->at - from->mark->at).count();
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
  STAND_IN_CALL();
  return cuEventElapsedTime_v2(milliseconds, from, to);
}
