// Device memory that a framework cuts its tensors from, so that they can be handed to other models
// as they are. The framework calls `gpubridge_arena_malloc` and `gpubridge_arena_free`, which it
// finds by name in this library.
#include <sys/types.h>

#include <iterator>
#include <mutex>

#include "python_object.h"

namespace gpubridge {
namespace {

// Alignment of the driver's own allocations.
constexpr std::size_t kAlignment = 512;

// Pieces of one block of addresses, by their own; nothing behind them is looked at.
class ResultArena {
 public:
  void set(std::uintptr_t pointer, std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.clear();
    used_.clear();
    in_use_ = refused_ = 0;
    const std::size_t odd = (kAlignment - pointer % kAlignment) % kAlignment;
    if (nbytes > odd) free_.emplace(pointer + odd, nbytes - odd);
  }

  std::uintptr_t take(std::size_t nbytes) {
    const std::size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
      if (piece->second < size) continue;
      const auto [address, whole] = *piece;
      free_.erase(piece);
      if (whole > size) free_.emplace(address + size, whole - size);
      used_.emplace(address, size);
      in_use_ += size;
      return address;
    }
    refused_ = nbytes;
    return 0;
  }

  void give_back(std::uintptr_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto used = used_.find(address);
    if (used == used_.end()) return;
    std::size_t size = used->second;
    used_.erase(used);
    in_use_ -= size;
    auto next = free_.lower_bound(address);
    if (next != free_.end() && next->first == address + size) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == address) {
        before->second += size;
        return;
      }
    }
    free_.emplace(address, size);
  }

  std::pair<std::size_t, std::size_t> state() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {in_use_, std::exchange(refused_, 0)};
  }

 private:
  // Never held together with the GIL's being waited for: frameworks hold locks of their own while
  // they call, which threads that have the GIL wait for.
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> free_;
  std::map<std::uintptr_t, std::size_t> used_;
  std::size_t in_use_ = 0;
  std::size_t refused_ = 0;
};

// Not destroyed: frameworks give memory back while the process ends.
ResultArena& arena() {
  static auto* const instance = new ResultArena();
  return *instance;
}

}  // namespace

void bind_result_arena(nb::module_& module) {
  // Lends memory from a pointer on from now on; what was cut before stays valid for as long as its
  // memory does, and goes nowhere when it is given back.
  module.def("arena_set",
             [](std::uintptr_t pointer, std::size_t nbytes) { arena().set(pointer, nbytes); });
  // Returns bytes in use, and the size of the last request that was not met since this was asked
  // last.
  module.def("arena_state", [] { return arena().state(); });
}

}  // namespace gpubridge

// As frameworks ask for them: a size, a device and its stream. Both are on one device, and memory
// goes from stream to stream only when the framework says so by giving it back.
extern "C" {

__attribute__((visibility("default"))) void* gpubridge_arena_malloc(ssize_t size, int /*device*/,
                                                                    void* /*stream*/) {
  if (size <= 0) return nullptr;
  const std::uintptr_t address = gpubridge::arena().take(static_cast<std::size_t>(size));
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

__attribute__((visibility("default"))) void gpubridge_arena_free(void* pointer, ssize_t /*size*/,
                                                                 int /*device*/, void* /*stream*/) {
  gpubridge::arena().give_back(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // extern "C"
