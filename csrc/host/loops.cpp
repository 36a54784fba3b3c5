// The typed loops, compiled for each instruction set (FA_NAMESPACE). FA_ONLY_BF16: only those of bf16. One
// file, because the headers, intrinsics above all, take long to read.
#include "loops.hpp"

#include "quantized_loops.hpp"
#include "reduce_loops.hpp"
#include "row_loops.hpp"

namespace FA_NAMESPACE {

template <class T>
constexpr TypeLoops loops_of() {
  TypeLoops loops = {reduce_loops<T>(), {}, {}};
  if constexpr (kIsHot<T>) {
    loops.rows = row_loops<T>();
    loops.quantized[FA_TRANSPORT_INT8] = quantized_loops<T, Int8>();
    loops.quantized[FA_TRANSPORT_F8E4M3] = quantized_loops<T, Float8>();
  }
  return loops;
}

#if defined(FA_ONLY_BF16)
extern const TypeLoops loops_bf16 = loops_of<Bf16>();
#else
#define FA_LOOPS(code, number, name, element, ...) extern const TypeLoops loops_##name = loops_of<element>();
FA_TYPES(FA_LOOPS, )
#endif

} // namespace FA_NAMESPACE
