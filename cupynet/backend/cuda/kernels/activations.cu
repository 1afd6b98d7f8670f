// Bias and ReLU, in place.

#include "common.cuh"

// y (rows, columns) += bias (columns,), then ReLU if `relu`: V columns at once, counted with I.
template <int V, class I, class S>
__device__ void add_bias_of(S* y, const S* bias, I packs, I packs_of_row, int relu) {
  Pack<S, V>* values = reinterpret_cast<Pack<S, V>*>(y);
  const Pack<S, V>* offsets = reinterpret_cast<const Pack<S, V>*>(bias);
  const I step = static_cast<I>(gridDim.x) * blockDim.x;
  for (I i = static_cast<I>(blockIdx.x) * blockDim.x + threadIdx.x; i < packs; i += step) {
    Pack<S, V> pack = values[i];
    const Pack<S, V> offset = offsets[i % packs_of_row];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const Wide<S> sum = wide(pack.lane[k]) + wide(offset.lane[k]);
      store(pack.lane[k], relu ? positive(sum) : sum);
    }
    values[i] = pack;
  }
}

template <int V, class S>
__device__ void add_bias_packed(S* y, const S* bias, long long rows, int columns, int relu) {
  const long long packs_of_row = columns / V, packs = rows * packs_of_row;
  if (packs < 1ll << 31) {  // divisions of 64 bits take several times longer
    add_bias_of<V, unsigned>(y, bias, packs, packs_of_row, relu);
  } else {
    add_bias_of<V, long long>(y, bias, packs, packs_of_row, relu);
  }
}

template <class S>
__device__ void add_bias(S* y, const S* bias, long long rows, int columns, int relu) {
  constexpr int V = 16 / sizeof(S);
  if (columns % V == 0 && aligned<V>(y) && aligned<V>(bias)) {
    add_bias_packed<V>(y, bias, rows, columns, relu);
  } else {
    add_bias_packed<1>(y, bias, rows, columns, relu);
  }
}

// x = max(x, 0); NaN stays.
template <class S>
__device__ void relu(S* x, long long n) {
  each<16 / sizeof(S)>(n, [](S& value) { store(value, positive(wide(value))); }, Change<S>{x});
}

// dy = dy where y > 0, else 0. No product: 0 times NaN is NaN.
template <class S>
__device__ void relu_backward(S* dy, const S* y, long long n) {
  const auto close = [](S& gradient, const S& output) {
    if (!(wide(output) > 0)) gradient = S{};
  };
  each<16 / sizeof(S)>(n, close, Change<S>{dy}, Read<S>{y});
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL add_bias_##kind(                                                                                             \
      S* y, const S* bias, long long rows, int columns, int relu) {                                                   \
    add_bias<S>(y, bias, rows, columns, relu);                                                                        \
  }                                                                                                                   \
  KERNEL relu_##kind(S* x, long long n) { relu<S>(x, n); }                                                            \
  KERNEL relu_backward_##kind(S* dy, const S* y, long long n) {                                                       \
    relu_backward<S>(dy, y, n);                                                                                       \
  }
INSTANCES(half, __half)
INSTANCES(bfloat16, __nv_bfloat16)
INSTANCES(float, float)
INSTANCES(double, double)
