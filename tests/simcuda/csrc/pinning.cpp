// Memory of the host that copies may read and write while they run.
#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "contexts.h"
#include "driver_lock.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

constexpr std::uintptr_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20U;

struct Pinned {
  std::size_t nbytes;
  bool ours;
};

// Never destroyed: streams may still run when the process ends.
std::mutex& g_pinning_mutex = *new std::mutex;
auto& g_pinned = *new std::map<std::uintptr_t, Pinned>;

struct Pages {
  // Whether all of them are mapped, so that they can be pinned.
  bool mapped;
  std::size_t touched;
  std::size_t untouched;
};

Pages look_at(std::uintptr_t at, std::size_t nbytes) {
  const std::uintptr_t first = at / kPage * kPage;
  std::vector<unsigned char> pages((at + nbytes - first + kPage - 1) / kPage);
  if (mincore(reinterpret_cast<void*>(first), at + nbytes - first, pages.data()) != 0)
    return {false, 0, 0};
  std::size_t touched = 0;
  for (const unsigned char page : pages) touched += page & 1U;
  return {true, touched, pages.size() - touched};
}

std::uint64_t cost_us(const Pages& pages) {
  const auto touched = static_cast<std::uint64_t>(settings().pin_us_per_mib) * pages.touched;
  const auto rest =
      static_cast<std::uint64_t>(settings().pin_us_per_mib_untouched) * pages.untouched;
  return (touched + rest) * kPage / kMiB + 1;
}

// Whether one registration has all of the bytes; the caller holds the lock.
bool is_covered(std::uintptr_t at, std::size_t nbytes) {
  auto after = g_pinned.upper_bound(at);
  if (after == g_pinned.begin()) return false;
  --after;
  return at + nbytes <= after->first + after->second.nbytes;
}

}  // namespace

bool is_pinned(const void* pointer, std::size_t nbytes) {
  if (!initialized()) return false;
  const std::lock_guard lock(g_pinning_mutex);
  return is_covered(reinterpret_cast<std::uintptr_t>(pointer), nbytes);
}

// Looks once: memory may be pinned or unpinned meanwhile.
bool is_partly_pinned(const void* pointer, std::size_t nbytes) {
  if (!initialized()) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  const std::lock_guard lock(g_pinning_mutex);
  const auto after = g_pinned.lower_bound(at + nbytes);
  if (after == g_pinned.begin() || is_covered(at, nbytes)) return false;
  const auto& [start, pinned] = *std::prev(after);
  return start + pinned.nbytes > at;
}

SIMCUDA_API cuMemHostRegister_v2(void* pointer, std::size_t nbytes, unsigned flags) {
  Call call("cuMemHostRegister");
  if (const CUresult fault = call.with(nbytes).with(flags).begin()) return call.end(fault);
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  const Pages pages = look_at(at, nbytes);
  if (nbytes == 0 || !pages.mapped) return call.end(kInvalidValue);
  hold_driver(cost_us(pages));
  const std::lock_guard lock(g_pinning_mutex);
  for (const auto& [start, pinned] : g_pinned)
    if (start < at + nbytes && at < start + pinned.nbytes)
      return call.end(kHostMemoryAlreadyRegistered);
  g_pinned[at] = {nbytes, false};
  return call.end(kSuccess);
}

SIMCUDA_API cuMemHostUnregister(void* pointer) {
  Call call("cuMemHostUnregister");
  if (const CUresult fault = call.begin()) return call.end(fault);
  synchronize(current_context());
  const std::lock_guard lock(g_pinning_mutex);
  const auto found = g_pinned.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == g_pinned.end() || found->second.ours) {
    violation("cuMemHostUnregister of what is not registered");
    return call.end(kHostMemoryNotRegistered);
  }
  g_pinned.erase(found);
  return call.end(kSuccess);
}

SIMCUDA_API cuMemHostAlloc(void** pointer, std::size_t nbytes, unsigned flags) {
  Call call("cuMemHostAlloc");
  if (const CUresult fault = call.with(nbytes).with(flags).begin()) return call.end(fault);
  void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return call.end(kOutOfMemory);
  hold_driver(cost_us({true, 0, nbytes / kPage}));
  const std::lock_guard lock(g_pinning_mutex);
  g_pinned[reinterpret_cast<std::uintptr_t>(mapped)] = {nbytes, true};
  *pointer = mapped;
  return call.end(kSuccess);
}

SIMCUDA_API cuMemFreeHost(void* pointer) {
  Call call("cuMemFreeHost");
  if (const CUresult fault = call.begin()) return call.end(fault);
  synchronize(current_context());
  const std::lock_guard lock(g_pinning_mutex);
  const auto found = g_pinned.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == g_pinned.end() || !found->second.ours) {
    violation("cuMemFreeHost of what is not allocated");
    return call.end(kInvalidValue);
  }
  munmap(pointer, found->second.nbytes);
  g_pinned.erase(found);
  return call.end(kSuccess);
}
