// Shared by all kernels: precisions, 16-byte accesses, and grid-stride loops.
//
// S is the storage type (half, bfloat16, float, double), and Wide<S> the type of computations (float, or double for
// double). All loops are grid-stride loops, so any grid size is valid. The order of sums depends only on the grid size, the
// block size and the alignment of vectors. There are no atomics.

#ifndef CUPYNET_COMMON
#define CUPYNET_COMMON

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define MAX_THREADS 1024  // maximum per block, which limits the registers per thread
#define KERNEL extern "C" __global__ __launch_bounds__(MAX_THREADS) void
// For kernels that `Kernels.images` launches, with the number of blocks that a multiprocessor runs at the same time.
#define IMAGE_THREADS 256  // per block, as in launch.py
#define IMAGES_KERNEL(blocks) extern "C" __global__ __launch_bounds__(IMAGE_THREADS, blocks) void

// precisions ----------------------------------------------------------------------------------------------------------

template <class S>
struct WideOf {
  using Type = float;
};
template <>
struct WideOf<double> {
  using Type = double;
};
template <class S>
using Wide = typename WideOf<S>::Type;

__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ double wide(double x) { return x; }

__device__ __forceinline__ void store(__half& to, float x) { to = __float2half_rn(x); }
__device__ __forceinline__ void store(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(float& to, float x) { to = x; }
__device__ __forceinline__ void store(double& to, double x) { to = x; }

// instances -----------------------------------------------------------------------------------------------------------

// A module contains the kernels of one precision (-DONLY_HALF, -DONLY_BFLOAT16, -DONLY_FLOAT or -DONLY_DOUBLE), because
// compiling all of them takes almost four times as long. Kernels that sum in float are in the first three. Without one of
// these options, a module contains all kernels.
#if defined(ONLY_BFLOAT16) || defined(ONLY_FLOAT) || defined(ONLY_DOUBLE)
#define IN_HALF(...)
#else
#define IN_HALF(...) __VA_ARGS__
#endif
#if defined(ONLY_HALF) || defined(ONLY_FLOAT) || defined(ONLY_DOUBLE)
#define IN_BFLOAT16(...)
#else
#define IN_BFLOAT16(...) __VA_ARGS__
#endif
#if defined(ONLY_HALF) || defined(ONLY_BFLOAT16) || defined(ONLY_DOUBLE)
#define IN_FLOAT(...)
#else
#define IN_FLOAT(...) __VA_ARGS__
#endif
#if defined(ONLY_HALF) || defined(ONLY_BFLOAT16) || defined(ONLY_FLOAT)
#define IN_DOUBLE(...)
#else
#define IN_DOUBLE(...) __VA_ARGS__
#endif
#ifdef ONLY_DOUBLE
#define WITH_FLOAT_SUMS(...)
#else
#define WITH_FLOAT_SUMS(...) __VA_ARGS__
#endif

// values --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// x after rounding to S
template <class S>
__device__ __forceinline__ Wide<S> rounded(Wide<S> x) {
  S stored{};
  store(stored, x);
  return wide(stored);
}

// max(x, 0); NaN stays NaN
template <class A>
__device__ __forceinline__ A positive(A x) {
  return x <= 0 ? A(0) : x;
}

// device-side inputs and outputs of asynchronous steps -----------------------------------------------------------------

// Indices into the controls, as in backend/controls.py.
enum Control { RATE, FIRST, SECOND, THIRD, SCALE, USED, GO, HALTED, STEPS, LOSSES, SAMPLES, HITS, STEADY, SKIPPED };

// x times one of the controls; x itself without controls.
template <class A>
__device__ __forceinline__ A steered(A x, const double* controls, Control place) {
  return controls ? x * static_cast<A>(controls[place]) : x;
}

// vectorized accesses -------------------------------------------------------------------------------------------------

template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T lane[V];
};

template <int V, class T>
__device__ __forceinline__ bool aligned(const T* p) {
  return reinterpret_cast<unsigned long long>(p) % sizeof(Pack<T, V>) == 0;
}

template <int N>
struct Values {
  static constexpr int NUMBER = N;
};

// Calls function(Values<V>) with the largest V of MOST, MOST / 2, ..., 1 that divides `channels` and to which all arrays
// are aligned.
template <int MOST, class F, class... T>
__device__ __forceinline__ void in_packs(int channels, F function, const T*... arrays) {
  if constexpr (MOST > 1) {
    if (channels % MOST != 0 || !(... && aligned<MOST>(arrays))) return in_packs<MOST / 2>(channels, function, arrays...);
  }
  function(Values<MOST>{});
}

// How an array is used by `each`.
template <class T>
struct Read {
  const T* at;
};
template <class T>
struct Change {
  T* at;
};
template <class T>
struct Write {
  T* at;
};

template <int V, class T>
__device__ __forceinline__ Pack<T, V> fetch(Read<T> a, long long i) {
  return reinterpret_cast<const Pack<T, V>*>(a.at)[i];
}
template <int V, class T>
__device__ __forceinline__ Pack<T, V> fetch(Change<T> a, long long i) {
  return reinterpret_cast<const Pack<T, V>*>(a.at)[i];
}
template <int V, class T>
__device__ __forceinline__ Pack<T, V> fetch(Write<T>, long long) {
  return Pack<T, V>{};
}
template <int V, class T>
__device__ __forceinline__ void keep(Read<T>, long long, const Pack<T, V>&) {}
template <int V, class T>
__device__ __forceinline__ void keep(Change<T> a, long long i, const Pack<T, V>& pack) {
  reinterpret_cast<Pack<T, V>*>(a.at)[i] = pack;
}
template <int V, class T>
__device__ __forceinline__ void keep(Write<T> a, long long i, const Pack<T, V>& pack) {
  reinterpret_cast<Pack<T, V>*>(a.at)[i] = pack;
}

template <int V, class F, class... Arrays>
__device__ __forceinline__ void together(long long i, F& function, Arrays... arrays) {
  [&](auto... packs) {
#pragma unroll
    for (int k = 0; k < V; ++k) function(packs.lane[k]...);
    (keep<V>(arrays, i, packs), ...);
  }(fetch<V>(arrays, i)...);
}

// Calls function(a[i], b[i], ...) for all i < n, with V values per access if all arrays are aligned. The n values are
// divided among the blocks along x.
template <int V, class F, class... Arrays>
__device__ __forceinline__ void each(long long n, F function, Arrays... arrays) {
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long packs = (... && aligned<V>(arrays.at)) ? n / V : 0;
#pragma unroll 1
  for (long long i = first; i < packs; i += step) together<V>(i, function, arrays...);
#pragma unroll 1
  for (long long i = packs * V + first; i < n; i += step) together<1>(i, function, arrays...);
}

// sums ----------------------------------------------------------------------------------------------------------------

// Blocks reduce as a tree in shared memory, in an order that depends only on the block size. Block sizes are powers of two.

struct Add {
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

// Reduces the values of the threads along x. Every thread gets the result.
template <class A, class F>
__device__ __forceinline__ A across(A value, F function) {
  __shared__ A shared[MAX_THREADS];
  A* line = shared + threadIdx.y * blockDim.x;
  line[threadIdx.x] = value;
  __syncthreads();
  for (unsigned reach = blockDim.x / 2; reach; reach /= 2) {
    if (threadIdx.x < reach) line[threadIdx.x] = function(line[threadIdx.x], line[threadIdx.x + reach]);
    __syncthreads();
  }
  const A all = line[0];
  __syncthreads();
  return all;
}

// Sum of the values, or of their squares, of the part of a vector that this block processes; every thread gets the result.
template <class A>
__device__ __forceinline__ A block_sum(const A* vector, long long n, int squares) {
  A sum = 0;
  each<16 / sizeof(A)>(n, [&](const A& x) { sum += squares ? x * x : x; }, Read<A>{vector});
  return across(sum, Add());
}

#endif
