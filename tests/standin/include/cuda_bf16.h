// bfloat16 as CUDA's header of this name has it: what is used of it, rounded to nearest, ties to even.

#pragma once

#include "cuda_host.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};

namespace standin {
STANDIN_NAME(__nv_bfloat16, "bfloat16")
}

inline float __bfloat162float(__nv_bfloat16 x) {
  const std::uint32_t wide = static_cast<std::uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}
inline __nv_bfloat16 __float2bfloat16(float x) {
  std::uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (x != x) return {static_cast<std::uint16_t>((wide >> 16) | 0x40)};
  wide += 0x7fff + ((wide >> 16) & 1);
  return {static_cast<std::uint16_t>(wide >> 16)};
}
inline __nv_bfloat16 __double2bfloat16(double x) {  // rounded once: what is cut off decides ties of what is kept
  float near = static_cast<float>(x);
  std::uint32_t wide;
  std::memcpy(&wide, &near, 4);
  if ((wide & 0xffff) == 0x8000 && static_cast<double>(near) != x) {
    near = std::nextafter(near, x > near ? INFINITY : -INFINITY);
  }
  return __float2bfloat16(near);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
