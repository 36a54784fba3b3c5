// Contexts: primary and other ones, the current context of each thread, and peer access.
#include "driver.h"

#include "launch/module.h"
#include "memory/memory.h"
#include "streams/stream.h"
#include "thread_variable.h"

namespace stand_in {
namespace {

// The calling thread's contexts, the current one last.
std::vector<CUcontext> &context_stack() { return ThreadVariable<std::vector<CUcontext>>::get(); }

std::mutex &mutex() {
  static auto *mutex = new std::mutex;
  return *mutex;
}

Handles<CUctx_st> &contexts() {
  static auto *contexts = new Handles<CUctx_st>;
  return *contexts;
}

// Initialises a context. A primary context that is retained again or reset gets a new ID.
void start(CUcontext context, CUdevice device) {
  static std::atomic<uint64_t> ids{0};
  context->id = ++ids;
  context->device = device;
  context->error = CUDA_SUCCESS;
  for (auto &peer : context->peers)
    peer = false;
  context->legacy = make_stream(context, 0, 0);
  context->alive = true;
}

// Destroys a context, but not its object: callers that still have the handle get an error instead of a crash.
void destroy(CUcontext context) {
  wait_for_context(context);
  context->alive = false;
  close_streams_of(context);
  destroy_events_of(context);
  unload_modules_of(context);
  release_memory_of(context);
}

// A device's primary context is always the same object.
CUcontext primary(CUdevice device) {
  static CUcontext primaries[kMaxDevices];
  if (!primaries[device]) {
    auto context = std::make_shared<CUctx_st>();
    context->primary = true;
    context->device = device;
    primaries[device] = contexts().insert(std::move(context));
  }
  return primaries[device];
}

CUresult check_known(CUcontext context) {
  STAND_IN_CHECK(check_initialized());
  return context && contexts().find(context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

} // namespace

void wait_for_neighbours(CUcontext context) {
  for (auto &other : contexts().all()) {
    const bool near =
        other.get() == context || other->peers[context->device] || context->peers[other->device];
    if (near && other->alive)
      wait_for_context(other.get());
  }
}

void synchronise_implicitly(CUcontext context) {
  if (settings().synchronise)
    wait_for_neighbours(context);
}

uint64_t live_contexts() {
  std::lock_guard<std::mutex> guard(mutex());
  uint64_t live = 0;
  for (auto &context : contexts().all())
    live += context->primary ? uint64_t(context->uses) : uint64_t(context->alive);
  return live;
}

void break_current_context(CUresult code) {
  if (context_stack().empty() || !context_stack().back())
    return;
  context_stack().back()->fail(code);
  await_ended_work_of(context_stack().back());
}

CUresult current_context(CUcontext *context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (context_stack().empty() || !context_stack().back())
    return CUDA_ERROR_INVALID_CONTEXT;
  *context = context_stack().back();
  if (!(*context)->alive)
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  const CUresult error = CUresult((*context)->error.load());
  if (error != CUDA_SUCCESS)
    await_ended_work_of(*context);
  return error;
}

} // namespace stand_in

void CUctx_st::fail(CUresult code) {
  uint32_t none = CUDA_SUCCESS;
  if (error.compare_exchange_strong(none, code))
    stand_in::end_work_of(this);
}

using namespace stand_in;

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(mutex());
  *context = primary(device);
  if ((*context)->uses++ == 0)
    start(*context, device);
  return CUDA_SUCCESS;
}

// The last release destroys the context with all its memory and streams.
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  std::lock_guard<std::mutex> guard(mutex());
  CUcontext context = primary(device);
  if (context->uses == 0)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->uses == 0)
    destroy(context);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  std::lock_guard<std::mutex> guard(mutex());
  CUcontext context = primary(device);
  if (!context->alive)
    return CUDA_SUCCESS;
  destroy(context);
  start(context, device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!flags || !active)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(mutex());
  *flags = primary(device)->flags;
  *active = primary(device)->alive;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  std::lock_guard<std::mutex> guard(mutex());
  primary(device)->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_device(device));
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  auto created = std::make_shared<CUctx_st>();
  created->flags = flags;
  start(created.get(), device);
  *context = contexts().insert(std::move(created));
  context_stack().push_back(*context);
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device) {
  STAND_IN_CALL();
  return parameters ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_known(context));
  if (context->primary || !context->alive)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (!context_stack().empty() && context_stack().back() == context)
    context_stack().pop_back();
  destroy(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (context)
    STAND_IN_CHECK(check_known(context));
  if (!context_stack().empty())
    context_stack().pop_back();
  if (context)
    context_stack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (!context)
    return CUDA_ERROR_INVALID_VALUE;
  *context = context_stack().empty() ? nullptr : context_stack().back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
  STAND_IN_CALL();
  if (context)
    STAND_IN_CHECK(check_known(context));
  else
    STAND_IN_CHECK(current_context(&context));
  if (!id)
    return CUDA_ERROR_INVALID_VALUE;
  *id = context->id;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_known(context));
  context_stack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (context_stack().empty())
    return CUDA_ERROR_INVALID_CONTEXT;
  if (context)
    *context = context_stack().back();
  context_stack().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (!device)
    return CUDA_ERROR_INVALID_VALUE;
  if (context_stack().empty())
    return CUDA_ERROR_INVALID_CONTEXT;
  *device = context_stack().back()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
  STAND_IN_CALL();
  STAND_IN_CHECK(check_initialized());
  if (!version)
    return CUDA_ERROR_INVALID_VALUE;
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned *flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!flags)
    return CUDA_ERROR_INVALID_VALUE;
  *flags = context->flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  context->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (!value)
    return CUDA_ERROR_INVALID_VALUE;
  *value = 1024;
  return limit < CU_LIMIT_MAX ? CUDA_SUCCESS : CUDA_ERROR_UNSUPPORTED_LIMIT;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  return limit < CU_LIMIT_MAX ? CUDA_SUCCESS : CUDA_ERROR_UNSUPPORTED_LIMIT;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  if (least)
    *least = 0;
  if (greatest)
    *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_context_not_captured(context));
  STAND_IN_CHECK(check_not_capturing());
  wait_for_context(context);
  return CUresult(context->error.load());
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_known(peer));
  if (flags)
    return CUDA_ERROR_INVALID_VALUE;
  if (!peer->alive || peer == context)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (!peers_reach_each_other(context->device, peer->device))
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  if (context->peers[peer->device].exchange(true))
    return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  STAND_IN_CALL();
  CUcontext context;
  STAND_IN_CHECK(current_context(&context));
  STAND_IN_CHECK(check_known(peer));
  if (!context->peers[peer->device].exchange(false))
    return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  return CUDA_SUCCESS;
}
