// Max pooling, optionally with the bias and ReLU of a preceding convolution, and average pooling.
//
// Images are divided among the blocks along y, and the values of an image among the blocks along x, so that all integer
// divisions are 32-bit.

#include "common.cuh"

// Window `at` along an axis: its start in the image, and the range [first, end) of its pixels that are inside the image
// (at least one).
struct Seen {
  int start, first, end;
  __device__ __forceinline__ Seen(int at, int size, int kernel, int stride, int zeros)
      : start(at * stride - zeros), first(max(0, -start)), end(min(kernel, size - start)) {}
};

constexpr int PIXELS = 4;  // pixels of a window that are loaded together

// y = maximum of each window of x + bias, then ReLU if `relu`; indices = index ky · K_w + kx of the maximum in the window.
// The first among equals wins, or the first NaN. If ReLU returns 0 (or gets NaN), the index is -1, or 255 in 8 bits, so
// that the window has no gradient. (count, H, W, C) -> 2 x (count, rows, cols, C). V channels at a time.
//
// x + bias is rounded to S before comparisons, so that ties are the same as in separate operations. bias (C,) may be null.
template <int V, class S, class W>
__device__ void max_pool_of(
    const S* x, const S* bias, S* y, W* indices, int count, int height, int width, int channels, int rows, int cols,
    int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left, int relu) {
  const int line = width * channels, groups = channels / V;
  const unsigned total = rows * cols * groups;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* image = x + static_cast<long long>(n) * height * line;
    const long long out = static_cast<long long>(n) * total;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % groups * V, place = i / groups, row = place / cols, col = place % cols;
      const Seen down(row, height, kernel_height, stride_down, top), across(col, width, kernel_width, stride_across, left);
      const S* pixels = image + ((down.start + down.first) * line + (across.start + across.first) * channels + c);
      const int in_row = across.end - across.first;
      const Pack<S, V> offset = bias ? fetch<V>(Read<S>{bias + c}, 0) : Pack<S, V>{};
      Wide<S> best[V] = {};
      int index[V] = {}, at = 0, here = down.first * kernel_width + across.first, passed = 0;
      bool first = true;
#pragma unroll 1
      for (int rest = (down.end - down.first) * in_row; rest > 0; rest -= PIXELS) {
        Pack<S, V> packs[PIXELS];
        int places[PIXELS];
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {  // all loads before the first use; the last pixel again after the end
          packs[k] = fetch<V>(Read<S>{pixels + at}, 0);
          places[k] = here;
          const bool turns = ++passed == in_row;
          if (k + 1 < rest) at += turns ? line - (in_row - 1) * channels : channels;
          if (k + 1 < rest) here += turns ? kernel_width - (in_row - 1) : 1;
          if (turns) passed = 0;
        }
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            Wide<S> candidate = wide(packs[k].lane[v]);
            if (bias) candidate = rounded<S>(candidate + wide(offset.lane[v]));
            if ((k == 0 && first) || (!(candidate <= best[v]) && best[v] == best[v])) {
              best[v] = candidate;
              index[v] = places[k];
            }
          }
        }
        first = false;
      }
      Pack<S, V> maxima;
      Pack<W, V> won;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const bool closed = relu && !(best[v] > 0);
        store(maxima.lane[v], closed ? positive(best[v]) : best[v]);
        won.lane[v] = static_cast<W>(closed ? -1 : index[v]);
      }
      keep<V>(Write<S>{y}, out + i, maxima);
      keep<V>(Write<W>{indices}, out + i, won);
    }
  }
}

template <class S, class W>
__device__ void max_pool(
    const S* x, const S* bias, S* y, W* indices, int count, int height, int width, int channels, int rows, int cols,
    int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left, int relu) {
  const auto find = [&](auto values) {
    max_pool_of<decltype(values)::NUMBER>(
        x, bias, y, indices, count, height, width, channels, rows, cols, kernel_height, kernel_width, stride_down,
        stride_across, top, left, relu);
  };
  in_packs<sizeof(S) < 8 ? 4 : 2>(channels, find, x, bias, y, indices);
}

// dx = sum of the gradients of all windows whose maximum is the pixel, in the order of its index in these windows.
// (count, rows, cols, C) -> (count, H, W, C). V channels at a time.
template <int V, class S, class W>
__device__ void max_pool_backward_of(
    const S* dy, const W* indices, S* dx, int count, int height, int width, int channels, int rows, int cols,
    int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left) {
  const int groups = channels / V;
  const unsigned total = height * width * groups;
  const long long windows = static_cast<long long>(rows) * cols * channels;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* gradient = dy + n * windows;
    const W* won = indices + n * windows;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % groups * V, pixel = i / groups;
      const int y = pixel / width + top, x = pixel % width + left;  // in the padded image
      const int last_row = min(y / stride_down, rows - 1), last_col = min(x / stride_across, cols - 1);
      Wide<S> sums[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = 0;
#pragma unroll 1
      for (int row = last_row; row >= 0 && y - row * stride_down < kernel_height; --row) {
#pragma unroll 1
        for (int col = last_col; col >= 0 && x - col * stride_across < kernel_width; --col) {
          const int place = (y - row * stride_down) * kernel_width + x - col * stride_across;
          const int at = (row * cols + col) * channels + c;
          const Pack<W, V> index = fetch<V>(Read<W>{won + at}, 0);
          const Pack<S, V> value = fetch<V>(Read<S>{gradient + at}, 0);
#pragma unroll
          for (int v = 0; v < V; ++v)
            if (index.lane[v] == static_cast<W>(place)) sums[v] += wide(value.lane[v]);
        }
      }
      Pack<S, V> out;
#pragma unroll
      for (int v = 0; v < V; ++v) store(out.lane[v], sums[v]);
      keep<V>(Write<S>{dx}, n * static_cast<long long>(total) + i, out);
    }
  }
}

template <class S, class W>
__device__ void max_pool_backward(
    const S* dy, const W* indices, S* dx, int count, int height, int width, int channels, int rows, int cols,
    int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left) {
  const auto gather = [&](auto values) {
    max_pool_backward_of<decltype(values)::NUMBER>(
        dy, indices, dx, count, height, width, channels, rows, cols, kernel_height, kernel_width, stride_down,
        stride_across, top, left);
  };
  in_packs<sizeof(S) < 8 ? 4 : 2>(channels, gather, dy, indices, dx);
}

// y = mean of each window, excluding padding. (count, H, W, C) -> (count, rows, cols, C).
template <class S>
__device__ void avg_pool(
    const S* x, S* y, int count, int height, int width, int channels, int rows, int cols, int kernel_height,
    int kernel_width, int stride_down, int stride_across, int top, int left) {
  const unsigned total = rows * cols * channels;
  const int line = width * channels;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* image = x + static_cast<long long>(n) * height * line;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % channels, place = i / channels, row = place / cols, col = place % cols;
      const Seen down(row, height, kernel_height, stride_down, top), across(col, width, kernel_width, stride_across, left);
      const S* corner = image + static_cast<long long>(down.start) * line + across.start * channels + c;
      Wide<S> sum = 0;
      for (int ky = down.first; ky < down.end; ++ky) {
        for (int kx = across.first; kx < across.end; ++kx) {
          sum += wide(corner[static_cast<long long>(ky) * line + kx * channels]);
        }
      }
      store(y[static_cast<long long>(n) * total + i], sum / ((down.end - down.first) * (across.end - across.first)));
    }
  }
}

// dx = each pixel's share of the gradients of all windows that contain it. (count, rows, cols, C) -> (count, H, W, C).
template <class S>
__device__ void avg_pool_backward(
    const S* dy, S* dx, int count, int height, int width, int channels, int rows, int cols, int kernel_height,
    int kernel_width, int stride_down, int stride_across, int top, int left) {
  const unsigned total = height * width * channels;
  const long long windows = static_cast<long long>(rows) * cols * channels;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* gradient = dy + n * windows;
    S* image = dx + static_cast<long long>(n) * total;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % channels, pixel = i / channels;
      const int y = pixel / width + top, x = pixel % width + left;  // in the padded image
      const int last_row = min(y / stride_down, rows - 1), last_col = min(x / stride_across, cols - 1);
      Wide<S> sum = 0;
      for (int row = last_row; row >= 0 && y - row * stride_down < kernel_height; --row) {
        const Seen down(row, height, kernel_height, stride_down, top);
        for (int col = last_col; col >= 0 && x - col * stride_across < kernel_width; --col) {
          const Seen across(col, width, kernel_width, stride_across, left);
          const int pixels = (down.end - down.first) * (across.end - across.first);
          sum += wide(gradient[(static_cast<long long>(row) * cols + col) * channels + c]) / pixels;
        }
      }
      store(image[i], sum);
    }
  }
}

#define INSTANCE(kind, S, numbers, W)                                                                                 \
  KERNEL max_pool_##kind##_##numbers(                                                                                 \
      const S* x, const S* bias, S* y, W* indices, int count, int height, int width, int channels, int rows,          \
      int cols, int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left,           \
      int relu) {                                                                                                     \
    max_pool<S, W>(                                                                                                   \
        x, bias, y, indices, count, height, width, channels, rows, cols, kernel_height, kernel_width, stride_down,    \
        stride_across, top, left, relu);                                                                              \
  }                                                                                                                   \
  KERNEL max_pool_backward_##kind##_##numbers(                                                                        \
      const S* dy, const W* indices, S* dx, int count, int height, int width, int channels, int rows, int cols,       \
      int kernel_height, int kernel_width, int stride_down, int stride_across, int top, int left) {                   \
    max_pool_backward<S, W>(                                                                                          \
        dy, indices, dx, count, height, width, channels, rows, cols, kernel_height, kernel_width, stride_down,        \
        stride_across, top, left);                                                                                    \
  }
#define AVERAGES(name, kind, S)                                                                                       \
  KERNEL name##_##kind(                                                                                               \
      const S* from, S* to, int count, int height, int width, int channels, int rows, int cols, int kernel_height,    \
      int kernel_width, int stride_down, int stride_across, int top, int left) {                                      \
    name<S>(                                                                                                          \
        from, to, count, height, width, channels, rows, cols, kernel_height, kernel_width, stride_down,               \
        stride_across, top, left);                                                                                    \
  }
#define INSTANCES(kind, S)                                                                                            \
  INSTANCE(kind, S, uint8, unsigned char)                                                                             \
  INSTANCE(kind, S, int32, int)                                                                                       \
  AVERAGES(avg_pool, kind, S)                                                                                         \
  AVERAGES(avg_pool_backward, kind, S)
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))
