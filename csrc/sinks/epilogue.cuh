// Epilogues: what is done with a result before it reaches a sink, and after the last phase. Algorithms take
// one as an argument.
//
// An epilogue has these members:
//
//   partition()      divides the message so that each block has what it needs: packs, or whole rows.
//   into()           wraps the sink of reduced results. A slice that peers gather has been through it once,
//                    at its owner.
//   into_rows()      as into(), in a pull, whose results come in ascending order, row by row.
//   into_gathered()  wraps, on a GPU, the sink of gathered results of a two-shot push.
//   gather()         copies the slices that the peers have reduced, in the last phase of a two-shot pull. A
//                    GPU also stages this rank's slices with it.
//   finish()         runs after the last phase, when all results are at the launch's output and no rank reads
//                    an input any more. Each block handles the results that it has stored, of all slices.
#pragma once

#include "../core/pack.cuh"
#include "../core/region.cuh"

namespace FA_NAMESPACE {

// Whether the results of an epilogue are still sums, none of which is -0.
template <class Epilogue>
constexpr bool kKeepsSums = false;

// The epilogue that does nothing.
struct Plain {
  template <class Reduce>
  FA_FN auto partition(const FaLaunch &, const Reduce &reduce) const {
    return reduce.partition();
  }

  template <class Sink>
  FA_FN Sink into(const Sink &sink) const {
    return sink;
  }

  template <class Sink>
  FA_FN Sink into_rows(const Sink &sink) const {
    return sink;
  }

  template <class Sink>
  FA_FN Sink into_gathered(const Sink &sink) const {
    return sink;
  }

  template <class Block, class Partition, class Slices>
  FA_FN void gather(const FaLaunch &launch, const Block &block, Partition partition, u8 *to,
                    const u64 *addresses, const Slices &slices, u32 world, u64 bytes) const {
    copy_slices(partition, block, to, addresses, slices, launch.rank, world, bytes, Target::kOutput);
  }

  template <class Block, class Partition>
  FA_FN void finish(const FaLaunch &, Block &, Partition, u64, u32) const {}
};

// Whether results are only stored.
template <class>
constexpr bool kIsPlain = false;
template <>
constexpr bool kIsPlain<Plain> = true;
template <>
constexpr bool kKeepsSums<Plain> = true;

} // namespace FA_NAMESPACE
