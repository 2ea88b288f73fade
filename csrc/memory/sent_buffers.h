// The buffers of a response on their way to a client.
#pragma once

#include "memory/lease_book.h"
#include "python_object.h"

namespace gpubridge {

// A sequence of buffers: LentBuffers, whose bytes are there without a Python object for each, or
// another sequence of bytes-like objects. It must outlive this.
class SentBuffers {
 public:
  explicit SentBuffers(nb::handle sequence);

  [[nodiscard]] std::size_t count() const { return sizes_.size(); }
  [[nodiscard]] std::size_t size(std::size_t index) const { return sizes_[index]; }
  [[nodiscard]] std::size_t total() const { return total_; }
  [[nodiscard]] nb::object object(std::size_t index) const {
    return spans_ == nullptr ? objects_[index] : (*spans_)[index].object();
  }
  // Appends the bytes of a buffer; throws ValueError where they are not as many as they were.
  void append_to(std::string& text, std::size_t index) const;

 private:
  const std::vector<LentSpan>* spans_;
  std::vector<nb::object> objects_;  // where there are no spans
  std::vector<std::size_t> sizes_;
  std::size_t total_ = 0;
};

// A message for a client in pieces. Buffers of at most `copied` bytes are copied to what is before
// them: one piece more costs more. Longer ones stay where they are.
class MessagePieces {
 public:
  MessagePieces(std::string opening, std::size_t copied)
      : pending_(std::move(opening)), copied_(copied) {}

  // Appends text, then a buffer.
  void append(const std::string& text, const SentBuffers& buffers, std::size_t index);
  std::vector<nb::object> finish(std::string_view ending = {});

 private:
  void flush() {
    if (!pending_.empty()) pieces_.push_back(bytes_object(pending_));
    pending_.clear();
  }

  std::string pending_;
  std::size_t copied_;
  std::vector<nb::object> pieces_;
};

}  // namespace gpubridge
