// CUDA's words for a C++ compiler: what a .cu file of this project uses of them, to run its kernels on the CPU.
//
// A kernel runs one block after the other. Where its file has barriers, the threads of a block are fibers (ucontext
// starts them, setjmp and longjmp switch: swapcontext asks the kernel of the host each time for the mask of signals)
// that take turns: each runs to its next __syncthreads(), then the next one. A barrier that some threads have left
// behind for good is an error here, though hardware forgives it. Not seen this way: races between barriers, coalescing,
// the rounding of device intrinsics.

#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef STANDIN_NAMES_ONLY  // else they are to be found in the preprocessed text
#define __global__
#define __launch_bounds__(...)
#endif
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static thread_local  // one block at a time in each thread of the host; its fibers share it

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace standin {

struct Place {
  dim3 thread, block, block_size, grid_size;
};
inline thread_local Place place;

// Fibers ---------------------------------------------------------------------------------------------------------------

constexpr std::size_t STACK = 64 << 10;

struct Fiber {
  jmp_buf here;  // where it goes on
  ucontext_t context;  // where it begins
  std::unique_ptr<char[]> stack;
  dim3 thread;
  bool begun = false, done = false;
  void* sanitizer = nullptr;
};

struct Block {
  jmp_buf back;
  void* back_sanitizer = nullptr;
  const void* back_stack = nullptr;
  std::size_t back_size = 0;
  Fiber* running = nullptr;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};
inline thread_local Block* block = nullptr;  // none where threads run one after the other
inline thread_local std::vector<std::unique_ptr<Fiber>> fibers;  // kept: each runs one thread after the other

inline void into_fiber(Fiber& fiber) {
  block->running = &fiber;
  place.thread = fiber.thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&block->back_sanitizer, fiber.stack.get(), STACK);
#endif
  if (!_setjmp(block->back)) {
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block->back_sanitizer, nullptr, nullptr);
#endif
}

inline void out_of_fiber() {
  Fiber& fiber = *block->running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber.sanitizer, block->back_stack, block->back_size);
#endif
  if (!_setjmp(fiber.here)) _longjmp(block->back, 1);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &block->back_stack, &block->back_size);
#endif
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block->back_stack, &block->back_size);
#endif
  for (;;) {  // a thread of each block that it is needed for
    block->body(block->argument);
    block->running->done = true;
    out_of_fiber();
  }
}

inline thread_local bool barrier_without_fibers = false;

inline void barrier() {
  if (!block) {
    barrier_without_fibers = true;
    return;
  }
  out_of_fiber();
}

// Launching ------------------------------------------------------------------------------------------------------------

enum Status { FINE = 0, LEFT_AT_BARRIER = 1, BARRIER_UNSEEN = 2 };

template <class Body>
Status run_block(dim3 size, bool with_barriers, Body&& body) {
  const unsigned threads = size.x * size.y * size.z;
  if (!with_barriers) {
    for (unsigned t = 0; t < threads; ++t) {
      place.thread = {t % size.x, t / size.x % size.y, t / size.x / size.y};
      body();
      if (barrier_without_fibers) return BARRIER_UNSEEN;
    }
    return FINE;
  }
  Block here;
  block = &here;
  using Plain = std::remove_reference_t<Body>;
  here.body = [](void* given) { (*static_cast<Plain*>(given))(); };
  here.argument = const_cast<void*>(static_cast<const void*>(&body));
  while (fibers.size() < threads) {
    Fiber& fiber = *fibers.emplace_back(std::make_unique<Fiber>());
    fiber.stack = std::make_unique_for_overwrite<char[]>(STACK);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  for (unsigned t = 0; t < threads; ++t) {
    fibers[t]->thread = {t % size.x, t / size.x % size.y, t / size.x / size.y};
    fibers[t]->done = false;
  }
  for (unsigned left = threads; left;) {
    unsigned ended = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t]->done) continue;
      into_fiber(*fibers[t]);
      ended += fibers[t]->done;
    }
    if (ended && ended < left) {
      block = nullptr;
      fibers.clear();  // those that wait will never go on
      return LEFT_AT_BARRIER;
    }
    left -= ended;
  }
  block = nullptr;
  return FINE;
}

template <class... A, std::size_t... I>
Status run(void (*kernel)(A...), dim3 grid, dim3 size, bool with_barriers, void** given, std::index_sequence<I...>) {
  place.grid_size = grid;
  place.block_size = size;
  barrier_without_fibers = false;
  auto body = [&] { kernel(*static_cast<std::remove_cv_t<A>*>(given[I])...); };
  for (unsigned b = 0; b < grid.x * grid.y * grid.z; ++b) {
    place.block = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    if (Status status = run_block(size, with_barriers, body)) return status;
  }
  return FINE;
}

template <class... A>
Status run(void (*kernel)(A...), dim3 grid, dim3 size, bool with_barriers, void** given) {
  return run(kernel, grid, size, with_barriers, given, std::index_sequence_for<A...>{});
}

// What a kernel takes, one word for each parameter: `float`, `in:half` (const half*), `out:half` (half*).
template <class T>
struct Name;
template <class T>
struct Name<const T*> {
  static std::string text() { return "in:" + Name<T>::text(); }
};
template <class T>
struct Name<T*> {
  static std::string text() { return "out:" + Name<T>::text(); }
};
#define STANDIN_NAME(type, word) \
  template <>                    \
  struct Name<type> {            \
    static std::string text() { return word; } \
  };
STANDIN_NAME(float, "float32")
STANDIN_NAME(double, "float64")
STANDIN_NAME(int, "int32")
STANDIN_NAME(unsigned, "uint32")
STANDIN_NAME(long, "int64")
STANDIN_NAME(long long, "int64")
STANDIN_NAME(unsigned long, "uint64")
STANDIN_NAME(unsigned long long, "uint64")
STANDIN_NAME(short, "int16")
STANDIN_NAME(unsigned short, "uint16")
STANDIN_NAME(signed char, "int8")
STANDIN_NAME(unsigned char, "uint8")
STANDIN_NAME(bool, "bool")

template <class... A>
std::string signature(void (*)(A...)) {
  std::string all;
  ((all += (all.empty() ? "" : " ") + Name<std::remove_cv_t<A>>::text()), ...);
  return all;
}

}  // namespace standin

#define threadIdx (standin::place.thread)
#define blockIdx (standin::place.block)
#define blockDim (standin::place.block_size)
#define gridDim (standin::place.grid_size)
#define __syncthreads() standin::barrier()

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
// never contracted with another operation
__attribute__((noinline)) inline double __dadd_rn(double x, double y) { return x + y; }
__attribute__((noinline)) inline double __dmul_rn(double x, double y) { return x * y; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int_as_float(int x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
using std::max;
using std::min;
using std::isnan;

// At the end of a library: its kernels' names, and what lets a kernel be found by its name.
#define STANDIN_NAMES(names) \
  extern "C" const char* exported_names() { return names; }
#define STANDIN_EXPORT(name)                                                                                    \
  extern "C" const char* signature_of_##name() {                                                                \
    static const std::string text = standin::signature(name);                                                   \
    return text.c_str();                                                                                        \
  }                                                                                                             \
  extern "C" int launch_##name(const unsigned* grid, const unsigned* size, int with_barriers, void** given) {   \
    return standin::run(name, {grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]}, with_barriers, given);  \
  }
