// Dropout with random numbers from Philox 4x32-10, bit-identical to backend/philox.py.

#include "common.cuh"

struct Four {
  unsigned lane[4];
};

// Returns four random numbers for four counters and a key.
__device__ __forceinline__ Four philox(Four counters, unsigned first, unsigned second) {
  unsigned a = counters.lane[0], b = counters.lane[1], c = counters.lane[2], d = counters.lane[3];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long low = 0xD2511F53ull * a, high = 0xCD9E8D57ull * c;
    a = static_cast<unsigned>(high >> 32) ^ b ^ first;
    b = static_cast<unsigned>(high);
    c = static_cast<unsigned>(low >> 32) ^ d ^ second;
    d = static_cast<unsigned>(low);
    first += 0x9E3779B9u;
    second += 0xBB67AE85u;
  }
  return Four{{a, b, c, d}};
}

// out = x · factor where the random number is at least `below`, else 0. x, out: (count, size); x may be out. samples:
// (count,); epoch: (1,). Each thread computes four values of a sample, a quarter of the sample apart. Samples are
// divided among the blocks along y.
template <class S>
__device__ void dropout(
    const S* x, S* out, const long long* samples, const long long* epoch, unsigned first, unsigned second,
    unsigned below, Wide<S> factor, int count, int size) {
  const unsigned when = static_cast<unsigned>(*epoch);
  const unsigned quarter = (static_cast<unsigned>(size) + 3) / 4, step = gridDim.x * blockDim.x;
  for (int n = blockIdx.y; n < count; n += gridDim.y) {
    const unsigned long long sample = samples[n];
    const S* source = x + static_cast<long long>(n) * size;
    S* target = out + static_cast<long long>(n) * size;
    for (unsigned q = blockIdx.x * blockDim.x + threadIdx.x; q < quarter; q += step) {
      const Four counters{{q, static_cast<unsigned>(sample), static_cast<unsigned>(sample >> 32), when}};
      const Four drawn = philox(counters, first, second);
#pragma unroll
      for (unsigned lane = 0; lane < 4; ++lane) {
        const unsigned at = lane * quarter + q;
        if (at < static_cast<unsigned>(size)) {
          store(target[at], drawn.lane[lane] >= below ? wide(source[at]) * factor : Wide<S>(0));
        }
      }
    }
  }
}

#define INSTANCES(kind, S)                                                                                            \
  KERNEL dropout_##kind(                                                                                              \
      const S* x, S* out, const long long* samples, const long long* epoch, unsigned first, unsigned second,          \
      unsigned below, Wide<S> factor, int count, int size) {                                                          \
    dropout<S>(x, out, samples, epoch, first, second, below, factor, count, size);                                    \
  }
IN_HALF(INSTANCES(half, __half))
IN_BFLOAT16(INSTANCES(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCES(float, float))
IN_DOUBLE(INSTANCES(double, double))
