// Scaled batches of images.

#include "common.cuh"

// batch[n] = images[samples[n]] · scale + shift, or images[n] · scale + shift without samples. images (., size) uint8;
// batch (count, size); scale and shift (channels), repeated for each pixel. The blocks along y share the images. Samples
// are not checked.
template <class S>
__device__ void load_images(
    const unsigned char* images, const long long* samples, const Wide<S>* scale, const Wide<S>* shift, S* batch,
    int count, int size, int channels) {
  const Wide<S> factor = scale[0], added = shift[0];
  const auto scaled = [=](const unsigned char& pixel, S& to) { store(to, pixel * factor + added); };
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const unsigned char* source = images + (samples ? samples[n] : n) * size;
    S* target = batch + static_cast<long long>(n) * size;
    if (channels == 1) {
      each<16 / sizeof(S)>(size, scaled, Read<unsigned char>{source}, Write<S>{target});
    } else {
      for (long long i = first; i < size; i += step)
        store(target[i], source[i] * scale[i % channels] + shift[i % channels]);
    }
  }
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL load_images_##kind(                                                                                          \
      const unsigned char* images, const long long* samples, const Wide<S>* scale, const Wide<S>* shift, S* batch,    \
      int count, int size, int channels) {                                                                            \
    load_images<S>(images, samples, scale, shift, batch, count, size, channels);                                      \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))
