// Half precision as CUDA's header of this name has it: what is used of it, rounded to nearest, ties to even.

#pragma once

#include "cuda_host.h"

struct __half {
  std::uint16_t bits;
};
using half = __half;

namespace standin {
STANDIN_NAME(__half, "float16")
}

inline float __half2float(__half x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return static_cast<float>(y);
}
inline __half __float2half(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  __half made;
  std::memcpy(&made, &y, 2);
  return made;
}
inline __half __float2half_rn(float x) { return __float2half(x); }
inline __half __double2half(double x) {
  const _Float16 y = static_cast<_Float16>(x);
  __half made;
  std::memcpy(&made, &y, 2);
  return made;
}
