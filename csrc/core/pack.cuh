// Packs, the unit of work: 16 bytes on a GPU, a cache line on the host. Code that moves packs does not know
// their element type. Also spans and slices of packs, the partitions that divide them, and copies.
//
// The last pack of a message may be partial. On a GPU, all packs of a misaligned message are moved like a
// partial one: granule by granule, in a loop that is not unrolled.
#pragma once

#include "block.cuh"

namespace FA_NAMESPACE {

#if FA_CUDA
constexpr u32 kPackBytes = FA_CUDA_PACK_BYTES;
#else
constexpr u32 kPackBytes = FA_HOST_PACK_BYTES;
#endif

// How much of a pack exists. On the host, whole and partial packs have different types.
struct Whole {
  static constexpr u32 bytes = kPackBytes;
};
struct Partial {
  u32 bytes;
};

#if FA_CUDA

// A 64-bit word from its halves, and its halves: two registers each, without an instruction. The compiler
// would shift and merge.
FA_FN u64 join(u32 low, u32 high) {
  u64 word;
  asm("mov.b64 %0, {%1, %2};" : "=l"(word) : "r"(low), "r"(high));
  return word;
}
FA_FN void split(u64 word, u32 *low, u32 *high) {
  asm("mov.b64 {%0, %1}, %2;" : "=r"(*low), "=r"(*high) : "l"(word));
}

// 32-bit words, like registers, so that a load needs no conversion that would wait for it.
struct alignas(FA_CUDA_PACK_BYTES) Pack {
  u32 word[4];

  FA_FN u64 low() const { return join(word[0], word[1]); }
  FA_FN u64 high() const { return join(word[2], word[3]); }
};

FA_FN Pack pack_of(u64 low, u64 high) {
  Pack pack;
  split(low, &pack.word[0], &pack.word[1]);
  split(high, &pack.word[2], &pack.word[3]);
  return pack;
}

// Selects one of two packs by value: selecting an address would need a stack frame.
FA_FN Pack select_pack(bool first, const Pack &a, const Pack &b) {
  return {first ? a.word[0] : b.word[0], first ? a.word[1] : b.word[1], first ? a.word[2] : b.word[2],
          first ? a.word[3] : b.word[3]};
}

struct Extent {
  u32 bytes;
  bool whole;
};

template <class>
constexpr bool kIsWhole = false;
template <>
constexpr bool kIsWhole<Whole> = true;

// The largest power of two up to 8 that divides all of the addresses and sizes in `bits`.
FA_FN u32 granule_of(u64 bits) { return 1u << (__ffsll(bits | 8) - 1); }

FA_FN u64 load_granule(const u8 *from, u32 granule) {
  switch (granule) {
  case 8: return *reinterpret_cast<const u64 *>(from);
  case 4: return *reinterpret_cast<const u32 *>(from);
  case 2: return *reinterpret_cast<const u16 *>(from);
  default: return *from;
  }
}

FA_FN void store_granule(u8 *to, u64 value, u32 granule) {
  switch (granule) {
  case 8: *reinterpret_cast<u64 *>(to) = value; break;
  case 4: *reinterpret_cast<u32 *>(to) = u32(value); break;
  case 2: *reinterpret_cast<u16 *>(to) = u16(value); break;
  default: *to = u8(value);
  }
}

// Shifts a pack up by a granule and inserts one at its beginning.
FA_FN void push_granule(Pack *pack, u64 value, u32 granule) {
  const u32 bits = 8 * granule;
  const u64 low = pack->low(), high = pack->high();
  *pack = bits == 64 ? pack_of(value, low) : pack_of(low << bits | value, high << bits | low >> (64 - bits));
}

// Loads from the last granule to the first, so that the pack is not indexed and stays in registers.
FA_FN Pack load_partial_inlined(const u8 *from, u32 bytes, u32 granule) {
  Pack pack = {};
  FA_NO_UNROLL
  for (u32 at = bytes; at > 0;) {
    at -= granule;
    push_granule(&pack, load_granule(from + at, granule), granule);
  }
  return pack;
}
FA_OUTLINED Pack load_partial(const u8 *from, u32 bytes, u32 granule) {
  return load_partial_inlined(from, bytes, granule);
}

FA_FN void store_partial_inlined(u8 *to, Pack pack, u32 bytes, u32 granule) {
  const u32 bits = 8 * granule;
  u64 low = pack.low(), high = pack.high();
  FA_NO_UNROLL
  for (u32 at = 0; at < bytes; at += granule) {
    store_granule(to + at, low, granule);
    low = bits == 64 ? high : low >> bits | high << (64 - bits);
    high = bits == 64 ? 0 : high >> bits;
  }
}
FA_OUTLINED void store_partial(u8 *to, Pack pack, u32 bytes, u32 granule) {
  store_partial_inlined(to, pack, bytes, granule);
}

FA_FN Pack load(const u8 *from, Whole, u32) {
  // Addresses of messages are integers; the compiler does not know their memory space.
  __builtin_assume(__isGlobal(from));
  const uint4 words = *reinterpret_cast<const uint4 *>(from);
  return {words.x, words.y, words.z, words.w};
}

// Loads or stores a whole pack if `wanted`: predicated rather than branched, so that several accesses
// overlap.
FA_FN void load_if(bool wanted, const u8 *from, Pack *pack) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
               "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "+r"(pack->word[0]), "+r"(pack->word[1]), "+r"(pack->word[2]), "+r"(pack->word[3])
               : "l"(from), "r"(u32(wanted))
               : "memory");
}
FA_FN void store_if(bool wanted, u8 *to, const Pack &pack) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
               "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(to),
               "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3]), "r"(u32(wanted))
               : "memory");
}

// Loads a word in the same way.
FA_FN void load_if(bool wanted, const u8 *from, u32 *word) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t"
               "@p ld.global.u32 %0, [%1];\n\t}"
               : "+r"(*word)
               : "l"(from), "r"(u32(wanted))
               : "memory");
}

// Loads a whole pack without a branch, or returns zeros if `wanted` is false.
FA_FN Pack load_if(bool wanted, u64 from) {
  Pack pack = {};
  load_if(wanted, reinterpret_cast<const u8 *>(from), &pack);
  return pack;
}

FA_FN void store(u8 *to, Pack pack, Whole, u32) {
  __builtin_assume(__isGlobal(to));
  *reinterpret_cast<uint4 *>(to) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
}

// Stores a whole pack without a branch, unless r is `own`.
FA_FN void store_unless(u32 r, u32 own, u8 *to, Pack pack) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %0, %1;\n"
               "@stores st.global.v4.u32 [%2], {%3, %4, %5, %6}; }" ::"r"(r),
               "r"(own), "l"(to), "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

FA_FN Pack load(const u8 *from, Extent extent, u32 granule) {
  return extent.whole ? load(from, Whole{}, granule) : load_partial(from, extent.bytes, granule);
}

FA_FN void store(u8 *to, Pack pack, Extent extent, u32 granule) {
  if (extent.whole)
    store(to, pack, Whole{}, granule);
  else
    store_partial(to, pack, extent.bytes, granule);
}

// An extent in an out-of-line function, which must not call functions: load() and store() are inlined.
struct LeafExtent : Extent {};
FA_FN LeafExtent in_leaf(Extent extent) { return {extent}; }
FA_FN Whole in_leaf(Whole whole) { return whole; }

FA_FN Pack load(const u8 *from, LeafExtent extent, u32 granule) {
  return extent.whole ? load(from, Whole{}, granule) : load_partial_inlined(from, extent.bytes, granule);
}

FA_FN void store(u8 *to, Pack pack, LeafExtent extent, u32 granule) {
  if (extent.whole)
    store(to, pack, Whole{}, granule);
  else
    store_partial_inlined(to, pack, extent.bytes, granule);
}

#else

struct Pack {
  u8 byte[kPackBytes];
};

FA_FN const Pack &select_pack(bool first, const Pack &a, const Pack &b) { return first ? a : b; }

FA_FN u32 granule_of(u64) { return 1; }

template <class Extent>
FA_FN Extent in_leaf(Extent extent) {
  return extent;
}

template <class Extent>
FA_FN Pack load(const u8 *from, Extent extent, u32) {
  Pack pack = {};
  __builtin_memcpy(&pack, from, extent.bytes);
  return pack;
}

template <class Extent>
FA_FN void store(u8 *to, const Pack &pack, Extent extent, u32) {
  __builtin_memcpy(to, &pack, extent.bytes);
}

#endif

// Returns whether vector accesses at these addresses are legal. If so, they are legal for every pack of the
// buffers.
FA_FN bool pack_aligned(u64 addresses) { return !FA_CUDA || addresses % FA_CUDA_PACK_BYTES == 0; }

// A run of packs of a message: first..first + length. The message's last pack may be partial.
struct Span {
  Index first;
  Index length;
};

FA_FN u64 packs_of(u64 bytes) { return (bytes + kPackBytes - 1) / kPackBytes; }

// The slices of a two-shot: rank r owns slice r. All have the same length, except the last non-empty one.
// Each is a multiple of `unit` packs.
struct Slices {
  Index packs; // of the message
  Index each;

  FA_FN Slices(Index packs, u32 world, Index unit = 1)
      : packs(packs), each((packs / unit + world - 1) / world * unit) {}

  FA_FN Span of(u32 r) const {
    const Index first = r * each, left = first < packs ? packs - first : 0;
    return {first, left < each ? left : each};
  }
};

// Slices of equal length.
struct EqualSlices {
  Index each;

  FA_FN Span of(u32 r) const { return {r * each, each}; }
};

// Calls body(byte offset, pack index, extent) for a pack of a message of `bytes` bytes. `vector`: all
// addresses that body accesses are pack_aligned.
template <class I, class Body>
FA_FN void with_extent(I pack, u64 bytes, bool vector, Body body) {
  const u64 at = u64(pack) * kPackBytes, left = bytes - at;
#if FA_CUDA
  body(at, pack, Extent{left < kPackBytes ? u32(left) : kPackBytes, vector && left >= kPackBytes});
#else
  (void)vector;
  if (left >= kPackBytes)
    body(at, pack, Whole{});
  else
    body(at, pack, Partial{u32(left)});
#endif
}

// A partition divides the packs of a message into slices for the ranks, and the packs of a span among a
// rank's blocks. All ranks use the same partition in all steps of a launch: block b stages, sends and
// receives the same packs as block b of a peer.
//
// This one divides at any pack, and supports partial packs.
struct PackPartition {
  static constexpr bool has_partial_packs = true;
  FA_FN Span all(u64 bytes) const { return {0, Index(packs_of(bytes))}; }
  FA_FN Slices slices(u64 bytes, u32 world) const { return Slices(Index(packs_of(bytes)), world); }
#if FA_CUDA
  // Calls body(i) for each pack i of a span that belongs to this block.
  template <class Block, class Body>
  FA_FN void for_each(const Block &block, Span span, Body body) const {
    block.for_each(span.length, body);
  }
#else
  // This block's share of a span.
  template <class Block>
  FA_FN Span share(const Block &block, Span span) const {
    const auto share = block.share(span.length);
    return {span.first + share.first, share.last - share.first};
  }
#endif
};
#if FA_CUDA
// The partition of messages of the hot set between W ranks: whole packs only, and slices of equal length.
template <u32 W>
struct WholePackPartition : PackPartition {
  static constexpr bool has_partial_packs = false;
  FA_FN Span all(u64 bytes) const { return {0, Index(bytes / kPackBytes)}; }
  FA_FN EqualSlices slices(u64 bytes, u32) const { return EqualSlices{all(bytes).length / W}; }
};
#endif
// All packs of a message.
FA_FN Span all_packs(u64 bytes) { return PackPartition().all(bytes); }

// Calls body(byte offset, pack index, extent) for each pack of a span that belongs to this block.
template <class Block, class Body, class Partition = PackPartition>
FA_FN void for_each_pack(const Block &block, Span span, u64 bytes, bool vector, Body body,
                         Partition partition = {}) {
#if FA_CUDA
  partition.for_each(block, span, [&](Index i) {
    if constexpr (Partition::has_partial_packs)
      with_extent(span.first + i, bytes, vector, body);
    else
      body(u64(span.first + i) * kPackBytes, span.first + i, Whole{});
  });
#else
  (void)vector;
  const Span share = partition.share(block, span);
  const u64 last = share.first + share.length, whole = bytes / kPackBytes;
  u64 i = share.first;
  for (; i < (last < whole ? last : whole); ++i)
    body(i * kPackBytes, i, Whole{});
  if (i < last)
    body(i * kPackBytes, i, Partial{u32(bytes - i * kPackBytes)});
#endif
}

template <class Block, class Partition>
FA_FN void copy_inlined(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes,
                        Partition partition) {
  const u64 addresses = u64(to) | u64(from);
  const u32 granule = granule_of(addresses | bytes);
  for_each_pack(
      block, span, bytes, pack_aligned(addresses),
      [&](u64 at, Index, auto extent) {
        store(to + at, load(from + at, in_leaf(extent), granule), in_leaf(extent), granule);
      },
      partition);
}

// Copies a span of packs of a message of `bytes` bytes.
template <class Block, class Partition = PackPartition>
FA_OUTLINED void copy(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes,
                      Partition partition = {}) {
  copy_inlined(block, to, from, span, bytes, partition);
}
#if FA_CUDA
// The hot set inlines its copies.
template <class Block, u32 W>
FA_FN void copy(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes,
                WholePackPartition<W> partition) {
  copy_inlined(block, to, from, span, bytes, partition);
}
#endif

// Copies into the caller's output. On the host, long runs use the C library, whose string instructions do not
// first read the lines that they overwrite. Not for staging, whose lines are in the peers' caches, and not
// for short runs, where it is slower at some alignments.
#if !FA_CUDA
constexpr u64 kLongCopy = 160 << 10;
#endif
template <class Block, class Partition = PackPartition>
FA_FN void copy_out(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes,
                    Partition partition = {}) {
#if !FA_CUDA
  const Span share = partition.share(block, span);
  const u64 first = u64(share.first) * kPackBytes, end = first + u64(share.length) * kPackBytes;
  const u64 length = (end < bytes ? end : bytes) - first;
  if (share.length != 0 && length >= kLongCopy) {
    __builtin_memcpy(to + first, from + first, length);
    return;
  }
#endif
  copy(block, to, from, span, bytes, partition);
}

// Copies to two destinations.
template <class Block>
FA_OUTLINED void copy_twice(const Block &block, u8 *to, u8 *also, const u8 *from, Span span, u64 bytes) {
  const u64 addresses = u64(to) | u64(also) | u64(from);
  const u32 granule = granule_of(addresses | bytes);
  for_each_pack(block, span, bytes, pack_aligned(addresses), [&](u64 at, Index, auto extent) {
    const Pack pack = load(from + at, in_leaf(extent), granule);
    store(to + at, pack, in_leaf(extent), granule);
    store(also + at, pack, in_leaf(extent), granule);
  });
}

#if FA_CUDA
// Stores pack i of each slice.
template <u32 W>
FA_FN void store_slices(u8 *to, const Pack *packs, Index i, const EqualSlices &slices) {
  FA_UNROLL
  for (u32 r = 0; r < W; ++r)
    store(to + u64(r * slices.each + i) * kPackBytes, packs[r], Whole{}, 0);
}
#endif

// On a GPU a rank copies its own slice like a peer's, and, except in the hot set, sends packets to itself:
// one loop body for all ranks. On the host a rank skips itself.
constexpr u32 kFirstStep = FA_CUDA ? 0 : 1;

// The destination of copied slices.
enum class Target { kStaging, kOutput };

// Copies the slices of a message, slice r from addresses[r].
template <class Partition, class Block>
FA_FN void copy_slices(Partition partition, const Block &block, u8 *to, const u64 *addresses,
                       const Slices &slices, u32 rank, u32 world, u64 bytes, Target target) {
  FA_NO_UNROLL
  for (u32 step = kFirstStep; step < world; ++step) {
    // Each rank begins with its right neighbour, so that the ranks do not all read one rank at once.
    const u32 r = (rank + step) % world;
    const u8 *from = reinterpret_cast<const u8 *>(addresses[r]);
    if (!FA_CUDA && target == Target::kOutput)
      copy_out(block, to, from, slices.of(r), bytes, partition);
    else
      copy(block, to, from, slices.of(r), bytes, partition);
  }
}

#if FA_CUDA
// Bytes that are copied from one place to another.
struct Run {
  u8 *to;
  const u8 *from;
  u64 bytes;

  // Number of packs that vector accesses can copy: all that are whole, or none.
  FA_FN Index whole() const { return pack_aligned(u64(to) | u64(from)) ? Index(bytes / kPackBytes) : 0; }
  FA_FN Index packs() const { return Index(packs_of(bytes)); }
};

// Copies the packs of a run that vector accesses cannot copy, by the threads that would copy them as a part
// of the whole run.
template <class Block>
FA_OUTLINED void copy_rest(const Block &block, Run run) {
  const u32 granule = granule_of(u64(run.to) | u64(run.from) | run.bytes);
  block.for_each_within(run.packs(), run.whole(), run.packs(), [&](Index i) {
    const u64 at = u64(i) * kPackBytes, left = run.bytes - at;
    const u32 length = left < kPackBytes ? u32(left) : kPackBytes;
    store_partial_inlined(run.to + at, load_partial_inlined(run.from + at, length, granule), length, granule);
  });
}

// Copies N runs: run_of(0), ..., run_of(N - 1), of which those of no bytes may have any addresses. Loads pack
// i of all runs before it stores one, so that the loads overlap: predicated, because runs may have different
// lengths. A block copies the packs that it would copy of each run alone, which is what the block of the same
// number of a peer has staged. Calls load(i) after the loads and store(i) after the stores, for each i of
// this block that is less than `also`, and others.
template <u32 N, class Block, class RunOf, class Load, class Store>
FA_FN void copy_runs(const Block &block, RunOf run_of, Index also, Load load, Store store) {
  Run runs[N];
  Index whole[N], most = also;
  Pack packs[N] = {};
  bool rest = false;
  FA_UNROLL
  for (u32 k = 0; k < N; ++k) {
    runs[k] = run_of(k);
    whole[k] = runs[k].whole();
    most = max(most, whole[k]);
    rest |= whole[k] != runs[k].packs();
  }
  block.for_each(most, [&](Index i) {
    const u64 at = u64(i) * kPackBytes;
    FA_UNROLL
    for (u32 k = 0; k < N; ++k)
      load_if(i < whole[k], runs[k].from + at, &packs[k]);
    load(i);
    FA_UNROLL
    for (u32 k = 0; k < N; ++k)
      store_if(i < whole[k], runs[k].to + at, packs[k]);
    store(i);
  });
  // One after the other, by one loop body.
  FA_NO_UNROLL
  for (u32 k = 0; rest && k < N; ++k)
    copy_rest(block, run_of(k));
}
template <u32 N, class Block, class RunOf>
FA_FN void copy_runs(const Block &block, RunOf run_of) {
  const auto nothing = [](Index) {};
  copy_runs<N>(block, run_of, 0, nothing, nothing);
}

// Loads pack i of all slices before it stores one, so that the loads overlap.
template <u32 W, class Block>
FA_FN void copy_slices(WholePackPartition<W> partition, const Block &block, u8 *to, const u64 *addresses,
                       const EqualSlices &slices, u32, u32, u64, Target) {
  partition.for_each(block, slices.of(0), [&](Index i) {
    Pack packs[W];
    FA_UNROLL
    for (u32 r = 0; r < W; ++r) {
      const Index at = r * slices.each + i;
      packs[r] = load(reinterpret_cast<const u8 *>(addresses[r]) + u64(at) * kPackBytes, Whole{}, 0);
    }
    store_slices<W>(to, packs, i, slices);
  });
}
#endif

} // namespace FA_NAMESPACE
