// Normalization by channel, with the sums from reductions.cu. Values (rows, columns), with one column per channel.

#include "common.cuh"

// running = momentum · running + (1 - momentum) · moment, for mean and variance (n,); moments (2, n), the variance times
// `unbiased`.
template <class A>
__device__ void track_moments(A* mean, A* variance, const A* moments, A momentum, A unbiased, long long n) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    mean[i] = momentum * mean[i] + (1 - momentum) * moments[i];
    variance[i] = momentum * variance[i] + (1 - momentum) * unbiased * moments[n + i];
  }
}

// Calls function(i, column) for each pack i of V adjacent values, which starts at this column. I is the index type,
// because 64-bit divisions take several times longer.
template <int V, class I, class F>
__device__ __forceinline__ void each_pack(I packs, I packs_of_row, F function) {
  const I step = static_cast<I>(gridDim.x) * blockDim.x;
  for (I i = static_cast<I>(blockIdx.x) * blockDim.x + threadIdx.x; i < packs; i += step) {
    function(static_cast<long long>(i), static_cast<int>(i % packs_of_row) * V);
  }
}

template <int V, class F>
__device__ __forceinline__ void each_pack_of(long long rows, int columns, F function) {
  const long long packs_of_row = columns / V, packs = rows * packs_of_row;
  if (packs < 1ll << 31) {
    each_pack<V, unsigned>(static_cast<unsigned>(packs), static_cast<unsigned>(packs_of_row), function);
  } else {
    each_pack<V, long long>(packs, packs_of_row, function);
  }
}

// y = (x - mean) / sqrt(variance + epsilon) · scale + shift, then ReLU if `relu`.
template <int V, class S>
__device__ void normalize_packed(
    const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const S* shift, S* y, Wide<S> epsilon,
    long long rows, int columns, int relu) {
  const Pack<S, V>* from = reinterpret_cast<const Pack<S, V>*>(x);
  Pack<S, V>* to = reinterpret_cast<Pack<S, V>*>(y);
  each_pack_of<V>(rows, columns, [=](long long i, int column) {
    const Pack<S, V> given = from[i];
    Pack<S, V> made{};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int c = column + k;
      const Wide<S> factor = wide(scale[c]) / root(variance[c] + epsilon);
      const Wide<S> value = (wide(given.lane[k]) - mean[c]) * factor + wide(shift[c]);
      store(made.lane[k], relu ? positive(value) : value);
    }
    to[i] = made;
  });
}

template <class S>
__device__ void normalize(
    const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const S* shift, S* y, Wide<S> epsilon,
    long long rows, int columns, int relu) {
  constexpr int V = 16 / sizeof(S);
  if (columns % V == 0 && aligned<V>(x) && aligned<V>(y)) {
    normalize_packed<V>(x, mean, variance, scale, shift, y, epsilon, rows, columns, relu);
  } else {
    normalize_packed<1>(x, mean, variance, scale, shift, y, epsilon, rows, columns, relu);
  }
}

// dy = scale / sigma · (dy - sums[0] / n - xhat · sums[1] / n); share = 1 / n; sums (2, columns).
template <int V, class S>
__device__ void normalize_backward_packed(
    S* dy, const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const Wide<S>* sums, Wide<S> share,
    Wide<S> epsilon, long long rows, int columns) {
  const Pack<S, V>* from = reinterpret_cast<const Pack<S, V>*>(x);
  Pack<S, V>* at = reinterpret_cast<Pack<S, V>*>(dy);
  each_pack_of<V>(rows, columns, [=](long long i, int column) {
    const Pack<S, V> given = from[i];
    Pack<S, V> gradient = at[i];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int c = column + k;
      const Wide<S> inverse = 1 / root(variance[c] + epsilon);
      const Wide<S> normal = (wide(given.lane[k]) - mean[c]) * inverse;
      const Wide<S> rest = wide(gradient.lane[k]) - sums[c] * share - normal * (sums[columns + c] * share);
      store(gradient.lane[k], wide(scale[c]) * inverse * rest);
    }
    at[i] = gradient;
  });
}

template <class S>
__device__ void normalize_backward(
    S* dy, const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const Wide<S>* sums, Wide<S> share,
    Wide<S> epsilon, long long rows, int columns) {
  constexpr int V = 16 / sizeof(S);
  if (columns % V == 0 && aligned<V>(x) && aligned<V>(dy)) {
    normalize_backward_packed<V>(dy, x, mean, variance, scale, sums, share, epsilon, rows, columns);
  } else {
    normalize_backward_packed<1>(dy, x, mean, variance, scale, sums, share, epsilon, rows, columns);
  }
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL normalize_##kind(                                                                                            \
      const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const S* shift, S* y,                 \
      Wide<S> epsilon, long long rows, int columns, int relu) {                                                       \
    normalize<S>(x, mean, variance, scale, shift, y, epsilon, rows, columns, relu);                                   \
  }                                                                                                                   \
  KERNEL normalize_backward_##kind(                                                                                   \
      S* dy, const S* x, const Wide<S>* mean, const Wide<S>* variance, const S* scale, const Wide<S>* sums,           \
      Wide<S> share, Wide<S> epsilon, long long rows, int columns) {                                                  \
    normalize_backward<S>(dy, x, mean, variance, scale, sums, share, epsilon, rows, columns);                         \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))

#define WIDE_INSTANCES(kind, A)                                                                                       \
  KERNEL track_moments_##kind(                                                                                        \
      A* mean, A* variance, const A* moments, A momentum, A unbiased, long long n) {                                  \
    track_moments<A>(mean, variance, moments, momentum, unbiased, n);                                                 \
  }
WITH_FLOAT_SUMS(WIDE_INSTANCES(float, float))
IN_DOUBLE(WIDE_INSTANCES(double, double))
