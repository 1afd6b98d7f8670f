// im2col and col2im, and depthwise convolutions, which need neither.
//
// Images are divided among the blocks along y, and the values of an image among the blocks along x, so that all integer
// divisions are 32-bit. The caller checks that an image and its windows have fewer than 2^31 values each.

#include "common.cuh"

struct Window {
  int height, width, channels;          // of an image
  int rows, cols;                       // number of windows, down and across
  int kernel_height, kernel_width;      // size of a window in pixels
  int stride_down, stride_across;       // pixels from one window to the next
  int top, left;                        // zeros before the image
  int gap_down, gap_across;             // dilation: distance between neighboring pixels of a window
};

#define WINDOW_PARAMETERS                                                                                             \
  int height, int width, int channels, int rows, int cols, int kernel_height, int kernel_width, int stride_down,      \
      int stride_across, int top, int left, int gap_down, int gap_across
#define WINDOW                                                                                                        \
  { height, width, channels, rows, cols, kernel_height, kernel_width, stride_down, stride_across, top, left, gap_down, gap_across }

constexpr int LINES = 5;    // rows of a window that are loaded together
constexpr int WINDOWS = 5;  // windows that contain a pixel and are loaded together

// (count, H, W, C) -> (count · rows · cols, K_h · K_w · C): K_h segments of K_w · C values, with zeros outside the image.
// T is one value, or several adjacent channels that are copied at once. A thread copies the values at one position
// in all segments of a window, LINES at a time.
template <class T>
__device__ void im2col_of(const T* x, T* columns, int count, const Window& w) {
  const unsigned segment = w.kernel_width * w.channels, total = w.rows * w.cols * segment;
  const int line = w.width * w.channels, step = w.gap_down * line;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const T* image = x + static_cast<long long>(n) * w.height * line;
    T* out = columns + static_cast<long long>(n) * total * w.kernel_height;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const unsigned place = i / segment, j = i - place * segment;
      const int row = place / w.cols, col = place % w.cols, top = row * w.stride_down - w.top;
      int at = (col * w.stride_across - w.left) * w.channels + static_cast<int>(j);
      if (w.gap_across > 1) at += static_cast<int>(j / w.channels) * (w.gap_across - 1) * w.channels;
      const bool inside = at >= 0 && at < line;
      const T* from = image + (top * line + at);
      T* to = out + (place * w.kernel_height * segment + j);
#pragma unroll 1
      for (int first = 0; first < w.kernel_height; first += LINES) {
        T values[LINES];
#pragma unroll
        for (int k = 0; k < LINES; ++k) {  // all loads before the first store
          const int y = top + (first + k) * w.gap_down;
          const bool copied = inside && first + k < w.kernel_height && y >= 0 && y < w.height;
          values[k] = copied ? from[(first + k) * step] : T{};
        }
#pragma unroll
        for (int k = 0; k < LINES; ++k)
          if (first + k < w.kernel_height) to[(first + k) * segment] = values[k];
      }
    }
  }
}

template <class S>
__device__ void im2col(const S* x, S* columns, int count, const Window& w) {
  const auto copy = [&](auto values) {
    using T = Pack<S, decltype(values)::NUMBER>;
    Window packs = w;
    packs.channels /= decltype(values)::NUMBER;
    im2col_of(reinterpret_cast<const T*>(x), reinterpret_cast<T*>(columns), count, packs);
  };
  in_packs<16 / sizeof(S)>(w.channels, copy, x, columns);
}

// The transpose of im2col, as a gather: a pixel is the sum of its values in all windows, in the order of its index in them.

// For stride 1 without dilation. Processes V channels and WINDOWS windows at a time.
template <int V, class S>
__device__ void col2im_dense(const S* columns, S* x, int count, const Window& w) {
  const int groups = w.channels / V, segment = w.kernel_width * w.channels, window = w.kernel_height * segment;
  const unsigned total = w.height * w.width * groups;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* rows = columns + static_cast<long long>(n) * w.rows * w.cols * window;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int pixel = i / groups, y = pixel / w.width + w.top, x_at = pixel % w.width + w.left;
      const int last_row = min(y, w.rows - 1), last_col = min(x_at, w.cols - 1);
      const int down = last_row - max(0, y - w.kernel_height + 1) + 1;
      const int across = last_col - max(0, x_at - w.kernel_width + 1) + 1;  // windows in a row that contain the pixel
      // steps to the pixel's value in the next window: to the left, or from the end of a row of windows to the row above
      const int left = w.channels - window, up = segment - w.cols * window - (across - 1) * left;
      const S* first = rows + (static_cast<long long>(last_row * w.cols + last_col) * window + (y - last_row) * segment +
                               (x_at - last_col) * w.channels + static_cast<int>(i % groups) * V);
      int at = 0, col = 0;
      Wide<S> sums[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] = 0;
#pragma unroll 1
      for (int rest = down * across; rest > 0; rest -= WINDOWS) {
        Pack<S, V> values[WINDOWS];
#pragma unroll
        for (int k = 0; k < WINDOWS; ++k) {  // all loads before the first use
          values[k] = fetch<V>(Read<S>{first + at}, 0);
          const bool turns = ++col == across;
          if (k + 1 < rest) at += turns ? up : left;
          if (turns) col = 0;
        }
#pragma unroll
        for (int k = 0; k < WINDOWS; ++k) {
#pragma unroll
          for (int v = 0; v < V; ++v)
            if (k < rest) sums[v] += wide(values[k].lane[v]);
        }
      }
      Pack<S, V> out;
#pragma unroll
      for (int v = 0; v < V; ++v) store(out.lane[v], sums[v]);
      keep<V>(Write<S>{x}, n * static_cast<long long>(total) + i, out);
    }
  }
}

template <class S>
__device__ void col2im(const S* columns, S* x, int count, const Window& w) {
  if (w.stride_down == 1 && w.stride_across == 1 && w.gap_down == 1 && w.gap_across == 1) {
    const auto gather = [&](auto values) { col2im_dense<decltype(values)::NUMBER>(columns, x, count, w); };
    in_packs<sizeof(S) < 8 ? 4 : 2>(w.channels, gather, columns, x);
    return;
  }
  const unsigned total = w.height * w.width * w.channels;
  const int segment = w.kernel_width * w.channels;
  const long long window = static_cast<long long>(w.kernel_height) * segment;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* rows = columns + static_cast<long long>(n) * w.rows * w.cols * window;
    S* image = x + static_cast<long long>(n) * total;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % w.channels, pixel = i / w.channels;
      const int y = pixel / w.width + w.top, x_at = pixel % w.width + w.left;  // in the padded image
      const int last_row = min(y / w.stride_down, w.rows - 1), last_col = min(x_at / w.stride_across, w.cols - 1);
      Wide<S> sum = 0;
      for (int row = last_row; row >= 0 && y - row * w.stride_down < (w.kernel_height - 1) * w.gap_down + 1; --row) {
        const int down = y - row * w.stride_down, ky = down / w.gap_down;
        if (ky * w.gap_down != down) continue;
        for (int col = last_col; col >= 0 && x_at - col * w.stride_across < (w.kernel_width - 1) * w.gap_across + 1; --col) {
          const int across = x_at - col * w.stride_across, kx = across / w.gap_across;
          if (kx * w.gap_across != across) continue;
          sum += wide(rows[(static_cast<long long>(row) * w.cols + col) * window + ky * segment + kx * w.channels + c]);
        }
      }
      store(image[i], sum);
    }
  }
}

// Depthwise: filter o uses only channel o / repeat. The weight is (K_h, K_w, O), with O = C · repeat.
//
// (count, H, W, C) -> (count, rows, cols, O).
template <class S>
__device__ void depthwise(const S* x, const S* weight, S* y, int count, const Window& w, int repeat) {
  const int filters = w.channels * repeat;
  const unsigned total = w.rows * w.cols * filters;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* image = x + static_cast<long long>(n) * w.height * w.width * w.channels;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int o = i % filters, place = i / filters, c = o / repeat;
      const int top = place / w.cols * w.stride_down - w.top, left = place % w.cols * w.stride_across - w.left;
      Wide<S> sum = 0;
      for (int ky = 0; ky < w.kernel_height; ++ky) {
        const int down = top + ky * w.gap_down;
        if (down < 0 || down >= w.height) continue;
        for (int kx = 0; kx < w.kernel_width; ++kx) {
          const int across = left + kx * w.gap_across;
          if (across < 0 || across >= w.width) continue;
          sum += wide(image[static_cast<long long>(down * w.width + across) * w.channels + c]) *
                 wide(weight[(ky * w.kernel_width + kx) * filters + o]);
        }
      }
      store(y[static_cast<long long>(n) * total + i], sum);
    }
  }
}

// dx, as a gather: each pixel sums the contributions of the windows that contain it.
template <class S>
__device__ void depthwise_input(const S* dy, const S* weight, S* dx, int count, const Window& w, int repeat) {
  const int filters = w.channels * repeat;
  const unsigned total = w.height * w.width * w.channels;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const S* gradient = dy + static_cast<long long>(n) * w.rows * w.cols * filters;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int c = i % w.channels, pixel = i / w.channels;
      Wide<S> sum = 0;
      for (int ky = 0; ky < w.kernel_height; ++ky) {
        const int down = pixel / w.width + w.top - ky * w.gap_down, row = down / w.stride_down;
        if (down < 0 || row * w.stride_down != down || row >= w.rows) continue;
        for (int kx = 0; kx < w.kernel_width; ++kx) {
          const int across = pixel % w.width + w.left - kx * w.gap_across, col = across / w.stride_across;
          if (across < 0 || col * w.stride_across != across || col >= w.cols) continue;
          const S* given = gradient + static_cast<long long>(row * w.cols + col) * filters + c * repeat;
          const S* factors = weight + (ky * w.kernel_width + kx) * filters + c * repeat;
          for (int o = 0; o < repeat; ++o) sum += wide(given[o]) * wide(factors[o]);
        }
      }
      store(dx[static_cast<long long>(n) * total + i], sum);
    }
  }
}

// sums (parts, K_h, K_w, O): part p is the weight gradient of rows p, p + parts, ... of windows.
template <class S, class A>
__device__ void depthwise_weight(
    const S* x, const S* dy, A* sums, int count, const Window& w, int repeat, int parts) {
  const int filters = w.channels * repeat;
  const unsigned total = w.kernel_height * w.kernel_width * filters;
  const long long lines = static_cast<long long>(count) * w.rows;
  for (int part = blockIdx.y; part < parts; part += gridDim.y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
      const int o = i % filters, place = i / filters, c = o / repeat;
      const int ky = place / w.kernel_width, kx = place % w.kernel_width;
      A sum = 0;
      for (long long line = part; line < lines; line += parts) {
        const long long n = line / w.rows;
        const int down = static_cast<int>(line % w.rows) * w.stride_down - w.top + ky * w.gap_down;
        if (down < 0 || down >= w.height) continue;
        const S* pixels = x + (n * w.height + down) * w.width * w.channels + c;
        const S* gradient = dy + line * w.cols * filters + o;
        for (int col = 0; col < w.cols; ++col) {
          const int across = col * w.stride_across - w.left + kx * w.gap_across;
          if (across < 0 || across >= w.width) continue;
          sum += wide(pixels[static_cast<long long>(across) * w.channels]) *
                 wide(gradient[static_cast<long long>(col) * filters]);
        }
      }
      sums[static_cast<long long>(part) * total + i] = sum;
    }
  }
}

#define INSTANCES(kind, S, A)                                                                                         \
  KERNEL im2col_##kind(                                                                                               \
      const S* x, S* columns, int count, WINDOW_PARAMETERS) {                                                         \
    im2col<S>(x, columns, count, WINDOW);                                                                             \
  }                                                                                                                   \
  KERNEL col2im_##kind(                                                                                               \
      const S* columns, S* x, int count, WINDOW_PARAMETERS) {                                                         \
    col2im<S>(columns, x, count, WINDOW);                                                                             \
  }                                                                                                                   \
  KERNEL depthwise_##kind(                                                                                            \
      const S* x, const S* weight, S* y, int count, WINDOW_PARAMETERS, int repeat) {                                  \
    depthwise<S>(x, weight, y, count, WINDOW, repeat);                                                                \
  }                                                                                                                   \
  KERNEL depthwise_input_##kind(                                                                                      \
      const S* dy, const S* weight, S* dx, int count, WINDOW_PARAMETERS, int repeat) {                                \
    depthwise_input<S>(dy, weight, dx, count, WINDOW, repeat);                                                        \
  }                                                                                                                   \
  KERNEL depthwise_weight_##kind(                                                                                     \
      const S* x, const S* dy, A* sums, int count, WINDOW_PARAMETERS, int repeat, int parts) {                        \
    depthwise_weight<S, A>(x, dy, sums, count, WINDOW, repeat, parts);                                                \
  }
IN_HALF(INSTANCES(half, __half, float))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16, float))
IN_FLOAT(INSTANCES(float, float, float))
IN_DOUBLE(INSTANCES(double, double, double))
