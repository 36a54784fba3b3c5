// Scales of gathered rows on the host, moved in runs of words.
#pragma once

#include "../core/block.cuh"
#include "../reduce/scales.cuh"

namespace FA_NAMESPACE {

// How a layout has words: the rows of a tile, those that follow each other at one distance, and the distances
// in bytes from a row to the next and from a word of a row to the next.
struct WordRuns {
  u32 tile, run;
  u64 row, column;

  FA_FN explicit WordRuns(const FaScales &scales) {
    column = u64(word_address(scales, 0, 1) - word_address(scales, 0, 0));
    switch (FaScaleLayout(scales.layout)) {
    case FA_LAYOUT_128X4: tile = 128, run = 32, row = 16; return;
    case FA_LAYOUT_8X4: tile = run = 8, row = 4; return;
    default: tile = run = ~0u, row = 4; // Of columns; scales in rows are moved otherwise.
    }
  }
};

// How staging has the scales of `rows` rows: like the output, except that parts of tiles are columns.
FA_FN FaScales staged_scales(const FaScales &like, u8 *staged, u32 rows) {
  FaScales scales = like;
  scales.scales = u64(staged), scales.stride = rows, scales.first_row = 0;
  if (like.layout != FA_LAYOUT_ROWS && rows % WordRuns(like).tile != 0)
    scales.layout = FA_LAYOUT_COLUMNS;
  return scales;
}

// Copies words of four bytes. The inner loop is the longer one.
FA_OUTLINED void copy_words(u8 *to, const u8 *from, const WordRuns &to_runs, const WordRuns &from_runs,
                            u64 rows, u64 columns) {
  const bool by_row = rows >= columns;
  const u64 inner = by_row ? rows : columns, outer = by_row ? columns : rows;
  const u64 to_inner = by_row ? to_runs.row : to_runs.column,
            to_outer = by_row ? to_runs.column : to_runs.row;
  const u64 from_inner = by_row ? from_runs.row : from_runs.column,
            from_outer = by_row ? from_runs.column : from_runs.row;
  for (u64 i = 0; i < outer; ++i, to += to_outer, from += from_outer) {
    if (to_inner == sizeof(u32) && from_inner == sizeof(u32))
      __builtin_memcpy(to, from, inner * sizeof(u32));
    else
      for (u64 j = 0; j < inner; ++j)
        __builtin_memcpy(to + j * to_inner, from + j * from_inner, sizeof(u32));
  }
}

// Copies the block's share of the scales of `rows` rows between layouts. Blocks of the same number on
// different ranks have the same share of the same rows.
FA_OUTLINED void copy_scales(const Block &block, const FaScales &to, u32 to_row, const FaScales &from,
                             u32 from_row, u32 rows, u32 words) {
  if (to.layout == FA_LAYOUT_ROWS) {
    const u64 row_bytes = u64(to.groups) * scale_bytes(to);
    const auto share = block.share(rows);
    // Without rows, there may be no memory.
    if (share.first == share.last)
      return;
    __builtin_memcpy(scale_address(to, to_row, 0) + share.first * row_bytes,
                     scale_address(from, from_row, 0) + share.first * row_bytes,
                     (share.last - share.first) * row_bytes);
    return;
  }
  const auto share = block.share(words);
  // The last word of a row may be partial.
  const u64 whole = to.rule == FA_RULE_F32 ? words : to.groups / 4;
  const u64 last = share.last < whole ? share.last : whole;
  const WordRuns to_runs(to), from_runs(from);
  for (u32 row = 0; row < rows && share.first < last;) {
    const u32 left = rows - row, to_phase = u32((to.first_row + to_row + row) % to_runs.tile),
              from_phase = u32((from.first_row + from_row + row) % from_runs.tile);
    u8 *const to_at = word_address(to, to_row + row, 0) + share.first * to_runs.column;
    const u8 *const from_at = word_address(from, from_row + row, 0) + share.first * from_runs.column;
    if (to.layout == from.layout && to_phase == 0 && from_phase == 0 && left >= to_runs.tile) {
      __builtin_memcpy(to_at, from_at, (last - share.first) * to_runs.column);
      row += to_runs.tile;
      continue;
    }
    const u32 to_end = to_runs.run - to_phase % to_runs.run,
              from_end = from_runs.run - from_phase % from_runs.run;
    const u32 end = to_end < from_end ? to_end : from_end, count = left < end ? left : end;
    copy_words(to_at, from_at, to_runs, from_runs, count, last - share.first);
    row += count;
  }
  for (u32 row = 0; row < rows && last != share.last; ++row)
    store_scales(to, to_row + row, u32(whole), load_scales(from, from_row + row, u32(whole)));
}

// Stages the scales of this rank's rows, and stores them in the output.
FA_FN void stage_scales(const Block &block, const FaGatheredRows &gathered, u32 first, u32 rows, u8 *staged) {
  const FaScales own = staged_scales(gathered.to, staged, rows);
  copy_scales(block, own, 0, gathered.from, 0, rows, gathered.words);
  copy_scales(block, gathered.to, first, own, 0, rows, gathered.words);
}

// Stores the scales of another rank's rows in the output.
FA_FN void place_scales(const Block &block, const FaGatheredRows &gathered, u32 first, u32 rows,
                        const u8 *staged) {
  const FaScales scales = staged_scales(gathered.to, const_cast<u8 *>(staged), rows);
  copy_scales(block, gathered.to, first, scales, 0, rows, gathered.words);
}

} // namespace FA_NAMESPACE
