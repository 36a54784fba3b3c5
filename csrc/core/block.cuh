// The execution context of kernels: a Block is a thread block on a GPU, a worker thread on the host.
//
// Block b of every rank works on the same elements for equal n and count(), because only blocks of the same
// index exchange the flags of a launch. (Packets do not need this rule: cuda/team_rows.cuh.)
#pragma once

#include "memory.cuh"

namespace FA_NAMESPACE {

// Type of pack indices. A GPU's integer arithmetic is 32 bits wide; there a region holds fewer than 2^31
// packs (`Cuda::MAX_BYTES`), so that an index plus a stride does not overflow.
#if FA_CUDA
using Index = u32;
#else
using Index = u64;
#endif

#if FA_CUDA

class Block {
public:
  FA_FN u32 index() const { return blockIdx.x; }
  FA_FN u32 count() const { return gridDim.x; }

  // Start and stride of a grid-stride loop, for this thread.
  FA_FN Index first() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  FA_FN Index stride() const { return gridDim.x * blockDim.x; }

  // Calls body(i) for this block's share of 0..n.
  template <class Body>
  FA_FN void for_each(Index n, Body body) const {
    FA_NO_UNROLL
    for (Index i = first(); i < n; i += stride())
      body(i);
  }

  // Calls body(i) for each i of begin..end in this block's share of 0..n. The share does not depend on begin
  // and end, so one thread handles all accesses to element i.
  template <class Body>
  FA_FN void for_each_within(Index, Index begin, Index end, Body body) const {
    Index i = first();
    if (i < begin)
      i += (begin - i + stride() - 1) / stride() * stride();
    FA_NO_UNROLL
    for (; i < end; i += stride())
      body(i);
  }

  // Calls body(i) for each i of 0..n, on the threads of this block alone.
  template <class N, class Body>
  FA_FN void for_each_in_block(N n, Body body) const {
    FA_NO_UNROLL
    for (N i = threadIdx.x; i < n; i += blockDim.x)
      body(i);
  }

  // Calls body(i, stride), which handles i, i + stride, ..., `Times` indices in all; the last ones may be n
  // or more.
  template <u32 Times, class Body>
  FA_FN void for_several_in_block(u32 n, Body body) const {
    FA_NO_UNROLL
    for (u32 i = threadIdx.x; i < n; i += Times * blockDim.x)
      body(i, blockDim.x);
  }

  // Calls body(i) on thread i of this block, for i < n. n is at most the number of threads.
  template <class Body>
  FA_FN void lanes(u32 n, Body body) const {
    if (threadIdx.x < n)
      body(threadIdx.x);
  }

  // Calls body like lanes(), then syncs. Returns true on every thread if body was true on all of them.
  template <class Body>
  FA_FN bool all_lanes(u32 n, Body body) const {
    return __syncthreads_and(threadIdx.x < n ? body(threadIdx.x) : true);
  }

  // Syncs. Returns true on every thread if `value` is true on all of them.
  FA_FN bool all(bool value) const { return __syncthreads_and(value); }

  // Returns whether one thread does all the work, so that nothing need be shared between threads.
  FA_FN constexpr bool has_one_thread() const { return false; }

  // Sets `count` words, by one thread.
  FA_FN void fill(u32 *words, u32 count, u32 value) const {
    for (u32 i = 0; i < count; ++i)
      words[i] = value;
  }

  FA_FN void sync() const { __syncthreads(); }

  // Returns two words for each rank, visible to all threads of the block after a sync.
  FA_FN u64 *scratch() const {
    __shared__ u64 words[2 * FA_MAX_RANKS];
    return words;
  }
};

#else

class Block {
public:
  Block(u32 index, u32 count) : index_(index), count_(count) {}

  u32 index() const { return index_; }
  u32 count() const { return count_; }

  // Returns this block's share of 0..n, contiguous for vectorisation and prefetching. A single block skips
  // the division, which is measurable in small calls.
  struct Share {
    Index first, last;
  };
  FA_FN Share share(Index n) const {
    return count_ == 1 ? Share{0, n} : Share{n * index_ / count_, n * (index_ + 1) / count_};
  }

  template <class Body>
  FA_FN void for_each_within(Index n, Index begin, Index end, Body body) const {
    const Share own = share(n);
    const Index stop = own.last < end ? own.last : end;
    for (Index i = own.first < begin ? begin : own.first; i < stop; ++i)
      body(i);
  }

  template <class N, class Body>
  FA_FN void for_each_in_block(N n, Body body) const {
    for (N i = 0; i < n; ++i)
      body(i);
  }

  template <class Body>
  FA_FN void lanes(u32 n, Body body) const {
    for (u32 i = 0; i < n; ++i)
      body(i);
  }

  template <class Body>
  FA_FN bool all_lanes(u32 n, Body body) const {
    bool all = true;
    for (u32 i = 0; i < n; ++i)
      all = body(i) && all;
    return all;
  }

  FA_FN bool all(bool value) const { return value; }

  FA_FN bool has_one_thread() const { return count_ == 1; }

  FA_FN void fill(u32 *words, u32 count, u32 value) const {
    typedef u32 Line __attribute__((vector_size(64)));
    constexpr u32 kWords = sizeof(Line) / sizeof(u32);
    const Line line = Line{} + value;
    u32 i = 0;
    for (; count - i >= kWords; i += kWords)
      __builtin_memcpy(words + i, &line, sizeof line);
    for (; i < count; ++i)
      words[i] = value;
  }

  FA_FN void sync() const {}

  FA_FN u64 *scratch() { return scratch_; }

private:
  u32 index_;
  u32 count_;
  u64 scratch_[2 * FA_MAX_RANKS] = {};
};

#endif

} // namespace FA_NAMESPACE
