// CUDA C++ as far as the image kernel uses it, on a processor: a block's threads are fibers of one
// thread, which change at barriers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct Dim {
  unsigned x, y, z;
};

extern thread_local Dim threadIdx;
extern thread_local Dim blockIdx;

// Returns when all threads of the block have called it.
void __syncthreads();

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static thread_local

template <typename T>
inline T __ldg(const T* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
}

inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
  return sum;
}

inline int dot_signed(unsigned pixels, unsigned weights, int sum) {
  for (int i = 0; i < 4; ++i)
    sum += static_cast<int>(pixels >> (8 * i) & 255) *
           static_cast<std::int8_t>(weights >> (8 * i) & 255);
  return sum;
}
