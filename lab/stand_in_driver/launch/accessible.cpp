// Checks that a launch's memory is accessible, before the kernels of the host run.
#include "accessible.h"

#include <algorithm>

#include "../memory/memory.h"

namespace stand_in {
namespace {

// Number of elements that a launch reads at its input and writes at its output.
struct Reach {
  uint64_t input, output;
};

Reach reach_of(const FaLaunch &launch) {
  uint64_t shares = 0;
  for (uint32_t r = 0; r < launch.world; ++r)
    shares = std::max(shares, launch.shares[r].first + launch.shares[r].count);
  const bool root = launch.rank == launch.root;
  switch (launch.algorithm) {
  case FA_ALL_GATHER:
  case FA_ALL_GATHER_ROWS: return {launch.count, shares};
  case FA_REDUCE_SCATTER:
  case FA_REDUCE_SCATTER_NORM: return {shares, launch.count};
  case FA_BROADCAST:
  case FA_SCATTERED_BROADCAST: return {root ? launch.count : 0, launch.count};
  case FA_REDUCE: return {launch.count, root ? launch.count : 0};
  case FA_BARRIER:
  case FA_SHARDED_RMS_NORM:
  case FA_TRANSFER: return {0, 0};
  default: return {launch.count, launch.count};
  }
}

bool messages_are_accessible(const CUctx_st &context, const FaLaunch &launch, const FaTransfers &transfers) {
  for (uint32_t channel = 0; channel < 2 * launch.world; ++channel) {
    for (uint32_t at = transfers.first[channel]; at < transfers.first[channel + 1]; ++at) {
      if (at >= FA_MAX_TRANSFERS)
        return false;
      const FaTransfer &message = transfers.transfer[at];
      const bool copy = channel / 2 == launch.rank;
      if (!is_accessible(context, message.address, message.bytes) ||
          (copy && !is_accessible(context, message.source, message.bytes)))
        return false;
    }
  }
  return true;
}

bool is_scaling(uint32_t scaling) {
#define FA_IS_SCALING(code, ...) || scaling == code
  return scaling == FA_NOT_SCALED FA_SCALINGS(FA_IS_SCALING, );
}

// Bytes of the scales of a message's first `rows` rows.
uint64_t scale_bytes(const FaScales &scales, uint64_t rows) {
  const uint64_t groups = scales.groups, fours = (groups + 3) / 4;
  const uint64_t each = scales.rule == FA_RULE_F32 ? sizeof(float) : 1;
  switch (scales.layout) {
  case FA_LAYOUT_ROWS: return rows * groups * each;
  case FA_LAYOUT_COLUMNS:
    return rows == 0 ? 0 : (((each == 1 ? fours : groups) - 1) * scales.stride + rows) * sizeof(float);
  case FA_LAYOUT_128X4: return (rows + 127) / 128 * fours * 512;
  case FA_LAYOUT_8X4: return (rows + 7) / 8 * fours * 32;
  }
  return UINT64_MAX;
}

// Bytes of the scales up to the launch's last row.
uint64_t scale_bytes(const FaFused &norm) {
  return norm.scaling == FA_SCALE_GIVEN ? sizeof(float)
                                        : scale_bytes(norm.scales, norm.scales.first_row + norm.rows);
}

bool experts_are_accessible(const CUctx_st &context, const FaLaunch &launch, const FaFused &norm) {
  const FaExperts &experts = norm.experts;
  const uint64_t entries = uint64_t(norm.rows) * experts.top_k, element = element_bytes(launch.dtype);
  return entries == 0 ||
         (is_accessible(context, experts.table, entries * sizeof(int32_t)) &&
          (experts.weights == 0 ||
           is_accessible(context, experts.weights, entries * element_bytes(experts.weights_dtype))) &&
          (experts.shared == 0 || is_accessible(context, experts.shared, launch.count * element)));
}

bool norm_is_accessible(const CUctx_st &context, const FaLaunch &launch, const FaFused &norm) {
  const uint64_t element = element_bytes(launch.dtype), bytes = launch.count * element;
  const bool has_bytes = norm.scales.rule != FA_RULE_F32, has_global = norm.scales.rule == FA_RULE_E4M3;
  const uint64_t numbers = launch.count * norm.number_bits / 8;
  return is_scaling(norm.scaling) && (!has_bytes || norm.row % norm.scales.group == 0) &&
         (!has_global || is_accessible(context, norm.global_scale, sizeof(float))) &&
         is_accessible(context, norm.residual, bytes) &&
         (norm.residual_out == 0 || is_accessible(context, norm.residual_out, bytes)) &&
         (norm.normed == 0 || is_accessible(context, norm.normed, bytes)) &&
         (norm.scaling == FA_NOT_SCALED || is_accessible(context, norm.numbers, numbers)) &&
         (norm.scaling == FA_NOT_SCALED || is_accessible(context, norm.scales.scales, scale_bytes(norm))) &&
         (norm.weight == 0 || is_accessible(context, norm.weight, norm.row * element)) &&
         (norm.bias == 0 || is_accessible(context, norm.bias, norm.row * element)) &&
         experts_are_accessible(context, launch, norm);
}

bool rows_are_accessible(const CUctx_st &context, const FaLaunch &launch, const FaGatheredRows &gathered) {
  uint64_t rows = 0;
  for (uint32_t r = 0; r < launch.world; ++r)
    rows = std::max(rows, (launch.shares[r].first + launch.shares[r].count) / gathered.row_bytes);
  const uint64_t own = gathered.from.first_row + launch.count / gathered.row_bytes;
  return is_accessible(context, gathered.from.scales, own == 0 ? 0 : scale_bytes(gathered.from, own)) &&
         is_accessible(context, gathered.to.scales, rows == 0 ? 0 : scale_bytes(gathered.to, rows));
}

bool sharded_rows_are_accessible(const CUctx_st &context, const FaLaunch &launch, const FaShardedNorm &norm) {
  const uint64_t element = element_bytes(launch.dtype);
  if (norm.parts > FA_SHARDED_PARTS || norm.rows != launch.count || norm.rows == 0)
    return false;
  for (uint32_t p = 0; p < norm.parts; ++p) {
    const FaShardedRows &part = norm.part[p];
    const uint64_t row = part.row * element;
    const auto covers = [&](uint64_t address, uint64_t bytes) {
      return row == 0 || is_accessible(context, address, bytes);
    };
    if (!covers(part.from, (norm.rows - 1) * part.from_stride + row) ||
        !covers(part.to, (norm.rows - 1) * part.to_stride + row) ||
        (part.weight != 0 && !covers(part.weight, row)))
      return false;
  }
  return true;
}

} // namespace

uint64_t operand_bytes(uint32_t algorithm) {
  if (algorithm == FA_TRANSFER)
    return sizeof(FaTransfers);
  if (algorithm == FA_ALL_GATHER_ROWS)
    return sizeof(FaGatheredRows);
  if (is_sharded(algorithm))
    return sizeof(FaShardedNorm);
  return is_norming(algorithm) ? sizeof(FaFused) : 0;
}

bool operands_are_accessible(const CUctx_st &context, const FaLaunch &launch) {
  if (launch.algorithm == FA_TRANSFER)
    return messages_are_accessible(context, launch, *reinterpret_cast<const FaTransfers *>(launch.operands));
  if (launch.algorithm == FA_ALL_GATHER_ROWS)
    return rows_are_accessible(context, launch, *reinterpret_cast<const FaGatheredRows *>(launch.operands));
  if (is_sharded(launch.algorithm)) {
    const auto &norm = *reinterpret_cast<const FaShardedNorm *>(launch.operands);
    return sharded_rows_are_accessible(context, launch, norm);
  }
  return !is_norming(launch.algorithm) ||
         norm_is_accessible(context, launch, *reinterpret_cast<const FaFused *>(launch.operands));
}

bool addresses_are_accessible(const CUctx_st &context, const FaLaunch &launch) {
  const uint64_t mailbox_end = launch.mailbox_offset + 3 * launch.mailbox_bytes;
  const uint64_t staging_end = launch.staging_offset + 2 * launch.staging_bytes;
  const uint64_t channel_end = launch.channel_offset + launch.channel_bytes;
  const uint64_t region = std::max<uint64_t>({sizeof(FaRegionHead), mailbox_end, staging_end, channel_end});
  for (uint32_t r = 0; r < launch.world; ++r) {
    if (!is_accessible(context, launch.regions[r], region))
      return false;
  }
  const uint64_t table = launch.buffer_count * FA_MAX_RANKS * sizeof(uint64_t);
  const Reach reach = reach_of(launch);
  const uint64_t element = element_bytes(launch.dtype);
  const auto covers = [&](uint64_t address, uint64_t count) {
    return count == 0 || is_accessible(context, address, count * element);
  };
  const FaFused *norm =
      is_norming(launch.algorithm) ? reinterpret_cast<const FaFused *>(launch.operands) : nullptr;
  const bool of_experts = norm != nullptr && norm->experts.top_k != 0;
  const uint64_t input = of_experts ? uint64_t(norm->experts.rows) * norm->row : reach.input;
  return is_accessible(context, launch.status, sizeof(FaStatus)) &&
         is_accessible(context, launch.buffers, table) && covers(launch.input, input) &&
         covers(launch.output, reach.output);
}

} // namespace stand_in
