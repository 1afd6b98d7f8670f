// Sums over rows, columns and vectors; softmax and losses; sums for normalization.

#include "common.cuh"

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

struct Larger {
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return b > a ? b : a;
  }
};

// Sum over the threads along y; valid in the threads with y = 0.
template <class A>
__device__ __forceinline__ A down(A value) {
  __shared__ A shared[MAX_THREADS];
  A* mine = shared + threadIdx.y * blockDim.x + threadIdx.x;
  *mine = value;
  __syncthreads();
  for (unsigned reach = blockDim.y / 2; reach; reach /= 2) {
    if (threadIdx.y < reach) *mine += mine[reach * blockDim.x];
    __syncthreads();
  }
  const A all = *mine;
  __syncthreads();
  return all;
}

// rows: the threads along x process one row at a time -----------------------------------------------------------------

#define EACH_ROW(row, rows)                                                                                           \
  for (long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y, base = row - threadIdx.y;       \
       base < rows; base += static_cast<long long>(gridDim.x) * blockDim.y,                                           \
                 row += static_cast<long long>(gridDim.x) * blockDim.y)

template <class S>
__device__ __forceinline__ Wide<S> largest_of(const S* line, int columns) {
  Wide<S> largest = line ? wide(line[0]) : Wide<S>(0);
  if (line)
    for (int c = threadIdx.x; c < columns; c += blockDim.x) largest = Larger()(largest, wide(line[c]));
  return across(largest, Larger());
}

template <class S>
__device__ __forceinline__ Wide<S> sum_of_exponentials(const S* line, int columns, Wide<S> shift) {
  Wide<S> sum = 0;
  if (line)
    for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += exponential(wide(line[c]) - shift);
  return across(sum, Add());
}

// x = exp(x) / sum(exp(x)) for each row, after subtracting the maximum.
template <class S>
__device__ void softmax(S* x, long long rows, int columns) {
  EACH_ROW(row, rows) {
    S* line = row < rows ? x + row * columns : nullptr;
    const Wide<S> largest = largest_of(line, columns), sum = sum_of_exponentials(line, columns, largest);
    if (line)
      for (int c = threadIdx.x; c < columns; c += blockDim.x)
        store(line[c], exponential(wide(line[c]) - largest) / sum);
  }
}

// dy = y · (dy - sum(dy · y)) for each row.
template <class S>
__device__ void softmax_backward(S* dy, const S* y, long long rows, int columns) {
  EACH_ROW(row, rows) {
    const bool here = row < rows;
    S* gradient = dy + row * columns;
    const S* output = y + row * columns;
    Wide<S> sum = 0;
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += wide(gradient[c]) * wide(output[c]);
    sum = across(sum, Add());
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x)
        store(gradient[c], (wide(gradient[c]) - sum) * wide(output[c]));
  }
}

// Argmax of a row, the first column on ties.
template <class S>
__device__ __forceinline__ int first_largest(const S* line, int columns) {
  Wide<S> largest = wide(line[0]);
  int place = 0;
  for (int c = 1; c < columns; ++c) {
    const Wide<S> value = wide(line[c]);
    if (value > largest) {
      largest = value;
      place = c;
    }
  }
  return place;
}

// hits = number of rows whose argmax is the label or, without labels, the argmax of `targets` (rows, stride). Uses one
// block with one thread per row, because there are few rows.
template <class S>
__device__ void count_hits(
    const S* scores, const long long* labels, const float* targets, long long* hits, int rows, int columns, int stride) {
  long long own = 0;
  for (long long row = threadIdx.x; row < rows; row += blockDim.x)
    own += first_largest(scores + row * columns, columns) ==
           (labels ? labels[row] : first_largest(targets + row * stride, columns));
  own = across(own, Add());
  if (threadIdx.x == 0) *hits = own;
}

// losses (rows,) = -sum(t · log softmax(logits)), gradient = (sum(t) · softmax(logits) - t) · scale. The target t is
// (1 - smoothing) · weights[label] at the label, plus smoothing / columns · weights[c] at each c. Without `weights`, all
// weights are 1. scale is `factor`, times the loss scale in `controls` if not null. A label out of range gives NaN.
template <class S>
__device__ void softmax_cross_entropy(
    const S* logits, const long long* labels, const Wide<S>* weights, Wide<S>* losses, S* gradient, Wide<S> smoothing,
    Wide<S> factor, const double* controls, int rows, int columns) {
  using A = Wide<S>;
  const A scale = steered(factor, controls, SCALE), even = smoothing / columns;
  EACH_ROW(row, rows) {
    const S* line = row < rows ? logits + row * columns : nullptr;
    const A largest = largest_of(line, columns), sum = sum_of_exponentials(line, columns, largest);
    A all = 0, some = 0;
    if (smoothing > 0) {
      if (line)
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
          const A weight = weights ? weights[c] : A(1);
          all += weight;
          some += weight * (wide(line[c]) - largest);
        }
      all = across(all, Add());
      some = across(some, Add());
    }
    if (!line) continue;  // no barrier follows
    const long long label = labels[row];
    const bool known = label >= 0 && label < columns;
    const A nothing = known ? A(0) : static_cast<A>(nanf(""));
    const A own = (1 - smoothing) * (weights && known ? weights[label] : A(1)), total = own + even * all;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const A probability = exponential(wide(line[c]) - largest) / sum;
      A target = c == label ? own : A(0);
      if (smoothing > 0) target += even * (weights ? weights[c] : A(1));
      store(gradient[row * columns + c], (total * probability - target + nothing) * scale);
    }
    if (threadIdx.x == 0) {
      const A spread = smoothing > 0 ? even * (all * logarithm(sum) - some) : A(0);
      losses[row] = known ? own * (logarithm(sum) - (wide(line[label]) - largest)) + spread : nothing;
    }
  }
}

// The same for targets (rows, stride) that are probabilities p: t is ((1 - smoothing) · p + smoothing / columns) ·
// weights[c]. If stride > columns, column `columns` is a factor of the row's loss.
template <class S>
__device__ void soft_cross_entropy(
    const S* logits, const float* targets, const Wide<S>* weights, Wide<S>* losses, S* gradient, Wide<S> smoothing,
    Wide<S> factor, const double* controls, int rows, int columns, int stride) {
  using A = Wide<S>;
  const A scale = steered(factor, controls, SCALE), even = smoothing / columns;
  EACH_ROW(row, rows) {
    const S* line = row < rows ? logits + row * columns : nullptr;
    const float* own = targets + row * stride;
    const A largest = largest_of(line, columns), sum = sum_of_exponentials(line, columns, largest);
    const A times = line && stride > columns ? A(own[columns]) : A(1);
    A all = 0, some = 0;
    if (line)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const A target = ((1 - smoothing) * A(own[c]) + even) * (weights ? weights[c] : A(1)) * times;
        all += target;
        some += target * (wide(line[c]) - largest);
      }
    all = across(all, Add());
    some = across(some, Add());
    if (!line) continue;  // no barrier follows
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const A target = ((1 - smoothing) * A(own[c]) + even) * (weights ? weights[c] : A(1)) * times;
      store(gradient[row * columns + c], (all * (exponential(wide(line[c]) - largest) / sum) - target) * scale);
    }
    if (threadIdx.x == 0) losses[row] = all * logarithm(sum) - some;
  }
}

// elementwise losses: value and slope for an output z and a target, as in reference/loss.py ---------------------------

__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }
__device__ __forceinline__ float logarithm_of_one_more(float x) { return log1pf(x); }
__device__ __forceinline__ double logarithm_of_one_more(double x) { return log1p(x); }

struct squared {
  template <class A>
  static __device__ __forceinline__ A of(A z, A t, A, A& slope) {
    const A off = z - t;
    slope = 2 * off;
    return off * off;
  }
};
struct logistic {
  template <class A>
  static __device__ __forceinline__ A of(A z, A t, A, A& slope) {
    const A e = exponential(-magnitude(z));
    slope = (z >= 0 ? 1 / (1 + e) : e / (1 + e)) - t;
    return (z > 0 ? z : z <= 0 ? A(0) : z) - z * t + logarithm_of_one_more(e);
  }
};
struct hinge {
  template <class A>
  static __device__ __forceinline__ A of(A z, A t, A, A& slope) {
    const A sign = 2 * t - 1, margin = 1 - sign * z;
    slope = margin > 0 ? -sign : A(0);
    return margin <= 0 ? A(0) : margin;
  }
};
struct huber {
  template <class A>
  static __device__ __forceinline__ A of(A z, A t, A delta, A& slope) {
    const A off = z - t, size = magnitude(off);
    slope = off > delta ? delta : off < -delta ? -delta : off;
    return size <= delta ? off * off / 2 : delta * (size - delta / 2);
  }
};

// losses (rows,) = mean of an elementwise loss over the columns. The target is one-hot, or in `targets` (rows, stride) as
// above. gradient = slope · scale, with the scale and the row's factor as above. A label out of range gives NaN.
template <class Kind, class S>
__device__ void target_loss(
    const S* prediction, const long long* labels, const float* targets, Wide<S>* losses, S* gradient,
    Wide<S> parameter, Wide<S> factor, const double* controls, int rows, int columns, int stride) {
  using A = Wide<S>;
  const A scale = steered(factor, controls, SCALE);
  EACH_ROW(row, rows) {
    A sum = 0;
    const bool here = row < rows;
    const long long label = here && labels ? labels[row] : 0;
    const float* own = targets + row * stride;
    const A times = here && stride > columns ? A(own[columns]) : A(1);
    const A nothing = label >= 0 && label < columns ? A(0) : static_cast<A>(nanf(""));
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const A target = targets ? A(own[c]) : c == label ? A(1) : A(0);
        A slope;
        sum += Kind::template of<A>(wide(prediction[row * columns + c]), target, parameter, slope);
        store(gradient[row * columns + c], (slope + nothing) * times * scale);
      }
    sum = across(sum, Add());
    if (here && threadIdx.x == 0) losses[row] = sum / columns * times + nothing;
  }
}

// columns -------------------------------------------------------------------------------------------------------------

constexpr int ROWS = 8;  // rows that are loaded together, to hide memory latency

// Returns sum + the K values at indices at(0) to at(K - 1), added in order. If y is not null, values are first set to 0
// where y is not positive.
template <int K, class S, class F>
__device__ __forceinline__ Wide<S> add_values(Wide<S> sum, S* values, const S* y, F at) {
  Wide<S> part[K];
#pragma unroll
  for (int k = 0; k < K; ++k) part[k] = wide(values[at(k)]);
  if (y) {
    bool open[K];
#pragma unroll
    for (int k = 0; k < K; ++k) open[k] = wide(y[at(k)]) > 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (!open[k]) values[at(k)] = S{}, part[k] = 0;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) sum += part[k];
  return sum;
}

// sums[chunk] = the sums of the columns of rows chunk · length to (chunk + 1) · length, or += these sums if `add`.
// values (rows, columns) -> sums (chunks, columns). Chunks are divided among the blocks along y, and columns among the
// blocks along x. If y is not null, values are first set to 0 where y is not positive: the derivative of ReLU.
template <class S>
__device__ void column_sums(
    S* values, const S* y, Wide<S>* sums, long long rows, int columns, long long length, int chunks, int add) {
  for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    const long long begin = chunk * length, end = min(begin + length, rows);
    for (long long left = static_cast<long long>(blockIdx.x) * blockDim.x; left < columns;
         left += static_cast<long long>(gridDim.x) * blockDim.x) {
      const long long column = left + threadIdx.x;
      const long long step = blockDim.y;
      Wide<S> sum = 0;
      if (column < columns) {
        long long row = begin + threadIdx.y;
        const auto at = [&](int k) { return (row + k * step) * columns + column; };
#pragma unroll 1
        for (; row + (ROWS - 1) * step < end; row += ROWS * step) sum = add_values<ROWS>(sum, values, y, at);
#pragma unroll 1
        for (; row < end; row += step) sum = add_values<1>(sum, values, y, at);
      }
      sum = down(sum);
      if (threadIdx.y == 0 && column < columns) {
        Wide<S>* to = sums + static_cast<long long>(chunk) * columns + column;
        *to = add ? *to + sum : sum;
      }
    }
  }
}

// moments -------------------------------------------------------------------------------------------------------------

// Like `down`, but all threads of the column get the sum.
template <class A>
__device__ __forceinline__ A down_for_all(A value) {
  __shared__ A shared[MAX_THREADS];
  const A sum = down(value);
  if (threadIdx.y == 0) shared[threadIdx.x] = sum;
  __syncthreads();
  const A all = shared[threadIdx.x];
  __syncthreads();
  return all;
}

// Iterates over chunks and columns like `column_sums`. All threads of a block call function(begin, end, column, here,
// chunk); `here` is true if the column exists.
template <class F>
__device__ __forceinline__ void each_chunk(long long rows, int columns, long long length, int chunks, F function) {
  for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    const long long begin = chunk * length, end = min(begin + length, rows);
    for (long long left = static_cast<long long>(blockIdx.x) * blockDim.x; left < columns;
         left += static_cast<long long>(gridDim.x) * blockDim.x) {
      const long long column = left + threadIdx.x;
      function(begin, end, column, column < columns, chunk);
    }
  }
}

// parts (chunks, 2, columns): mean of each column, and sum of squared deviations from it, for each chunk of rows.
template <class S>
__device__ void moment_parts(
    const S* x, Wide<S>* parts, long long rows, int columns, long long length, int chunks) {
  using A = Wide<S>;
  each_chunk(rows, columns, length, chunks, [=](long long begin, long long end, long long column, bool here, int chunk) {
    A sum = 0, squares = 0;
    if (here)
      for (long long row = begin + threadIdx.y; row < end; row += blockDim.y) sum += wide(x[row * columns + column]);
    const A mean = down_for_all(sum) / static_cast<A>(end - begin);
    if (here)
      for (long long row = begin + threadIdx.y; row < end; row += blockDim.y) {
        const A apart = wide(x[row * columns + column]) - mean;
        squares += apart * apart;
      }
    squares = down(squares);
    if (threadIdx.y == 0 && here) {
      A* to = parts + static_cast<long long>(chunk) * 2 * columns + column;
      to[0] = mean;
      to[columns] = squares;
    }
  });
}

// Merges `moment_parts` (chunks, 2, columns) to mean and biased variance (2, columns), in double (Chan et al. 1979). The
// chunks of a column are divided among the threads along y.
template <class A>
__device__ void moment_merge(const A* parts, A* moments, long long rows, int columns, long long length, int chunks) {
  for (long long left = static_cast<long long>(blockIdx.x) * blockDim.x; left < columns;
       left += static_cast<long long>(gridDim.x) * blockDim.x) {
    const long long column = left + threadIdx.x;
    const bool here = column < columns;
    double sum = 0, squares = 0;
    if (here)
      for (int chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
        const double count = static_cast<double>(min(length, rows - chunk * length));
        sum += count * parts[static_cast<long long>(chunk) * 2 * columns + column];
      }
    const double mean = down_for_all(sum) / static_cast<double>(rows);
    if (here)
      for (int chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
        const A* part = parts + static_cast<long long>(chunk) * 2 * columns + column;
        const double count = static_cast<double>(min(length, rows - chunk * length)), delta = part[0] - mean;
        squares += part[columns] + delta * delta * count;
      }
    squares = down(squares);
    if (threadIdx.y == 0 && here) {
      moments[column] = static_cast<A>(mean);
      moments[columns + column] = static_cast<A>(squares / static_cast<double>(rows));
    }
  }
}

// sums (chunks, 2, columns): sums of dy and of dy · xhat for each chunk of rows. If y is not null, dy is first set to 0
// where y is not positive.
template <class S>
__device__ void normalize_sums(
    S* dy, const S* x, const S* y, const Wide<S>* mean, const Wide<S>* variance, Wide<S>* sums, Wide<S> epsilon,
    long long rows, int columns, long long length, int chunks) {
  using A = Wide<S>;
  each_chunk(rows, columns, length, chunks, [=](long long begin, long long end, long long column, bool here, int chunk) {
    A sum = 0, product = 0;
    if (here) {
      const A middle = mean[column], inverse = 1 / root(variance[column] + epsilon);
      for (long long row = begin + threadIdx.y; row < end; row += blockDim.y) {
        const long long i = row * columns + column;
        if (y && !(wide(y[i]) > 0)) dy[i] = S{};
        const A slope = wide(dy[i]);
        sum += slope;
        product += slope * (wide(x[i]) - middle) * inverse;
      }
    }
    sum = down(sum);
    product = down(product);
    if (threadIdx.y == 0 && here) {
      A* to = sums + static_cast<long long>(chunk) * 2 * columns + column;
      to[0] = sum;
      to[columns] = product;
    }
  });
}

// y = (x - mean) / sqrt(variance + epsilon) · scale + shift for each row; moments (rows, 2): mean and 1 / sqrt(...).
template <class S>
__device__ void normalize_rows(
    const S* x, const S* scale, const S* shift, S* y, Wide<S>* moments, Wide<S> epsilon, long long rows, int columns) {
  using A = Wide<S>;
  EACH_ROW(row, rows) {
    const bool here = row < rows;
    const S* line = x + row * columns;
    A sum = 0, apart = 0, squares = 0;
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += wide(line[c]);
    const A rough = across(sum, Add()) / columns;  // corrected below, because the sum of a long row has a rounding error
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const A away = wide(line[c]) - rough;
        apart += away;
        squares += away * away;
      }
    const A drift = across(apart, Add()) / columns;
    const A mean = rough + drift, variance = across(squares, Add()) / columns - drift * drift;
    const A inverse = 1 / root((variance < 0 ? 0 : variance) + epsilon);
    if (here) {
      for (int c = threadIdx.x; c < columns; c += blockDim.x)
        store(y[row * columns + c], (wide(line[c]) - mean) * inverse * wide(scale[c]) + wide(shift[c]));
      if (threadIdx.x == 0) {
        moments[2 * row] = mean;
        moments[2 * row + 1] = inverse;
      }
    }
  }
}

// sums (chunks, 2, columns): sums of dy · xhat and of dy for each chunk of rows; moments as above.
template <class S>
__device__ void normalize_rows_sums(
    const S* dy, const S* x, const Wide<S>* moments, Wide<S>* sums, long long rows, int columns, long long length,
    int chunks) {
  using A = Wide<S>;
  each_chunk(rows, columns, length, chunks, [=](long long begin, long long end, long long column, bool here, int chunk) {
    A sum = 0, product = 0;
    if (here)
      for (long long row = begin + threadIdx.y; row < end; row += blockDim.y) {
        const A slope = wide(dy[row * columns + column]);
        sum += slope;
        product += slope * (wide(x[row * columns + column]) - moments[2 * row]) * moments[2 * row + 1];
      }
    sum = down(sum);
    product = down(product);
    if (threadIdx.y == 0 && here) {
      A* to = sums + static_cast<long long>(chunk) * 2 * columns + column;
      to[0] = product;
      to[columns] = sum;
    }
  });
}

// dy = (g - mean(g) - xhat · mean(g · xhat)) / sigma for each row, with g = dy · scale.
template <class S>
__device__ void normalize_rows_backward(
    S* dy, const S* x, const Wide<S>* moments, const S* scale, long long rows, int columns) {
  using A = Wide<S>;
  EACH_ROW(row, rows) {
    const bool here = row < rows;
    const S* line = x + row * columns;
    S* gradient = dy + row * columns;
    const A mean = here ? moments[2 * row] : A(0), inverse = here ? moments[2 * row + 1] : A(0);
    A first = 0, second = 0;
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const A slope = wide(gradient[c]) * wide(scale[c]);
        first += slope;
        second += slope * (wide(line[c]) - mean) * inverse;
      }
    first = across(first, Add()) / columns;
    second = across(second, Add()) / columns;
    if (here)
      for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const A normal = (wide(line[c]) - mean) * inverse;
        store(gradient[c], (wide(gradient[c]) * wide(scale[c]) - first - normal * second) * inverse);
      }
  }
}

// vectors -------------------------------------------------------------------------------------------------------------

// sums[b] = sum of the values, or of their squares if `squares`, of the part of the vector (n,) that block b processes.
template <class A>
__device__ void sum_vector(const A* vector, A* sums, long long n, int squares) {
  const A sum = block_sum(vector, n, squares);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

#define TARGET_LOSS(loss, kind, S)                                                                                    \
  KERNEL loss##_loss_##kind(                                                                                          \
      const S* prediction, const long long* labels, const float* targets, Wide<S>* losses, S* gradient,               \
      Wide<S> parameter, Wide<S> factor, const double* controls, int rows, int columns, int stride) {                 \
    target_loss<loss, S>(                                                                                             \
        prediction, labels, targets, losses, gradient, parameter, factor, controls, rows, columns, stride);           \
  }

#define INSTANCES(kind, S)                                                                                            \
  KERNEL softmax_##kind(S* x, long long rows, int columns) {                                                          \
    softmax<S>(x, rows, columns);                                                                                     \
  }                                                                                                                   \
  KERNEL softmax_backward_##kind(                                                                                     \
      S* dy, const S* y, long long rows, int columns) {                                                               \
    softmax_backward<S>(dy, y, rows, columns);                                                                        \
  }                                                                                                                   \
  KERNEL softmax_cross_entropy_##kind(                                                                                \
      const S* logits, const long long* labels, const Wide<S>* weights, Wide<S>* losses, S* gradient,                 \
      Wide<S> smoothing, Wide<S> factor, const double* controls, int rows, int columns) {                             \
    softmax_cross_entropy<S>(                                                                                         \
        logits, labels, weights, losses, gradient, smoothing, factor, controls, rows, columns);                       \
  }                                                                                                                   \
  KERNEL soft_cross_entropy_##kind(                                                                                   \
      const S* logits, const float* targets, const Wide<S>* weights, Wide<S>* losses, S* gradient,                    \
      Wide<S> smoothing, Wide<S> factor, const double* controls, int rows, int columns, int stride) {                 \
    soft_cross_entropy<S>(                                                                                            \
        logits, targets, weights, losses, gradient, smoothing, factor, controls, rows, columns, stride);              \
  }                                                                                                                   \
  KERNEL moment_parts_##kind(                                                                                         \
      const S* x, Wide<S>* parts, long long rows, int columns, long long length, int chunks) {                        \
    moment_parts<S>(x, parts, rows, columns, length, chunks);                                                         \
  }                                                                                                                   \
  KERNEL normalize_sums_##kind(                                                                                       \
      S* dy, const S* x, const S* y, const Wide<S>* mean, const Wide<S>* variance, Wide<S>* sums, Wide<S> epsilon,    \
      long long rows, int columns, long long length, int chunks) {                                                    \
    normalize_sums<S>(dy, x, y, mean, variance, sums, epsilon, rows, columns, length, chunks);                        \
  }                                                                                                                   \
  KERNEL normalize_rows_##kind(                                                                                       \
      const S* x, const S* scale, const S* shift, S* y, Wide<S>* moments, Wide<S> epsilon, long long rows,            \
      int columns) {                                                                                                  \
    normalize_rows<S>(x, scale, shift, y, moments, epsilon, rows, columns);                                           \
  }                                                                                                                   \
  KERNEL normalize_rows_sums_##kind(                                                                                  \
      const S* dy, const S* x, const Wide<S>* moments, Wide<S>* sums, long long rows, int columns, long long length,  \
      int chunks) {                                                                                                   \
    normalize_rows_sums<S>(dy, x, moments, sums, rows, columns, length, chunks);                                      \
  }                                                                                                                   \
  KERNEL normalize_rows_backward_##kind(                                                                              \
      S* dy, const S* x, const Wide<S>* moments, const S* scale, long long rows, int columns) {                       \
    normalize_rows_backward<S>(dy, x, moments, scale, rows, columns);                                                 \
  }                                                                                                                   \
  KERNEL count_hits_##kind(                                                                                           \
      const S* scores, const long long* labels, const float* targets, long long* hits, int rows, int columns,         \
      int stride) {                                                                                                   \
    count_hits<S>(scores, labels, targets, hits, rows, columns, stride);                                              \
  }                                                                                                                   \
  TARGET_LOSS(squared, kind, S)                                                                                       \
  TARGET_LOSS(logistic, kind, S)                                                                                      \
  TARGET_LOSS(hinge, kind, S)                                                                                         \
  TARGET_LOSS(huber, kind, S)                                                                                         \
  KERNEL column_sums_##kind(                                                                                          \
      S* values, const S* y, Wide<S>* sums, long long rows, int columns, long long length, int chunks, int add) {     \
    column_sums<S>(values, y, sums, rows, columns, length, chunks, add);                                              \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))

#define WIDE_INSTANCES(kind, A)                                                                                       \
  KERNEL sum_vector_##kind(                                                                                           \
      const A* vector, A* sums, long long n, int squares) {                                                           \
    sum_vector<A>(vector, sums, n, squares);                                                                          \
  }                                                                                                                   \
  KERNEL moment_merge_##kind(                                                                                         \
      const A* parts, A* moments, long long rows, int columns, long long length, int chunks) {                        \
    moment_merge<A>(parts, moments, rows, columns, length, chunks);                                                   \
  }
WITH_FLOAT_SUMS(WIDE_INSTANCES(float, float))
IN_DOUBLE(WIDE_INSTANCES(double, double))
