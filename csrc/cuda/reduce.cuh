// How a GPU's protocols reduce: pack by pack, each in the registers of a thread.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../reduce/reduction.cuh"

namespace FA_NAMESPACE {

// The number of ranks, known to the compiler (the hot set) or not.
template <u32 W>
struct World {
  static constexpr bool known = true;
  FA_FN constexpr u32 size() const { return W; }
};
struct AnyWorld {
  static constexpr bool known = false;
  u32 ranks;
  FA_FN constexpr u32 size() const { return ranks; }
};
template <u32 W>
NoParts packs_of_kernel(World<W>);
Parts packs_of_kernel(AnyWorld);

// body(r) for r in 0..world in order; unrolled when the world is known, so that indices are constants.
template <u32 W, class Body>
FA_FN void for_each_rank(World<W>, Body body) {
  FA_UNROLL
  for (u32 r = 0; r < W; ++r)
    body(r);
}

template <class Body>
FA_FN void for_each_rank(AnyWorld world, Body body) {
  FA_ROLL
  for (u32 r = 0; r < world.ranks; ++r)
    body(r);
}

template <class T, class Op, class WorldT>
class Reduce {
  static constexpr u32 kLanes = kPackBytes / sizeof(T);
  using All = Elements<T, kLanes>;
  using One = Elements<T, 1>;

public:
  // The kernels of any world also take checked launches, and messages that are not all whole packs at aligned
  // addresses: so the hot set needs no code for either.
  static constexpr bool compares = !WorldT::known;
  using Packs = decltype(packs_of_kernel(WorldT{}));

  FA_FN Reduce(Op op, WorldT world) : op_(op), world_(world) {}

  FA_FN u32 world() const { return world_.size(); }

  // Reduces this block's share of a span of a message over the ranks' inputs, into the sink.
  template <class Block, class Sink>
  FA_FN void inputs(const FaLaunch &, Block &block, const Inputs &inputs, Span span, u64 bytes,
                    const Sink &sink) const {
    const bool vector = pack_aligned(inputs.addresses() | sink.addresses());
    for_each_pack<Packs>(block, span, bytes, vector, [&](u64 at, u64 i, auto extent) {
      if constexpr (!kIsWhole<decltype(extent)>) {
        if (!extent.whole)
          return sink.put(at, i, reduce_part(inputs, at, extent.bytes), extent, sizeof(T));
      }
      Reduction<T, Op, kLanes> reduction(op_, world());
      for_each_rank(world_,
                    [&](u32 r) { reduction.add(elements<All>(load(inputs.at(r) + at, Whole{}, 0))); });
      sink.put(at, i, pack_of(reduction.finish()), extent, sizeof(T));
    });
  }

  // The same over this rank's input and the packets of `part` that its peers send it. False: not all came.
  template <class Block, class Sink>
  FA_FN bool packets(const FaLaunch &launch, Block &block, u32 epoch, u32 part, u32 parts, Span span,
                     u64 bytes, const Sink &sink) const {
    const u8 *input = reinterpret_cast<const u8 *>(launch.input);
    const bool vector = pack_aligned(launch.input | sink.addresses());
    bool complete = true;
    for_each_pack<Packs>(block, span, bytes, vector, [&](u64 at, u64 i, auto extent) {
      if (!complete)
        return;
      const Pack own = load(input + at, extent, sizeof(T));
      Reduction<T, Op, kLanes> reduction(op_, world());
      complete = gather(launch, slots_of(launch, launch.rank, epoch, part, parts, 0) + (i - span.first),
                        mailbox_share(launch), epoch, own, world_, &reduction);
      if (complete)
        sink.put(at, i, pack_of(reduction.finish()), extent, sizeof(T));
    });
    return complete;
  }

  // Reduces two packs. `whole`: now all ranks' are in it, which an average divides.
  FA_FN Pack packs(const Pack &first, const Pack &second, bool whole) const {
    Reduction<T, Op, kLanes> reduction(op_, world());
    reduction.add(elements<All>(first));
    reduction.add(elements<All>(second));
    return pack_of(reduction.finish(whole));
  }

  // The same of one.
  FA_FN Pack pack(const Pack &only, bool whole) const {
    Reduction<T, Op, kLanes> reduction(op_, world());
    reduction.add(elements<All>(only));
    return pack_of(reduction.finish(whole));
  }

private:
  Op op_;
  WorldT world_;

  // Element by element, from the last to the first, as parts are loaded.
  FA_FN Pack reduce_part(const Inputs &inputs, u64 at, u32 bytes) const {
    Pack pack = {0, 0};
    FA_ROLL
    for (u32 e = bytes; e > 0;) {
      e -= sizeof(T);
      Reduction<T, Op, 1> reduction(op_, world());
      FA_ROLL
      for (u32 r = 0; r < world(); ++r)
        reduction.add(*reinterpret_cast<const One *>(inputs.at(r) + at + e));
      push_granule(&pack, bits_of(reduction.finish()), sizeof(T));
    }
    return pack;
  }

  template <class E>
  static FA_FN E elements(const Pack &pack) {
    return *reinterpret_cast<const E *>(&pack);
  }
  static FA_FN Pack pack_of(const All &elements) { return *reinterpret_cast<const Pack *>(&elements); }
  static FA_FN u64 bits_of(const One &element) {
    if constexpr (sizeof(T) == 1)
      return *reinterpret_cast<const u8 *>(&element);
    else if constexpr (sizeof(T) == 2)
      return *reinterpret_cast<const u16 *>(&element);
    else if constexpr (sizeof(T) == 4)
      return *reinterpret_cast<const u32 *>(&element);
    else
      return *reinterpret_cast<const u64 *>(&element);
  }

  // Adds the ranks' packets of one pack, of which rank 0's is in `slot` and the others' at a distance each.
  // All are looked at together, so that the looks wait for each other's memory only once.
  template <u32 W, class R>
  static FA_FN bool gather(const FaLaunch &launch, const Slot *slot, u64 distance, u32 tag, const Pack &own,
                           World<W>, R *reduction) {
    Pack packs[W];
    Patience patience;
    bool here = true;
    for (;;) {
      u32 missing = 0;
      FA_UNROLL
      for (u32 r = 0; r < W; ++r) {
        packs[r] = own;
        if (r != launch.rank && !load_packet(slot + r * distance, tag, &packs[r]))
          missing |= 1u << r;
      }
      if (missing == 0)
        break;
      here = patience.another_poll(launch, __ffs(missing) - 1, tag);
      if (!here)
        break;
    }
    FA_UNROLL
    for (u32 r = 0; r < W; ++r)
      reduction->add(elements<All>(packs[r]));
    return here;
  }

  template <class R>
  static FA_FN bool gather(const FaLaunch &launch, const Slot *slot, u64 distance, u32 tag, const Pack &own,
                           AnyWorld world, R *reduction) {
    FA_ROLL
    for (u32 r = 0; r < world.ranks; ++r) {
      Pack pack = own;
      if (r != launch.rank && !wait_packet(launch, slot + r * distance, r, tag, &pack))
        return false;
      reduction->add(elements<All>(pack));
    }
    return true;
  }
};

} // namespace FA_NAMESPACE
