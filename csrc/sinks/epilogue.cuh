// Epilogues: what is done with a result on its way into a sink, and after it. A protocol takes one as an
// argument.
//
// What an epilogue has to have:
//
//   partition()  divides the message so that each block has all that it needs at once: packs, or whole rows.
//   into()       wraps the sink that the protocol stores or sends a result by: a result that is gathered from
//                its owner has been through the epilogue there, once.
//   into_rows()  the same in a pull, whose results come in ascending order: rows are complete one by one.
//   into_gathered()  wraps, on a GPU, the sink by which a rank stores the sums of a two-shot push.
//   gather()     copies the slices that the peers have reduced, in the last phase of a two-shot pull; on a
//                GPU this rank's own slices to its staging, too.
//   finish()     is what each rank does with all results, after the last phase, when they are at the launch's
//                output and nobody reads an input any more: each block with those that it has stored, of so
//                many slices.
#pragma once

#include "../core/pack.cuh"
#include "../core/region.cuh"

namespace FA_NAMESPACE {

// Whether results that have been through an epilogue are still sums, of which none is -0.
template <class Epilogue>
constexpr bool kKeepsSums = false;

// Nothing is done with a result.
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
                    const u64 *sources, const Slices &slices, u32 world, u64 bytes) const {
    copy_slices(partition, block, to, sources, slices, launch.rank, world, bytes, Target::kOutput);
  }

  template <class Block, class Partition>
  FA_FN void finish(const FaLaunch &, Block &, Partition, u64, u32) const {}
};
template <>
constexpr bool kKeepsSums<Plain> = true;

} // namespace FA_NAMESPACE
