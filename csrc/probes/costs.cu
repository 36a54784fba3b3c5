// Microbenchmarks of `gpu-check`, and kernels for its checks of possible deadlocks: a separate module,
// which the library embeds only with its feature `probes`.
//
// All kernels take the same parameters. Thread 0 of block b stores the cycles that it counted in results[3
// b], and the times in ns at which it began and ended in the next two words. `sink` keeps loaded values
// alive.
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

// Waits for a value before the next instruction is issued. The constant has the width of the value: a
// narrower value would differ from it whatever it is, and nothing would wait.
template <class Value>
FA_FN void consume(Value value) {
  if (value == Value(0xFA57A11EDBADC0DEull))
    asm volatile("trap;");
}

// Measures from its construction to end(), on thread 0.
class Timer {
public:
  FA_FN Timer() : start_ns_(nanoseconds()), start_(cycles()) {}

  FA_FN void end(u64 *results) const { end(results, cycles() - start_); }

  // Reports cycles that were counted separately.
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

// Times only the fence that follows `count` posted stores of 16 bytes to separate lines.
template <class Fence>
FA_FN void time_fences(u64 *results, u8 *memory, u64 count, u32 iterations, Fence fence) {
  const Timer timer;
  u8 *own = memory + (u64(blockIdx.x) * blockDim.x + threadIdx.x) * count * 128;
  u64 counted = 0;
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    FA_NO_UNROLL
    for (u64 store = 0; store < count; ++store)
      store_relaxed_pair(reinterpret_cast<u64 *>(own + store * 128), iteration, store);
    const u64 start = cycles();
    fence();
    counted += cycles() - start;
  }
  timer.end(results, counted);
}

// Follows a chain of offsets from offset 0, and returns the last one.
template <class Load>
FA_FN u64 follow(u8 *memory, u64 at, u32 steps, Load load) {
  FA_NO_UNROLL
  for (u32 step = 0; step < steps; ++step)
    at = load(reinterpret_cast<const u64 *>(memory + at));
  consume(at);
  return at;
}

// Follows a chain twice: the first time warms the caches. The sink gets the offset that was reached.
template <class Load>
FA_FN void chase(u64 *results, u8 *memory, u32 iterations, u64 *sink, Load load) {
  u64 at = follow(memory, 0, iterations, load);
  const Timer timer;
  at = follow(memory, at, iterations, load);
  timer.end(results);
  if (threadIdx.x == 0)
    *sink = at;
}

FA_FN u64 load_weak(const u64 *at) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Waits until a word has a value, at most a second; returns whether it came.
template <class Load>
FA_FN bool poll(const u32 *word, u32 value, Load load) {
  constexpr u32 kPolls = 1024; // between two looks at the time
  constexpr u64 kLimit = 1'000'000'000;
  u64 start = 0, now = 0;
  do {
    FA_NO_UNROLL
    for (u32 polls = 0; polls < kPolls; ++polls) {
      if (load(word) == value)
        return true;
    }
    now = nanoseconds();
    start = start ? start : now;
  } while (now - start < kLimit);
  return false;
}

// One of two kernels on different GPUs that signal each other: `own` is polled here, `peer` there. The first
// two rounds, in which a kernel may still wait for the other one's launch, are not timed. If a signal does
// not come, the kernel reports 0 cycles.
FA_FN void ping_pong(u64 *results, u32 *own, u32 *peer, u32 iterations, bool first) {
  const auto load = [](const u32 *word) { return load_acquire(word); };
  const auto rounds = [&](u32 from, u32 to) {
    bool complete = true;
    FA_NO_UNROLL
    for (u32 round = from; round < to && complete; ++round) {
      if (first)
        store_release(peer, round);
      complete = poll(own, round, load);
      if (!first)
        store_release(peer, round);
    }
    return complete;
  };
  const bool began = rounds(1, 3);
  const Timer timer;
  if (began && rounds(3, 3 + iterations))
    timer.end(results);
  else
    timer.end(results, 0);
}

// Memory of peers that all blocks access together, in turns of blocks. `payload` bytes of each 128-byte line
// are accessed: 16, 32, 64 or 128.
struct Peers {
  u64 count, payload, value;
  u64 address[16];
};

// Calls access(pack, value) for each pack of 16 bytes of a block's `lines` lines.
template <class Access>
FA_FN void for_packs_of_peers(const Peers *peers, u64 lines, u32 iterations, Access access) {
  const u32 count = u32(peers->count), packs = u32(peers->payload / sizeof(Words));
  const u64 start = blockIdx.x / count * lines;
  u8 *own = reinterpret_cast<u8 *>(peers->address[blockIdx.x % count]) + start * 128;
  const u32 value = u32(peers->value);
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    FA_NO_UNROLL
    for (u32 i = threadIdx.x; i < lines * packs; i += blockDim.x)
      access(own + u64(i / packs) * 128 + i % packs * sizeof(Words), value);
  }
}

template <u32 Words>
struct Parameters {
  u32 word[Words];
};

// Times the first access to the last line of the parameters.
template <u32 Words>
FA_FN void time_parameters(u64 *results, const Parameters<Words> &parameters) {
  const Timer timer;
  const u64 start = cycles();
  // The index is a constant that the compiler does not know, so the load is issued after the clock is read.
  const u32 word = parameters.word[Words - 1 + (start >> 63)];
  consume(word);
  timer.end(results, cycles() - start);
}

// A chain of dependent multiplications, 16 bytes of code each. Few statements, because each costs nvcc time.
#define FA_MULTIPLY "mad.lo.u32 %0, %0, %1, %1;\n"
#define FA_8_TIMES(text) text text text text text text text text
#define FA_STEPS(text) asm volatile(text : "+r"(x) : "r"(y));
#define FA_STEP_64 FA_STEPS(FA_8_TIMES(FA_8_TIMES(FA_MULTIPLY)))
#define FA_STEP_512 FA_STEPS(FA_8_TIMES(FA_8_TIMES(FA_8_TIMES(FA_MULTIPLY))))
#define FA_STEP_4096 FA_8_TIMES(FA_STEP_512)

} // namespace

#define FA_PROBE(name)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                       \
      name(u64 *results, u8 *memory, u64 count, u32 iterations, u64 *sink)

// Each iteration is 64 dependent multiplications.
FA_PROBE(cost_arithmetic) {
  u32 x = iterations, y = u32(count);
  const Timer timer;
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    FA_STEP_64
  }
  consume(x);
  timer.end(results);
}

// The memory holds a ring of offsets.
FA_PROBE(cost_load_weak) { chase(results, memory, iterations, sink, load_weak); }
FA_PROBE(cost_load_relaxed) {
  chase(results, memory, iterations, sink, [](const u64 *at) { return load_relaxed(at); });
}
FA_PROBE(cost_load_acquire) {
  chase(results, memory, iterations, sink, [](const u64 *at) { return load_acquire(at); });
}

// Follows the ring once, with cold caches. Before, it loads a line that is not one of the ring in each 2 MiB
// of the first `count` bytes, so that their addresses are known.
FA_PROBE(cost_load_once) {
  u64 sum = 0;
  FA_NO_UNROLL
  for (u64 page = 0; page < count; page += 2 << 20)
    sum += load_weak(reinterpret_cast<const u64 *>(memory + page + 128));
  consume(sum);
  const Timer timer;
  *sink = follow(memory, 0, iterations, load_weak);
  timer.end(results);
}

FA_PROBE(cost_load_shared) {
  __shared__ u32 ring[32];
  if (threadIdx.x < 32)
    ring[threadIdx.x] = (threadIdx.x + 1 + u32(count)) % 32;
  __syncthreads();
  u32 at = 0;
  const Timer timer;
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    const volatile u32 *next = &ring[at];
    at = *next;
  }
  consume(at);
  timer.end(results);
}

FA_PROBE(cost_sync) {
  const Timer timer;
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration)
    __syncthreads();
  timer.end(results);
}

FA_PROBE(cost_fence_block) {
  time_fences(results, memory, count, iterations, [] { fence_block(); });
}
FA_PROBE(cost_fence_gpu) {
  time_fences(results, memory, count, iterations, [] { fence_gpu(); });
}
FA_PROBE(cost_fence_system) {
  time_fences(results, memory, count, iterations, [] { fence_release(); });
}
FA_PROBE(cost_fence_sc) {
  time_fences(results, memory, count, iterations, [] { fence_sc(); });
}

// Two blocks signal each other alternately, in the first two lines; with release and acquire if `count` is
// not 0. If a block waits too long, it reports 0 cycles.
FA_PROBE(cost_signal) {
  const u32 own = blockIdx.x;
  u32 *to = reinterpret_cast<u32 *>(memory + 128 * (1 - own)),
      *from = reinterpret_cast<u32 *>(memory + 128 * own);
  const auto send = [&](u32 iteration) {
    count ? store_release(to, iteration) : store_relaxed(to, iteration);
  };
  const Timer timer;
  bool complete = true;
  FA_NO_UNROLL
  for (u32 iteration = 1; iteration <= iterations && complete; ++iteration) {
    if (own == 0)
      send(iteration);
    complete = poll(from, iteration,
                    [&](const u32 *word) { return count ? load_acquire(word) : load_relaxed(word); });
    if (own != 0)
      send(iteration);
  }
  if (complete)
    timer.end(results);
  else
    timer.end(results, 0);
}

// Two kernels of one thread on different GPUs; `count` is the address of the other one's word.
FA_PROBE(cost_signal_first) {
  ping_pong(results, reinterpret_cast<u32 *>(memory), reinterpret_cast<u32 *>(count), iterations, true);
}
FA_PROBE(cost_signal_second) {
  ping_pong(results, reinterpret_cast<u32 *>(memory), reinterpret_cast<u32 *>(count), iterations, false);
}

// `memory` is a table of peers, and `count` the lines of each block. The stores of an iteration are posted;
// the last ones have arrived when the kernel ends.
FA_PROBE(rate_peers_store) {
  const Timer timer;
  for_packs_of_peers(reinterpret_cast<const Peers *>(memory), count, iterations, [](u8 *pack, u32 value) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(pack), "r"(value) : "memory");
  });
  fence_release();
  __syncthreads();
  timer.end(results);
}
FA_PROBE(rate_peers_load) {
  u32 sum = 0;
  const Timer timer;
  for_packs_of_peers(reinterpret_cast<const Peers *>(memory), count, iterations, [&](u8 *pack, u32) {
    Words words;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
                 : "l"(pack)
                 : "memory");
    sum += words.word[0] ^ words.word[1] ^ words.word[2] ^ words.word[3];
  });
  if (sum == 0xFA57A11E)
    *sink = sum;
  __syncthreads();
  timer.end(results);
}

// Each block loads its `count` bytes, bypassing the first-level cache, with four loads of a thread in flight.
FA_PROBE(rate_load) {
  const Words *own = reinterpret_cast<const Words *>(memory + blockIdx.x * count);
  const u32 packs = u32(count / sizeof(Words));
  u32 sum = 0;
  const Timer timer;
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    FA_NO_UNROLL
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
  FA_NO_UNROLL
  for (u32 iteration = 0; iteration < iterations; ++iteration) {
    FA_NO_UNROLL
    for (u32 i = threadIdx.x; i < packs; i += blockDim.x)
      asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(own + i), "r"(iteration) : "memory");
  }
  fence_gpu();
  __syncthreads();
  timer.end(results);
}

// Passes over straight-line code; the first one fetches it. cost_code has 16 KiB; evict_code has 256 KiB and
// evicts it from the caches. sink[pass] gets the cycles of each pass.
FA_PROBE(cost_code) {
  u32 x = iterations, y = u32(count);
  const Timer timer;
  FA_NO_UNROLL
  for (u32 pass = 0; pass < iterations; ++pass) {
    const u64 start = cycles();
    FA_STEP_512 FA_STEP_512 consume(x);
    if (threadIdx.x == 0)
      sink[pass] = cycles() - start;
  }
  timer.end(results);
}
FA_PROBE(evict_code) {
  u32 x = iterations, y = u32(count);
  const Timer timer;
  FA_STEP_4096 FA_STEP_4096 FA_STEP_4096 FA_STEP_4096 consume(x);
  timer.end(results);
}

// Empty kernels, for the time between two launches.
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

// Sets the third word of memory, waits at most `count` ns for the first word to become non-zero, and stores
// in results[0] whether it did.
FA_PROBE(spin) {
  const u64 start = nanoseconds();
  u32 *flag = reinterpret_cast<u32 *>(memory);
  if (threadIdx.x == 0)
    store_release(flag + 2, 1);
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
