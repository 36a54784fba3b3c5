// The sink that stores a result at one or two addresses.
//
// Every sink has these members. On a GPU, where a result is in registers: put(), for each pack. On the host,
// where the typed loop stores the result: to(at), the address of byte `at` of the message; also(), a second
// address of the message, or null; most(pack), the longest run of packs that may begin at a pack; and done(),
// called after each run.
#pragma once

#include "../core/pack.cuh"

namespace FA_NAMESPACE {

class Store {
public:
  FA_FN explicit Store(u8 *to, u8 *also = nullptr) : to_(to), also_(also) {}

  FA_FN u8 *to(u64 at = 0) const { return to_ + at; }
  FA_FN u8 *also() const { return also_; }
  // Returns the bitwise or of both addresses, from which their alignment follows.
  FA_FN u64 addresses() const { return u64(to_) | u64(also_); }

#if FA_CUDA
  template <class Extent>
  FA_FN void put(u64 at, Index, const Pack &pack, Extent extent, u32 granule) const {
    store(to_ + at, pack, extent, granule);
    if (also_ != nullptr)
      store(also_ + at, pack, extent, granule);
  }
#else
  u64 most(u64) const { return ~u64(0); }
  FA_FN void done(Span, u64) const {}
#endif

private:
  u8 *to_, *also_;
};

} // namespace FA_NAMESPACE
