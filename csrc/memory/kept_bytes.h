// What a peer has its connection keep beside large bodies: how much that is, and when it is
// charged.
#pragma once

#include "std.h"

namespace gpubridge {

// Bytes that count in a total, as their holder says: while it lives.
class KeptBytes {
 public:
  explicit KeptBytes(std::uint64_t& total) : total_(total) {}
  KeptBytes(KeptBytes&& other) noexcept
      : total_(other.total_), nbytes_(std::exchange(other.nbytes_, 0)) {}
  KeptBytes(const KeptBytes&) = delete;
  ~KeptBytes() { set(0); }

  void set(std::uint64_t nbytes) {
    total_ += nbytes - nbytes_;
    nbytes_ = nbytes;
  }
  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

 private:
  std::uint64_t& total_;
  std::uint64_t nbytes_ = 0;
};

// The charge of a connection's total. A charge costs a call of Python, so that few bytes have none,
// and many are charged in steps. Where a charge was refused, nothing more is taken that would be
// kept, until it is granted or enough is let go of.
class KeptCharge {
 public:
  // What is to be charged now; none where the total has not changed much since.
  [[nodiscard]] std::optional<std::uint64_t> due(std::uint64_t total) const {
    if (total > std::max(charged, kUncharged)) return total + kStep;
    if (charged == 0) return std::nullopt;
    if (total <= kUncharged / 2) return 0;
    return total + 3 * kStep < charged ? std::optional(total + kStep) : std::nullopt;
  }

  // Notes what the owner has charged of what was due.
  void settle(std::uint64_t due, std::uint64_t granted) {
    charged = granted;
    refused_ = granted < due;
  }
  // True if there is no memory for more than this total.
  [[nodiscard]] bool refuses(std::uint64_t total) const {
    return refused_ && total > std::max(charged, kUncharged);
  }

  static constexpr std::uint64_t kUncharged = std::uint64_t{1} << 17U;

  // What the owner has charged.
  std::uint64_t charged = 0;

 private:
  static constexpr std::uint64_t kStep = kUncharged / 2;

  bool refused_ = false;
};

}  // namespace gpubridge
