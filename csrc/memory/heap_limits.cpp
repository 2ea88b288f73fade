// Bounds of what the C library keeps of freed memory, for a server: gpubridge/_native.pyi has the
// function.

#include "python_object.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gpubridge {
namespace {

#ifdef __GLIBC__
// The event loop's thread has one; the few others, which mostly hold the interpreter's lock, share
// the second. By default there are eight for each processor, each with free memory of its own.
constexpr int kArenas = 2;
// From this size on an allocation is a mapping of its own, and goes back to the system when freed.
// glibc would raise the size, and the one below, to those of what was freed: up to 32 and 64 MiB.
constexpr int kMappedBytes = 1 << 18;
// Each arena keeps at most this much free memory at its end.
constexpr int kKeptBytes = 1 << 20;
#endif

void limit_heap() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, kArenas);
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
#endif
}

}  // namespace

void bind_heap_limits(nb::module_& module) { module.def("limit_heap", limit_heap); }

}  // namespace gpubridge
