// Convolution with small patches (few channels, as in the first layer) and its max-pool, computed directly from the
// images. Neither im2col rows nor the output of the convolution are stored.
//
// In the forward pass, a thread computes the pooled output of V filters. In the backward pass, a thread sums the gradients
// of TAPS weights of a filter over its part of the windows, reading only the patches of the winners.
//
// Loops whose bounds are minima or maxima are not unrolled, here and in other kernels: the compiler would compute their
// trip count, which ptxas 13.0 gets wrong for sm_90 (see tests/backend/cuda/test_compiles.py).

#include "common.cuh"

constexpr int TAPS = 5;    // adjacent values in a row of a patch that a thread computes
constexpr int AHEAD = 4;   // windows whose gradients are loaded together
constexpr int NONE = 255;  // winner of a window that ReLU zeroed, which has no gradient

struct Geometry {
  int height, width, channels;          // of an image
  int rows, cols;                       // of the convolution's output
  int kernel_height, kernel_width;      // of the convolution
  int stride_down, stride_across;
  int top, left;                        // padding before the image
  int pooled_rows, pooled_cols;         // of the pool's output
  int pool_height, pool_width;          // of the pool
  int pool_down, pool_across;           // its stride
  int pool_top, pool_left;              // padding before the convolution's output
  int filters;
};

#define GEOMETRY_PARAMETERS                                                                                           \
  int height, int width, int channels, int rows, int cols, int kernel_height, int kernel_width, int stride_down,      \
      int stride_across, int top, int left, int pooled_rows, int pooled_cols, int pool_height, int pool_width,        \
      int pool_down, int pool_across, int pool_top, int pool_left, int filters
#define GEOMETRY                                                                                                      \
  { height, width, channels, rows, cols, kernel_height, kernel_width, stride_down, stride_across, top, left,          \
    pooled_rows, pooled_cols, pool_height, pool_width, pool_down, pool_across, pool_top, pool_left, filters }

// Range of indices of `length` values from `start` on that are inside a line of `size` values.
struct Inside {
  int first, end;
  __device__ __forceinline__ Inside(int start, int length, int size)
      : first(max(0, -start)), end(min(length, size - start)) {}
};

// sums += COUNT values from `pixels` on times their weights, for V filters. Weights are `filters` apart.
template <int COUNT, int V, class S>
__device__ __forceinline__ void multiply(const S* pixels, const S* weights, int filters, Wide<S> (&sums)[V]) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const Wide<S> pixel = wide(pixels[j]);
    const Pack<S, V> pack = fetch<V>(Read<S>{weights + j * filters}, 0);
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] += pixel * wide(pack.lane[v]);
  }
}

// sums[v] = pixel (row, col) of the convolution for V filters from `weight` on.
template <int V, class S>
__device__ __forceinline__ void convolve(
    const S* image, const S* weight, const Geometry& g, int row, int col, Wide<S> (&sums)[V]) {
  const int line = g.width * g.channels, length = g.kernel_width * g.channels;
  const int y = row * g.stride_down - g.top, start = (col * g.stride_across - g.left) * g.channels;
  const Inside down(y, g.kernel_height, g.height), across(start, length, line);
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = 0;
#pragma unroll 1
  for (int ky = down.first; ky < down.end; ++ky) {
    const S* pixels = image + static_cast<long long>(y + ky) * line + start;
    const S* weights = weight + ky * length * g.filters;
    int j = across.first;
#pragma unroll 1
    for (; j + TAPS <= across.end; j += TAPS) multiply<TAPS>(pixels + j, weights + j * g.filters, g.filters, sums);
#pragma unroll 1
    for (; j < across.end; ++j) multiply<1>(pixels + j, weights + j * g.filters, g.filters, sums);
  }
}

// Like max_pool in pool.cu, but of the convolution of x. y, winners: (count, pooled_rows, pooled_cols, O).
template <int V, class S>
__device__ void conv_pool_of(
    const S* x, const S* weight, const S* bias, S* y, unsigned char* winners, int count, const Geometry& g, int relu) {
  using A = Wide<S>;
  const unsigned groups = g.filters / V, total = g.pooled_rows * g.pooled_cols * groups;
  const long long values = static_cast<long long>(g.height) * g.width * g.channels;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int filter = i % groups * V, place = i / groups;
      const int row = place / g.pooled_cols * g.pool_down - g.pool_top;
      const int col = place % g.pooled_cols * g.pool_across - g.pool_left;
      const Inside down(row, g.pool_height, g.rows), across(col, g.pool_width, g.cols);
      const Pack<S, V> offset = bias ? fetch<V>(Read<S>{bias + filter}, 0) : Pack<S, V>{};
      A best[V] = {};
      unsigned char winner[V] = {};
#pragma unroll 1
      for (int py = down.first; py < down.end; ++py) {
#pragma unroll 1
        for (int px = across.first; px < across.end; ++px) {
          A sums[V];
          convolve<V>(x + n * values, weight + filter, g, row + py, col + px, sums);
          const bool first = py == down.first && px == across.first;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            A candidate = rounded<S>(sums[v]);
            if (bias) candidate = rounded<S>(candidate + wide(offset.lane[v]));
            if (first || (!(candidate <= best[v]) && best[v] == best[v])) {
              best[v] = candidate;
              winner[v] = py * g.pool_width + px;
            }
          }
        }
      }
      Pack<S, V> out;
      Pack<unsigned char, V> won;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const bool closed = relu && !(best[v] > 0);
        store(out.lane[v], closed ? positive(best[v]) : best[v]);
        won.lane[v] = closed ? NONE : winner[v];
      }
      const long long at = (static_cast<long long>(n) * g.pooled_rows * g.pooled_cols + place) * g.filters + filter;
      keep<V>(Write<S>{y + at}, 0, out);
      keep<V>(Write<unsigned char>{winners + at}, 0, won);
    }
  }
}

template <class S>
__device__ void conv_pool(
    const S* x, const S* weight, const S* bias, S* y, unsigned char* winners, int count, const Geometry& g, int relu) {
  const bool packed = g.filters % 4 == 0 && aligned<4>(weight) && (!bias || aligned<4>(bias)) && aligned<4>(y);
  if (packed && aligned<4>(winners)) {
    conv_pool_of<4>(x, weight, bias, y, winners, count, g, relu);
  } else {
    conv_pool_of<1>(x, weight, bias, y, winners, count, g, relu);
  }
}

// Weights of a thread: `count` (at most TAPS) values in row `ky` of a filter's patch, from value `from` on.
struct Taps {
  int filter, ky, from, count;
};

// sums += gradient of the pooling window at (row, col) of the convolution times the pixels of its winner.
template <class S>
__device__ __forceinline__ void add_window(
    const S* image, Wide<S> gradient, int winner, int row, int col, const Geometry& g, const Taps& taps,
    Wide<S> (&sums)[TAPS]) {
  const int line = g.width * g.channels;
#pragma unroll 1
  for (; winner >= g.pool_width; winner -= g.pool_width) ++row;  // faster than a division
  const int y = row * g.stride_down - g.top + taps.ky;
  const int start = ((col + winner) * g.stride_across - g.left) * g.channels + taps.from;
  if (y < 0 || y >= g.height) return;
  const S* pixels = image + static_cast<long long>(y) * line + start;
#pragma unroll
  for (int k = 0; k < TAPS; ++k) {
    const int at = start + k;
    if (k < taps.count && at >= 0 && at < line) sums[k] += gradient * wide(pixels[k]);
  }
}

// Partial sums of gradients: part p sums over lines p, p + parts, ... of pooling windows. weight_sums
// (parts, K_h, K_w, C, O) and, if there is a bias, bias_sums (parts, O).
template <class S>
__device__ void conv_pool_weight(
    const S* x, const S* dy, const unsigned char* winners, Wide<S>* weight_sums, Wide<S>* bias_sums, int count,
    const Geometry& g, int parts) {
  using A = Wide<S>;
  const int length = g.kernel_width * g.channels, chunks = (length + TAPS - 1) / TAPS;
  const unsigned of_weight = g.kernel_height * chunks * g.filters, total = of_weight + (bias_sums ? g.filters : 0);
  const long long values = static_cast<long long>(g.height) * g.width * g.channels;
  const long long lines = static_cast<long long>(count) * g.pooled_rows;
  for (int part = blockIdx.y; part < parts; part += gridDim.y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int filter = i % g.filters, chunk = i / g.filters, from = chunk % chunks * TAPS;
      const Taps taps{filter, chunk / chunks, from, min(TAPS, length - from)};
      const bool weighs = i < of_weight;
      A sums[TAPS];
#pragma unroll
      for (int k = 0; k < TAPS; ++k) sums[k] = 0;
#pragma unroll 1
      for (long long of = part; of < lines; of += parts) {
        const int row = static_cast<int>(of % g.pooled_rows) * g.pool_down - g.pool_top;
        const S* image = x + of / g.pooled_rows * values;
        const long long first = of * g.pooled_cols * g.filters + filter;
#pragma unroll 1
        for (int col = 0; col < g.pooled_cols; col += AHEAD) {
          int won[AHEAD];
          A gradients[AHEAD];
#pragma unroll
          for (int k = 0; k < AHEAD; ++k) {  // all loads before the first use
            const bool here = col + k < g.pooled_cols;
            const long long at = first + static_cast<long long>(col + k) * g.filters;
            won[k] = here ? winners[at] : NONE;
            gradients[k] = here ? wide(dy[at]) : A(0);
          }
#pragma unroll
          for (int k = 0; k < AHEAD; ++k) {
            if (won[k] == NONE) continue;
            if (weighs) {
              const int left = (col + k) * g.pool_across - g.pool_left;
              add_window(image, gradients[k], won[k], row, left, g, taps, sums);
            } else {
              sums[0] += gradients[k];
            }
          }
        }
      }
      if (!weighs) {
        bias_sums[static_cast<long long>(part) * g.filters + filter] = sums[0];
        continue;
      }
      const long long patch = (static_cast<long long>(part) * g.kernel_height + taps.ky) * length + from;
#pragma unroll
      for (int k = 0; k < TAPS; ++k)
        if (k < taps.count) weight_sums[(patch + k) * g.filters + filter] = sums[k];
    }
  }
}

#define INSTANCES(kind, S, A)                                                                                         \
  KERNEL conv_pool_##kind(                                                                                            \
      const S* x, const S* weight, const S* bias, S* y, unsigned char* winners, int count, GEOMETRY_PARAMETERS,       \
      int relu) {                                                                                                     \
    conv_pool(x, weight, bias, y, winners, count, Geometry GEOMETRY, relu);                                           \
  }                                                                                                                   \
  KERNEL conv_pool_weight_##kind(                                                                                     \
      const S* x, const S* dy, const unsigned char* winners, A* weight_sums, A* bias_sums, int count,                 \
      GEOMETRY_PARAMETERS, int parts) {                                                                               \
    conv_pool_weight(x, dy, winners, weight_sums, bias_sums, count, Geometry GEOMETRY, parts);                        \
  }
IN_HALF(INSTANCES(half, __half, float))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16, float))
IN_FLOAT(INSTANCES(float, float, float))
IN_DOUBLE(INSTANCES(double, double, double))
