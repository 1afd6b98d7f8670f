// Updates of flat vectors: weights, gradients, optimizer state. S is what layers read, Wide<S> what is updated.

#include "common.cuh"

template <class S>
constexpr int AT_ONCE = 16 / sizeof(Wide<S>);  // values of the wider vectors in 16 bytes

// w -= rate · (scale · g + l2 · w); g = 0; stored (may be null) = w as layers read it.
template <class S>
__device__ void sgd_update(
    Wide<S>* weight, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> l2, Wide<S> scale, long long n) {
  using A = Wide<S>;
  const auto move = [=](A& w, A& g) {
    const A slope = l2 != 0 ? scale * g + l2 * w : scale * g;
    w -= rate * slope;
    g = 0;
  };
  if (stored) {
    const auto all = [=](A& w, A& g, S& copy) {
      move(w, g);
      store(copy, w);
    };
    each<AT_ONCE<S>>(n, all, Change<A>{weight}, Change<A>{grad}, Write<S>{stored});
  } else {
    each<AT_ONCE<S>>(n, move, Change<A>{weight}, Change<A>{grad});
  }
}

// v = mu · v - rate · (scale · g + l2 · w); w += v, with Nesterov w += mu · v - rate · (...); g = 0; stored as above.
template <class S>
__device__ void momentum_update(
    Wide<S>* weight, Wide<S>* velocity, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> momentum, Wide<S> l2,
    Wide<S> scale, int nesterov, long long n) {
  using A = Wide<S>;
  const auto move = [=](A& w, A& v, A& g) {
    const A step = rate * (l2 != 0 ? scale * g + l2 * w : scale * g);
    v = momentum * v - step;
    w += nesterov ? momentum * v - step : v;
    g = 0;
  };
  if (stored) {
    const auto all = [=](A& w, A& v, A& g, S& copy) {
      move(w, v, g);
      store(copy, w);
    };
    each<AT_ONCE<S>>(n, all, Change<A>{weight}, Change<A>{velocity}, Change<A>{grad}, Write<S>{stored});
  } else {
    each<AT_ONCE<S>>(n, move, Change<A>{weight}, Change<A>{velocity}, Change<A>{grad});
  }
}

template <class S>
__device__ void widen(const S* from, Wide<S>* to, long long n) {
  each<AT_ONCE<S>>(n, [](const S& x, Wide<S>& y) { y = wide(x); }, Read<S>{from}, Write<Wide<S>>{to});
}

template <class S>
__device__ void narrow(const Wide<S>* from, S* to, long long n) {
  each<AT_ONCE<S>>(n, [](const Wide<S>& x, S& y) { store(y, x); }, Read<Wide<S>>{from}, Write<S>{to});
}

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// Shortens a vector whose whole has this squared norm (one number) to `largest` if it is longer; NaN stays NaN.
template <class A>
__device__ void clip_norm(A* grad, const A* squared_norm, A largest, long long n) {
  const A length = root(*squared_norm);
  if (length <= largest) return;
  const A factor = largest / length;
  each<AT_ONCE<A>>(n, [=](A& g) { g *= factor; }, Change<A>{grad});
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL sgd_update_##kind(                                                                                           \
      Wide<S>* weight, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> l2, Wide<S> scale, long long n) {              \
    sgd_update<S>(weight, grad, stored, rate, l2, scale, n);                                                          \
  }                                                                                                                   \
  KERNEL momentum_update_##kind(                                                                                      \
      Wide<S>* weight, Wide<S>* velocity, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> momentum, Wide<S> l2,       \
      Wide<S> scale, int nesterov, long long n) {                                                                     \
    momentum_update<S>(weight, velocity, grad, stored, rate, momentum, l2, scale, nesterov, n);                       \
  }                                                                                                                   \
  KERNEL widen_##kind(const S* from, Wide<S>* to, long long n) {                                                      \
    widen<S>(from, to, n);                                                                                            \
  }                                                                                                                   \
  KERNEL narrow_##kind(const Wide<S>* from, S* to, long long n) {                                                     \
    narrow<S>(from, to, n);                                                                                           \
  }
INSTANCES(half, __half)
INSTANCES(bfloat16, __nv_bfloat16)
INSTANCES(float, float)
INSTANCES(double, double)

#define WIDE_INSTANCES(kind, A)                                                                                       \
  KERNEL clip_norm_##kind(                                                                                            \
      A* grad, const A* squared_norm, A largest, long long n) {                                                       \
    clip_norm<A>(grad, squared_norm, largest, n);                                                                     \
  }
WIDE_INSTANCES(float, float)
WIDE_INSTANCES(double, double)
