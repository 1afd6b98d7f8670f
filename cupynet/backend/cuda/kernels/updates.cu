// Updates of flat vectors: weights, gradients, optimizer state. S is what layers read, Wide<S> what is updated.

#include "common.cuh"

template <class S>
constexpr int AT_ONCE = 16 / sizeof(Wide<S>);  // values of the wider vectors in 16 bytes

// Where `controls` are given, they have a factor of the learning rate and the loss scale that a gradient was made with; and
// they say whether a step is made at all: if not, gradients are set to zero, and nothing else is read or written.

template <class A>
__device__ __forceinline__ A gradient_scale(A scale, const double* controls) {
  return controls ? scale / static_cast<A>(controls[USED]) : scale;
}

template <class A>
__device__ __forceinline__ bool left_out(A* grad, const double* controls, long long n) {
  if (!controls || controls[GO] != 0) return false;
  each<16 / sizeof(A)>(n, [](A& g) { g = 0; }, Write<A>{grad});
  return true;
}

// w -= rate · (scale · g + l2 · w); g = 0; stored (may be null) = w as layers read it.
template <class S>
__device__ void sgd_update(
    Wide<S>* weight, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> l2, Wide<S> scale, const double* controls,
    long long n) {
  using A = Wide<S>;
  if (left_out(grad, controls, n)) return;
  rate = steered(rate, controls, RATE);
  scale = gradient_scale(scale, controls);
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
    Wide<S> scale, int nesterov, const double* controls, long long n) {
  using A = Wide<S>;
  if (left_out(grad, controls, n)) return;
  rate = steered(rate, controls, RATE);
  scale = gradient_scale(scale, controls);
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

// Shortens a vector whose whole has this squared norm (one number) to `largest` if it is longer; NaN stays NaN. It is as
// long as its loss scale says, which is in `controls` if there are any.
template <class A>
__device__ void clip_norm(A* grad, const A* squared_norm, A largest, const double* controls, long long n) {
  largest = steered(largest, controls, USED);
  const A length = root(*squared_norm);
  if (length <= largest) return;
  const A factor = largest / length;
  each<AT_ONCE<A>>(n, [=](A& g) { g *= factor; }, Change<A>{grad});
}

__device__ __forceinline__ bool is_number(float x) { return x - x == 0; }
__device__ __forceinline__ bool is_number(double x) { return x - x == 0; }

// Whether a step is made, from the sum of its losses and the squared norm of its gradient. A gradient that overflows is
// left out, and halves the loss scale; `grow_after` steps without one double it; 0: it stays as it is. A loss that is not
// finite, or a gradient that is not at the least scale, halts: from then on nothing is moved. One thread.
template <class A>
__device__ void judge(
    double* controls, const A* loss, const A* squared_norm, int samples, int grow_after, double least, double most) {
  if (blockIdx.x || threadIdx.x) return;
  const double scale = controls[SCALE];
  const bool overflow = !is_number(*squared_norm), lost = !is_number(*loss);
  controls[USED] = scale;
  controls[STEPS] += 1;
  if (controls[HALTED] == 0 && (lost || (overflow && !(grow_after && scale > least)))) {
    controls[HALTED] = controls[STEPS];
  }
  const bool running = controls[HALTED] == 0, go = running && !overflow;
  controls[GO] = go;
  if (go) {
    controls[LOSSES] += *loss;
    controls[SAMPLES] += samples;
  }
  if (!running || !grow_after) return;
  controls[STEADY] += 1;
  if (overflow) {
    controls[SKIPPED] += 1;
    controls[SCALE] = scale / 2 > least ? scale / 2 : least;
    controls[STEADY] = 0;
  } else if (controls[STEADY] >= grow_after && scale < most) {
    controls[SCALE] = scale * 2;
    controls[STEADY] = 0;
  }
}

// vector = kept, where the step is left out.
template <class A>
__device__ void undo(A* vector, const A* kept, const double* controls, long long n) {
  if (controls[GO] != 0) return;
  each<AT_ONCE<A>>(n, [](A& x, const A& before) { x = before; }, Write<A>{vector}, Read<A>{kept});
}

// Numbers that the host gives to the next step: they travel with the launch.
__device__ __forceinline__ void steer_to(double* controls, double rate) {
  if (blockIdx.x || threadIdx.x) return;
  controls[RATE] = rate;
}

KERNEL steer_double(double* controls, double rate) { steer_to(controls, rate); }

#define INSTANCES(kind, S)                                                                                            \
  KERNEL sgd_update_##kind(                                                                                           \
      Wide<S>* weight, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> l2, Wide<S> scale, const double* controls,     \
      long long n) {                                                                                                  \
    sgd_update<S>(weight, grad, stored, rate, l2, scale, controls, n);                                                \
  }                                                                                                                   \
  KERNEL momentum_update_##kind(                                                                                      \
      Wide<S>* weight, Wide<S>* velocity, Wide<S>* grad, S* stored, Wide<S> rate, Wide<S> momentum, Wide<S> l2,       \
      Wide<S> scale, int nesterov, const double* controls, long long n) {                                             \
    momentum_update<S>(weight, velocity, grad, stored, rate, momentum, l2, scale, nesterov, controls, n);             \
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
      A* grad, const A* squared_norm, A largest, const double* controls, long long n) {                               \
    clip_norm<A>(grad, squared_norm, largest, controls, n);                                                           \
  }                                                                                                                   \
  KERNEL judge_##kind(                                                                                                \
      double* controls, const A* loss, const A* squared_norm, int samples, int grow_after, double least,              \
      double most) {                                                                                                  \
    judge<A>(controls, loss, squared_norm, samples, grow_after, least, most);                                         \
  }                                                                                                                   \
  KERNEL undo_##kind(A* vector, const A* kept, const double* controls, long long n) {                                 \
    undo<A>(vector, kept, controls, n);                                                                               \
  }
WIDE_INSTANCES(float, float)
WIDE_INSTANCES(double, double)
