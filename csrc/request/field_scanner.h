// The top level of a ModelInferRequest that comes in pieces: its *form* (everything but the id and
// the raw contents; a message itself), its id, and its raw contents, which may be large and are to
// be received where they stay.
#pragma once

#include "std.h"

namespace gpubridge {

// Bytes are no message, or one of too many fields or with an id of so many bytes, which have no
// reason.
struct MessageFault {
  std::string_view reason;
  std::uint64_t id_bytes = 0;
};

class FieldScanner {
 public:
  // Each takes time, and two bytes are enough for one.
  static constexpr unsigned kMostFields = 1U << 14U;
  // Bytes of an id (gpubridge/protocol/fields.py).
  static constexpr std::uint64_t kLongestId = std::uint64_t{1} << 20U;

  // `nbytes` are the bytes of the whole message.
  explicit FieldScanner(std::uint64_t nbytes) : left_(nbytes) {}
  FieldScanner(const FieldScanner&) = delete;
  FieldScanner& operator=(const FieldScanner&) = delete;

  // Takes bytes up to the next raw content; returns how many. Throws MessageFault as soon as they
  // can be no message of that length.
  std::size_t feed(std::string_view data);

  // The bytes of the raw content that comes next, which the caller takes: then `pass_raw`.
  [[nodiscard]] const std::optional<std::uint64_t>& raw() const { return raw_; }
  void pass_raw() {
    left_ -= *raw_;
    raw_.reset();
  }

  // Bytes of the message that are still to come, that raw content included.
  [[nodiscard]] std::uint64_t left() const { return left_; }
  // Inputs seen so far.
  [[nodiscard]] std::size_t inputs() const { return inputs_; }
  [[nodiscard]] std::size_t form_bytes() const { return form_.size(); }
  // The name of the model, if it is the first field of what has come.
  [[nodiscard]] std::optional<std::string_view> model_name() const;

  // Of the complete message; they throw MessageFault.
  [[nodiscard]] std::string_view form() const;
  [[nodiscard]] std::string_view identifier() const;

 private:
  void take_header();
  void begin(std::uint64_t number, std::uint64_t length);

  std::uint64_t left_;
  std::optional<std::uint64_t> raw_;
  std::size_t inputs_ = 0;
  std::string form_;
  std::string identifier_;
  std::string pending_;          // of a field's tag, and its length or number
  std::string* sink_ = nullptr;  // where the field's data go
  std::uint64_t want_ = 0;       // bytes of them still to come
  unsigned depth_ = 0;
  unsigned fields_ = 0;
};

}  // namespace gpubridge
