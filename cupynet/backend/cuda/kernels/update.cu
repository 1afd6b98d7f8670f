// Updates of flat vectors: weights, gradients, optimizer state. S is the type that layers read, Wide<S> the updated one.

#include "common.cuh"

template <class S>
constexpr int AT_ONCE = 16 / sizeof(Wide<S>);  // values of the wider vectors in 16 bytes

// `controls`, if not null, contain a factor of the learning rate, the loss scale of the gradient, and a flag that is 0 if
// the step is skipped. A skipped step sets gradients to zero, and reads and writes nothing else.

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

// The factor that clips the norm of a gradient to `largest`, given its squared norm. A NaN norm gives NaN. With
// `controls`, the gradient contains the loss scale, so `largest` is multiplied by it.
template <class A>
__device__ __forceinline__ A norm_factor(A squared_norm, A largest, const double* controls) {
  largest = steered(largest, controls, USED);
  const A length = root(squared_norm);
  return length <= largest ? A(1) : largest / length;
}

// The parameters of an update, in the order of `UpdateScalars.in_order` (update_rules.py).
template <class A>
struct Numbers {
  A rate, first, second, third, scale, clip, l1, l2, decay, a, b, c, largest;
  const A* squared_norm;  // of the whole gradient; null if it is not clipped
  A factor = 1;

  __device__ __forceinline__ Numbers resolved(const double* controls) const {
    Numbers k = *this;
    if (squared_norm) k.factor = norm_factor(*squared_norm, largest, controls);
    k.rate = steered(rate, controls, RATE);
    k.first = steered(first, controls, FIRST);
    k.second = steered(second, controls, SECOND);
    k.third = steered(third, controls, THIRD);
    k.scale = gradient_scale(scale, controls);
    return k;
  }
  // clip(scale · factor · g) + l2 · w + l1 · sign(w)
  __device__ __forceinline__ A slope(A g, A w) const {
    g *= factor;
    g *= scale;
    g = g > clip ? clip : g < -clip ? -clip : g;
    if (l2 != 0) g += l2 * w;
    if (l1 != 0) g += w > 0 ? l1 : w < 0 ? -l1 : A(0);
    return g;
  }
};

// Update rules: the step of a weight, from its gradient g and the vectors of the rule. update_rules.py contains the same
// rules as array code.

template <class A>
__device__ __forceinline__ A forgetting(A& mean, A share, A value) {
  mean += share * (value - mean);
  return mean;
}

struct sgd {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g) {
    return k.rate * g;
  }
};
struct momentum {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& v) {
    v = k.a * v - k.rate * g;
    return -v;
  }
};
struct nesterov {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& v) {
    const A own = k.rate * g;
    v = k.a * v - own;
    return own - k.a * v;
  }
};
struct adam {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& m, A& v) {
    forgetting(m, k.a, g);
    forgetting(v, k.b, g * g);
    return k.rate * (k.first * m) / (root(v) * k.second + k.c);
  }
};
struct nadam {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& m, A& v) {
    forgetting(m, k.a, g);
    forgetting(v, k.b, g * g);
    return k.rate * (k.first * m + k.second * g) / (root(v) * k.third + k.c);
  }
};
struct amsgrad {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& m, A& v, A& largest) {
    forgetting(m, k.a, g);
    forgetting(v, k.b, g * g);
    if (!(v <= largest)) largest = v;
    return k.rate * (k.first * m) / (root(largest) * k.second + k.c);
  }
};
struct adamax {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& m, A& largest) {
    forgetting(m, k.a, g);
    const A size = (g < 0 ? -g : g) + k.c, kept = k.b * largest;
    largest = size <= kept ? kept : size;
    return k.rate * (k.first * m) / largest;
  }
};
struct adagrad {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& squares) {
    squares += g * g;
    return k.rate * g / (root(squares) + k.a);
  }
};
struct rmsprop {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& squares) {
    forgetting(squares, k.a, g * g);
    return k.rate * g / (root(squares) + k.b);
  }
};
struct adadelta {
  static constexpr bool MOVES = true;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& squares, A& steps) {
    forgetting(squares, k.a, g * g);
    const A own = root(steps + k.b) / root(squares + k.b) * g;
    forgetting(steps, k.a, own * own);
    return k.rate * own;
  }
};
struct lamb {
  static constexpr bool MOVES = false;
  template <class A>
  static __device__ __forceinline__ A step(const Numbers<A>& k, A g, A& m, A& v) {
    forgetting(m, k.a, g);
    forgetting(v, k.b, g * g);
    return k.first * m / (root(v) * k.second + k.c);
  }
};

// w -= step + rate · decay · w; g = 0; stored (may be null) = w in the type that layers read. If the rule does not update
// weights directly, g = step + decay · w instead.
template <class Rule, class S, class... States>
__device__ __forceinline__ void move_weights(
    Wide<S>* weight, Wide<S>* grad, S* stored, const Numbers<Wide<S>>& given, const double* controls, long long n,
    States*... states) {
  using A = Wide<S>;
  if (left_out(grad, controls, n)) return;
  const Numbers<A> k = given.resolved(controls);
  const auto move = [=](A& w, A& g, auto&... own) {
    A step = Rule::template step<A>(k, k.slope(g, w), own...);
    if (Rule::MOVES) {
      if (k.decay != 0) step += k.rate * k.decay * w;
      w -= step;
      g = 0;
    } else {
      g = k.decay != 0 ? step + k.decay * w : step;
    }
  };
  if (stored && Rule::MOVES) {
    const auto all = [=](S& copy, A& w, A& g, auto&... own) {
      move(w, g, own...);
      store(copy, w);
    };
    each<AT_ONCE<S>>(n, all, Write<S>{stored}, Change<A>{weight}, Change<A>{grad}, Change<A>{states}...);
  } else {
    each<AT_ONCE<S>>(n, move, Change<A>{weight}, Change<A>{grad}, Change<A>{states}...);
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

// Clips the norm of a gradient, for optimizers that need it before the update.
template <class A>
__device__ void clip_norm(A* grad, const A* squared_norm, A largest, const double* controls, long long n) {
  const A factor = norm_factor(*squared_norm, largest, controls);
  if (factor == 1) return;
  each<AT_ONCE<A>>(n, [=](A& g) { g *= factor; }, Change<A>{grad});
}

__device__ __forceinline__ bool is_number(float x) { return x - x == 0; }
__device__ __forceinline__ bool is_number(double x) { return x - x == 0; }

// Takes the scalars of the next step from a table, which contains the number of rows taken, the number of rows, and the
// rows. If no row is left, the scalars do not change.
__device__ __forceinline__ void take_row(double* controls, double* table) {
  const long long taken = static_cast<long long>(table[0]);
  if (taken >= table[1]) return;
  for (int i = RATE; i <= THIRD; ++i) controls[i] = table[2 + 4 * taken + i];
  table[0] = static_cast<double>(taken + 1);
}

// Decides if a step is applied, from the sum of its losses, and from the sum of `squares`, the squared norm of its
// gradient. If the gradient overflows, the step is skipped and the loss scale is halved; `grow_after` steps without
// overflow double it. If `grow_after` is 0, the scale is fixed. After a loss that is not finite, or an overflow when the
// scale cannot be halved, no step is applied. Takes the scalars of the step, and adds its samples to order[0] (see
// `next_batch`), if not null. Uses one block.
template <class A>
__device__ void judge(
    double* controls, const A* losses, const A* squares, A* squared_norm, const long long* hits, double* table,
    long long* order, int count, int parts, int samples, int grow_after, double least, double most) {
  const A loss = block_sum(losses, count, false), norm = block_sum(squares, parts, false);
  if (threadIdx.x) return;
  *squared_norm = norm;
  take_row(controls, table);
  if (order) order[0] += samples;
  const double scale = controls[SCALE];
  const bool overflow = !is_number(norm), lost = !is_number(loss);
  controls[USED] = scale;
  controls[STEPS] += 1;
  if (controls[HALTED] == 0 && (lost || (overflow && !(grow_after && scale > least)))) {
    controls[HALTED] = controls[STEPS];
  }
  const bool running = controls[HALTED] == 0, go = running && !overflow;
  controls[GO] = go;
  if (go) {
    controls[LOSSES] += loss;
    controls[SAMPLES] += samples;
    controls[HITS] += *hits;
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

// vector = kept if the step is skipped
template <class A>
__device__ void undo(A* vector, const A* kept, const double* controls, long long n) {
  if (controls[GO] != 0) return;
  each<AT_ONCE<A>>(n, [](A& x, const A& before) { x = before; }, Write<A>{vector}, Read<A>{kept});
}

// Takes the scalars of an update that does not call `judge`.
KERNEL steer_double(double* controls, double* table) {
  if (blockIdx.x || threadIdx.x) return;
  take_row(controls, table);
}

// Starts a series of steps: resets the results of earlier steps, but keeps the scalars of the update.
KERNEL begin_double(double* controls, double scale, double used, double steady) {
  if (blockIdx.x || threadIdx.x) return;
  for (int place = SCALE; place <= SKIPPED; ++place) controls[place] = 0;
  controls[SCALE] = scale;
  controls[USED] = used;
  controls[GO] = 1;
  controls[STEADY] = steady;
}

// layer by layer ------------------------------------------------------------------------------------------------------

// table (stretches, 3): start, stop and layer of each stretch of a vector. Stretches are divided among the blocks along
// y, and the values of a stretch among the blocks along x.

// sums (stretches, gridDim.x) = the sum of squares of the part of a stretch that each block processes.
template <class A>
__device__ void stretch_squares(const A* vector, const long long* table, A* sums, int stretches) {
  for (int t = blockIdx.y; t < stretches; t += gridDim.y) {
    const long long start = table[3 * t];
    const A sum = block_sum(vector + start, table[3 * t + 1] - start, true);
    if (threadIdx.x == 0) sums[static_cast<long long>(t) * gridDim.x + blockIdx.x] = sum;
  }
}

// squares (layers,) = the sums (stretches, parts) of each layer's stretches, added in their order.
template <class A>
__device__ void layer_squares(
    const A* sums, const long long* table, A* squares, int stretches, int parts, int layers) {
  for (int layer = blockIdx.x * blockDim.x + threadIdx.x; layer < layers; layer += gridDim.x * blockDim.x) {
    A total = 0;
    for (int t = 0; t < stretches; ++t)
      if (table[3 * t + 2] == layer)
        for (int part = 0; part < parts; ++part) total += sums[static_cast<long long>(t) * parts + part];
    squares[layer] = total;
  }
}

// `clip_norm` for each layer.
template <class A>
__device__ void clip_norms(
    A* grad, const A* squares, const long long* table, A largest, const double* controls, int stretches) {
  for (int t = blockIdx.y; t < stretches; t += gridDim.y) {
    const A factor = norm_factor(squares[table[3 * t + 2]], largest, controls);
    if (factor == 1) continue;
    const long long start = table[3 * t];
    each<AT_ONCE<A>>(table[3 * t + 1] - start, [=](A& g) { g *= factor; }, Change<A>{grad + start});
  }
}

// w -= rate · |w| / |g| · g for each layer; g = 0; stored (may be null) = w in the type that layers read. The ratio is 1 if
// either norm is 0. If the step is skipped, gradients are already zero, and weights do not change.
template <class S>
__device__ void trust_weights(
    Wide<S>* weight, Wide<S>* grad, S* stored, const Wide<S>* squares, const Wide<S>* steps, const long long* table,
    Wide<S> rate, const double* controls, int stretches) {
  using A = Wide<S>;
  if (controls && controls[GO] == 0) return;
  rate = steered(rate, controls, RATE);
  for (int t = blockIdx.y; t < stretches; t += gridDim.y) {
    const A own = squares[table[3 * t + 2]], step = steps[table[3 * t + 2]];
    const A factor = own > 0 && step > 0 ? rate * root(own / step) : rate;
    const long long start = table[3 * t], length = table[3 * t + 1] - start;
    const auto move = [=](A& w, A& g) {
      w -= factor * g;
      g = 0;
    };
    const auto all = [=](S& as_read, A& w, A& g) {
      move(w, g);
      store(as_read, w);
    };
    if (stored) {
      each<AT_ONCE<S>>(length, all, Write<S>{stored + start}, Change<A>{weight + start}, Change<A>{grad + start});
    } else {
      each<AT_ONCE<S>>(length, move, Change<A>{weight + start}, Change<A>{grad + start});
    }
  }
}

#define NUMBERS(A)                                                                                                    \
  A rate, A first, A second, A third, A scale, A clip, A l1, A l2, A decay, A a, A b, A c, A largest,                 \
      const A* squared_norm
#define GIVEN {rate, first, second, third, scale, clip, l1, l2, decay, a, b, c, largest, squared_norm}

#define WITHOUT(rule, kind, S)                                                                                        \
  KERNEL rule##_update_##kind(                                                                                        \
      Wide<S>* weight, Wide<S>* grad, S* stored, NUMBERS(Wide<S>), const double* controls, long long n) {             \
    move_weights<rule, S>(weight, grad, stored, GIVEN, controls, n);                                                  \
  }
#define WITH_ONE(rule, kind, S)                                                                                       \
  KERNEL rule##_update_##kind(                                                                                        \
      Wide<S>* weight, Wide<S>* grad, Wide<S>* one, S* stored, NUMBERS(Wide<S>), const double* controls,              \
      long long n) {                                                                                                  \
    move_weights<rule, S>(weight, grad, stored, GIVEN, controls, n, one);                                             \
  }
#define WITH_TWO(rule, kind, S)                                                                                       \
  KERNEL rule##_update_##kind(                                                                                        \
      Wide<S>* weight, Wide<S>* grad, Wide<S>* one, Wide<S>* two, S* stored, NUMBERS(Wide<S>),                        \
      const double* controls, long long n) {                                                                          \
    move_weights<rule, S>(weight, grad, stored, GIVEN, controls, n, one, two);                                        \
  }
#define WITH_THREE(rule, kind, S)                                                                                     \
  KERNEL rule##_update_##kind(                                                                                        \
      Wide<S>* weight, Wide<S>* grad, Wide<S>* one, Wide<S>* two, Wide<S>* three, S* stored, NUMBERS(Wide<S>),        \
      const double* controls, long long n) {                                                                          \
    move_weights<rule, S>(weight, grad, stored, GIVEN, controls, n, one, two, three);                                 \
  }

#define INSTANCES(kind, S)                                                                                            \
  WITHOUT(sgd, kind, S)                                                                                               \
  WITH_ONE(momentum, kind, S)                                                                                         \
  WITH_ONE(nesterov, kind, S)                                                                                         \
  WITH_TWO(adam, kind, S)                                                                                             \
  WITH_TWO(nadam, kind, S)                                                                                            \
  WITH_THREE(amsgrad, kind, S)                                                                                        \
  WITH_TWO(adamax, kind, S)                                                                                           \
  WITH_ONE(adagrad, kind, S)                                                                                          \
  WITH_ONE(rmsprop, kind, S)                                                                                          \
  WITH_TWO(adadelta, kind, S)                                                                                         \
  WITH_TWO(lamb, kind, S)                                                                                             \
  KERNEL trust_weights_##kind(                                                                                        \
      Wide<S>* weight, Wide<S>* grad, S* stored, const Wide<S>* squares, const Wide<S>* steps,                        \
      const long long* table, Wide<S> rate, const double* controls, int stretches) {                                  \
    trust_weights<S>(weight, grad, stored, squares, steps, table, rate, controls, stretches);                         \
  }                                                                                                                   \
  KERNEL widen_##kind(const S* from, Wide<S>* to, long long n) {                                                      \
    widen<S>(from, to, n);                                                                                            \
  }                                                                                                                   \
  KERNEL narrow_##kind(const Wide<S>* from, S* to, long long n) {                                                     \
    narrow<S>(from, to, n);                                                                                           \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))

#define WIDE_INSTANCES(kind, A)                                                                                       \
  KERNEL stretch_squares_##kind(const A* vector, const long long* table, A* sums, int stretches) {                    \
    stretch_squares<A>(vector, table, sums, stretches);                                                               \
  }                                                                                                                   \
  KERNEL layer_squares_##kind(                                                                                        \
      const A* sums, const long long* table, A* squares, int stretches, int parts, int layers) {                      \
    layer_squares<A>(sums, table, squares, stretches, parts, layers);                                                 \
  }                                                                                                                   \
  KERNEL clip_norms_##kind(                                                                                           \
      A* grad, const A* squares, const long long* table, A largest, const double* controls, int stretches) {          \
    clip_norms<A>(grad, squares, table, largest, controls, stretches);                                                \
  }                                                                                                                   \
  KERNEL clip_norm_##kind(                                                                                            \
      A* grad, const A* squared_norm, A largest, const double* controls, long long n) {                               \
    clip_norm<A>(grad, squared_norm, largest, controls, n);                                                           \
  }                                                                                                                   \
  KERNEL judge_##kind(                                                                                                \
      double* controls, const A* losses, const A* squares, A* squared_norm, const long long* hits, double* table,     \
      long long* order, int count, int parts, int samples, int grow_after, double least, double most) {               \
    judge<A>(                                                                                                         \
        controls, losses, squares, squared_norm, hits, table, order, count, parts, samples, grow_after, least, most); \
  }                                                                                                                   \
  KERNEL undo_##kind(A* vector, const A* kept, const double* controls, long long n) {                                 \
    undo<A>(vector, kept, controls, n);                                                                               \
  }
WITH_FLOAT_SUMS(WIDE_INSTANCES(float, float))
IN_DOUBLE(WIDE_INSTANCES(double, double))
