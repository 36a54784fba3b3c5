// The sink that stores: a result goes to one place, or to two.
//
// What a sink has to have. On a GPU, where a result is in registers: put(), for each pack. On the host, where
// the typed loop has stored it: to() and also(), the places of what begins at a byte of the message and of
// the message; most(), how many packs a run may have that begins at one; and done(), for each run.
#pragma once

#include "../core/pack.cuh"

namespace FA_NAMESPACE {

class Store {
public:
  FA_FN explicit Store(u8 *to, u8 *also = nullptr) : to_(to), also_(also) {}

  FA_FN u8 *to(u64 at = 0) const { return to_ + at; }
  FA_FN u8 *also() const { return also_; }
  // All address bits that are set in any place.
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
