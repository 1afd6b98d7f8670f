// Convolution with small patches (few channels, as in the first layer) followed by max pooling, computed directly from
// the images. Neither im2col rows nor the output of the convolution are stored.
//
// In the forward pass, a thread computes the pooled output of V filters. In the backward pass, a thread sums the gradients
// of TAPS weights of a filter over its part of the windows, reading only the patches of the maxima.
//
// Loops whose bounds are minima or maxima are not unrolled, here and in other kernels: the compiler would compute their
// trip count, which ptxas 13.0 gets wrong for sm_90 (see tests/backend/cuda/test_compiles.py).

#include "common.cuh"

constexpr int TAPS = 5;    // adjacent values in a row of a patch that a thread processes
constexpr int AHEAD = 6;   // windows whose gradients, and then pixels, are loaded together
constexpr int SIDE = 2;    // size of pooling windows whose pixels are computed together
constexpr int NONE = 255;  // index in a window that ReLU zeroed, which has no gradient

struct Geometry {
  int height, width, channels;          // of an image
  int rows, cols;                       // of the convolution's output
  int kernel_height, kernel_width;      // of the convolution
  int stride_down, stride_across;
  int top, left;                        // padding before the image
  int pooled_rows, pooled_cols;         // of the pooled output
  int pool_height, pool_width;          // of a pooling window
  int pool_down, pool_across;           // stride of pooling
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

// Range of indices into `length` values from `start` on that are inside a line of `size` values.
struct Inside {
  int first, end;
  __device__ __forceinline__ Inside(int start, int length, int size)
      : first(max(0, -start)), end(min(length, size - start)) {}
};

// Adds to sums COUNT values from `pixels` on, times their weights, for V filters. Weights are `filters` apart.
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

// Adds to sums[p][v] COUNT values times their weights, for the patches at all positions p of a SIDE x SIDE pooling
// window and for V filters. Positions are `below` and `beside` values apart.
template <int COUNT, int V, class S>
__device__ __forceinline__ void multiply_pool(
    const S* pixels, const S* weights, int below, int beside, int filters, Wide<S> (&sums)[SIDE * SIDE][V]) {
  Wide<S> pixel[SIDE * SIDE][COUNT];
#pragma unroll
  for (int p = 0; p < SIDE * SIDE; ++p) {
    const S* at = pixels + (p / SIDE * below + p % SIDE * beside);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) pixel[p][j] = wide(at[j]);
  }
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const Pack<S, V> pack = fetch<V>(Read<S>{weights + j * filters}, 0);
#pragma unroll
    for (int p = 0; p < SIDE * SIDE; ++p) {
#pragma unroll
      for (int v = 0; v < V; ++v) sums[p][v] += pixel[p][j] * wide(pack.lane[v]);
    }
  }
}

// Like `convolve`, at all positions of a SIDE x SIDE pooling window whose patches are inside the image. The first patch
// begins at `pixels`.
template <int V, class S>
__device__ __forceinline__ void convolve_pool(
    const S* pixels, const S* weights, const Geometry& g, Wide<S> (&sums)[SIDE * SIDE][V]) {
  const int line = g.width * g.channels, length = g.kernel_width * g.channels;
  const int below = g.stride_down * line, beside = g.stride_across * g.channels;
#pragma unroll
  for (int p = 0; p < SIDE * SIDE; ++p) {
#pragma unroll
    for (int v = 0; v < V; ++v) sums[p][v] = 0;
  }
#pragma unroll 1
  for (int ky = 0; ky < g.kernel_height; ++ky, pixels += line) {
    int j = 0;
#pragma unroll 1
    for (; j + TAPS <= length; j += TAPS, weights += TAPS * g.filters)
      multiply_pool<TAPS>(pixels + j, weights, below, beside, g.filters, sums);
#pragma unroll 1
    for (; j < length; ++j, weights += g.filters)
      multiply_pool<1>(pixels + j, weights, below, beside, g.filters, sums);
  }
}

// Like max_pool in pool.cu, but applied to the convolution of x. y, indices: (count, pooled_rows, pooled_cols, O).
template <int V, class S>
__device__ void conv_pool_of(
    const S* x, const S* weight, const S* bias, S* y, unsigned char* indices, int count, const Geometry& g, int relu) {
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
      unsigned char index[V] = {};
      const auto compare = [&](const A(&sums)[V], int place, bool first) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          A candidate = rounded<S>(sums[v]);
          if (bias) candidate = rounded<S>(candidate + wide(offset.lane[v]));
          if (first || (!(candidate <= best[v]) && best[v] == best[v])) {
            best[v] = candidate;
            index[v] = place;
          }
        }
      };
      const int top = row * g.stride_down - g.top, left = col * g.stride_across - g.left;
      const bool whole = g.pool_height == SIDE && g.pool_width == SIDE && row >= 0 && row + SIDE <= g.rows && col >= 0 &&
                         col + SIDE <= g.cols && top >= 0 && top + g.stride_down + g.kernel_height <= g.height &&
                         left >= 0 && left + g.stride_across + g.kernel_width <= g.width;
      if (whole) {
        A sums[SIDE * SIDE][V];
        const S* pixels = x + n * values + (top * g.width + left) * g.channels;
        convolve_pool(pixels, weight + filter, g, sums);
#pragma unroll
        for (int p = 0; p < SIDE * SIDE; ++p) compare(sums[p], p, p == 0);
      } else {
#pragma unroll 1
        for (int py = down.first; py < down.end; ++py) {
#pragma unroll 1
          for (int px = across.first; px < across.end; ++px) {
            A sums[V];
            convolve<V>(x + n * values, weight + filter, g, row + py, col + px, sums);
            compare(sums, py * g.pool_width + px, py == down.first && px == across.first);
          }
        }
      }
      Pack<S, V> out;
      Pack<unsigned char, V> won;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const bool closed = relu && !(best[v] > 0);
        store(out.lane[v], closed ? positive(best[v]) : best[v]);
        won.lane[v] = closed ? NONE : index[v];
      }
      const long long at = (static_cast<long long>(n) * g.pooled_rows * g.pooled_cols + place) * g.filters + filter;
      keep<V>(Write<S>{y + at}, 0, out);
      keep<V>(Write<unsigned char>{indices + at}, 0, won);
    }
  }
}

template <class S>
__device__ void conv_pool(
    const S* x, const S* weight, const S* bias, S* y, unsigned char* indices, int count, const Geometry& g, int relu) {
  const auto compute = [&](auto values) {
    conv_pool_of<decltype(values)::NUMBER>(x, weight, bias, y, indices, count, g, relu);
  };
  in_packs<sizeof(S) < 8 ? 4 : 2>(g.filters, compute, weight, bias, y, indices);
}

// Weights of a thread: `count` (at most TAPS) values in row `ky` of a filter's patch, from value `from` on.
struct Taps {
  int filter, ky, from, count;
};

// Adds to sums the gradients of AHEAD pooling windows of a line, from (row, col) of the convolution on, times the pixels
// of their maxima. WHOLE: all pixels of maxima are inside the image, and there are TAPS weights. Otherwise, the image's
// first pixel is loaded in place of missing ones, because branches would separate the loads. reciprocal: see
// `conv_pool_weight_of`.
template <bool WHOLE, class S>
__device__ __forceinline__ void add_windows(
    const S* image, const Wide<S> (&gradients)[AHEAD], const int (&won)[AHEAD], int row, int col, const Geometry& g,
    const Taps& taps, int reciprocal, Wide<S> (&sums)[TAPS]) {
  const int line = g.width * g.channels, step = g.stride_across * g.channels;
  const int below = g.stride_down * line - g.pool_width * step;  // added for each row of the pool
  const int top = row * g.stride_down - g.top + taps.ky, left = col * step - g.left * g.channels + taps.from;
  int starts[AHEAD];  // in a line of the image
  S pixels[AHEAD][TAPS];
  const auto inside = [&](int start, int j) {
    return WHOLE ? start >= 0 : j < taps.count && start + j >= 0 && start + j < line;
  };
#pragma unroll
  for (int k = 0; k < AHEAD; ++k) {
    const int down = won[k] * reciprocal >> 16, y = top + down * g.stride_down;
    const int at = left + (k * g.pool_across + won[k]) * step, start = WHOLE ? 0 : at - down * g.pool_width * step;
    const bool seen = won[k] != NONE && (WHOLE || (y >= 0 && y < g.height));
    starts[k] = seen ? start : -TAPS;
    const int first = seen ? at + top * line + down * below : 0;  // y · line + start
#pragma unroll
    for (int j = 0; j < TAPS; ++j) pixels[k][j] = image[WHOLE || inside(starts[k], j) ? first + j : 0];
  }
#pragma unroll
  for (int k = 0; k < AHEAD; ++k) {
#pragma unroll
    for (int j = 0; j < TAPS; ++j)
      if (inside(starts[k], j)) sums[j] += gradients[k] * wide(pixels[k][j]);
  }
}

// Partial sums of gradients: part p sums over lines p, p + parts, ... of pooling windows. weight_sums
// (parts, K_h, K_w, C, O) and, if there is a bias, bias_sums (parts, O).
template <bool WHOLE, class S>
__device__ void conv_pool_weight_of(
    const S* x, const S* dy, const unsigned char* indices, Wide<S>* weight_sums, Wide<S>* bias_sums, int count,
    const Geometry& g, int parts) {
  using A = Wide<S>;
  const int length = g.kernel_width * g.channels, chunks = (length + TAPS - 1) / TAPS;
  const unsigned of_weight = g.kernel_height * chunks * g.filters, total = of_weight + (bias_sums ? g.filters : 0);
  const long long values = static_cast<long long>(g.height) * g.width * g.channels;
  const int reciprocal = (1 << 16) / g.pool_width + 1;  // replaces divisions of indices, which are below 2^8
  for (int part = blockIdx.y; part < parts; part += gridDim.y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int filter = i % g.filters, chunk = i / g.filters, from = chunk % chunks * TAPS;
      const Taps taps{filter, chunk / chunks, from, min(TAPS, length - from)};
      const bool weighs = i < of_weight;
      A sums[TAPS];
#pragma unroll
      for (int k = 0; k < TAPS; ++k) sums[k] = 0;
      int n = part / g.pooled_rows, line = part % g.pooled_rows;
#pragma unroll 1
      while (n < count) {
        const long long first = (static_cast<long long>(n) * g.pooled_rows + line) * g.pooled_cols * g.filters + filter;
        const unsigned char* index = indices + first;
        const S* gradient = dy + first;
#pragma unroll 1
        for (int col = 0; col < g.pooled_cols; col += AHEAD) {
          int won[AHEAD];
          A gradients[AHEAD];
#pragma unroll
          for (int k = 0; k < AHEAD; ++k) {  // all loads before the first use
            const int at = min(col + k, g.pooled_cols - 1) * g.filters;
            won[k] = index[at];
            gradients[k] = wide(gradient[at]);
          }
#pragma unroll
          for (int k = 0; k < AHEAD; ++k)
            if (col + k >= g.pooled_cols) won[k] = NONE;
          if (weighs) {
            const int row = line * g.pool_down - g.pool_top, left = col * g.pool_across - g.pool_left;
            add_windows<WHOLE>(x + n * values, gradients, won, row, left, g, taps, reciprocal, sums);
          } else {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k)
              if (won[k] != NONE) sums[0] += gradients[k];
          }
        }
        n += parts / g.pooled_rows;  // the next line of this part
        line += parts % g.pooled_rows;
        if (line >= g.pooled_rows) {
          line -= g.pooled_rows;
          ++n;
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

template <class S>
__device__ void conv_pool_weight(
    const S* x, const S* dy, const unsigned char* indices, Wide<S>* weight_sums, Wide<S>* bias_sums, int count,
    const Geometry& g, int parts) {
  const bool padded = g.top > 0 || g.left > 0 || (g.rows - 1) * g.stride_down + g.kernel_height > g.height ||
                      (g.cols - 1) * g.stride_across + g.kernel_width > g.width;
  if (!padded && g.kernel_width * g.channels % TAPS == 0) {
    conv_pool_weight_of<true>(x, dy, indices, weight_sums, bias_sums, count, g, parts);
  } else {
    conv_pool_weight_of<false>(x, dy, indices, weight_sums, bias_sums, count, g, parts);
  }
}

#define INSTANCES(kind, S, A)                                                                                         \
  IMAGES_KERNEL(3) conv_pool_##kind(                                                                                  \
      const S* x, const S* weight, const S* bias, S* y, unsigned char* indices, int count, GEOMETRY_PARAMETERS,       \
      int relu) {                                                                                                     \
    conv_pool(x, weight, bias, y, indices, count, Geometry GEOMETRY, relu);                                           \
  }                                                                                                                   \
  IMAGES_KERNEL(2) conv_pool_weight_##kind(                                                                           \
      const S* x, const S* dy, const unsigned char* indices, A* weight_sums, A* bias_sums, int count,                 \
      GEOMETRY_PARAMETERS, int parts) {                                                                               \
    conv_pool_weight(x, dy, indices, weight_sums, bias_sums, count, Geometry GEOMETRY, parts);                        \
  }
IN_HALF(INSTANCES(half, __half, float))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16, float))
IN_FLOAT(INSTANCES(float, float, float))
IN_DOUBLE(INSTANCES(double, double, double))
