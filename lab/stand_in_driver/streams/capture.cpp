// Capture: streams record work into a graph instead of running it.
#include "stream.h"

#include <algorithm>

#include "graph.h"

namespace stand_in {
namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

std::vector<std::shared_ptr<Capture>> &active() {
  static auto *active = new std::vector<std::shared_ptr<Capture>>;
  return *active;
}

bool has_unjoined_streams(Capture &capture) {
  const Clock &seen = capture.streams.at(capture.origin);
  for (auto &[stream, clock] : capture.streams) {
    const auto own = clock.find(stream);
    const auto joined = seen.find(stream);
    if (own == clock.end() || stream == capture.origin)
      continue;
    if (joined == seen.end() || joined->second < own->second)
      return true;
  }
  return false;
}

} // namespace

CUresult add_node(CUstream_st &stream, Work work) {
  Capture &capture = *stream.capture;
  if (capture.invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  ++capture.streams[&stream][&stream];
  std::set<size_t> &last = capture.last[&stream];
  const size_t number = capture.graph->nodes.size();
  capture.graph->nodes.push_back({std::move(work), last});
  last = {number};
  return CUDA_SUCCESS;
}

bool is_capturing(const CUstream_st &stream) {
  std::lock_guard<std::mutex> guard(state());
  return stream.capture != nullptr;
}

CUresult refuse_in_capture(CUstream_st &stream, CUresult code) {
  std::lock_guard<std::mutex> guard(state());
  if (stream.capture)
    stream.capture->invalid = true;
  return code;
}

CUresult check_not_capturing() {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(state());
  for (auto &capture : active()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool global =
        capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || !(own || global))
      continue;
    capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

std::shared_ptr<CUgraph_st> captured_graph(CUgraph handle) {
  std::lock_guard<std::mutex> guard(state());
  for (auto &capture : active()) {
    if (capture->graph.get() == handle)
      return capture->graph;
  }
  return nullptr;
}

void detach(Capture &capture) {
  capture.ended = true;
  for (auto &[stream, clock] : capture.streams)
    stream->capture = nullptr;
  auto &captures = active();
  captures.erase(std::remove_if(captures.begin(), captures.end(), [&](auto &other) { return other->ended; }),
                 captures.end());
}

} // namespace stand_in

using namespace stand_in;

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  if (stream == stream->context->legacy)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::lock_guard<std::mutex> guard(state());
  if (stream->capture)
    return CUDA_ERROR_ILLEGAL_STATE;
  static uint64_t next_id = 1;
  auto capture = std::make_shared<Capture>();
  capture->id = next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream.get();
  capture->graph = std::make_shared<CUgraph_st>();
  capture->streams[stream.get()];
  active().push_back(capture);
  stream->capture = std::move(capture);
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!graph)
    return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  std::shared_ptr<Capture>
      capture; // destroyed after the lock is released, with the user objects of its graph
  std::lock_guard<std::mutex> guard(state());
  capture = stream->capture;
  if (!capture)
    return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream.get()) {
    capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  detach(*capture);
  if (capture->invalid)
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (has_unjoined_streams(*capture))
    return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *graph = graphs().insert(capture->graph);
  return CUDA_SUCCESS;
}

// Dependencies are not reported.
CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
  STAND_IN_CALL();
  std::shared_ptr<CUstream_st> stream;
  STAND_IN_CHECK(find_stream(handle, &stream));
  if (!status)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(state());
  // "if this is called on CU_STREAM_LEGACY (the null stream) while a blocking stream in the same context is
  // capturing, it will return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT [...] The blocking stream capture is not
  // invalidated" (Driver API, cuStreamIsCapturing and cuStreamGetCaptureInfo).
  if (!captures_under_legacy(*stream).empty())
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  const Capture *capture = stream->capture.get();
  *status = !capture           ? CU_STREAM_CAPTURE_STATUS_NONE
            : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                               : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (id)
    *id = capture ? capture->id : 0;
  if (graph)
    *graph = capture ? capture->graph.get() : nullptr;
  if (dependencies)
    *dependencies = nullptr;
  if (count)
    *count = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies, const void **edges,
                                   size_t *count) {
  STAND_IN_CALL();
  if (edges)
    *edges = nullptr;
  return cuStreamGetCaptureInfo_v2(handle, status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id) {
  STAND_IN_CALL();
  return cuStreamGetCaptureInfo_v2(handle, status, id, nullptr, nullptr, nullptr);
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  STAND_IN_CALL();
  return cuStreamGetCaptureInfo(handle, status, nullptr);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  STAND_IN_CALL();
  if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}
