// Sums over rows, columns and vectors; softmax and its loss.
//
// A block adds up as a tree, in shared memory and in an order that follows from its size. Its sizes are powers of two.

#include "common.cuh"

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

struct Add {
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

struct Larger {
  template <class A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return b > a ? b : a;
  }
};

// All values of a line of the block (its threads along x) as one, for each of these threads.
template <class A, class F>
__device__ __forceinline__ A across(A value, F function) {
  __shared__ A shared[MOST_THREADS];
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

// What the threads of one column (along y) have, added up; right in the threads with y = 0.
template <class A>
__device__ __forceinline__ A down(A value) {
  __shared__ A shared[MOST_THREADS];
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

// rows: each line of a block takes one at a time ----------------------------------------------------------------------

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

// x = exp(x) / sum exp(x) in each row, shifted by the row's largest.
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

// dy = y · (dy - sum(dy · y)) in each row.
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

// losses (rows,) = -log softmax(logits)[label]; gradient = (softmax(logits) - onehot) · scale, and times the loss scale in
// `controls` if there are any. NaN where a label is no column.
template <class S>
__device__ void softmax_cross_entropy(
    const S* logits, const long long* labels, Wide<S>* losses, S* gradient, Wide<S> factor, const double* controls,
    int rows, int columns) {
  const Wide<S> scale = steered(factor, controls, SCALE);
  EACH_ROW(row, rows) {
    const S* line = row < rows ? logits + row * columns : nullptr;
    const Wide<S> largest = largest_of(line, columns), sum = sum_of_exponentials(line, columns, largest);
    if (!line) continue;  // there is no barrier behind this
    const long long label = labels[row];
    const bool known = label >= 0 && label < columns;
    const Wide<S> nothing = known ? Wide<S>(0) : static_cast<Wide<S>>(nanf(""));
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const Wide<S> probability = exponential(wide(line[c]) - largest) / sum;
      store(gradient[row * columns + c], (probability - (c == label ? 1 : 0) + nothing) * scale);
    }
    if (threadIdx.x == 0) {
      losses[row] = known ? logarithm(sum) - (wide(line[label]) - largest) : nothing;
    }
  }
}

// columns -------------------------------------------------------------------------------------------------------------

// sums[chunk] = the sums of the columns of rows chunk · length to (chunk + 1) · length; added to what is there
// if `add`. values (rows, columns) -> sums (chunks, columns). The blocks along y share the chunks, those along x the
// columns.
template <class S>
__device__ void column_sums(
    const S* values, Wide<S>* sums, long long rows, int columns, long long length, int chunks, int add) {
  for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
    const long long begin = chunk * length, end = min(begin + length, rows);
    for (long long left = static_cast<long long>(blockIdx.x) * blockDim.x; left < columns;
         left += static_cast<long long>(gridDim.x) * blockDim.x) {
      const long long column = left + threadIdx.x;
      Wide<S> sum = 0;
      if (column < columns)
        for (long long row = begin + threadIdx.y; row < end; row += blockDim.y)
          sum += wide(values[row * columns + column]);
      sum = down(sum);
      if (threadIdx.y == 0 && column < columns) {
        Wide<S>* to = sums + static_cast<long long>(chunk) * columns + column;
        *to = add ? *to + sum : sum;
      }
    }
  }
}

// vectors -------------------------------------------------------------------------------------------------------------

// sums[b] = the sum of squares of what block b has of the vector (n,), or of the values themselves unless `squares`.
template <class A>
__device__ void sum_vector(const A* vector, A* sums, long long n, int squares) {
  A sum = 0;
  each<16 / sizeof(A)>(n, [&](const A& x) { sum += squares ? x * x : x; }, Read<A>{vector});
  sum = across(sum, Add());
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
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
      const S* logits, const long long* labels, Wide<S>* losses, S* gradient, Wide<S> factor,                         \
      const double* controls, int rows, int columns) {                                                                \
    softmax_cross_entropy<S>(logits, labels, losses, gradient, factor, controls, rows, columns);                      \
  }                                                                                                                   \
  KERNEL column_sums_##kind(                                                                                          \
      const S* values, Wide<S>* sums, long long rows, int columns, long long length, int chunks, int add) {           \
    column_sums<S>(values, sums, rows, columns, length, chunks, add);                                                 \
  }
INSTANCES(half, __half)
INSTANCES(bfloat16, __nv_bfloat16)
INSTANCES(float, float)
INSTANCES(double, double)

#define WIDE_INSTANCES(kind, A)                                                                                       \
  KERNEL sum_vector_##kind(                                                                                           \
      const A* vector, A* sums, long long n, int squares) {                                                           \
    sum_vector<A>(vector, sums, n, squares);                                                                          \
  }
WIDE_INSTANCES(float, float)
WIDE_INSTANCES(double, double)
