// A call: one launch on all ranks, the inputs of each, and its expected outputs.
#pragma once

#include "region.hpp"

#include <algorithm>
#include <cmath>
#include <random>

// One message of a launch of transfers.
struct Letter {
  uint32_t from, to, tag;
  uint64_t count;
  bool posted; // the receiver reads it from the sender's memory
};

struct Call {
  uint32_t number; // index of the launch in its world
  uint32_t world, algorithm, blocks, dtype, op, root, transport;
  uint64_t count;     // elements of an allreduce, a broadcast or a reduce; otherwise of all shares together
  uint32_t row, norm; // elements of a row that is normalised, and the norm
  uint32_t split;     // columns of the first part of a row that is divided among ranks
  bool experts;       // inputs are computed from experts' rows
  uint32_t groups, rule, layout; // of the scales of gathered rows: of a row; FaScaleRule; FaScaleLayout
  FaShare shares[FA_MAX_RANKS];
  std::vector<Letter> letters;
  uint32_t staging_slots = 1; // slots of a generation
  // Posted messages are in private memory that threads read (`threads`) or that the operating system reads
  // (`direct`); otherwise in registered buffers.
  bool threads = true, direct = false;
  uint32_t channel_stripes = 1;
  uint32_t socket_ranks = 0; // a two-shot pull with two levels

  // Returns the number of elements before a letter in its sender's input, or in its receiver's output.
  uint64_t first_of(size_t letter, bool sender) const {
    uint64_t first = 0;
    for (size_t other = 0; other < letter; ++other) {
      const bool same =
          sender ? letters[other].from == letters[letter].from : letters[other].to == letters[letter].to;
      first += same ? letters[other].count : 0;
    }
    return first;
  }

  uint64_t letters_of(uint32_t rank, bool sender) const {
    uint64_t count = 0;
    for (const Letter &letter : letters)
      count += (sender ? letter.from : letter.to) == rank ? letter.count : 0;
    return count;
  }

  // Returns whether a residual is added and rows are normalised.
#define IS_NORMING(code, ...) algorithm == code ||
  bool normalises() const { return FA_NORMING(IS_NORMING, ) false; }
#undef IS_NORMING
  // Returns whether each rank has a share.
  bool gathers() const { return algorithm == FA_ALL_GATHER || algorithm == FA_ALL_GATHER_ROWS; }
  // Returns whether each rank gets its share of the reduction.
  bool scatters() const { return algorithm == FA_REDUCE_SCATTER || algorithm == FA_REDUCE_SCATTER_NORM; }
  // Returns whether rows are normalised whose elements are divided among the ranks.
  bool is_sharded() const { return algorithm == FA_SHARDED_RMS_NORM; }
  // Returns whether it is an in-switch reduction.
  bool is_nvls() const { return algorithm == FA_ONE_SHOT_NVLS || algorithm == FA_TWO_SHOT_NVLS; }

  uint64_t input_length(uint32_t rank) const {
    switch (algorithm) {
    case FA_ALL_GATHER:
    case FA_ALL_GATHER_ROWS: return shares[rank].count;
    case FA_BROADCAST:
    case FA_SCATTERED_BROADCAST: return rank == root ? count : 0;
    case FA_BARRIER: return 0;
    case FA_TRANSFER: return letters_of(rank, true);
    default: return count;
    }
  }

  uint64_t output_length(uint32_t rank) const {
    switch (algorithm) {
    case FA_REDUCE_SCATTER:
    case FA_REDUCE_SCATTER_NORM: return shares[rank].count;
    case FA_REDUCE: return rank == root ? count : 0;
    case FA_BARRIER: return 0;
    case FA_TRANSFER: return letters_of(rank, false);
    default: return count;
    }
  }

  bool pulls() const {
    switch (algorithm) {
    case FA_ONE_SHOT_PULL:
    case FA_TWO_SHOT_PULL:
    case FA_ONE_SHOT_PULL_NORM:
    case FA_TWO_SHOT_PULL_NORM:
    case FA_REDUCE_SCATTER:
    case FA_REDUCE_SCATTER_NORM:
    case FA_REDUCE:
    case FA_ALL_GATHER:
    case FA_BROADCAST:
    case FA_SCATTERED_BROADCAST:
    case FA_TRANSFER: return true;
    default: return false;
    }
  }

  // Returns whether peers may read the input in its buffer.
  bool can_be_direct(uint32_t rank, bool in_place) const {
    return pulls() && !experts && input_length(rank) > 0 &&
           !(in_place && (algorithm == FA_ONE_SHOT_PULL || normalises()));
  }

  // Return the number of elements before the input and the output in the memory of a call in place.
  uint64_t input_skip(uint32_t rank) const { return gathers() ? shares[rank].first : 0; }
  uint64_t output_skip(uint32_t rank) const { return scatters() ? shares[rank].first : 0; }

  // Returns small integers: every result is exact in every type.
  int input(uint32_t rank, uint64_t i) const { return int((number * 7 + rank * 3 + i) % 6) + 1; }

  // Returns the index in the input of element i of memory: experts' rows are in descending order.
  uint64_t in_memory(uint64_t i) const { return experts ? count - row - i / row * row + i % row : i; }

  // The residual and the weight are equal on all ranks.
  int residual(uint64_t i) const { return int((number * 5 + i) % 4); }
  int weight(uint64_t i) const { return int((number + i) % 3) + 1; }
  static constexpr float epsilon = 0.5;

  // Returns element i of the message's rows normalised by RMSNorm or LayerNorm, without rounding.
  double normalised(uint64_t i) const {
    const uint64_t first = i / row * row;
    double mean = 0, squares = 0;
    for (uint64_t j = first; norm == FA_NORM_LAYER && j < first + row; ++j)
      mean += (reduced(j) + residual(j)) / row;
    for (uint64_t j = first; j < first + row; ++j) {
      const double difference = reduced(j) + residual(j) - mean;
      squares += difference * difference;
    }
    return (reduced(i) + residual(i) - mean) / std::sqrt(squares / row + epsilon) * weight(i % row);
  }

  // Returns element i of this rank's part of the rows, without rounding.
  double sharded(uint32_t rank, uint64_t i) const {
    const bool is_first = i % row < split;
    const uint64_t first = i / row * row + (is_first ? 0 : split), columns = is_first ? split : row - split;
    double squares = 0;
    for (uint32_t other = 0; other < world; ++other) {
      for (uint64_t j = first; j < first + columns; ++j)
        squares += double(input(other, j)) * input(other, j);
    }
    return input(rank, i) / std::sqrt(squares / (columns * world) + epsilon) * weight(i % row);
  }

  double output(uint32_t rank, uint64_t i) const {
    if (normalises())
      return reduced(output_skip(rank) + i) + residual(output_skip(rank) + i);
    if (is_sharded())
      return sharded(rank, i);
    switch (algorithm) {
    case FA_REDUCE_SCATTER: return reduced(shares[rank].first + i);
    case FA_BROADCAST:
    case FA_SCATTERED_BROADCAST: return input(root, i);
    case FA_ALL_GATHER:
    case FA_ALL_GATHER_ROWS: {
      uint32_t from = 0;
      while (i >= shares[from].first + shares[from].count)
        ++from;
      return input(from, i - shares[from].first);
    }
    case FA_TRANSFER:
      for (size_t letter = 0;; ++letter) {
        if (letters[letter].to != rank)
          continue;
        if (i < letters[letter].count)
          return input(letters[letter].from, first_of(letter, true) + i);
        i -= letters[letter].count;
      }
    default: return reduced(i);
    }
  }

  // Returns the distance of columns of scales, the number of scales of `rows` rows with padding, and the
  // place of a group's scale. Columns of bytes are of words of four groups.
  uint64_t stride(uint64_t rows) const { return layout == FA_LAYOUT_COLUMNS ? (rows + 3) / 4 * 4 : 0; }
  uint64_t scales(uint64_t rows) const {
    const uint64_t fours = (groups + 3) / 4;
    switch (layout) {
    case FA_LAYOUT_ROWS: return rows * groups;
    case FA_LAYOUT_COLUMNS: return rule == FA_RULE_F32 ? stride(rows) * groups : stride(rows) * fours * 4;
    case FA_LAYOUT_8X4: return (rows + 7) / 8 * fours * 32;
    default: return (rows + 127) / 128 * fours * 512;
    }
  }
  uint64_t place(uint64_t rows, uint64_t of_row, uint64_t group) const {
    const uint64_t fours = (groups + 3) / 4;
    switch (layout) {
    case FA_LAYOUT_ROWS: return of_row * groups + group;
    case FA_LAYOUT_COLUMNS:
      return rule == FA_RULE_F32 ? group * stride(rows) + of_row
                                 : (group / 4 * stride(rows) + of_row) * 4 + group % 4;
    case FA_LAYOUT_8X4: return (of_row / 8 * fours + group / 4) * 32 + of_row % 8 * 4 + group % 4;
    default: break;
    }
    const uint64_t tile = of_row / 128 * fours + group / 4;
    return ((tile * 32 + of_row % 32) * 4 + of_row % 128 / 32) * 4 + group % 4;
  }
  // Whether the rest of a row's last word is set to zero.
  bool pads_words() const { return layout == FA_LAYOUT_COLUMNS && rule != FA_RULE_F32; }
  uint32_t scale(uint64_t of_row, uint64_t group) const { return 1 + (number + of_row * 7 + group) % 250; }

  // Returns the permitted error of a result. Quantised: a fraction of the ranks' largest inputs
  // (docs/quantized.md).
  double tolerance() const {
    if (algorithm == FA_TWO_SHOT_QUANTIZED)
      return (transport == FA_TRANSPORT_INT8 ? 0.012 : 0.078) * 6 * world;
    // No element is larger than 6 times the root of the mean, and no weight is larger than 3.
    if (is_sharded())
      return 18 * (dtype == FA_F32 ? 1e-5 : 1.0 / 200);
    return op == FA_AVG && dtype == FA_F32 ? 1e-6 : 0;
  }

  // For a message of `bytes` bytes: `part_of` returns the size of a stripe's part, in units; `stripes_of`
  // returns the number of stripes that have a part.
  uint32_t part_of(uint64_t bytes) const {
    const uint64_t unit = uint64_t(channel_stripes) * FA_PART_ALIGNMENT;
    return channel_stripes == 1 ? 0 : uint32_t(std::max<uint64_t>((bytes + unit - 1) / unit, 1));
  }
  uint32_t stripes_of(uint64_t bytes) const {
    const uint64_t part = uint64_t(part_of(bytes)) * FA_PART_ALIGNMENT;
    return part == 0 ? 1 : uint32_t(std::max<uint64_t>((bytes + part - 1) / part, 1));
  }

  // Returns a rank's transfers, with elements of `size` bytes at these addresses. `registered` is the input's
  // address in a registered buffer, or 0.
  FaTransfers transfers(uint32_t rank, uint64_t input, uint64_t output, uint64_t size,
                        uint64_t registered) const {
    FaTransfers packed = {};
    uint32_t length = 0, stripes = 0;
    for (uint32_t channel = 0; channel < 2 * world; ++channel) {
      const uint32_t peer = channel / 2;
      const bool sends = channel % 2 == 0;
      packed.first[channel] = length;
      packed.stripes[channel] = stripes;
      uint32_t most = 0;
      std::vector<size_t> in_order;
      for (size_t letter = 0; letter < letters.size(); ++letter) {
        const auto [from, to, tag, count, posted] = letters[letter];
        if (sends ? from == rank && to == peer && to != rank : to == rank && from == peer)
          in_order.push_back(letter);
      }
      std::stable_sort(in_order.begin(), in_order.end(),
                       [&](size_t a, size_t b) { return letters[a].tag < letters[b].tag; });
      for (size_t letter : in_order) {
        const uint64_t source = input + first_of(letter, true) * size;
        const uint64_t target = output + first_of(letter, false) * size;
        // Private memory is posted if a channel has one stripe.
        const bool here = channel_stripes == 1 && (threads || direct);
        const uint64_t posted = here              ? source | uint64_t(1) << FA_SOURCE_PRIVATE_SHIFT
                                : registered != 0 ? registered + first_of(letter, true) * size
                                                  : 0;
        packed.transfer[length++] = {sends ? source : target, letters[letter].count * size,
                                     peer == rank                      ? source
                                     : sends && letters[letter].posted ? posted
                                                                       : 0,
                                     letters[letter].tag, part_of(letters[letter].count * size)};
        most = std::max(most, stripes_of(letters[letter].count * size));
      }
      stripes += most;
    }
    packed.first[2 * world] = length;
    packed.stripes[2 * world] = stripes;
    return packed;
  }

private:
  double reduced(uint64_t i) const {
    double result = input(0, i);
    for (uint32_t rank = 1; rank < world; ++rank) {
      const double value = input(rank, i);
      switch (op) {
      case FA_SUM:
      case FA_AVG: result += value; break;
      case FA_PROD: result *= value; break;
      case FA_MIN: result = std::min(result, value); break;
      default: result = std::max(result, value); break;
      }
    }
    if (op != FA_AVG)
      return result;
    result /= world;
    return dtype == FA_F32 || dtype == FA_F64 ? result : double(int64_t(result));
  }
};

constexpr uint32_t kAlgorithms = FA_SHARDED_RMS_NORM + 1;
constexpr uint32_t kMixed = kAlgorithms; // all algorithms, rather than one

// Returns the largest number of packs of a launch.
inline uint64_t most_packs(uint32_t algorithm, uint32_t world) {
  const uint64_t packs = kMostBytes / FA_HOST_PACK_BYTES, slots = kMailboxSlots / world;
  switch (algorithm) {
  case FA_RING: return world == 1 ? packs : std::min(packs, slots / (2 * world - 2) * world);
  case FA_HALVING_DOUBLING: return std::min(packs, slots / 2);
  default: return packs;
  }
}

// Divides the count into shares, some of them empty.
inline void draw_shares(std::mt19937_64 &random, Call &call, uint64_t lanes) {
  uint64_t first = 0;
  for (uint32_t rank = 0; rank < call.world; ++rank) {
    const uint64_t most = call.count / call.world;
    uint64_t count = random() % 4 == 0 ? 0 : 1 + random() % std::max<uint64_t>(most, 1);
    count = lanes > 0 ? count / lanes * lanes : count;
    call.shares[rank] = {first, count};
    first += count;
  }
  call.count = first;
  // In an empty launch a rank would hear from no peer.
  if (first == 0)
    call.count = call.shares[call.world - 1].count = std::max<uint64_t>(lanes, 1);
}

inline void draw_letters(std::mt19937_64 &random, Call &call, uint64_t lanes) {
  const uint64_t number = random() % 8;
  for (uint64_t letter = 0; letter < number; ++letter) {
    const uint32_t from = random() % call.world, to = random() % call.world, tag = random() % 3;
    const uint64_t count = random() % 5 == 0 ? 0 : 1 + random() % (call.count / 4 + 1);
    call.letters.push_back({from, to, tag, lanes > 0 ? count / lanes * lanes : count, random() % 2 == 0});
  }
  call.threads = random() % 3 == 0;
  call.direct = !call.threads && random() % 2 == 0;
}

// Divides the message into rows: of any length if one block processes all of them, otherwise of whole packs.
// All ranks' slices have the same number of whole rows.
inline void draw_rows(std::mt19937_64 &random, Call &call, uint64_t lanes, bool whole) {
  call.norm = random() % 2 ? FA_NORM_RMS : FA_NORM_LAYER;
  if (call.blocks == 1 && !whole) {
    call.row = 1 + random() % std::min<uint64_t>(call.count, 700);
    call.count = call.count / call.row * call.row;
    return;
  }
  const uint64_t packs = 1 + random() % 4, most = most_packs(call.algorithm, call.world);
  uint64_t rows = std::max<uint64_t>(call.count / (packs * lanes), 1);
  while (rows > 1 && (rows + call.world - 1) / call.world * call.world * packs > most)
    --rows;
  call.row = uint32_t(packs * lanes);
  call.count = rows * call.row;
}

// Divides the message into whole rows, and these into shares, some of them empty.
inline void draw_row_shares(std::mt19937_64 &random, Call &call, uint64_t lanes, bool whole) {
  const uint64_t rows = 1 + random() % (2 * call.world);
  call.norm = random() % 2 ? FA_NORM_RMS : FA_NORM_LAYER;
  call.row = call.blocks == 1 && !whole ? 1 + random() % std::max<uint64_t>(call.count / (2 * call.world), 1)
                                        : uint32_t(lanes * (1 + random() % 2));
  call.count = rows;
  draw_shares(random, call, 0);
  for (FaShare &share : call.shares)
    share = {share.first * call.row, share.count * call.row};
  call.count *= call.row;
}

// Draws rows of bytes with scales of four bytes, or of one byte.
inline void draw_gathered_rows(std::mt19937_64 &random, Call &call) {
  call.row = 40 + random() % 24;
  draw_shares(random, call, call.row);
  call.groups = 1 + random() % 5;
  call.rule = random() % 2 ? FA_RULE_F32 : FA_RULE_E4M3;
  static constexpr uint32_t layouts[] = {FA_LAYOUT_ROWS, FA_LAYOUT_COLUMNS, FA_LAYOUT_8X4, FA_LAYOUT_128X4};
  call.layout = layouts[random() % (call.rule == FA_RULE_F32 ? 2 : 4)];
}

// Divides the elements of each rank into rows, of which the mailboxes have a slot each.
inline void draw_sharded_rows(std::mt19937_64 &random, Call &call, uint64_t lanes, bool whole) {
  const uint64_t unit = whole ? lanes : 1;
  call.row = uint32_t((1 + random() % std::min<uint64_t>(call.count / unit, 700 / unit)) * unit);
  call.count = std::min<uint64_t>(call.count / call.row, kMailboxSlots / call.world) * call.row;
  // One part, or two.
  call.split = random() % 2 ? call.row : uint32_t((1 + random() % (call.row / unit)) * unit);
}

// Draws a call, the same on all ranks because each seeds its generator alike. It has at least one element: in
// an empty launch a rank would hear from no peer, and the library starts none.
inline Call draw(std::mt19937_64 &random, uint32_t number, uint32_t world, uint32_t workers,
                 uint32_t fixed_algorithm, bool whole) {
  static constexpr uint32_t dtypes[] = {FA_BF16, FA_F32, FA_F64, FA_U8, FA_I32, FA_I64};
  static constexpr uint32_t sizes[] = {2, 4, 8, 1, 4, 8};
  Call call = {};
  call.number = number;
  call.world = world;
  call.algorithm = fixed_algorithm < kMixed ? fixed_algorithm : random() % kAlgorithms;
  const bool quantized = call.algorithm == FA_TWO_SHOT_QUANTIZED;
  const bool floats = quantized || call.normalises() || call.is_nvls() || call.is_sharded();
  const uint32_t type = call.algorithm == FA_ALL_GATHER_ROWS ? 3 : random() % (floats ? 2 : 6);
  call.blocks = random() % 2 ? workers : 1;
  call.root = random() % world;
  call.dtype = dtypes[type];
  call.op = random() % 2 ? uint32_t(FA_SUM) : random() % 5;
  if (floats)
    call.op = FA_SUM;
  call.transport = random() % 2 ? FA_TRANSPORT_INT8 : FA_TRANSPORT_F8E4M3;
  // bfloat16 has 8 bits: averages would be rounded, and so would products of 4 ranks.
  if (call.dtype == FA_BF16 && (call.op == FA_AVG || call.op == FA_PROD))
    call.op = FA_SUM;
  // 6^4 does not fit in 8 bits.
  if (call.dtype == FA_U8 && call.op == FA_PROD)
    call.op = FA_MAX;
  // These two algorithms send partial sums. They compute averages of f32 and f64 only.
  const bool is_float = call.dtype == FA_F32 || call.dtype == FA_F64;
  if ((call.algorithm == FA_RING || call.algorithm == FA_HALVING_DOUBLING) && call.op == FA_AVG && !is_float)
    call.op = FA_SUM;
  if (call.algorithm == FA_TWO_SHOT_PULL && call.op != FA_AVG && world > 2 && world % 2 == 0 && random() % 2)
    call.socket_ranks = world / 2;
  const uint64_t lanes = FA_HOST_PACK_BYTES / sizes[type];
  const uint64_t most = most_packs(call.algorithm, world) * lanes;
  switch (random() % 4) {
  case 0: call.count = 1 + random() % 3; break;
  case 1: call.count = 1 + random() % (lanes + 1); break;
  default: call.count = 1 + random() % most; break;
  }
  if (whole)
    call.count = call.count < lanes ? lanes : call.count / lanes * lanes;
  if (call.algorithm == FA_ALL_GATHER || call.algorithm == FA_REDUCE_SCATTER)
    draw_shares(random, call, whole ? lanes : 0);
  if (call.algorithm == FA_ALL_GATHER_ROWS)
    draw_gathered_rows(random, call);
  if (call.algorithm == FA_TRANSFER)
    draw_letters(random, call, whole ? lanes : 0);
  if (call.algorithm == FA_REDUCE_SCATTER_NORM) {
    draw_row_shares(random, call, lanes, whole);
  } else if (call.normalises()) {
    draw_rows(random, call, lanes, whole);
    call.experts = random() % 3 == 0;
  }
  if (call.is_sharded())
    draw_sharded_rows(random, call, lanes, whole);
  // A share is rounded up to whole packs. A reduce-scatter stages each share at a multiple of the largest.
  uint64_t largest = 0;
  for (const FaShare &share : call.shares)
    largest = std::max<uint64_t>(largest, share.count);
  const uint64_t all = call.scatters() ? world * largest : call.count;
  const uint64_t scales =
      call.algorithm == FA_ALL_GATHER_ROWS ? FA_SCALES_ALIGNMENT + call.count / call.row * 20 : 0;
  const uint64_t staged = all * sizes[type] + world * FA_HOST_PACK_BYTES + scales;
  // Quantised calls do not use the staging ring (src/call/arguments.rs): their parts are aligned, and there
  // are more of them.
  while (!quantized && random() % 2 && staged <= kMaxBytes / (2 * call.staging_slots))
    call.staging_slots *= 2;
  return call;
}
