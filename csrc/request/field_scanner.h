// The top level of a ModelInferRequest that comes in pieces: its *form* (everything but the id and
// the raw contents; a message itself), its id, and its raw contents, which may be large and are to
// be received where they stay.
#pragma once

#include "memory/growing_memory.h"
#include "request/wire.h"
#include "std.h"
#include "text.h"

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
  std::size_t feed(std::string_view data) {
    if (data.size() > left_) throw MessageFault{"there is more than its length says"};
    std::size_t at = 0;
    while (at < data.size() && !raw_) {
      if (want_ == 0) {
        pending_.push_back(data[at++]);
        --left_;
        take_header();
        continue;
      }
      const std::string_view part = data.substr(at, static_cast<std::size_t>(want_));
      take(part);
      want_ -= part.size();
      left_ -= part.size();
      at += part.size();
    }
    return at;
  }

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
  [[nodiscard]] std::size_t form_bytes() const { return form_->size(); }
  // Bytes of form and id that are kept here.
  [[nodiscard]] std::size_t kept() const { return form_->size() + identifier_.size(); }
  // Keeps the memory of the form.
  [[nodiscard]] const std::shared_ptr<GrowingMemory>& form_memory() const { return form_; }
  // The name of the model, if it is the first field of what has come.
  [[nodiscard]] std::optional<std::string_view> model_name() const {
    WireReader fields(form_->text());
    std::string_view name;
    if (fields.done() || fields.tag() != wire_tag(1, kWireBytes) || !fields.bytes(name)) {
      return std::nullopt;
    }
    return name;
  }

  // Of the complete message; they throw MessageFault.
  [[nodiscard]] std::string_view form() const {
    if (left_ != 0 || want_ != 0 || !pending_.empty() || depth_ != 0) {
      throw MessageFault{"it ends within a field"};
    }
    return form_->text();
  }

  [[nodiscard]] std::string_view identifier() const {
    if (!is_utf8(identifier_)) throw kNoText;
    return identifier_;
  }

 private:
  static constexpr std::uint64_t kId = 3;
  static constexpr std::uint64_t kInputs = 5;
  static constexpr std::uint64_t kRaw = 7;

  static constexpr MessageFault kNoText{"its id is no UTF-8"};
  static constexpr std::size_t kLongestVarint = 10;
  static constexpr unsigned kDeepest = 100;

  // Takes a number, if it is all there.
  [[nodiscard]] static bool take_number(WireReader& fields, std::uint64_t& number) {
    const std::size_t begin = fields.at();
    if (fields.varint(number)) return true;
    if (fields.at() - begin == kLongestVarint) throw MessageFault{"a number has more than 64 bits"};
    return false;
  }

  // Takes data of the field that has begun.
  void take(std::string_view part) {
    if (of_form_) {
      form_->append(part);
    } else {
      identifier_.append(part);
    }
  }

  // Begins a field once its tag, and its length or number, are there.
  void take_header() {
    WireReader fields(pending_);
    std::uint64_t tag = 0;
    if (!take_number(fields, tag)) return;
    if (tag >> 3U == 0) throw MessageFault{"a field has number 0"};
    const auto kind = static_cast<unsigned>(tag & 7U);
    const bool top = depth_ == 0;
    std::uint64_t length = 0;
    switch (kind) {
      case kWireVarint:
      case kWireBytes:
        if (!take_number(fields, length)) return;
        if (kind == kWireVarint) length = 0;
        break;
      case kWire64:
        length = sizeof(std::uint64_t);
        break;
      case kWire32:
        length = sizeof(std::uint32_t);
        break;
      case kWireGroup:
        if (depth_++ == kDeepest) throw MessageFault{"its groups are too deep"};
        break;
      case kWireEndGroup:
        if (depth_-- == 0) throw MessageFault{"its groups do not match"};
        break;
      default:
        throw MessageFault{"there is no such wire type"};
    }
    if (length > left_) throw MessageFault{"a field is longer than the message"};
    begin(top && kind == kWireBytes ? tag >> 3U : 0, length);
  }

  // Begins with the data of a field; the number is 0 for one without a meaning here.
  void begin(std::uint64_t number, std::uint64_t length) {
    if (++fields_ > kMostFields) throw MessageFault{};
    if (number == kRaw) {
      raw_ = length;
    } else if (number == kId) {
      if (length > kLongestId) throw MessageFault{{}, length};
      // The last one counts, but each has to be one.
      if (!is_utf8(identifier_)) throw kNoText;
      identifier_.clear();
      of_form_ = false;
      want_ = length;
    } else {
      inputs_ += number == kInputs ? 1 : 0;
      form_->append(pending_);
      of_form_ = true;
      want_ = length;
    }
    pending_.clear();
  }

  std::uint64_t left_;
  std::optional<std::uint64_t> raw_;
  std::size_t inputs_ = 0;
  std::shared_ptr<GrowingMemory> form_ = std::make_shared<GrowingMemory>();
  std::string identifier_;
  std::string pending_;     // of a field's tag, and its length or number
  bool of_form_ = false;    // the field's data belong to the form, else to the id
  std::uint64_t want_ = 0;  // bytes of them still to come
  unsigned depth_ = 0;
  unsigned fields_ = 0;
};

}  // namespace gpubridge
