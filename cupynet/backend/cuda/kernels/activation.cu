// Bias and ReLU, in place, and the other pointwise activations.

#include "common.cuh"

// y (rows, columns) += bias (columns,), then ReLU if `relu`. V columns per access; I is the index type.
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

// x = max(x, 0); NaN stays NaN.
template <class S>
__device__ void relu(S* x, long long n) {
  each<16 / sizeof(S)>(n, [](S& value) { store(value, positive(wide(value))); }, Change<S>{x});
}

// dy = dy where y > 0, else 0. Not a product, because 0 times NaN is NaN.
template <class S>
__device__ void relu_backward(S* dy, const S* y, long long n) {
  const auto close = [](S& gradient, const S& output) {
    if (!(wide(output) > 0)) gradient = S{};
  };
  each<16 / sizeof(S)>(n, close, Change<S>{dy}, Read<S>{y});
}

// The other activations, in the order of backend/reference/activation.py. `forward` computes y from x, and `derivative`
// dy/dx from y, or from x for Gelu and Silu, in Wide<S> and without overflow of exp.
enum Activation { LEAKY_RELU, ELU, TANH, SIGMOID, SOFTPLUS, GELU, SILU };

template <class A>
struct LeakyRelu {
  A slope;
  __device__ __forceinline__ A forward(A x) const { return x > 0 ? x : slope * x; }
  __device__ __forceinline__ A derivative(A y) const { return y > 0 ? A(1) : slope; }
};
template <class A>
struct Elu {
  __device__ __forceinline__ A forward(A x) const { return x > 0 ? x : A(expm1(x)); }
  __device__ __forceinline__ A derivative(A y) const { return y > 0 ? A(1) : y + 1; }
};
template <class A>
struct Tanh {
  __device__ __forceinline__ A forward(A x) const { return tanh(x); }
  __device__ __forceinline__ A derivative(A y) const { return 1 - y * y; }
};
template <class A>
struct Sigmoid {
  __device__ __forceinline__ A forward(A x) const {
    const A small = exp(-fabs(x));
    return (x < 0 ? small : A(1)) / (1 + small);
  }
  __device__ __forceinline__ A derivative(A y) const { return y * (1 - y); }
};
template <class A>
struct Softplus {
  __device__ __forceinline__ A forward(A x) const { return (x < 0 ? A(0) : x) + A(log1p(exp(-fabs(x)))); }
  __device__ __forceinline__ A derivative(A y) const { return -expm1(-y); }
};
template <class A>
struct Gelu {
  static constexpr A DOWN = A(-0.70710678118654752440), DENSITY = A(0.39894228040143267794);  // -1/√2, 1/√(2π)
  __device__ __forceinline__ A forward(A x) const { return x * A(0.5) * A(erfc(x * DOWN)); }
  __device__ __forceinline__ A derivative(A x) const {
    return A(0.5) * A(erfc(x * DOWN)) + x * DENSITY * A(exp(A(-0.5) * x * x));
  }
};
template <class A>
struct Silu {
  __device__ __forceinline__ A forward(A x) const { return x * Sigmoid<A>().forward(x); }
  __device__ __forceinline__ A derivative(A x) const {
    return Sigmoid<A>().forward(x) * (1 + x * Sigmoid<A>().forward(-x));
  }
};

// Calls `use` with the activation whose number is `name`.
template <class A, class F>
__device__ __forceinline__ void chosen(int name, A slope, F use) {
  switch (name) {
    case LEAKY_RELU: return use(LeakyRelu<A>{slope});
    case ELU: return use(Elu<A>());
    case TANH: return use(Tanh<A>());
    case SIGMOID: return use(Sigmoid<A>());
    case SOFTPLUS: return use(Softplus<A>());
    case GELU: return use(Gelu<A>());
    case SILU: return use(Silu<A>());
  }
}

// out = activation(x); out may be x.
template <class S>
__device__ void pointwise(const S* x, S* out, int name, Wide<S> slope, long long n) {
  chosen(name, slope, [&](auto activation) {
    if (x == out) {
      each<16 / sizeof(S)>(n, [&](S& y) { store(y, activation.forward(wide(y))); }, Change<S>{out});
    } else {
      each<16 / sizeof(S)>(n, [&](S& y, const S& from) { store(y, activation.forward(wide(from))); }, Write<S>{out}, Read<S>{x});
    }
  });
}

// dy *= derivative at `kept`, which is y or x.
template <class S>
__device__ void pointwise_backward(S* dy, const S* kept, int name, Wide<S> slope, long long n) {
  chosen(name, slope, [&](auto activation) {
    const auto pass = [&](S& gradient, const S& value) { store(gradient, wide(gradient) * activation.derivative(wide(value))); };
    each<16 / sizeof(S)>(n, pass, Change<S>{dy}, Read<S>{kept});
  });
}

#define INSTANCES(kind, S, A)                                                                                         \
  KERNEL add_bias_##kind(                                                                                             \
      S* y, const S* bias, long long rows, int columns, int relu) {                                                   \
    add_bias<S>(y, bias, rows, columns, relu);                                                                        \
  }                                                                                                                   \
  KERNEL relu_##kind(S* x, long long n) { relu<S>(x, n); }                                                            \
  KERNEL relu_backward_##kind(S* dy, const S* y, long long n) {                                                       \
    relu_backward<S>(dy, y, n);                                                                                       \
  }                                                                                                                   \
  KERNEL pointwise_##kind(const S* x, S* out, int name, A slope, long long n) {                                       \
    pointwise<S>(x, out, name, slope, n);                                                                             \
  }                                                                                                                   \
  KERNEL pointwise_backward_##kind(S* dy, const S* kept, int name, A slope, long long n) {                            \
    pointwise_backward<S>(dy, kept, name, slope, n);                                                                  \
  }
IN_HALF(INSTANCES(half, __half, float))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16, float))
IN_FLOAT(INSTANCES(float, float, float))
IN_DOUBLE(INSTANCES(double, double, double))
