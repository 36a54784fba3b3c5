// Pushes of rows to which a residual is added and which are normalised, where several blocks, a team, process
// each row together. Each block keeps its packs of the row in shared memory from the sum until they are
// normalised. If there are at least as many rows as blocks, a team is one block, which processes several
// rows.
//
// In a two-shot a team sends its row to the rank that owns its slice. All blocks of that rank reduce the
// slice, a warp's packs at a time, round-robin, and send the sums to all ranks, where the row's team
// continues with them. Packets use the same slots as in a two-shot without teams: a rank whose addresses are
// not aligned runs that code in the same kernel.
//
// A block has whole chunks of a row, except at the row's end. The blocks of a team exchange the chunks' sums,
// so that the total is the one that a single block would compute. They exchange them in words of packets that
// this rank sends to itself: no other rank ever writes that part of its mailbox. All words of mailboxes have
// tags, so a word with this launch's epoch was written in this launch. The value and its tag are one access,
// and nothing read later depends on its ordering, so it is relaxed
// (lab/litmus/programs/packets/team_words.litmus).
//
// The blocks of a team wait for each other, so they must all be resident: the grid is limited accordingly
// (src/plan/grid.rs). There is no circular wait: a block sends its inputs before it waits for any; it sends
// sums, which depend on inputs only, before it waits for others' sums; and it sends its chunks' sums
// before it waits for those of its team.
//
// It does not matter which block of a peer sends a packet, or which block of this rank reads it. A sender
// writes a slot again two launches later. By then it has received all packets of the launch in between,
// also this rank's, which began that launch after the one that read the slot had ended
// (team_slices.litmus).
#pragma once

#include "../sinks/rms_norm_cuda.cuh"
#include "reduce_packs.cuh"

namespace FA_NAMESPACE {

template <class T, class Reduce, bool TwoShot>
class TeamRows {
  static constexpr u32 kWarp = 32, kEach = kPackBytes / sizeof(T);
  static constexpr Index kChunkPacks = kChunk * sizeof(T) / kPackBytes;
  using Two = Elements<T, 2>;

public:
  FA_FN TeamRows(const FaLaunch &launch, const FaFused &norm, const Reduce &reduce)
      : launch_(launch), norm_(norm), reduce_(reduce),
        sender_slots_(slots_per_sender(launch, reduce.world())),
        row_packs_(norm.row * u32(sizeof(T)) / kPackBytes) {}

  FA_FN void push(Block &block) const {
    const u32 team = blockIdx.x * norm_.team_inverse >> 16;
    const u32 step = norm_.team == 1 ? gridDim.x : norm_.rows;
    const Index first = (blockIdx.x - team * norm_.team) * norm_.block_packs;
    const Index length = min(norm_.block_packs, row_packs_ - first);
    // Loaded in parallel with the launch state, which takes as long.
    Pack pack = {};
    if (team < turns() && location_of(team).row < norm_.rows && threadIdx.x < length)
      pack = load_input(location_of(team).row * row_packs_ + first + threadIdx.x);
    const LaunchState state = begin_launch(launch_, block, false);
    if (!same_call<true>(launch_, block, state))
      return;
    const Tag tag = reduce_.packet_tag(launch_, state.epoch);
    // Offset in a region of the slots of this rank's packets.
    const u64 slots = u64(slots_of(launch_, state.epoch, tag) + launch_.rank * sender_slots_) - launch_.own;
    FA_NO_UNROLL
    for (u32 turn = team; turn < turns(); turn += step) {
      const RowLocation location = location_of(turn);
      if (location.row >= norm_.rows)
        continue;
      FA_NO_UNROLL
      for (Index i = threadIdx.x; i < length; i += blockDim.x) {
        if (turn != team || i != threadIdx.x)
          pack = load_input(location.row * row_packs_ + first + i);
        const u64 slot = u64(reinterpret_cast<Slot *>(slots) + (location.first + first + i));
        if constexpr (TwoShot)
          store_packet(reinterpret_cast<Slot *>(launch_.regions[location.owner] + slot), pack, tag);
        else
          reduce_.send(launch_, slot, pack, tag);
      }
    }
    advance_after_sending(launch_, block, state, TwoShot);
    bool complete = true;
    if constexpr (TwoShot)
      complete = reduce_slice(state.epoch, tag, slots);
    FA_NO_UNROLL
    for (u32 turn = team; turn < turns(); turn += step) {
      const RowLocation location = location_of(turn);
      if (location.row >= norm_.rows)
        continue;
      complete = norm_row(block, state.epoch, tag, location, first, length, complete);
      if (!complete)
        break;
    }
    end_push(launch_, block, state, TwoShot);
  }

private:
  const FaLaunch &launch_;
  const FaFused &norm_;
  const Reduce &reduce_;
  const u32 sender_slots_; // slots of each sender
  const Index row_packs_;

  // A row; in a two-shot, the owner of its slice; and the index of its first packet among a sender's.
  struct RowLocation {
    u32 row, owner;
    Index first;
  };
  FA_FN RowLocation location_of(u32 turn) const {
    if (!TwoShot)
      return {turn, 0, turn * row_packs_};
    const FaRowTurns &turns = norm_.turns;
    const u32 quotient = turns.inverse == 0 ? turn : __umulhi(turn, turns.inverse);
    const u32 rest = turn - quotient * turns.divisor;
    const u32 owner = turns.by_slice ? rest : quotient, in_slice = turns.by_slice ? quotient : rest;
    return {owner * turns.slice_rows + in_slice, owner, in_slice * row_packs_};
  }
  // Number of turns, some of which may have no row.
  FA_FN u32 turns() const {
    return TwoShot && norm_.turns.by_slice ? norm_.turns.divisor * norm_.turns.slice_rows : norm_.rows;
  }

  // Reduces this rank's slice and sends the sums to all ranks. `slots`: offset in a region of this rank's
  // slots. Returns false if not all packets came, so that some sums were not sent.
  FA_FN bool reduce_slice(u32 epoch, Tag tag, u64 slots) const {
    const u32 begin = launch_.rank * norm_.turns.slice_rows,
              left = begin < norm_.rows ? norm_.rows - begin : 0;
    const Index length = min(norm_.turns.slice_rows, left) * row_packs_, stride = gridDim.x * blockDim.x;
    const Tag sums = {epoch, kSums};
    Slot *from = slots_of(launch_, epoch, tag);
    FA_NO_UNROLL
    for (Index i = (threadIdx.x / kWarp * gridDim.x + blockIdx.x) * kWarp + threadIdx.x % kWarp; i < length;
         i += stride) {
      Pack sum;
      Slot *slot = from + i;
      if (!reduce_.packet(launch_, slot, sender_slots_, tag, &sum))
        return false;
      reduce_.send(launch_, u64(reinterpret_cast<Slot *>(slots) + (sender_slots_ / kSections + i)), sum,
                   sums);
      reduce_.empty_packets(slot, sender_slots_, tag);
    }
    return true;
  }

  // Receives the sum of a pack of a row. Returns false if it did not come.
  FA_FN bool receive(Slot *slot, u32 owner, Tag tag, Pack *sum) const {
    if constexpr (!TwoShot)
      return reduce_.packet(launch_, slot, sender_slots_, tag, sum);
    Pack sent = {};
    const bool came = wait_packet(launch_, slot, owner, tag, &sent);
    *sum = sum_of(sent, tag);
    return came;
  }
  FA_FN void empty(Slot *slot, Tag tag) const {
    if constexpr (TwoShot)
      empty_packet(slot, tag);
    else
      reduce_.empty_packets(slot, sender_slots_, tag);
  }

  static FA_FN Pack load_pack(u64 address, Index i) {
    return load(reinterpret_cast<const u8 *>(address) + u64(i) * kPackBytes, Whole{}, 0);
  }
  FA_FN Pack load_input(Index i) const {
    return reduce_.own(reinterpret_cast<const u8 *>(launch_.input) + u64(i) * kPackBytes, Whole{}, 0);
  }
  FA_FN Pack load_weights(Index i) const { return norm_.weight == 0 ? Pack{} : load_pack(norm_.weight, i); }
  static FA_FN void put(u64 address, Index i, const Pack &pack) {
    store(reinterpret_cast<u8 *>(address) + u64(i) * kPackBytes, pack, Whole{}, 0);
  }

  // The words in which blocks exchange values: the slots of this rank's packets to itself, most of which a
  // row of two chunks or more does not use.
  FA_FN u64 *words_of(u32 epoch) const {
    return slots_of(launch_, epoch, {epoch, kTagged})[launch_.rank * sender_slots_].word;
  }
  // The slots of this rank's mailbox for packets with this kind of tag.
  FA_FN Slot *slots_of(const FaLaunch &launch, u32 epoch, Tag tag) const {
    return reinterpret_cast<Slot *>(launch.own + (tag.sentinel() ? sentinel_mailbox_offset(launch, epoch)
                                                                 : mailbox_offset(launch, epoch)));
  }

  // Processes this block's packs of a row: `length` packs from `first` on. Returns false if not all packets
  // came, or if `complete` is false.
  FA_FN bool norm_row(Block &block, u32 epoch, Tag inputs, RowLocation location, Index first, Index length,
                      bool complete) const {
    __shared__ Pack block_row[FA_TEAM_BLOCK_PACKS];
    const u32 chunks = (length + kChunkPacks - 1) / kChunkPacks, row = location.row;
    const Tag tag = TwoShot ? Tag{epoch, kSums} : inputs;
    const Index from = TwoShot ? location.owner * sender_slots_ + sender_slots_ / kSections : 0;
    Slot *slots = slots_of(launch_, epoch, tag) + (from + location.first + first);
    const Span span = {row * row_packs_ + first, length};
    Pack weight = {}, residual = {};
    if (threadIdx.x < span.length) {
      residual = load_pack(norm_.residual, span.first + threadIdx.x);
      weight = load_weights(first + threadIdx.x);
    }
    Index i = threadIdx.x;
    FA_NO_UNROLL
    for (; complete && i < span.length; i += blockDim.x) {
      Pack sum;
      complete = receive(slots + i, location.owner, tag, &sum);
      if (!complete)
        break;
      if (norm_.residual_out != 0)
        put(launch_.output, span.first + i, sum);
      sum = added_pack<T>(sum, residual);
      block_row[i] = sum;
      put(norm_.residual_out != 0 ? norm_.residual_out : launch_.output, span.first + i, sum);
      if (i + blockDim.x < span.length)
        residual = load_pack(norm_.residual, span.first + i + blockDim.x);
    }
    // Pads to whole chunks with zeros.
    FA_NO_UNROLL
    for (; complete && i < chunks * kChunkPacks; i += blockDim.x)
      block_row[i] = {};
    if (!block.all(complete))
      return false;
    const auto empty_slots = [&] {
      FA_NO_UNROLL
      for (Index i = threadIdx.x; i < span.length; i += blockDim.x)
        empty(slots + i, tag);
    };
    const RowPart part = {u64(block_row) - u64(first) * kPackBytes,
                          {first * kEach, (first + length) * kEach},
                          row,
                          epoch,
                          norm_.team == 1 ? nullptr : words_of(epoch)};
    const bool is_rms = norm_.norm == FA_NORM_RMS;
    NormedPart normed = {{}, true};
    if (is_rms) {
      normed.complete = norm_by_rms(block, part, block_row, weight, span, empty_slots);
    } else {
      empty_slots();
      normed = normalise<T>(launch_, norm_, part);
    }
    if (normed.complete && norm_.scaling != FA_NOT_SCALED)
      normed.complete = put_quantized<T>(launch_, norm_, part, normed.state, is_rms);
    // All threads have read block_row, before it is written for the next row.
    block.sync();
    return normed.complete;
  }

  // RMSNorm of this block's packs of a row, inlined because it is the usual norm. It leaves the normalised
  // packs in `block_row` if they are to be quantised. meanwhile(): what to do while the other blocks' sums
  // are on their way.
  template <class Meanwhile>
  FA_FN bool norm_by_rms(Block &block, const RowPart &part, Pack *block_row, Pack weight, Span span,
                         const Meanwhile &meanwhile) const {
    __shared__ float4 all_sums[kMostChunks / 4];
    float *sums = reinterpret_cast<float *>(all_sums);
    const Index first = span.first - part.row * row_packs_;
    const u32 lane = threadIdx.x % kWarp, chunks = (span.length + kChunkPacks - 1) / kChunkPacks;
    u64 *words = part.words + part.row * norm_.chunks;
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x / kWarp; chunk < chunks; chunk += blockDim.x / kWarp) {
      Two twos[kChunk / kPartials];
      FA_UNROLL
      for (u32 run = 0; run < kChunk / kPartials; ++run)
        twos[run] = reinterpret_cast<const Two *>(block_row)[(chunk * kChunk + run * kPartials) / 2 + lane];
      ChunkSum<T> squares;
      FA_UNROLL
      for (const Two &two : twos)
        squares.add(two);
      const float sum = squares.sum();
      if (lane != 0)
        continue;
      if (norm_.team == 1)
        sums[chunk] = sum;
      else
        store_relaxed(words + first / kChunkPacks + chunk, u64(part.epoch) << 32 | __float_as_uint(sum));
    }
    meanwhile();
    const u32 padded = (norm_.chunks + kAtOnce - 1) / kAtOnce * kAtOnce;
    bool complete = true;
    FA_NO_UNROLL
    for (u32 chunk = threadIdx.x; chunk < padded; chunk += blockDim.x) {
      if (chunk >= norm_.chunks)
        sums[chunk] = 0;
      else if (norm_.team != 1)
        complete = complete && wait_for_word(launch_, words + chunk, part.epoch, &sums[chunk]);
    }
    if (!block.all(complete))
      return false;
    float squares = 0;
    FA_NO_UNROLL
    for (u32 some = 0; some < padded / 4; some += kAtOnce / 4) {
      FA_UNROLL
      for (u32 k = 0; k < kAtOnce / 4; ++k) {
        const float4 four = all_sums[some + k];
        squares = squares + four.x + four.y + four.z + four.w;
      }
    }
    const float scale = row_scale(squares, norm_.total, norm_.epsilon);
    FA_NO_UNROLL
    for (Index i = threadIdx.x; i < span.length; i += blockDim.x) {
      const Pack normed =
          scaled_pack<T>(block_row[i], {0, scale}, weight, norm_.weight != 0, norm_.unit_offset != 0);
      if (norm_.normed != 0)
        put(norm_.normed, span.first + i, normed);
      if (norm_.scaling != FA_NOT_SCALED)
        block_row[i] = normed;
      if (i + blockDim.x < span.length)
        weight = load_weights(first + i + blockDim.x);
    }
    return true;
  }

  // Number of chunks whose sums are added in one unrolled step. Missing ones are +0, which does not change a
  // sum of squares.
  static constexpr u32 kAtOnce = 8;
  static_assert(kMostChunks % kAtOnce == 0, "all_sums holds every padded count");
};

} // namespace FA_NAMESPACE
