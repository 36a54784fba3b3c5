// Names and texts of result codes, and symbols by name.
#include "driver.h"

#include <dlfcn.h>

CUresult cuGetErrorName(CUresult result, const char **name) {
  STAND_IN_CALL();
  if (!name)
    return CUDA_ERROR_INVALID_VALUE;
  *name = nullptr;
  switch (result) {
#define STAND_IN_NAME(code, value, text)                                                                     \
  case code: *name = #code; return CUDA_SUCCESS;
    STAND_IN_RESULTS(STAND_IN_NAME)
#undef STAND_IN_NAME
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
  STAND_IN_CALL();
  if (!text)
    return CUDA_ERROR_INVALID_VALUE;
  *text = nullptr;
  switch (result) {
#define STAND_IN_TEXT(code, value, words)                                                                    \
  case code: *text = words; return CUDA_SUCCESS;
    STAND_IN_RESULTS(STAND_IN_TEXT)
#undef STAND_IN_TEXT
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Returns the newest variant of a symbol, as for a program built for the newest version.
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int, uint64_t, uint32_t *status) {
  STAND_IN_CALL();
  if (!symbol || !function)
    return CUDA_ERROR_INVALID_VALUE;
  Dl_info self;
  *function = nullptr;
  if (dladdr(reinterpret_cast<void *>(&cuGetErrorName), &self)) {
    if (void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
      for (const char *suffix : {"_v4", "_v3", "_v2", ""}) {
        if (!*function)
          *function = dlsym(library, (std::string(symbol) + suffix).c_str());
      }
      dlclose(library);
    }
  }
  constexpr uint32_t kFound = 0, kSymbolNotFound = 1;
  if (status)
    *status = *function ? kFound : kSymbolNotFound;
  return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  STAND_IN_CALL();
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

CUresult cuProfilerStart() {
  STAND_IN_CALL();
  return CUDA_SUCCESS;
}
CUresult cuProfilerStop() {
  STAND_IN_CALL();
  return CUDA_SUCCESS;
}
