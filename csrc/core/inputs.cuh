// The inputs of a pull: where each rank's are, and copying one's own to where peers can read it.
#pragma once

#include "barrier.cuh"
#include "pack.cuh"

namespace FA_NAMESPACE {

// Bytes of an element of a type.
FA_FN u32 element_bytes(u32 dtype) {
  // A digit for each, as constants are in a GPU's code.
#define FA_DIGIT(code, number, name, element, bytes, ...) | u64(bytes) << 4 * number
  constexpr u64 kBytes = 0 FA_TYPES(FA_DIGIT, );
  return u32(kBytes >> 4 * dtype) & 0xF;
}

// Of the whole message, or of this rank's share.
FA_FN u64 message_bytes(const FaLaunch &launch) { return launch.count * element_bytes(launch.dtype); }

// Where every rank's input is, after the start barrier.
class Inputs {
public:
  FA_FN Inputs(const u64 *words, u32 world) : words_(words) {
    FA_ROLL
    for (u32 r = 0; r < world; ++r)
      all_ |= words[r];
  }

  FA_FN const u8 *at(u32 r) const { return reinterpret_cast<const u8 *>(words_[r] & ~kDirect); }
  // All address bits that are set in any.
  FA_FN u64 addresses() const { return all_ & ~kDirect; }
  // Some rank's own buffer is read, so nobody may return before all have read.
  FA_FN bool direct() const { return (all_ & kDirect) != 0; }

  // Addresses have 57 bits at most.
  static constexpr u64 kDirect = u64(1) << 63;

private:
  const u64 *words_;
  u64 all_ = 0;
};

// The start barrier of a pull, after which every thread has all ranks' inputs in the block's scratch.
// `staged` and `whole` are the bytes to skip: in what a rank staged, and in an input that is read where it
// is.
template <class Block, class Meanwhile>
FA_FN bool meet_for_inputs(const FaLaunch &launch, Block &block, Turn turn, u64 staged, u64 whole,
                           Meanwhile meanwhile) {
  return barrier(launch, block, kStart, turn, meanwhile, [&](u32 r) {
    const u64 source =
        r == launch.rank
            ? launch.source
            : load_relaxed(&signal_of(launch, launch.rank, kStart, turn, block.index(), r)->source);
    u64 address;
    if (r == launch.rank) {
      address = launch.input + whole;
    } else if (source == 0) {
      address = u64(staging(launch, r, turn)) + staged;
    } else {
      address = registered_address(launch, r, source);
      if (address == 0) {
        record_failure(launch, FA_UNKNOWN_BUFFER, 0, turn.epoch);
        return false;
      }
      address += whole;
    }
    block.scratch()[r] = address | (source != 0 ? Inputs::kDirect : 0);
    return true;
  });
}

template <class Block>
FA_FN bool meet_for_inputs(const FaLaunch &launch, Block &block, Turn turn) {
  return meet_for_inputs(launch, block, turn, 0, 0, [] {});
}

// Copies a span of this rank's input to its staging, unless peers read the input itself.
template <class Packs = Parts, class Block>
FA_FN void stage_input(const FaLaunch &launch, const Block &block, Span span, Turn turn, u64 bytes) {
  if (launch.source == 0)
    copy<Packs>(block, staging(launch, launch.rank, turn), reinterpret_cast<const u8 *>(launch.input), span,
                bytes);
}

// The same, and copies it to this rank's output as well, unless it is there. What peers read where it is must
// still be copied there: they need not wait for that.
template <class Block>
FA_FN void stage_and_keep(const FaLaunch &launch, const Block &block, Span span, Turn turn, u64 bytes,
                          u8 *output) {
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  if (launch.source != 0 || input == output)
    return stage_input(launch, block, span, turn, bytes);
  copy_twice(block, staging(launch, launch.rank, turn), output, input, span, bytes);
}

template <class Block>
FA_FN void keep_unstaged(const FaLaunch &launch, const Block &block, Span span, u64 bytes, u8 *output) {
  const u8 *input = reinterpret_cast<const u8 *>(launch.input);
  if (launch.source != 0 && input != output)
    copy(block, output, input, span, bytes);
}

} // namespace FA_NAMESPACE
