#include "stub/output_pool.h"

namespace gpubridge::stub {
namespace {

constexpr std::size_t kSmallest = 4096;
// Small slots of one size that the pool keeps; more are placed by the OutputMemory itself.
constexpr std::size_t kMostSlots = 512;
// So many slots that are still lent are passed by before a new one is taken.
constexpr int kPatience = 2;

// Sizes of slots: powers of two, above kLarge quarter steps.
std::size_t class_of(std::size_t nbytes) {
  if (nbytes <= OutputPool::kLarge) {
    return static_cast<std::size_t>(std::bit_width((nbytes - 1) / kSmallest));
  }
  const auto bits = static_cast<std::size_t>(std::bit_width((nbytes - 1) / OutputPool::kLarge));
  const std::size_t quarter = (nbytes - 1) / (OutputPool::kLarge << (bits - 1) >> 2U) & 3U;
  return 1 + 4 * bits + quarter;
}
static_assert(kSmallest << 4U == OutputPool::kLarge);

}  // namespace

OutputPool::OutputPool(nb::object memory, nb::handle table)
    : memory_(std::move(memory)), table_(std::make_unique<BufferView>(table, PyBUF_WRITABLE)) {}

// Leases of small slots end nearly in the order in which slots were lent, so the first ones are
// looked at.
std::optional<OutputPool::Slot> OutputPool::lend(std::size_t nbytes, std::string_view consumer) {
  auto found = classes_.find(consumer);
  if (found == classes_.end()) found = classes_.try_emplace(std::string(consumer)).first;
  Class& entries = found->second.at(class_of(nbytes));
  if (nbytes > kLarge) {
    // The same ones again and again: their bytes may still be in the processor's cache.
    for (Entry& entry : entries) {
      if (is_free(entry)) return take(entry);
    }
    return grow(entries, nbytes, consumer);
  }
  for (int looks = 0; looks < kPatience && !entries.empty(); ++looks) {
    Entry entry = std::move(entries.front());
    entries.pop_front();
    const bool free = is_free(entry);
    entries.push_back(std::move(entry));
    if (free) return take(entries.back());
  }
  return grow(entries, nbytes, consumer);
}

std::optional<OutputPool::Slot> OutputPool::grow(Class& entries, std::size_t nbytes,
                                                 std::string_view consumer) {
  if (nbytes <= kLarge && entries.size() >= kMostSlots) return std::nullopt;
  const auto made = nb::cast<nb::tuple>(
      memory_.attr("reserve_lease")(nbytes, nb::str(consumer.data(), consumer.size())));
  nb::object slot = made[0];
  auto memory = std::make_unique<BufferView>(slot.attr("memory"), PyBUF_WRITABLE);
  const TensorRef place{nb::cast<std::uint64_t>(slot.attr("segment").attr("region")),
                        nb::cast<std::uint64_t>(slot.attr("offset")), memory->size(),
                        nb::cast<std::uint32_t>(made[1])};
  entries.push_back({std::move(slot), std::move(memory), place});
  return take(entries.back());
}

void OutputPool::give_back() {
  for (auto& [consumer, sizes] : classes_) {
    for (Class& entries : sizes) {
      // Python may let other threads in, which lend what is in the class then.
      for (Entry& entry : std::exchange(entries, {})) {
        if (!is_free(entry)) {
          entries.push_back(std::move(entry));
          continue;
        }
        entry.memory.reset();
        memory_.attr("return_lease")(entry.slot, entry.place.lease);
      }
    }
  }
}

}  // namespace gpubridge::stub
