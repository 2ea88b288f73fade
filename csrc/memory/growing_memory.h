// Private memory that grows as bytes come, never by what was promised.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "std.h"

namespace gpubridge {

// Owns its bytes. Few lie in the heap. Many lie in pages of their own, which the kernel moves
// instead of copying them, and which it gets back at once. Throws std::bad_alloc without memory.
class GrowingMemory {
 public:
  GrowingMemory() = default;
  GrowingMemory(GrowingMemory&& other) noexcept { swap(other); }
  GrowingMemory& operator=(GrowingMemory&& other) noexcept {
    GrowingMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~GrowingMemory() {
    if (mapped()) {
      munmap(data_, capacity_);
    } else {
      std::free(data_);  // NOLINT: realloc grows it
    }
  }

  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] std::string_view text() const { return {data_, size_}; }

  void append(std::string_view bytes) {
    if (bytes.empty()) return;
    const std::size_t size = size_ + bytes.size();
    if (size > capacity_) reserve(std::max(size, size_ + size_ / 2));
    std::memcpy(data_ + size_, bytes.data(), bytes.size());
    size_ = size;
  }

  // Has so many bytes; further ones than there were are undefined.
  void resize(std::size_t size) {
    if (size > capacity_) reserve(size);
    size_ = size;
  }

 private:
  static constexpr std::size_t kLeast = 512;
  static constexpr std::size_t kMostInHeap = std::size_t{1} << 16U;

  [[nodiscard]] bool mapped() const { return capacity_ > kMostInHeap; }

  void swap(GrowingMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  void reserve(std::size_t least) {
    if (least <= kMostInHeap) {
      const std::size_t capacity = std::bit_ceil(std::max(least, kLeast));
      void* const moved = std::realloc(data_, capacity);  // NOLINT: the heap may grow it in place
      if (moved == nullptr) throw std::bad_alloc();
      data_ = static_cast<char*>(moved);
      capacity_ = capacity;
      return;
    }
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t capacity = (least + page - 1) / page * page;
    void* const moved = mapped() ? mremap(data_, capacity_, capacity, MREMAP_MAYMOVE)
                                 : mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (moved == MAP_FAILED) throw std::bad_alloc();
    if (!mapped()) {
      if (size_ != 0) std::memcpy(moved, data_, size_);
      std::free(data_);  // NOLINT: realloc grows it
    }
    data_ = static_cast<char*>(moved);
    capacity_ = capacity;
  }

  char* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace gpubridge
