// What things cost on a GPU: the microbenchmarks of `gpu-check`, and kernels for its probes of hazards. A
// module of its own, which the library does not embed unless its feature `probes` is on.
//
// All take the same parameters. Thread 0 of block b leaves the cycles that it counted, and the times in ns at
// which it began and ended, in results[3 b] and the two words behind; `sink` keeps what is loaded alive.
#include "../core/memory.cuh"

using namespace FA_NAMESPACE;

namespace {

struct Words {
  u32 word[4];
};

FA_FN u64 cycles() {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

FA_FN u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Waits for a value before what comes next is issued.
FA_FN void settle(u64 value) {
  if (value == 0xFA57A11EDBADC0DEull)
    asm volatile("trap;");
}

// From its construction to end(), on thread 0.
class Timer {
public:
  FA_FN Timer() : start_ns_(nanoseconds()), start_(cycles()) {}

  FA_FN void end(u64 *results) const { end(results, cycles() - start_); }

  // With cycles that were counted otherwise.
  FA_FN void end(u64 *results, u64 counted) const {
    if (threadIdx.x != 0)
      return;
    u64 *own = results + 3 * blockIdx.x;
    own[0] = counted;
    own[1] = start_ns_;
    own[2] = nanoseconds();
  }

private:
  u64 start_ns_, start_;
};

FA_FN void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
FA_FN void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// `count` posted stores of 16 bytes, to lines of their own, then a fence, which alone is timed.
template <class Fence>
FA_FN void time_fences(u64 *results, u8 *memory, u64 count, u32 turns, Fence fence) {
  const Timer timer;
  u8 *own = memory + (u64(blockIdx.x) * blockDim.x + threadIdx.x) * count * 128;
  u64 counted = 0;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    FA_ROLL
    for (u64 store = 0; store < count; ++store)
      store_relaxed_pair(reinterpret_cast<u64 *>(own + store * 128), turn, store);
    const u64 start = cycles();
    fence();
    counted += cycles() - start;
  }
  timer.end(results, counted);
}

// Follows offsets from one word to the next.
template <class Load>
FA_FN void chase(u64 *results, u8 *memory, u32 turns, Load load) {
  u64 at = 0;
  const auto steps = [&](u32 count) {
    FA_ROLL
    for (u32 turn = 0; turn < count; ++turn)
      at = load(reinterpret_cast<const u64 *>(memory + at));
    settle(at);
  };
  // What has to be in a cache is.
  steps(turns);
  const Timer timer;
  steps(turns);
  timer.end(results);
}

template <u32 Words>
struct Parameters {
  u32 word[Words];
};

// The first touch of the last line of the parameters.
template <u32 Words>
FA_FN void time_parameters(u64 *results, const Parameters<Words> &parameters) {
  const Timer timer;
  const u64 start = cycles();
  // The index is a constant that the compiler does not know, so that it loads after the clock was read.
  const u64 word = parameters.word[Words - 1 + (start >> 63)];
  settle(word);
  timer.end(results, cycles() - start);
}

// A chain of dependent multiplications: 16 bytes of code each. In few statements, as each costs nvcc time.
#define FA_MULTIPLY "mad.lo.u32 %0, %0, %1, %1;\n"
#define FA_8_TIMES(text) text text text text text text text text
#define FA_STEPS(text) asm volatile(text : "+r"(x) : "r"(y));
#define FA_STEP_64 FA_STEPS(FA_8_TIMES(FA_8_TIMES(FA_MULTIPLY)))
#define FA_STEP_512 FA_STEPS(FA_8_TIMES(FA_8_TIMES(FA_8_TIMES(FA_MULTIPLY))))
#define FA_STEP_4096 FA_8_TIMES(FA_STEP_512)

} // namespace

#define FA_PROBE(name)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                       \
      name(u64 *results, u8 *memory, u64 count, u32 turns, u64 *sink)

// Turns of 64 dependent multiplications.
FA_PROBE(cost_arithmetic) {
  u32 x = turns, y = u32(count);
  const Timer timer;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    FA_STEP_64
  }
  settle(x);
  timer.end(results);
}

// The memory holds a ring of offsets.
FA_PROBE(cost_load_weak) {
  chase(results, memory, turns, [](const u64 *at) {
    u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  });
}
FA_PROBE(cost_load_relaxed) {
  chase(results, memory, turns, [](const u64 *at) { return load_relaxed(at); });
}
FA_PROBE(cost_load_acquire) {
  chase(results, memory, turns, [](const u64 *at) { return load_acquire(at); });
}

FA_PROBE(cost_load_shared) {
  __shared__ u32 ring[32];
  if (threadIdx.x < 32)
    ring[threadIdx.x] = (threadIdx.x + 1 + u32(count)) % 32;
  __syncthreads();
  u32 at = 0;
  const Timer timer;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    const volatile u32 *next = &ring[at];
    at = *next;
  }
  settle(at);
  timer.end(results);
}

FA_PROBE(cost_sync) {
  const Timer timer;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn)
    __syncthreads();
  timer.end(results);
}

FA_PROBE(cost_fence_block) {
  time_fences(results, memory, count, turns, [] { fence_block(); });
}
FA_PROBE(cost_fence_gpu) {
  time_fences(results, memory, count, turns, [] { fence_gpu(); });
}
FA_PROBE(cost_fence_system) {
  time_fences(results, memory, count, turns, [] { fence_release(); });
}

// Two blocks signal each other in turn, in the first two lines: by release and acquire if `count`. Whoever
// waits for too long gives up, and counts no cycles.
FA_PROBE(cost_signal) {
  constexpr u32 kMostPolls = 1 << 22;
  const u32 own = blockIdx.x;
  u32 *to = reinterpret_cast<u32 *>(memory + 128 * (1 - own)),
      *from = reinterpret_cast<u32 *>(memory + 128 * own);
  const auto send = [&](u32 turn) { count ? store_release(to, turn) : store_relaxed(to, turn); };
  const Timer timer;
  bool complete = true;
  FA_ROLL
  for (u32 turn = 1; turn <= turns && complete; ++turn) {
    if (own == 0)
      send(turn);
    u32 polls = 0;
    while ((count ? load_acquire(from) : load_relaxed(from)) != turn && polls < kMostPolls)
      ++polls;
    complete = polls < kMostPolls;
    if (own != 0)
      send(turn);
  }
  if (complete)
    timer.end(results);
  else
    timer.end(results, 0);
}

// Each block loads its `count` bytes, of which the first-level cache keeps nothing, with four loads of a
// thread in flight.
FA_PROBE(rate_load) {
  const Words *own = reinterpret_cast<const Words *>(memory + blockIdx.x * count);
  const u32 packs = u32(count / sizeof(Words));
  u32 sum = 0;
  const Timer timer;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    FA_ROLL
    for (u32 i = threadIdx.x; i + 3 * blockDim.x < packs; i += 4 * blockDim.x) {
      Words words[4];
      FA_UNROLL
      for (u32 k = 0; k < 4; ++k)
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[k].word[0]), "=r"(words[k].word[1]), "=r"(words[k].word[2]),
                       "=r"(words[k].word[3])
                     : "l"(own + i + k * blockDim.x));
      FA_UNROLL
      for (u32 k = 0; k < 4; ++k)
        sum += words[k].word[0] ^ words[k].word[1] ^ words[k].word[2] ^ words[k].word[3];
    }
  }
  if (sum == 0xFA57A11E)
    *sink = sum;
  __syncthreads();
  timer.end(results);
}

FA_PROBE(rate_store) {
  Words *own = reinterpret_cast<Words *>(memory + blockIdx.x * count);
  const u32 packs = u32(count / sizeof(Words));
  const Timer timer;
  FA_ROLL
  for (u32 turn = 0; turn < turns; ++turn) {
    FA_ROLL
    for (u32 i = threadIdx.x; i < packs; i += blockDim.x)
      asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(own + i), "r"(turn) : "memory");
  }
  fence_gpu();
  __syncthreads();
  timer.end(results);
}

// Passes over straight code, one after the other: the first fetches it. Of 16 and of 256 KiB; the larger one
// drives the smaller one's code out of the caches. `sink` has the cycles of each pass.
FA_PROBE(cost_code) {
  u32 x = turns, y = u32(count);
  const Timer timer;
  FA_ROLL
  for (u32 pass = 0; pass < turns; ++pass) {
    const u64 start = cycles();
    FA_STEP_512 FA_STEP_512 settle(x);
    if (threadIdx.x == 0)
      sink[pass] = cycles() - start;
  }
  timer.end(results);
}
FA_PROBE(evict_code) {
  u32 x = turns, y = u32(count);
  const Timer timer;
  FA_STEP_4096 FA_STEP_4096 FA_STEP_4096 FA_STEP_4096 settle(x);
  timer.end(results);
}

// Kernels that do nothing, for the time between two launches.
FA_PROBE(empty) {}
FA_PROBE(empty_dependent) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
extern "C" __global__ void parameters_64(u64 *results, const __grid_constant__ Parameters<14> parameters) {
  time_parameters(results, parameters);
}
extern "C" __global__ void parameters_576(u64 *results, const __grid_constant__ Parameters<142> parameters) {
  time_parameters(results, parameters);
}

// Waits for the first word of memory, `count` ns at most, and leaves in results[0] whether it came.
FA_PROBE(spin) {
  const u64 start = nanoseconds();
  const u32 *flag = reinterpret_cast<const u32 *>(memory);
  bool came = load_acquire(flag) != 0;
  while (!came && nanoseconds() - start < count)
    came = load_acquire(flag) != 0;
  if (threadIdx.x == 0) {
    results[0] = came;
    results[1] = start;
    results[2] = nanoseconds();
  }
}
FA_PROBE(raise) {
  if (threadIdx.x == 0)
    store_release(reinterpret_cast<u32 *>(memory), 1);
}
