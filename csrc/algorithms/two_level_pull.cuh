// Two-level pull: a two-shot pull of the host whose ranks are on several sockets, so that few bytes cross the
// link between them. It takes the place of two_shot_pull() in launches that say how many ranks a socket has.
//
//   input -> own staging | start barrier | reduce own part over the socket's ranks -> own staging |
//   second barrier | reduce own slice over the sockets -> output, own staging of the next pull |
//   start barrier | copy the part's other slices from the other sockets -> output, own staging |
//   second barrier | gather the other parts from the socket's ranks
//
// There are as many slices as ranks. Part i is slices i * sockets to (i + 1) * sockets - 1, which the ranks
// at place i of every socket reduce. So a slice crosses the link as a partial sum and as a result, each once
// to every other socket. Partial sums are rounded to the type and added in the order of the sockets: other
// bits than those of direct algorithms, the same on all ranks and in every run.
//
// Orderings: these are two pulls in one launch. Each has two barriers of all ranks, and a generation of
// staging and signals of its own; the number of pulls advances by two. No rank reads an input after the first
// pull's second barrier, as in two_shot_pull(), so the output may be in place. A rank writes only its own
// staging: in the first pull, its own part, which no other rank reads before the second barrier; in the next
// pull, its own slice before the start barrier, and its part's other slices, which ranks read only after the
// second barrier. Every slice is divided among blocks alike in all steps, so that block b reads what blocks b
// have written.
#pragma once

#include "../core/inputs.cuh"
#include "../sinks/store.cuh"

namespace FA_NAMESPACE {

#if !FA_CUDA
template <class Reduce>
void two_level_pull(const FaLaunch &launch, Block &block, const Reduce &reduce) {
  const LaunchState state = begin_launch(launch, block, true);
  if (!same_call<Reduce::compares>(launch, block, state))
    return;
  LaunchState next = state;
  ++next.pulls;
  locate_staging(launch, &next);
  const u32 rank = launch.rank, ranks = reduce.world(), local = launch.socket_ranks, sockets = ranks / local;
  const u32 first = rank / local * local, place = rank % local, socket = rank / local;
  const u64 bytes = reduce.message_bytes(launch);
  const auto partition = reduce.partition();
  const Slices slices = partition.slices(bytes, ranks);
  u8 *output = reinterpret_cast<u8 *>(launch.output);
  const auto slice = [&](u32 part, u32 t) { return slices.of(part * sockets + t); };
  for (u32 part = 0; part < local; ++part)
    for (u32 t = 0; t < sockets && (part != place || reduce.computes_input()); ++t)
      stage_reduced(launch, block, reduce, slice(part, t), state, bytes, partition);
  if (!exchange_inputs(launch, block, state, reduce.computes_input()))
    return;
  for (u32 t = 0; t < sockets; ++t)
    reduce.some_inputs(block, block.scratch() + first, local, false, partition, slice(place, t), bytes,
                       Store(staging(launch, rank, state)));
  if (!barrier(launch, block, kSecond, state))
    return;
  u64 sums[FA_MAX_RANKS];
  for (u32 t = 0; t < sockets; ++t)
    sums[t] = u64(staging(launch, t * local + place, state));
  u8 *results = staging(launch, rank, next);
  reduce.some_inputs(block, sums, sockets, true, partition, slice(place, socket), bytes,
                     Store(results, output));
  if (!barrier(launch, block, kStart, next))
    return;
  for (u32 step = 1; step < sockets; ++step) {
    const u32 t = (socket + step) % sockets;
    copy_twice(block, results, output, staging(launch, t * local + place, next), slice(place, t), bytes);
  }
  if (!barrier(launch, block, kSecond, next))
    return;
  for (u32 step = 1; step < local; ++step) {
    const u32 part = (place + step) % local;
    for (u32 t = 0; t < sockets; ++t)
      copy_out(block, output, staging(launch, first + part, next), slice(part, t), bytes, partition);
  }
  end_launch(launch, block, next);
}
#endif

} // namespace FA_NAMESPACE
