// Streaming stores: sums of large calls that bypass the caches on their way to the output. A plain store
// first reads the line that it overwrites, and puts it into the caches, where it takes the place of staging.
// What is gathered does not need them: copy_out() leaves long copies to the C library, which does not read
// the lines either.
//
// The output is the caller's memory, which no peer reads during the call, so streaming stores take no part in
// the protocols. But they are weakly ordered: on x86 a later store, even one that releases, may become
// visible before them. A worker thread would report its end, or the caller pass the output to another thread,
// before the results are there. So a fence follows the phase that streams, also if a later phase fails: the
// memory may be another's then (lab/litmus/programs/pulls/streamed_output.litmus).
#pragma once

#include "../core/pack.cuh"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h> // shorter
#endif

namespace FA_NAMESPACE {

#if defined(__x86_64__)
// Copies with streaming stores, except parts of cache lines. The caller fences.
inline void stream(u8 *to, const u8 *from, u64 bytes) {
  constexpr u64 kLine = 64;
  const u64 before = (kLine - u64(to) % kLine) % kLine, head = before < bytes ? before : bytes;
  __builtin_memcpy(to, from, head);
  u64 at = head;
  for (; at + kLine <= bytes; at += kLine) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
#elif defined(__AVX2__)
    for (u64 i = at; i < at + kLine; i += sizeof(__m256i))
      _mm256_stream_si256(reinterpret_cast<__m256i *>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i)));
#else
    for (u64 i = at; i < at + kLine; i += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i *>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)));
#endif
  }
  __builtin_memcpy(to + at, from + at, bytes - at);
}
inline void fence_streams() { _mm_sfence(); }
#else
// Other architectures have no such stores that were measured.
inline void stream(u8 *to, const u8 *from, u64 bytes) { __builtin_memcpy(to, from, bytes); }
inline void fence_streams() {}
#endif

// The sink that stores results in staging, and streams them from there to the output while they are in the
// first-level cache. The caller fences.
class StreamedStore {
public:
  StreamedStore(u8 *staged, u8 *output) : staged_(staged), output_(output) {}

  u8 *to(u64 at = 0) const { return staged_ + at; }
  u8 *also() const { return nullptr; }
  u64 most(u64) const { return kRun; }
  void done(Span packs, u64 bytes) const {
    const u64 first = packs.first * kPackBytes, end = first + packs.length * kPackBytes;
    stream(output_ + first, staged_ + first, (end < bytes ? end : bytes) - first);
  }

private:
  static constexpr u64 kRun = 4096 / kPackBytes;
  u8 *staged_, *output_;
};

} // namespace FA_NAMESPACE
