// Pixels as fractions.

#include "common.cuh"

// batch[n] = images[samples[n]] / 255, or images[n] / 255 without samples; images (., size) of uint8, batch
// (count, size). The blocks along y share the images. Samples are not checked here.
template <class S>
__device__ void load_images(
    const unsigned char* images, const long long* samples, S* batch, int count, int size) {
  const auto scale = [](const unsigned char& pixel, S& to) { store(to, pixel * static_cast<Wide<S>>(1.0 / 255)); };
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const long long sample = samples ? samples[n] : n;
    each<16 / sizeof(S)>(
        size, scale, Read<unsigned char>{images + sample * size}, Write<S>{batch + static_cast<long long>(n) * size});
  }
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL load_images_##kind(                                                                                          \
      const unsigned char* images, const long long* samples, S* batch, int count, int size) {                         \
    load_images<S>(images, samples, batch, count, size);                                                              \
  }
INSTANCES(half, __half)
INSTANCES(bfloat16, __nv_bfloat16)
INSTANCES(float, float)
INSTANCES(double, double)
