// Inputs of a pull: where each rank's input is, and how a rank stages its own.
#pragma once

#include "barrier.cuh"
#include "pack.cuh"

namespace FA_NAMESPACE {

// Size of an element in bytes.
FA_FN u32 element_bytes(u32 dtype) {
  // One hexadecimal digit for each type: a GPU's code has the number as an immediate.
#define FA_DIGIT(code, number, name, element, bytes, ...) | u64(bytes) << 4 * number
#define FA_FITS_DIGIT(code, number, name, element, bytes, ...)                                               \
  static_assert(number < 16 && bytes < 16, "a type has one hexadecimal digit of 64 bits");
  FA_TYPES(FA_FITS_DIGIT, )
  constexpr u64 kBytes = 0 FA_TYPES(FA_DIGIT, );
  return u32(kBytes >> 4 * dtype) & 0xF;
}

// Bytes of the whole message, or of this rank's share.
FA_FN u64 message_bytes(const FaLaunch &launch) { return launch.count * element_bytes(launch.dtype); }

// Addresses of all ranks' inputs, after the start barrier. The block's scratch has the addresses by rank,
// then the sources of FaSignal by rank.
class Inputs {
public:
  FA_FN Inputs(const u64 *words, u32 world) : words_(words), world_(world) {}

  FA_FN const u8 *at(u32 r) const { return reinterpret_cast<const u8 *>(words_[r]); }
  // Returns the bitwise or of all addresses, from which their alignment follows.
  FA_FN u64 addresses() const { return all_of(words_); }
  // Returns whether some rank's own buffer is read, so that no rank may return before all have read.
  FA_FN bool any_registered() const { return all_of(words_ + FA_MAX_RANKS) != 0; }

private:
  const u64 *words_;
  u32 world_;

  FA_FN u64 all_of(const u64 *words) const {
    u64 all = 0;
    for (u32 r = 0; r < world_; ++r)
      all |= words[r];
    return all;
  }
};

// Finds the input of rank r, on the lane that has waited for its start signal. `*address` is r's staging;
// it is replaced if the input is elsewhere. This rank's own input is staged only if `own_staged`.
// `input_offset` is the offset in inputs that are not staged.
FA_FN Failure find_input(const FaLaunch &launch, u32 r, const Arrival &arrival, u64 input_offset,
                         bool own_staged, u64 *address, u64 *source) {
  *source = launch.source;
  if (r == launch.rank) {
    if (!own_staged)
      *address = launch.input + input_offset;
    return {};
  }
  *source = arrival.source();
  if (*source == 0)
    return {};
  // An unknown buffer is not the fault of any rank.
  if (!find_registered(launch, r, *source, address))
    return {FA_UNKNOWN_BUFFER, 0};
  *address += input_offset;
  return {};
}

// Sets rank r's address in the block's scratch for Inputs: at the start barrier its input, as in
// find_input(); at the second barrier what it has staged.
template <class Block>
FA_FN Failure set_input(const FaLaunch &launch, Block &block, BarrierStage stage, u32 r,
                        const Arrival &arrival, const u8 *staged, bool own_staged = false,
                        u64 input_offset = 0) {
  u64 address = u64(staged), source = 0;
  if (stage == kStart) {
    const Failure failure = find_input(launch, r, arrival, input_offset, own_staged, &address, &source);
    if (!failure.none())
      return failure;
  }
  block.scratch()[r] = address;
  block.scratch()[FA_MAX_RANKS + r] = source;
  return {};
}

// The start barrier of a pull. Afterwards every thread has all ranks' inputs in the block's scratch.
// `staging_offset` is the offset in staging, `input_offset` the one in inputs that are not staged.
template <class Block>
FA_FN bool exchange_inputs(const FaLaunch &launch, Block &block, const LaunchState &state,
                           bool own_staged = false, u64 staging_offset = 0, u64 input_offset = 0) {
  return barrier(
      launch, block, launch.world, kStart, state, [] {},
      [&](u32 r, const Arrival &arrival) {
        return set_input(launch, block, kStart, r, arrival, staging(launch, r, state) + staging_offset,
                         own_staged, input_offset);
      });
}

// Copies a span of this rank's input to its staging, unless peers read the input itself.
template <class Block, class Partition = PackPartition>
FA_FN void stage_input(const FaLaunch &launch, const Block &block, Span span, const LaunchState &state,
                       u64 bytes, Partition partition = {}) {
  if (launch.source == 0)
    copy(block, staging(launch, launch.rank, state), reinterpret_cast<const u8 *>(launch.input), span, bytes,
         partition);
}

// Stages a span of the input of a reduction. Inputs that have to be premultiplied are always staged.
template <class Reduce, class Block, class Partition>
FA_FN void stage_reduced(const FaLaunch &launch, const Block &block, const Reduce &reduce, Span span,
                         const LaunchState &state, u64 bytes, Partition partition) {
  if (launch.source == 0)
    reduce.stage(block, staging(launch, launch.rank, state), reinterpret_cast<const u8 *>(launch.input), span,
                 bytes, partition);
}

// Copies a span of this rank's input to its staging and, unless the call is in place, to its output. A
// registered input is not staged: copy_unstaged() copies it to the output later, because the peers need not
// wait for that.
template <class Block>
FA_FN void stage_and_copy(const FaLaunch &launch, const Block &block, Span span, const LaunchState &state,
                          u64 bytes, u8 *output) {
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  if (launch.source != 0 || input == output)
    return stage_input(launch, block, span, state, bytes);
  copy_twice(block, staging(launch, launch.rank, state), output, input, span, bytes);
}

template <class Block>
FA_FN void copy_unstaged(const FaLaunch &launch, const Block &block, Span span, u64 bytes, u8 *output) {
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  if (launch.source != 0 && input != output)
    copy(block, output, input, span, bytes);
}

#if FA_CUDA
// Number of peers whose shares a gather loads together.
constexpr u32 kPeersAtOnce = 4;

// The rank that this one reads in step 1, 2, ... of a gather. Each rank begins with its right neighbour, so
// that the ranks do not all read one rank at once. In steps beyond the last: this rank.
FA_FN u32 peer_in_step(const FaLaunch &launch, u32 step) {
  const u32 r = launch.rank + (step < launch.world ? step : 0);
  return r < launch.world ? r : r - launch.world;
}

// What a gather copies in a step: the peer's share, to its place in the output. Nothing in steps beyond the
// last.
FA_FN Run run_of_share(const FaLaunch &launch, const Inputs &inputs, u32 step, u32 element) {
  const u32 r = peer_in_step(launch, step);
  const FaShare &share = launch.shares[r];
  const u64 count = step < launch.world ? share.count : 0;
  return {reinterpret_cast<u8 *>(launch.output) + share.first * element, inputs.at(r), count * element};
}
#endif

} // namespace FA_NAMESPACE
