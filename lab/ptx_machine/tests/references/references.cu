// Published protocols of an allreduce, each in its smallest form. The clock's predictions for them are
// compared with the published figures (lab/gpu-model.md). Sums of bf16 in packs of 16 bytes.
//
//   flags_one_shot, flags_two_shot   vLLM's csrc/custom_all_reduce.cuh: flags, then loads from peers
//   sentinel_one_shot                SGLang's v2 and TensorRT-LLM's: a value that no data has marks words
//                                    that have not arrived
//   words_one_shot                   NCCL's LL: each word of 8 bytes has 4 of data and an epoch
#include <cuda_bf16.h>
#include <stdint.h>

constexpr int kRanks = 8;
constexpr int kBlocks = 132;

// Flags and epochs of one rank. `Launch` of ptx-clock has the same layout.
struct Signals {
  uint32_t start[2][kBlocks][kRanks];
  uint32_t end[2][kBlocks][kRanks];
  uint32_t epoch[kBlocks];
};

struct Launch {
  Signals *signals[kRanks];
  const uint4 *const *inputs; // by rank, in memory, as addresses of graphs are
  uint4 *scratch[kRanks];     // packets, and the reduced slice of a two-shot
  uint4 *output;
  uint32_t rank;
  uint32_t packs;
};

__device__ void store_volatile(uint32_t *at, uint32_t value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ uint32_t load_volatile(const uint32_t *at) {
  uint32_t value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_release(uint32_t *at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ uint32_t load_acquire(const uint32_t *at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_pack(uint4 *at, uint4 pack) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(pack.x), "r"(pack.y),
               "r"(pack.z), "r"(pack.w)
               : "memory");
}

__device__ uint4 load_pack(const uint4 *at) {
  uint4 pack;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "l"(at)
               : "memory");
  return pack;
}

struct Sums {
  float of[8];

  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      of[i] = 0;
  }

  __device__ void add(const uint4 &pack) {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[2 * i] += __uint_as_float(words[i] << 16);
      of[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }

  __device__ uint4 pack() const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(of[2 * i], of[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t *>(&two);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

template <int N>
__device__ void start(const Launch &launch, uint32_t epoch) {
  if (threadIdx.x < N) {
    store_volatile(&launch.signals[threadIdx.x]->start[epoch % 2][blockIdx.x][launch.rank], epoch);
    const uint32_t *own = &launch.signals[launch.rank]->start[epoch % 2][blockIdx.x][threadIdx.x];
    while (load_volatile(own) != epoch) {
    }
  }
  __syncthreads();
}

template <int N>
__device__ void end(const Launch &launch, uint32_t epoch, bool ordered) {
  __syncthreads();
  if (threadIdx.x < N) {
    uint32_t *peer = &launch.signals[threadIdx.x]->end[epoch % 2][blockIdx.x][launch.rank];
    const uint32_t *own = &launch.signals[launch.rank]->end[epoch % 2][blockIdx.x][threadIdx.x];
    if (ordered) {
      store_release(peer, epoch);
      while (load_acquire(own) != epoch) {
      }
    } else {
      store_volatile(peer, epoch);
      while (load_volatile(own) != epoch) {
      }
    }
  }
  if (ordered)
    __syncthreads();
}

template <int N>
__device__ void flags_one_shot(const Launch &launch) {
  const uint4 *inputs[N];
#pragma unroll
  for (int r = 0; r < N; ++r)
    inputs[r] = launch.inputs[r];
  Signals *own = launch.signals[launch.rank];
  const uint32_t epoch = own->epoch[blockIdx.x] + 1;
  start<N>(launch, epoch);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < launch.packs; i += gridDim.x * blockDim.x) {
    Sums sums;
#pragma unroll
    for (int r = 0; r < N; ++r)
      sums.add(inputs[r][i]);
    launch.output[i] = sums.pack();
  }
  end<N>(launch, epoch, false);
  if (threadIdx.x == 0)
    own->epoch[blockIdx.x] = epoch;
}

// The output has no alias: loads may pass its stores.
template <int N>
__device__ void gather(uint4 *__restrict__ output, const uint4 *const *reduced, uint32_t rank,
                       uint32_t part) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < part; i += gridDim.x * blockDim.x) {
#pragma unroll
    for (int r = 0; r < N; ++r)
      output[(rank + r) % N * part + i] = reduced[r][i];
  }
}

template <int N>
__device__ void flags_two_shot(const Launch &launch) {
  const uint32_t part = launch.packs / N, first = launch.rank * part;
  const uint4 *inputs[N];
  const uint4 *reduced[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int r = (launch.rank + i) % N;
    inputs[i] = launch.inputs[r];
    reduced[i] = launch.scratch[r];
  }
  Signals *own = launch.signals[launch.rank];
  const uint32_t epoch = own->epoch[blockIdx.x] + 1, stride = gridDim.x * blockDim.x;
  start<N>(launch, epoch);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < part; i += stride) {
    Sums sums;
#pragma unroll
    for (int r = 0; r < N; ++r)
      sums.add(inputs[r][first + i]);
    launch.scratch[launch.rank][i] = sums.pack();
  }
  end<N>(launch, epoch, true);
  gather<N>(launch.output, reduced, launch.rank, part);
  if (threadIdx.x == 0)
    own->epoch[blockIdx.x] = epoch;
}

constexpr uint32_t kSentinel = 0x80008000u;

__device__ bool has_come(const uint4 &pack) {
  return pack.x != kSentinel && pack.y != kSentinel && pack.z != kSentinel && pack.w != kSentinel;
}

// Three generations: a peer may already fill the next call's; the last call's is cleared.
template <int N>
__device__ void sentinel_one_shot(const Launch &launch) {
  Signals *own = launch.signals[launch.rank];
  const uint32_t epoch = own->epoch[blockIdx.x];
  const uint32_t now = epoch % 3 * N * launch.packs, last = (epoch + 2) % 3 * N * launch.packs;
  const uint4 *input = launch.inputs[launch.rank];
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < launch.packs; i += gridDim.x * blockDim.x) {
    const uint4 pack = input[i];
#pragma unroll
    for (int r = 0; r < N; ++r)
      store_pack(&launch.scratch[r][now + launch.rank * launch.packs + i], pack);
    uint4 packs[N];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int r = 0; r < N; ++r)
        packs[r] = load_pack(&launch.scratch[launch.rank][now + r * launch.packs + i]);
#pragma unroll
      for (int r = 0; r < N; ++r)
        all = all && has_come(packs[r]);
    } while (!all);
    Sums sums;
#pragma unroll
    for (int r = 0; r < N; ++r)
      sums.add(packs[r]);
    launch.output[i] = sums.pack();
#pragma unroll
    for (int r = 0; r < N; ++r)
      launch.scratch[launch.rank][last + r * launch.packs + i] = {kSentinel, kSentinel, kSentinel, kSentinel};
  }
  __syncthreads();
  if (threadIdx.x == 0)
    own->epoch[blockIdx.x] = epoch + 1;
}

__device__ void store_words(uint4 *at, uint32_t a, uint32_t b, uint32_t epoch) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(at), "r"(a), "r"(epoch), "r"(b)
               : "memory");
}

__device__ uint4 load_words(const uint4 *at) {
  uint4 words;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}

// Two generations. A pack is two lines of 16 bytes; a warp writes those of its packs one after the other.
template <int N>
__device__ void words_one_shot(const Launch &launch) {
  Signals *own = launch.signals[launch.rank];
  const uint32_t epoch = own->epoch[blockIdx.x] + 1;
  const uint32_t now = epoch % 2 * N * 2 * launch.packs;
  const uint4 *input = launch.inputs[launch.rank];
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < launch.packs; i += gridDim.x * blockDim.x) {
    const uint4 pack = input[i];
#pragma unroll
    for (int r = 0; r < N; ++r) {
      uint4 *to = launch.scratch[r] + now + launch.rank * 2 * launch.packs;
      store_words(to + i, pack.x, pack.y, epoch);
      store_words(to + launch.packs + i, pack.z, pack.w, epoch);
    }
    Sums sums;
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const uint4 *from = launch.scratch[launch.rank] + now + r * 2 * launch.packs;
      uint4 low, high;
      do {
        low = load_words(from + i);
        high = load_words(from + launch.packs + i);
      } while (low.y != epoch || low.w != epoch || high.y != epoch || high.w != epoch);
      sums.add({low.x, low.z, high.x, high.z});
    }
    launch.output[i] = sums.pack();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    own->epoch[blockIdx.x] = epoch;
}

#define KERNEL(protocol, ranks)                                                                              \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                       \
      protocol##_w##ranks(const __grid_constant__ Launch launch) {                                           \
    protocol<ranks>(launch);                                                                                 \
  }
#define KERNELS(protocol) KERNEL(protocol, 2) KERNEL(protocol, 4) KERNEL(protocol, 8)

KERNELS(flags_one_shot)
KERNELS(flags_two_shot)
KERNELS(sentinel_one_shot)
KERNELS(words_one_shot)
