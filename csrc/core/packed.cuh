// Pack<T>: the unit of work as it lies in memory, 16 bytes on a GPU and a cache line on the host. An extent
// says how much of it exists: Whole, moved by vector accesses, or Part, moved element by element.
#pragma once

#include "element.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA
constexpr u32 kPackBytes = FA_CUDA_PACK_BYTES;
#else
constexpr u32 kPackBytes = FA_HOST_PACK_BYTES;
#endif

template <class T>
constexpr u32 kPackLanes = kPackBytes / sizeof(T);

template <class T>
struct Pack {
  using Small = typename Convert<T>::Small;
  static constexpr u32 units = kPackBytes / sizeof(Small);
  Small unit[units];
};

template <class T>
using PackLanes = Lanes<typename Element<T>::Accumulate, kPackLanes<T>>;

struct Whole {};
struct Part {
  u32 lanes;
};

template <class T>
FA_FN Pack<T> load(const T *from, Whole) {
  Pack<T> pack;
#if FA_CUDA
  *reinterpret_cast<uint4 *>(&pack) = *reinterpret_cast<const uint4 *>(from);
#else
  __builtin_memcpy(&pack, from, kPackBytes);
#endif
  return pack;
}

template <class T>
FA_FN void store(T *to, const Pack<T> &pack, Whole) {
#if FA_CUDA
  *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(&pack);
#else
  __builtin_memcpy(to, &pack, kPackBytes);
#endif
}

template <class T>
FA_FN Pack<T> load(const T *from, Part part) {
  Pack<T> pack = {};
#if FA_CUDA
  // Constant indices after unrolling, so that the pack stays in registers.
  FA_UNROLL
  for (u32 i = 0; i < kPackLanes<T>; ++i) {
    if (i < part.lanes)
      pack.unit[i] = reinterpret_cast<const typename Pack<T>::Small *>(from)[i];
  }
#else
  __builtin_memcpy(&pack, from, part.lanes * sizeof(T));
#endif
  return pack;
}

template <class T>
FA_FN void store(T *to, const Pack<T> &pack, Part part) {
#if FA_CUDA
  FA_UNROLL
  for (u32 i = 0; i < kPackLanes<T>; ++i) {
    if (i < part.lanes)
      reinterpret_cast<typename Pack<T>::Small *>(to)[i] = pack.unit[i];
  }
#else
  __builtin_memcpy(to, &pack, part.lanes * sizeof(T));
#endif
}

template <class T>
FA_FN PackLanes<T> widen(const Pack<T> &pack) {
  PackLanes<T> lanes;
  FA_UNROLL
  for (u32 i = 0; i < Pack<T>::units; ++i)
    lanes.unit[i] = Convert<T>::widen(pack.unit[i]);
  return lanes;
}

template <class T>
FA_FN Pack<T> narrow(const PackLanes<T> &lanes) {
  Pack<T> pack;
  FA_UNROLL
  for (u32 i = 0; i < Pack<T>::units; ++i)
    pack.unit[i] = Convert<T>::narrow(lanes.unit[i]);
  return pack;
}

// True where vector accesses at this address are legal; packs keep it true all through a buffer.
FA_FN bool pack_aligned(const void *address) {
#if FA_CUDA
  return reinterpret_cast<u64>(address) % kPackBytes == 0;
#else
  (void)address;
  return true;
#endif
}

// A run of packs of a message: packs first..first + length, of which the message's last may be partial.
struct Span {
  u64 first;
  u64 length;
};

template <class T>
FA_FN u64 packs_of(u64 count) {
  return (count + kPackLanes<T> - 1) / kPackLanes<T>;
}

// The packs that rank r owns in a two-shot.
FA_FN Span slice_of(u64 packs, u32 world, u32 r) {
  const u64 first = packs * r / world;
  return {first, packs * (r + 1) / world - first};
}

// body(element offset, pack index, extent) for one pack of a message of `count` elements. `vector`: all
// addresses that body touches are pack_aligned.
template <class T, class Body>
FA_FN void with_extent(u64 pack, u64 count, bool vector, Body body) {
  const u64 offset = pack * kPackLanes<T>;
  const u64 left = count - offset;
  if (vector && left >= kPackLanes<T>) {
    body(offset, pack, Whole{});
  } else {
    body(offset, pack, Part{left < kPackLanes<T> ? u32(left) : kPackLanes<T>});
  }
}

// The same for this block's share of a span.
template <class T, class Block, class Body>
FA_FN void for_each_pack(const Block &block, Span span, u64 count, bool vector, Body body) {
  block.for_each(span.length, [&](u64 i) { with_extent<T>(span.first + i, count, vector, body); });
}

} // namespace FA_NAMESPACE
