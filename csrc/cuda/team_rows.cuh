// Pushes of rows to which a residual is added and which are normalised, where several blocks, a team, process
// each row together. Each block keeps its packs of the row in shared memory from the sum until they are
// normalised. If there are at least as many rows as blocks, a team is one block, which processes several
// rows.
//
// In a two-shot a team sends its row to the rank that owns its slice. All blocks of that rank reduce the
// slice, a warp's packs at a time, round-robin, and send the sums to all ranks, where the row's team
// continues with them. One-shots and two-shots share a kernel: most of the code is the same. Packets use the
// same slots as in a two-shot without teams: a rank whose addresses are not aligned runs that code in the
// same kernel.
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

// Waits for words with `epoch` that another block of this rank stores. If that block fails, it reports which
// rank it waited for. The first poll comes before anything else: the words are often there.
template <class Load>
FA_FN bool wait_for_block(const FaLaunch &launch, u32 epoch, const Load &load) {
  Backoff<> backoff;
  FA_NO_UNROLL
  while (!load()) {
    const Failure failure = backoff.pause(launch, launch.rank);
    if (!failure.none())
      return succeeded(launch, {failure.code(), 0}, epoch);
  }
  return true;
}

// A value that is in a register from here on. Without this the compiler reads a thread's number, or computes
// addresses, where they are used, when all else waits for them.
FA_FN u32 in_register(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <class T, class Reduce>
class TeamRows {
  static constexpr u32 kWarp = 32, kEach = kPackBytes / sizeof(T);
  static constexpr Index kChunkPacks = kChunk * sizeof(T) / kPackBytes;
  using Two = Elements<T, 2>;

public:
  FA_FN TeamRows(const FaLaunch &launch, const FaFused &norm, const Reduce &reduce)
      : launch_(launch), norm_(norm), reduce_(reduce),
        sender_slots_(slots_per_sender(launch, reduce.world())),
        row_packs_(norm.row * u32(sizeof(T)) / kPackBytes), thread_(in_register(threadIdx.x)),
        two_shot_(norm.turns.slice_rows != 0) {}

  FA_FN void push(Block &block) const {
    const u32 team = blockIdx.x * norm_.team_inverse >> 16;
    const Index first = (blockIdx.x - team * norm_.team) * norm_.block_packs;
    const BlockPart part = {team, norm_.team == 1 ? gridDim.x : norm_.rows, first,
                            min(norm_.block_packs, row_packs_ - first)};
    Sent sent;
    if (!send(block, part, &sent))
      return;
    norm_rows(block, part, sent);
    end_push(launch_, block, sent.state, two_shot_);
  }

private:
  const FaLaunch &launch_;
  const FaFused &norm_;
  const Reduce &reduce_;
  const u32 sender_slots_; // slots of each sender
  const Index row_packs_;
  const u32 thread_; // threadIdx.x
  const bool two_shot_;

  // A row; the owner of its slice, 0 in a one-shot; and the index of its first packet among a sender's.
  struct RowLocation {
    u32 row, owner;
    Index first;
  };
  FA_FN RowLocation location_of(u32 turn) const {
    const FaRowTurns &turns = norm_.turns;
    u32 quotient = __umulhi(turn, turns.inverse);
    quotient = turns.inverse == 0 ? turn : quotient;
    const u32 rest = turn - quotient * turns.divisor;
    const u32 owner = turns.by_slice ? rest : quotient, in_slice = turns.by_slice ? quotient : rest;
    return {owner * turns.slice_rows + in_slice, owner, in_slice * row_packs_};
  }
  // Number of turns, some of which may have no row.
  FA_FN u32 turns() const {
    const u32 by_slice = norm_.turns.divisor * norm_.turns.slice_rows;
    return two_shot_ & (norm_.turns.by_slice != 0) ? by_slice : norm_.rows;
  }

  static FA_FN u8 *address_of(u64 address, Index i) {
    return reinterpret_cast<u8 *>(address + u64(i) * kPackBytes);
  }

  // A pack of the weights and of the biases: what a norm applies to each row.
  struct Columns {
    Pack weight = {}, bias = no_bias<T, Pack>();
  };
  // That of pack i, if the row has it.
  FA_FN Columns load_columns(Index i, bool exists) const {
    Columns columns;
    load_if(exists & (norm_.weight != 0), address_of(norm_.weight, i), &columns.weight);
    load_if(exists & (norm_.bias != 0), address_of(norm_.bias, i), &columns.bias);
    return columns;
  }

  // What a block has: turns `team`, `team` + `step`, ..., and of each of their rows `length` packs from
  // `first` on.
  struct BlockPart {
    u32 team, step;
    Index first, length;
  };
  struct Sent {
    LaunchState state;
    Columns columns; // of this thread's first pack
    bool complete;   // whether this thread has sent all
  };

  // Sends the block's parts of all its rows and, in a two-shot, its sums of this rank's slice. Returns false
  // if the launch fails before it sends anything.
  FA_FN bool send(Block &block, const BlockPart &part, Sent *sent) const {
    const SenderSlots sender(launch_, reduce_.world(), 0, 1, reduce_.packet_tag(launch_, 0));
    const LaunchState state = begin_launch(launch_, block, false);
    const u32 end = turns();
    // This thread's first pack of a row: loaded in parallel with the launch state, which takes as long, and
    // with the previous row's stores. What is computed from experts' rows is computed later.
    const bool computes = reduce_.computes_input(), has_pack = !computes & (thread_ < part.length);
    const auto load_first = [&](u32 turn) {
      const u32 row = location_of(turn).row;
      return load_if(has_pack & (turn < end) & (row < norm_.rows),
                     launch_.input + u64(row * row_packs_ + part.first + thread_) * kPackBytes);
    };
    Pack pack = load_first(part.team);
    bool complete = may_exchange<false>(launch_, block, state);
    if (computes | (norm_.checked != 0)) {
      if (computes && !find_experts(launch_, norm_, block))
        return false;
      if (norm_.checked && !same_call<true>(launch_, block, state))
        return false;
    }
    const Tag tag = reduce_.packet_tag(launch_, state.epoch);
    // Offset in a region of the slots of this rank's packets.
    const u64 slots = sender.of(state.epoch);
    u32 turn = part.team;
    FA_NO_UNROLL
    do {
      const RowLocation location = location_of(turn);
      const Index packs = complete & (turn < end) & (location.row < norm_.rows) ? part.length : 0;
      FA_NO_UNROLL
      for (Index i = thread_; i < packs; i += blockDim.x) {
        if (computes | (i != thread_))
          pack = load_input(location.row * row_packs_ + part.first + i);
        const u64 slot = u64(reinterpret_cast<Slot *>(slots) + (location.first + part.first + i));
        // In a two-shot to the owner alone.
        reduce_.send(launch_, slot, pack, tag, two_shot_ ? location.owner : launch_.rank,
                     two_shot_ ? 1 : reduce_.world());
      }
      turn += part.step;
      pack = load_first(turn);
    } while (turn < end);
    // While packets fly.
    sent->columns = load_columns(part.first + thread_, thread_ < part.length);
    advance_after_sending(launch_, block, state, two_shot_);
    if (two_shot_)
      complete = complete && reduce_slice(state.epoch, tag, slots);
    sent->state = state;
    sent->complete = complete;
    return true;
  }

  // Where a thread begins to measure the block's part of a row. Computed before packets come.
  struct Part {
    u32 first_chunk; // of the row, of the block's part
    u32 chunks;      // of the block's part
    u32 warp;        // this warp's first chunk in the part
    u32 two;         // this thread's first pair of elements in the part
    u32 lane_chunk;  // this lane's chunk of the row when all are combined
    bool has_team;   // whether other blocks have parts of the row
  };
  FA_FN Part part_of(const BlockPart &own) const {
    const u32 warp = thread_ / kWarp, lane = thread_ % kWarp;
    return {in_register(own.first / kChunkPacks),
            in_register((own.length + kChunkPacks - 1) / kChunkPacks),
            in_register(warp),
            in_register(warp * (kChunk / 2) + lane),
            in_register(min(lane, norm_.chunks - 1)),
            norm_.team != 1};
  }

  // Receives and normalises the block's parts of its rows.
  FA_FN void norm_rows(Block &block, const BlockPart &own, const Sent &sent) const {
    const u32 end = turns(), epoch = sent.state.epoch;
    const Part part = part_of(own);
    u64 *const words = words_of(epoch);
    bool complete = sent.complete;
    u32 turn = own.team;
    FA_NO_UNROLL
    for (; turn < end; turn += own.step) {
      const RowLocation location = location_of(turn);
      if (location.row >= norm_.rows)
        continue;
      // All threads have read the shared packs of the previous row.
      if (turn != own.team && !block.all(complete))
        break;
      complete = norm_row(block, epoch, location, own, part, sent.columns, words, complete);
    }
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
    for (Index i = (thread_ / kWarp * gridDim.x + blockIdx.x) * kWarp + thread_ % kWarp; i < length;
         i += stride) {
      Pack sum;
      if (!reduce_.packet(launch_, from + i, sender_slots_, tag, &sum))
        return false;
      reduce_.send(launch_, u64(reinterpret_cast<Slot *>(slots) + (sender_slots_ / kSections + i)), sum, sums,
                   launch_.rank, reduce_.world());
    }
    return true;
  }

  // Receives the sum of a pack of a row, and empties its packets. Returns false if it did not come.
  FA_FN bool receive(Slot *slot, u32 owner, Tag inputs, Pack *sum) const {
    if (!two_shot_) {
      // Between two ranks links are so fast that the time to execute a larger batch would show.
      if (reduce_.world() <= 2)
        return reduce_.template packet<2>(launch_, slot, sender_slots_, inputs, sum);
      return reduce_.packet(launch_, slot, sender_slots_, inputs, sum);
    }
    const Tag tag = {inputs.epoch, kSums};
    Pack sent = {};
    const bool came = wait_packet(launch_, slot, owner, tag, &sent);
    if (came)
      empty_packet(slot, tag);
    *sum = sum_of(sent, tag);
    return came;
  }

  FA_FN Pack load_input(Index i) const {
    return reduce_.own(reinterpret_cast<const u8 *>(launch_.input) + u64(i) * kPackBytes, Whole{}, 0);
  }

  // Where the sums with the residual go.
  FA_FN u64 sums_to() const { return norm_.residual_out != 0 ? norm_.residual_out : launch_.output; }

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

  // Processes this block's packs of a row. `columns`: those of this thread's first pack. `words`:
  // those in which blocks exchange values. Returns false, on one thread at least, if not all packets came, if
  // another block of the team failed, or if `complete` is false. If only a block of the team failed, the rows
  // are stored, with other numbers.
  FA_FN bool norm_row(Block &block, u32 epoch, RowLocation location, const BlockPart &own_part,
                      const Part &part, Columns columns, u64 *words, bool complete) const {
    __shared__ Pack block_row[FA_TEAM_BLOCK_PACKS];
    const Index first = own_part.first, length = own_part.length;
    const Index padded = part.chunks * kChunkPacks;
    const Tag inputs = reduce_.packet_tag(launch_, epoch);
    const Index from = two_shot_ ? location.owner * sender_slots_ + sender_slots_ / kSections : 0;
    Slot *slots = slots_of(launch_, epoch, inputs) + (from + location.first + first);
    const Index begin = location.row * row_packs_ + first;
    Pack residual = {};
    load_if(thread_ < length, address_of(norm_.residual, begin + thread_), &residual);
    // Pads to whole chunks with zeros.
    FA_NO_UNROLL
    for (Index i = complete ? thread_ : padded; i < padded;) {
      Pack sum = {};
      if (i < length) {
        if (!receive(slots + i, location.owner, inputs, &sum)) {
          complete = false;
          break;
        }
        store_unless(norm_.residual_out != 0, false, address_of(launch_.output, begin + i), sum);
        sum = added_pack<T>(sum, residual);
      }
      block_row[i] = sum;
      i += blockDim.x;
      residual = load_if(i < length, norm_.residual + u64(begin + i) * kPackBytes);
    }
    if (!block.all(complete))
      return false;
    Pack own = {}; // This thread's first pack. While packets are awaited there are no registers for it.
    RowState state;
    const bool is_scaled = norm_.scaling != FA_NOT_SCALED;
    PackQuantizer<T> quantizer;
    u8 *scale_to = nullptr;
    complete = measure(block, epoch, block_row, part, words + location.row * norm_.chunks * 2, &state, [&] {
      if (thread_ < padded)
        own = block_row[thread_];
      if (!is_scaled)
        return;
      quantizer = {norm_, location.row};
      if (thread_ < length)
        scale_to = scale_of_pack(norm_, location.row, (first + thread_) * kEach);
    });
    // Below, packs after a thread's first one take the place of sums, which other warps may still be
    // measuring.
    if (is_scaled & (length > blockDim.x))
      block.sync();
    const bool shifts = is_centred(norm_.norm) | (norm_.bias != 0);
    u32 greatest = 0;
    FA_NO_UNROLL
    for (Index i = thread_; i < length;) {
      const Pack sum = i < blockDim.x ? own : block_row[i];
      const Pack normed = normed_pack<T>(sum, state, factors_of<T>(columns.weight, weight_offset(norm_)),
                                         columns.bias, shifts);
      store(address_of(sums_to(), begin + i), sum, Whole{}, 0);
      store_unless(norm_.normed != 0, false, address_of(norm_.normed, begin + i), normed);
      if (is_scaled) {
        if (i < blockDim.x)
          own = normed;
        else
          block_row[i] = normed;
        greatest = max(greatest, greatest_of_pack<T>(normed));
      }
      i += blockDim.x;
      if (i >= length)
        break;
      columns = load_columns(first + i, true);
    }
    if (!is_scaled)
      return complete;
    if (norm_.scaling == FA_SCALE_PER_ROW)
      complete &= combine_greatest(block, epoch, part, words, location.row, &greatest);
    // All lanes of a warp, since those of a group compute its scale together.
    FA_NO_UNROLL
    for (Index i = thread_; i / kWarp * kWarp < length;) {
      quantizer.put((first + i) * kEach, own, greatest, scale_to);
      i += blockDim.x;
      if (i / kWarp * kWarp >= length)
        break;
      const bool exists = i < length;
      own = exists ? block_row[i] : Pack{};
      scale_to = exists ? scale_of_pack(norm_, location.row, (first + i) * kEach) : nullptr;
    }
    return complete;
  }

  // Computes how a row is normalised, of which this block has a part, padded with zeros to whole chunks. The
  // blocks exchange what their chunks contribute, and each combines all of it, so that the result is that of
  // a block with the whole row. `pairs`: the words of the row in which they do. Calls meanwhile() while the
  // first of them is loaded. Returns false on threads that waited in vain, because a block failed; then the
  // state is of no use on any thread of their warps.
  template <class Meanwhile>
  FA_FN bool measure(Block &block, u32 epoch, const Pack *block_row, const Part &part, u64 *pairs,
                     RowState *state, const Meanwhile &meanwhile) const {
    __shared__ ChunkTerms all_terms[kMostChunks];
    const u32 lane = thread_ % kWarp;
    u32 two = part.two;
    FA_NO_UNROLL
    for (u32 chunk = part.warp; chunk < part.chunks;) {
      Two twos[kRuns];
      FA_UNROLL
      for (u32 run = 0; run < kRuns; ++run)
        twos[run] = reinterpret_cast<const Two *>(block_row)[two + run * (kPartials / 2)];
      const u32 number = part.first_chunk + chunk;
      const ChunkTerms terms = terms_of_chunk<T>(twos, thread_, norm_.norm, chunk_length(norm_, number));
      if (part.has_team)
        store_relaxed_pair_below(lane, 1, pairs + 2 * number, join(__float_as_uint(terms.sum), epoch),
                                 join(__float_as_uint(terms.mean), epoch));
      else if (lane == 0)
        all_terms[number] = terms;
      chunk += blockDim.x / kWarp;
      two += blockDim.x / kWarp * (kChunk / 2);
    }
    // By the time that it is done, other blocks see what this one has stored.
    meanwhile();
    const auto load = [&](u32 chunk, ChunkTerms *terms) {
      if (!part.has_team) {
        block.sync();
        *terms = all_terms[chunk];
        return true;
      }
      const u64 *pair = pairs + 2 * chunk;
      u32 values[2], epochs[2];
      const bool complete = wait_for_block(launch_, epoch, [&] {
        u64 sum, mean;
        load_relaxed_pair(pair, &sum, &mean);
        split(sum, &values[0], &epochs[0]);
        split(mean, &values[1], &epochs[1]);
        return ((epochs[0] ^ epoch) | (epochs[1] ^ epoch)) == 0;
      });
      *terms = {__uint_as_float(values[0]), __uint_as_float(values[1])};
      return complete;
    };
    float sum = 0;
    const bool complete = combine_chunks(norm_, norm_.chunks, thread_, part.lane_chunk, load, state, &sum);
    with_terms(norm_.norm, [&](auto of) { state->scale = of.scale(sum, norm_.total, norm_.epsilon); });
    return complete;
  }

  // The warps of a block that have packs, if each thread has at most one.
  FA_FN u32 warps() const { return min(blockDim.x, (norm_.block_packs + kWarp - 1) / kWarp * kWarp) / kWarp; }

  // Turns the greatest magnitude of a thread's packs into that of the row. The team's blocks send those of
  // their warps, in `words` after those of chunks. Returns false on threads that waited in vain.
  FA_FN bool combine_greatest(Block &block, u32 epoch, const Part &part, u64 *words, u32 row,
                              u32 *greatest) const {
    if (!part.has_team) {
      *greatest = greatest_of(block, *greatest);
      return true;
    }
    const u32 lane = thread_ % kWarp, warp = thread_ / kWarp, count = norm_.team * warps();
    const u32 block_in_team = part.first_chunk * kChunkPacks / norm_.block_packs;
    words += norm_.rows * norm_.chunks * 2 + row * count;
    *greatest = greatest_of_warp(*greatest);
    if (lane == 0 && warp < warps())
      store_relaxed(words + block_in_team * warps() + warp, u64(epoch) << 32 | *greatest);
    bool complete = true;
    FA_NO_UNROLL
    for (u32 w = lane; complete && w < count; w += kWarp) {
      u64 word = 0;
      complete = wait_for_block(launch_, epoch, [&] {
        word = load_relaxed(words + w);
        return u32(word >> 32) == epoch;
      });
      *greatest = max(*greatest, u32(word));
    }
    *greatest = greatest_of_warp(*greatest);
    return complete;
  }
};

} // namespace FA_NAMESPACE
