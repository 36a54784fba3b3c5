// Loads and stores of elements, unit by unit, each in one access. For a pack GCC would copy parts of 16 bytes
// through the stack, and a wider load from there waits until their stores have left the store buffer.
#pragma once

#include "../reduce/reduction.cuh"

namespace FA_NAMESPACE {

// A single vector.
template <class Vector>
FA_FN void load_units(Vector *to, const u8 *from) {
  __builtin_memcpy(to, from, sizeof *to);
}
template <class Vector>
FA_FN void store_units(u8 *to, const Vector &from) {
  __builtin_memcpy(to, &from, sizeof from);
}

template <class T, u32 N>
FA_FN void load_units(Elements<T, N> *to, const u8 *from) {
  FA_UNROLL
  for (u32 i = 0; i < to->units; ++i)
    __builtin_memcpy(to->unit + i, from + i * sizeof *to->unit, sizeof *to->unit);
}
template <class T, u32 N>
FA_FN void store_units(u8 *to, const Elements<T, N> &from) {
  FA_UNROLL
  for (u32 i = 0; i < from.units; ++i)
    __builtin_memcpy(to + i * sizeof *from.unit, from.unit + i, sizeof *from.unit);
}

} // namespace FA_NAMESPACE
