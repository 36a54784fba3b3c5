// Transfers: any number of messages between pairs of ranks in one launch. All channels progress in parallel,
// a chunk at a time, so that ranks cannot deadlock, in whatever order they list their messages. Ranks without
// messages take no part: the launch has no epoch.
//
// The stripes of all channels in use are distributed round-robin over the blocks, whatever their numbers, so
// each rank chooses its grid independently. A stripe belongs to one block during a launch.
#pragma once

#include "../core/channel.cuh"
#if FA_CUDA
#include "../core/posted.cuh"
#else
#include "../core/rendezvous.cuh"
#endif

namespace FA_NAMESPACE {

// Most stripes of a launch: those of the channels to and from 8 other ranks (from 10 ranks on, channels have
// fewer stripes: src/region.rs), and of a rank's copies to itself.
constexpr u32 kMostStripes = (2 * 8 + 1) * FA_MAX_STRIPES;

// Returns the first transfer of a channel, from index `at` on, that has a part for the stripe.
FA_FN u32 next_part(const FaTransfers &transfers, u32 direction, u32 stripe, u32 at) {
  while (at != transfers.first[direction + 1] && !has_part(transfers.transfer[at], stripe))
    ++at;
  return at;
}

// Initialises the state of stripe `number` of those that the launch uses.
FA_FN void open_channel(const FaLaunch &launch, const FaTransfers &transfers, u32 number, Channel *channel) {
  u32 direction = 0;
  while (transfers.stripes[direction + 1] <= number)
    ++direction;
  const u32 stripe = number - transfers.stripes[direction], peer = direction / 2;
  const bool sends = direction % 2 == 0;
  const FaRegionHead *head = own_head(launch);
  // Through a pointer: the sanitizer of GCC 12 miscompiles the index of a conditional array.
  const u32 *numbers = sends ? head->sent[stripe] : head->received[stripe];
  channel->direction = u8(direction);
  channel->stripe = u8(stripe);
  channel->at = u8(next_part(transfers, direction, stripe, transfers.first[direction]));
  channel->end = u8(transfers.first[direction + 1]);
  channel->mode = kUndecided;
  channel->number = numbers[peer];
  channel->credited = sends ? head->credited[stripe][peer] : 0;
  channel->has_released = true;
  channel->done = 0;
  channel->wait = {};
#if !FA_CUDA
  channel->measured = kNotMeasured;
  channel->start = 0;
#endif
}

// Stores the counts for the next launch. No other block has this stripe.
FA_FN void close_channel(const FaLaunch &launch, const Channel &channel) {
  FaRegionHead *head = own_head(launch);
  u32 *const numbers = channel.sends() ? head->sent[channel.stripe] : head->received[channel.stripe];
  numbers[channel.peer()] = channel.number;
  if (channel.sends())
    head->credited[channel.stripe][channel.peer()] = channel.credited;
}

// Updates a channel after an outcome, on one thread.
FA_FN void advance_channel(const FaLaunch &launch, const FaTransfers &transfers, Channel &channel,
                           u64 outcome, u64 bytes, bool is_whole) {
  channel.number += channel.peer() != launch.rank && outcome != kPartly;
  channel.wait = {};
  channel.mode = outcome == kRefused ? u8(kChunks) : is_whole ? u8(kUndecided) : channel.mode;
#if !FA_CUDA
  if (is_whole || outcome == kRefused)
    channel.measured = kNotMeasured;
#endif
  channel.done = is_whole || outcome == kRefused ? 0 : channel.done + bytes;
  if (is_whole)
    channel.at = u8(next_part(transfers, channel.direction, channel.stripe, channel.at + 1u));
}

// Withdraws everything that is posted, when the launch fails.
template <class Block>
FA_FN void withdraw_all(const FaLaunch &launch, const Block &block, const Channel *channels, u32 count) {
  block.lanes(1, [&](u32) {
    FA_NO_UNROLL
    for (u32 i = 0; i < count; ++i) {
      if (channels[i].is_open() && channels[i].mode == kPosted)
        withdraw(launch, channels[i].peer());
    }
  });
}

template <class Block>
FA_FN void transfer(const FaLaunch &launch, Block &block, const FaTransfers &transfers) {
  // As in `same_call`; checked only after the counts have been loaded as well.
  const u32 failed = FA_STREAMS ? load_relaxed(&own_head(launch)->failed) : 0;
#if FA_CUDA
  // One thread changes them, between two syncs: an array for each thread would be a stack frame.
  __shared__ __align__(8) u8 storage[kMostStripes * sizeof(Channel)];
#else
  // Not initialised: few entries are used, and the time would be noticeable for small messages.
  alignas(Channel) u8 storage[kMostStripes * sizeof(Channel)];
#endif
  Channel *channels = reinterpret_cast<Channel *>(storage);
  const u32 all = transfers.stripes[2 * launch.world], index = block.index(), blocks = block.count();
  const u32 count = index < all ? (all - index + blocks - 1) / blocks : 0;
  block.for_each_in_block(count,
                          [&](u32 i) { open_channel(launch, transfers, index + i * blocks, channels + i); });
  if (!block.all(failed == 0))
    return;

  for (bool busy = true; busy;) {
    busy = false;
    for (u32 i = 0; i < count; ++i) {
      Channel &channel = channels[i];
      if (!channel.is_open())
        continue;
      busy = true;
      const StripePart part = part_of(transfers.transfer[channel.at], channel.stripe);
      const u64 left = part.bytes - channel.done;
      u64 bytes = left < launch.chunk_bytes ? left : launch.chunk_bytes;
      const u64 outcome = advance(launch, block, channel, part, &bytes);
      if (outcome == kFailed)
        return withdraw_all(launch, block, channels, count);
      if (outcome == kNotReady)
        continue;
      // All threads have read the channel's state.
      block.sync();
      const bool is_whole = outcome != kRefused && bytes == left;
      block.lanes(1, [&](u32) { advance_channel(launch, transfers, channel, outcome, bytes, is_whole); });
      block.sync();
    }
  }
  block.for_each_in_block(count, [&](u32 i) { close_channel(launch, channels[i]); });
}

} // namespace FA_NAMESPACE
