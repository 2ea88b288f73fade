// Slots of output memory for responses and the inputs of calls, each with a lease of its own, used
// again and again.
#pragma once

#include "buffer_view.h"
#include "ipc/records.h"
#include "python_object.h"

namespace gpubridge::stub {

// Takes slots from the stub's `OutputMemory` (Python), which they go back to when they are idle for
// long or memory is short. A slot is free when the server has cleared its lease's byte.
class OutputPool {
 public:
  // `memory` is the OutputMemory, `table` the bytes of its leases.
  OutputPool(nb::object memory, nb::handle table)
      : memory_(std::move(memory)), table_(std::make_unique<BufferView>(table, PyBUF_WRITABLE)) {}

  struct Slot {
    char* data;
    TensorRef place;  // with the slot's size as nbytes
  };

  // The OutputMemory, which holds this, too.
  [[nodiscard]] nb::handle memory() const { return memory_; }
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(memory_.ptr());
    return 0;
  }
  void clear() {
    classes_.clear();
    memory_ = nb::none();
  }

  // The most bytes that have a place here.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 24U;
  // Slots of more have sizes in quarter steps between powers of two.
  static constexpr std::size_t kLarge = std::size_t{1} << 16U;

  // A slot of at least so many bytes, lent to the server from now on. It lies in memory for the
  // processes of a model, or for the server alone where the name is empty. Throws what the
  // OutputMemory raises where there is no more memory.
  //
  // Leases of small slots end nearly in the order in which slots were lent, so the first ones are
  // looked at.
  [[nodiscard]] Slot lend(std::size_t nbytes, std::string_view consumer) {
    auto found = classes_.find(consumer);
    if (found == classes_.end()) found = classes_.try_emplace(std::string(consumer)).first;
    const std::size_t fits = class_of(nbytes);
    Class& entries = found->second.at(fits);
    if (nbytes > kLarge) {
      // The same ones again and again: their bytes may still be in the processor's cache. Up to
      // twice as large ones are taken before new ones.
      const std::size_t end = std::min(fits + kDoubled + 1, found->second.size());
      for (std::size_t size = fits; size < end; ++size) {
        for (Entry& entry : found->second.at(size)) {
          if (is_free(entry)) return take(entry);
        }
      }
      // The OutputMemory uses them for slots of any size.
      give_back_large(found->second);
      return grow(entries, nbytes, consumer);
    }
    for (int looks = 0; looks < kPatience && !entries.empty(); ++looks) {
      Entry entry = std::move(entries.front());
      entries.pop_front();
      const bool free = is_free(entry);
      entries.push_back(std::move(entry));
      if (free) return take(entries.back());
    }
    if (entries.size() >= kMostSlots) return lend_once(nbytes, consumer);
    return grow(entries, nbytes, consumer);
  }

  // Bytes that are to be copied, and the number of the reference that says where they lie then.
  struct Piece {
    std::size_t index;
    const char* data;
    std::size_t size;
  };

  // Copies pieces to one slot for the processes of a model, and puts where they lie in `refs`;
  // returns how many bytes those are. Other threads may run meanwhile.
  std::uint64_t copy(std::span<const Piece> pieces, std::string_view consumer,
                     std::span<TensorRef> refs) {
    std::size_t total = 0;
    for (const Piece& piece : pieces) total += aligned(piece.size);
    if (total == 0) return 0;
    const Slot slot = lend(total, consumer);
    std::uint64_t copied = 0;
    std::size_t at = 0;
    for (const auto& [index, data, size] : pieces) {
      copy_bytes(slot.data + at, data, size);
      refs[index] = {slot.place.region, slot.place.offset + at, size, slot.place.lease};
      at += aligned(size);
      copied += size;
    }
    return copied;
  }

  static std::size_t aligned(std::size_t size) {
    return (size + kAlignment - 1) & ~(kAlignment - 1);
  }

  // Counts bytes that were copied for no response, until they are taken.
  void count(std::uint64_t copied) { copied_ += copied; }
  [[nodiscard]] std::uint64_t take_copied() { return std::exchange(copied_, 0); }

  // Takes slots back that were lent, and are not sent.
  void take_back(std::span<const TensorRef> places) {
    for (const TensorRef& place : places) {
      if (place.nbytes != 0) __atomic_store_n(lease(place), 0, __ATOMIC_RELEASE);
    }
  }

  // Whether the OutputMemory has lent slots by itself since the last call: it has to reclaim them.
  [[nodiscard]] bool take_lent_once() { return std::exchange(lent_once_, false); }

  // True if models have got slots to write to: then outputs may lie in one.
  [[nodiscard]] bool shown() const { return nb::cast<bool>(memory_.attr("exposed")); }

  // Gives all free slots back.
  void give_back() {
    for (auto& [consumer, sizes] : classes_) {
      for (Class& entries : sizes) give_back(entries);
    }
  }

  // Writes to no lease byte any more: for a forked child.
  void disown() { classes_.clear(); }

 private:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kSmallest = 4096;
  // Small slots of one size that the pool keeps; more are lent by the OutputMemory, each once.
  static constexpr std::size_t kMostSlots = 512;
  // So many slots that are still lent are passed by before a new one is taken.
  static constexpr int kPatience = 2;
  // So many classes above that of a large slot its size has doubled.
  static constexpr std::size_t kDoubled = 4;

  // Sizes of slots: powers of two, above kLarge quarter steps.
  static std::size_t class_of(std::size_t nbytes) {
    if (nbytes <= kLarge) {
      return static_cast<std::size_t>(std::bit_width((nbytes - 1) / kSmallest));
    }
    const auto bits = static_cast<std::size_t>(std::bit_width((nbytes - 1) / kLarge));
    const std::size_t quarter = (nbytes - 1) / (kLarge << (bits - 1) >> 2U) & 3U;
    return 1 + 4 * bits + quarter;
  }

  static_assert(kSmallest << 4U == kLarge);

  struct Entry {
    nb::object slot;
    std::unique_ptr<BufferView> memory;
    TensorRef place;
  };
  using Class = std::deque<Entry>;
  using Classes = std::array<Class, 37>;

  [[nodiscard]] unsigned char* lease(const TensorRef& place) const {
    return static_cast<unsigned char*>(table_->data()) + place.lease;
  }
  [[nodiscard]] bool is_free(const Entry& entry) const {
    return __atomic_load_n(lease(entry.place), __ATOMIC_ACQUIRE) == 0;
  }
  Slot take(Entry& entry) {
    __atomic_store_n(lease(entry.place), 1, __ATOMIC_RELEASE);
    return {static_cast<char*>(entry.memory->data()), entry.place};
  }
  void give_back(Class& entries) {
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
  void give_back_large(Classes& sizes) {
    for (std::size_t size = class_of(kLarge + 1); size < sizes.size(); ++size) {
      give_back(sizes.at(size));
    }
  }
  Slot grow(Class& entries, std::size_t nbytes, std::string_view consumer) {
    entries.push_back(entry_of(memory_.attr("reserve_lease")(nbytes, text_object(consumer))));
    return take(entries.back());
  }
  // Its memory stays where it is: it is lent.
  Slot lend_once(std::size_t nbytes, std::string_view consumer) {
    const Entry entry = entry_of(memory_.attr("lend")(nbytes, text_object(consumer)));
    lent_once_ = true;
    return {static_cast<char*>(entry.memory->data()), entry.place};
  }
  // Of a slot and its lease.
  static Entry entry_of(const nb::object& made) {
    nb::object slot = made[0];
    auto memory = std::make_unique<BufferView>(slot.attr("memory"), PyBUF_WRITABLE);
    const TensorRef place{nb::cast<std::uint64_t>(slot.attr("segment").attr("region")),
                          nb::cast<std::uint64_t>(slot.attr("offset")), memory->size(),
                          nb::cast<std::uint32_t>(made[1])};
    return {std::move(slot), std::move(memory), place};
  }

  nb::object memory_;
  std::unique_ptr<BufferView> table_;
  // By consumer: a class for each size of slots.
  std::map<std::string, Classes, std::less<>> classes_;
  bool lent_once_ = false;
  std::uint64_t copied_ = 0;
};

}  // namespace gpubridge::stub
