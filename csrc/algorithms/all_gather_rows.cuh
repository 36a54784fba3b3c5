// All-gather of quantised rows: every rank gets the numbers of all ranks' rows, and their scales in the
// layout of one message.
//
//   own numbers, own scales -> own staging | start barrier | copy the peers' numbers and scales
//
// Numbers and scales are always staged: a start signal has room for one address. As in a one-shot pull,
// staged data needs no second barrier.
#pragma once

#include "../core/inputs.cuh"
#include "../reduce/scales.cuh"
#if !FA_CUDA
#include "../host/scale_runs.hpp"
#endif

namespace FA_NAMESPACE {

// Where a rank stages the scales of its rows, behind `bytes` bytes of numbers.
FA_FN u64 scales_behind(u64 bytes) {
  return (bytes + FA_SCALES_ALIGNMENT - 1) & ~u64(FA_SCALES_ALIGNMENT - 1);
}

#if FA_CUDA
// Calls body(row, word) for each word of the scales of `rows` rows that belongs to this block. Blocks of the
// same number on different ranks have the same words.
template <class Block, class Body>
FA_FN void for_each_scale(const Block &block, u32 rows, u32 words, Body body) {
  block.for_each(rows * words, [&](u32 i) { body(i / words, i % words); });
}

// Stages the scales of this rank's rows row by row, and stores them in the output.
template <class Block>
FA_FN void stage_scales(const Block &block, const FaGatheredRows &gathered, u32 first, u32 rows, u8 *staged) {
  const u32 words = gathered.words;
  for_each_scale(block, rows, words, [&](u32 row, u32 word) {
    const u32 scales = load_scales(gathered.from, row, word);
    reinterpret_cast<u32 *>(staged)[row * words + word] = scales;
    store_scales(gathered.to, first + row, word, scales);
  });
}

// Address of a word of the scales of a rank's row in the output; `first`: first byte of the rank's numbers.
FA_OUTLINED u8 *gathered_word(const FaGatheredRows &gathered, u64 first, u32 row, u32 word) {
  return word_address(gathered.to, u32(first / gathered.row_bytes) + row, word);
}

// Copies the numbers and scales of the peers in steps `step`, ..., `step` + N - 1.
template <u32 N, class Block>
FA_FN void gather_rows(const FaLaunch &launch, const Block &block, const FaGatheredRows &gathered,
                       const Inputs &inputs, u32 step) {
  const u32 words = gathered.words, row_bytes = gathered.row_bytes;
  const auto run_of = [&](u32 k) { return run_of_share(launch, inputs, step + k, 1); };
  const u8 *staged[N];
  u8 *to[N];
  u32 bytes[N], scales[N] = {}, most = 0, row = 0, word = 0;
  FA_UNROLL
  for (u32 k = 0; k < N; ++k) {
    const Run run = run_of(k);
    staged[k] = run.from + scales_behind(run.bytes);
    bytes[k] = u32(run.bytes);
    most = max(most, bytes[k]);
  }
  const u32 all_words = most / row_bytes * words;
  // Word i of each share is of the same row of the share, if the share has that row. Addresses are computed
  // while the loads are in flight.
  copy_runs<N>(
      block, run_of, all_words,
      [&](Index i) {
        if (i >= all_words)
          return;
        row = i / words, word = i - row * words;
        FA_UNROLL
        for (u32 k = 0; k < N; ++k)
          load_if(row * row_bytes < bytes[k], staged[k] + u64(i) * sizeof(u32), &scales[k]);
        FA_UNROLL
        for (u32 k = 0; k < N; ++k) {
          const u64 first = launch.shares[peer_in_step(launch, step + k)].first;
          to[k] = gathered_word(gathered, first, row, word);
        }
      },
      [&](Index i) {
        if (i >= all_words)
          return;
        FA_UNROLL
        for (u32 k = 0; k < N; ++k) {
          if (row * row_bytes < bytes[k])
            store_scales(gathered.to, to[k], word, scales[k]);
        }
      });
}
#endif

// If the call is in place, a rank's numbers are its own share of the output, which no other copy overwrites.
template <class Block>
FA_FN void all_gather_rows(const FaLaunch &launch, Block &block, const FaGatheredRows &gathered) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call(launch, block, state))
    return;
  const auto rows_of = [&](u32 r) { return u32(launch.shares[r].count) / gathered.row_bytes; };
  const auto first_of = [&](u32 r) { return u32(launch.shares[r].first / gathered.row_bytes); };
  const Span own = all_packs(launch.count);
  u8 *output = reinterpret_cast<u8 *>(launch.output), *kept = output + launch.shares[launch.rank].first;
  stage_and_copy(launch, block, own, state, launch.count, kept);
  u8 *staged = staging(launch, launch.rank, state) + scales_behind(launch.count);
  stage_scales(block, gathered, first_of(launch.rank), rows_of(launch.rank), staged);
  if (!exchange_inputs(launch, block, state))
    return;

  const Inputs inputs(block.scratch(), launch.world);
#if FA_CUDA
  if (launch.world == 2) {
    gather_rows<1>(launch, block, gathered, inputs, 1);
  } else {
    FA_NO_UNROLL
    for (u32 step = 1; step < launch.world; step += kPeersAtOnce)
      gather_rows<kPeersAtOnce>(launch, block, gathered, inputs, step);
  }
#else
  FA_NO_UNROLL
  for (u32 step = 1; step < launch.world; ++step) {
    // Each rank begins with its right neighbour, so that the ranks do not all read one rank at once.
    const u32 r = (launch.rank + step) % launch.world;
    const u64 bytes = launch.shares[r].count;
    copy_out(block, output + launch.shares[r].first, inputs.at(r), all_packs(bytes), bytes);
    place_scales(block, gathered, first_of(r), rows_of(r), inputs.at(r) + scales_behind(bytes));
  }
#endif
  end_launch(launch, block, state);
}

} // namespace FA_NAMESPACE
