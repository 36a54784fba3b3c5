// Reductions of the host's algorithms: in runs of packs, by the typed loop of the call.
#pragma once

#include "../core/inputs.cuh"
#include "../core/packet.cuh"
#include "../reduce/rows.cuh"
#include "../reduce/span.cuh"
#include "../sinks/packets.cuh"

namespace FA_NAMESPACE {

// The loop that computes this rank's input from experts' rows, with its operands; null if memory has the
// input.
struct ExpertRows {
  void (*gather)(const GatheredSpan &) = nullptr;
  const FaFused *norm = nullptr;
};

class Reduce {
public:
  static constexpr u32 kRanks = 0; // not known to the compiler
  // Whether a launch is checked is known at run time only.
  static constexpr bool compares = true;

  Reduce(const ReduceSpans &spans, const FaLaunch &launch, ExpertRows experts = {})
      : spans_(spans), op_(launch.op == FA_PREMUL_SUM ? u32(FA_SUM) : launch.op), world_(launch.world),
        computes_(launch.op == FA_PREMUL_SUM || experts.gather != nullptr), scale_(launch.scale),
        experts_(experts), input_(launch.input) {}

  u32 world() const { return world_; }
  // The partition for results that are independent of each other.
  PackPartition partition() const { return {}; }
  u64 message_bytes(const FaLaunch &launch) const { return FA_NAMESPACE::message_bytes(launch); }

  // Whether this rank's input is premultiplied, or computed from experts' rows. Then only stage() and own()
  // read it.
  bool computes_input() const { return computes_; }

  // Copies a span of this rank's input to staging, or computes it there.
  template <class Block, class Partition>
  void stage(const Block &block, u8 *to, const u8 *from, Span span, u64 bytes, Partition partition) const {
    if (!computes_)
      return copy(block, to, from, span, bytes, partition);
    const Span share = partition.share(block, span);
    if (experts_.gather != nullptr) {
      const u64 at = share.first * kPackBytes, end = at + share.length * kPackBytes;
      if (share.length != 0)
        gather(at, (end < bytes ? end : bytes) - at, to + at);
      return;
    }
    const u64 source = u64(from);
    run(spans_.of[FA_PREMUL_SUM][1], &source, 1, share.first * kPackBytes, kPackBytes, share, bytes,
        Store(to));
  }

  // A pack of this rank's input.
  template <class Extent>
  FA_FN Pack own(const u8 *from, Extent extent, u32 granule) const {
    if (!__builtin_expect(computes_, false))
      return load(from, extent, granule);
    if (experts_.gather != nullptr) {
      Pack pack = {};
      gather(u64(from) - input_, extent.bytes, pack.byte);
      return pack;
    }
    const Pack pack = load(from, extent, granule);
    const u64 source = u64(&pack);
    return through(FA_PREMUL_SUM, &source, 1);
  }

  // Reduces this block's share of a span over the ranks' inputs, into the sink.
  template <u32 = 1, class Block, class Partition, class Sink>
  void inputs(const FaLaunch &, Block &block, const Inputs &, Partition partition, Span span, u64 bytes,
              const Sink &sink) const {
    const Span own = partition.share(block, span);
    const ReduceSpan loop = spans_.of[op_][world_];
    for (u64 i = own.first, last = own.first + own.length; i < last;) {
      const u64 most = sink.most(i);
      const Span run_of = {i, last - i < most ? last - i : most};
      run(loop, block.scratch(), world_, i * kPackBytes, kPackBytes, run_of, bytes, sink,
          (last - i) * kPackBytes);
      i += run_of.length;
    }
  }

  // Reduces this block's share of a span over `count` inputs at these addresses, into the sink. `whole`: the
  // result then includes all ranks, so that an average divides it.
  template <class Block, class Partition, class Sink>
  void some_inputs(const Block &block, const u64 *inputs, u32 count, bool whole, Partition partition,
                   Span span, u64 bytes, const Sink &sink) const {
    const Span own = partition.share(block, span);
    const u32 op = op_ == FA_AVG && !whole ? u32(FA_SUM) : op_;
    run(spans_.of[op][count], inputs, count, own.first * kPackBytes, kPackBytes, own, bytes, sink,
        own.length * kPackBytes);
  }

  Tag packet_tag(const FaLaunch &launch, u32 epoch) const { return FA_NAMESPACE::packet_tag(launch, epoch); }

  // Reduces this block's share of a span over this rank's input and the packets in `section` from its peers,
  // into the sink. Returns false if not all came.
  template <class Block, class Partition, class Sink>
  bool packets(const FaLaunch &launch, Block &block, u32 epoch, u32 section, u32 sections,
               Partition partition, Span span, u64 bytes, const Sink &sink) const {
    constexpr u64 kRun = 8;
    const Tag tag = packet_tag(launch, epoch);
    const Span share = partition.share(block, span);
    const u64 first = share.first - span.first, last = first + share.length;
    for (u64 i = first; i < last; i += kRun) {
      const Span run_of = {span.first + i, last - i < kRun ? last - i : kRun};
      // This rank's own packs, laid out like slots: the loop has one stride.
      Slot own[kRun];
      u64 inputs[FA_MAX_RANKS];
      for (u32 r = 0; r < world_; ++r) {
        const Slot *slots =
            r == launch.rank ? own : own_slots_of(launch, world_, epoch, section, sections, r) + i;
        inputs[r] = u64(slots);
        for (u64 k = 0; k < run_of.length; ++k) {
          if (r != launch.rank) {
            if (!wait_packet(launch, slots + k, r, tag))
              return false;
          } else {
            with_extent(run_of.first + k, bytes, true, [&](u64 at, Index, auto extent) {
              const u8 *from = reinterpret_cast<const u8 *>(launch.input) + at;
              if (__builtin_expect(computes_, false)) {
                const Pack pack = this->own(from, extent, 1);
                __builtin_memcpy(own[k].data, &pack, extent.bytes);
              } else {
                __builtin_memcpy(own[k].data, from, extent.bytes);
              }
            });
          }
        }
      }
      run(spans_.of[op_][world_], inputs, world_, 0, sizeof(Slot), run_of, bytes, sink);
    }
    return true;
  }

  // The second phase of a two-shot push: reduces this rank's slice, sends it, and stores the peers' slices.
  template <class Epilogue, class Block, class Partition, class Outgoing>
  void slices(const FaLaunch &launch, Block &block, u32 epoch, const Epilogue &epilogue, Partition partition,
              const Slices &slices, u64 bytes, u8 *output, const Recipients<> &recipients,
              const Outgoing &) const {
    const Span own = slices.of(launch.rank);
    const Tag tag = packet_tag(launch, epoch);
    const auto sink = epilogue.into(
        Packets<>(output, recipients, launch, world_, epoch, kResults, kSections, own.first, tag));
    if (packets(launch, block, epoch, kInputs, kSections, partition, own, bytes, sink))
      receive_slices(
          launch, block, u64(output),
          [&](u64 at, Index, const Pack &pack, auto extent, u32 granule) {
            store(output + at, pack, extent, granule);
          },
          slices, bytes, world_, epoch, kResults, kSections, tag, partition);
  }

  // Reduces two packs, or only the last. `whole`: the sum then includes all ranks, so that an average divides
  // it.
  Pack packs(const Pack &first, const Pack &last, bool only_last, bool whole) const {
    const u64 inputs[] = {u64(&first), u64(&last)};
    return through(op_ == FA_AVG && !whole ? u32(FA_SUM) : op_, inputs + only_last, 2 - only_last);
  }

private:
  const ReduceSpans &spans_;
  u32 op_, world_;
  bool computes_;
  double scale_;
  ExpertRows experts_;
  u64 input_;

  void gather(u64 at, u64 bytes, u8 *to) const {
    experts_.gather({*experts_.norm, reinterpret_cast<const u8 *>(input_), at, bytes, to});
  }

  // Reduces one pack of each source.
  Pack through(u32 op, const u64 *inputs, u32 count) const {
    Pack result;
    spans_.of[op][count]({inputs, count, world_, 0, kPackBytes, kPackBytes, result.byte, nullptr, 0, scale_});
    return result;
  }

  // Runs the loop over the bytes of the message in a run of packs.
  template <class Sink>
  FA_FN void run(ReduceSpan loop, const u64 *inputs, u32 count, u64 from, u64 stride, Span packs, u64 bytes,
                 const Sink &sink, u64 reach = 0) const {
    if (packs.length == 0)
      return;
    const u64 at = packs.first * kPackBytes, end = at + packs.length * kPackBytes;
    u8 *also = sink.also();
    loop({inputs, count, world_, from, stride, (end < bytes ? end : bytes) - at, sink.to(at),
          also == nullptr ? nullptr : also + at, reach, scale_});
    sink.done(packs, bytes);
  }
};

} // namespace FA_NAMESPACE
