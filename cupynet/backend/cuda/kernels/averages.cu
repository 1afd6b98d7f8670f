// Weighted sums of flat vectors, to average replicas.

#include "common.cuh"

#define TERMS 16  // maximum number of vectors in one pass

template <class S>
struct Terms {
  const S* part[TERMS];
  double share[TERMS];
};

__device__ __forceinline__ double precise(__half x) { return __half2float(x); }
__device__ __forceinline__ double precise(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ double precise(float x) { return x; }
__device__ __forceinline__ double precise(double x) { return x; }

__device__ __forceinline__ void settle(__half& to, double x) { to = __double2half(x); }
__device__ __forceinline__ void settle(__nv_bfloat16& to, double x) { to = __double2bfloat16(x); }
__device__ __forceinline__ void settle(float& to, double x) { to = static_cast<float>(x); }
__device__ __forceinline__ void settle(double& to, double x) { to = x; }

// Computes V values of out, from index V·i on.
template <int V, class S>
__device__ __forceinline__ void weighted_sums(S* out, const Terms<S>& terms, int count, long long i) {
  double totals[V] = {};
#pragma unroll
  for (int k = 0; k < TERMS; ++k) {
    if (k < count) {
      const Pack<S, V> part = fetch<V>(Read<S>{terms.part[k]}, i);
#pragma unroll
      for (int v = 0; v < V; ++v)
        totals[v] = __dadd_rn(totals[v], __dmul_rn(precise(part.lane[v]), terms.share[k]));
    }
  }
  Pack<S, V> sums;
#pragma unroll
  for (int v = 0; v < V; ++v) settle(sums.lane[v], totals[v]);
  keep<V>(Write<S>{out}, i, sums);
}

// out = sum over k < count of share[k] · part[k], in this order. Products are rounded, as on the host. `out` may be a part.
template <class S>
__device__ void weighted_sum(S* out, const Terms<S>& terms, int count, long long n) {
  constexpr int V = 16 / sizeof(S);
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  bool whole = aligned<V>(out);
#pragma unroll
  for (int k = 0; k < TERMS; ++k) whole = whole && (k >= count || aligned<V>(terms.part[k]));
  const long long packs = whole ? n / V : 0;
#pragma unroll 1
  for (long long i = first; i < packs; i += step) weighted_sums<V>(out, terms, count, i);
#pragma unroll 1
  for (long long i = packs * V + first; i < n; i += step) weighted_sums<1>(out, terms, count, i);
}

#define INSTANCE(kind, S)                                                                                             \
  KERNEL weighted_sum_##kind(                                                                                         \
      S* out, const S* p0, const S* p1, const S* p2, const S* p3, const S* p4, const S* p5, const S* p6,              \
      const S* p7, const S* p8, const S* p9, const S* p10, const S* p11, const S* p12, const S* p13,                  \
      const S* p14, const S* p15, double s0, double s1, double s2, double s3, double s4, double s5, double s6,        \
      double s7, double s8, double s9, double s10, double s11, double s12, double s13, double s14, double s15,        \
      int count, long long n) {                                                                                       \
    const Terms<S> terms{{p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15},                      \
        {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15}};                                      \
    weighted_sum<S>(out, terms, count, n);                                                                            \
  }
IN_HALF(INSTANCE(half, __half))
IN_BFLOAT16(INSTANCE(bfloat16, __nv_bfloat16))
IN_FLOAT(INSTANCE(float, float))
IN_DOUBLE(INSTANCE(double, double))
