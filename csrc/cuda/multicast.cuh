// In-switch reduction: a thread handles 16 bytes of each window. 16-bit floats are added in f32.
#pragma once

#include "../core/multicast.cuh"
#include "../reduce/element.cuh"

namespace FA_NAMESPACE {

// Relaxed: barriers order these accesses. Only whole packs: bytes of a window beyond the end of the message
// are summed too, but not stored in the output.
#define FA_MULTICAST_LOAD(element, type)                                                                     \
  FA_FN Pack load_sum(element, const u8 *from) {                                                             \
    Pack pack;                                                                                               \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0, %1, %2, %3}, [%4];"                 \
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])            \
                 : "l"(from)                                                                                 \
                 : "memory");                                                                                \
    return pack;                                                                                             \
  }

#if __CUDA_ARCH__ >= 900

FA_MULTICAST_LOAD(F16, ".acc::f32.v4.f16x2")
FA_MULTICAST_LOAD(Bf16, ".acc::f32.v4.bf16x2")

FA_FN Pack load_sum(float, const u8 *from) {
  float lane[4];
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(lane[0]), "=f"(lane[1]), "=f"(lane[2]), "=f"(lane[3])
               : "l"(from)
               : "memory");
  return {__float_as_uint(lane[0]), __float_as_uint(lane[1]), __float_as_uint(lane[2]),
          __float_as_uint(lane[3])};
}

// The store moves bits, whatever the element type.
FA_FN void store_to_all(u8 *to, Pack pack) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(pack.word[0])), "f"(__uint_as_float(pack.word[1])),
               "f"(__uint_as_float(pack.word[2])), "f"(__uint_as_float(pack.word[3]))
               : "memory");
}

template <class T>
class MulticastSum {
public:
  template <class Block>
  FA_FN void to_output(const FaLaunch &launch, const Block &block, const LaunchState &state, Span span,
                       u64 bytes) const {
    const u8 *from = multicast(launch, state);
    u8 *to = reinterpret_cast<u8 *>(launch.output);
    for_each_pack(block, span, bytes, pack_aligned(u64(to)), [&](u64 at, Index, auto extent) {
      store(to + at, load_sum(T{}, from + at), extent, sizeof(T));
    });
  }

  template <class Block>
  FA_FN void to_windows(const FaLaunch &launch, const Block &block, const LaunchState &state, Span span,
                        u64) const {
    u8 *window = multicast(launch, state);
    block.for_each(span.length, [&](Index i) {
      u8 *at = window + u64(span.first + i) * kPackBytes;
      store_to_all(at, load_sum(T{}, at));
    });
  }

private:
  static FA_FN u8 *multicast(const FaLaunch &launch, const LaunchState &state) {
    return reinterpret_cast<u8 *>(launch.multicast + window_offset(launch, state));
  }
};

#endif

} // namespace FA_NAMESPACE
