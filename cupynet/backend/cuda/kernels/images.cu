// Scaled batches of images.

#include "common.cuh"

// batch[n] = images[samples[n]] · scale + shift, or images[n] · scale + shift without samples. images (., size) uint8;
// batch (count, size); scale and shift (channels), repeated for each pixel. Images are divided among the blocks along y.
// Sample indices are not checked.
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

// Loads the next batch of an epoch. order: the number of samples taken in this epoch, followed by its sample indices.
// Either classes (.) or targets (., columns) are the epoch's labels in the same order; the other is null. batch_samples
// may be null. `judge` increases order[0] later, after all blocks have read it.
template <class S>
__device__ void next_batch(
    const unsigned char* images, const long long* order, const long long* classes, const float* targets,
    const Wide<S>* scale, const Wide<S>* shift, S* batch, long long* batch_classes, float* batch_targets,
    long long* batch_samples, int count, int size, int channels, int columns) {
  const long long taken = order[0];
  const long long* samples = order + 1 + taken;
  load_images<S>(images, samples, scale, shift, batch, count, size, channels);
  if (blockIdx.x) return;
  for (long long n = blockIdx.y; n < count; n += gridDim.y) {
    if (classes && threadIdx.x == 0) batch_classes[n] = classes[taken + n];
    if (batch_samples && threadIdx.x == 0) batch_samples[n] = samples[n];
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
      batch_targets[n * columns + i] = targets[(taken + n) * columns + i];
  }
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL load_images_##kind(                                                                                          \
      const unsigned char* images, const long long* samples, const Wide<S>* scale, const Wide<S>* shift, S* batch,    \
      int count, int size, int channels) {                                                                            \
    load_images<S>(images, samples, scale, shift, batch, count, size, channels);                                      \
  }                                                                                                                   \
  KERNEL next_batch_##kind(                                                                                           \
      const unsigned char* images, const long long* order, const long long* classes, const float* targets,            \
      const Wide<S>* scale, const Wide<S>* shift, S* batch, long long* batch_classes, float* batch_targets,           \
      long long* batch_samples, int count, int size, int channels, int columns) {                                     \
    next_batch<S>(                                                                                                    \
        images, order, classes, targets, scale, shift, batch, batch_classes, batch_targets, batch_samples, count,     \
        size, channels, columns);                                                                                     \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))
