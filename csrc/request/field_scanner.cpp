#include "request/field_scanner.h"

#include "request/wire.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr std::uint64_t kId = 3;
constexpr std::uint64_t kInputs = 5;
constexpr std::uint64_t kRaw = 7;

constexpr MessageFault kNoText{"its id is no UTF-8"};
constexpr std::size_t kLongestVarint = 10;
constexpr unsigned kDeepest = 100;
constexpr std::size_t kLong = std::size_t{1} << 16U;

// Takes a number, if it is all there.
bool take_number(WireReader& fields, std::uint64_t& number) {
  const std::size_t begin = fields.at();
  if (fields.varint(number)) return true;
  if (fields.at() - begin == kLongestVarint) throw MessageFault{"a number has more than 64 bits"};
  return false;
}

}  // namespace

std::size_t FieldScanner::feed(std::string_view data) {
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
    sink_->append(part);
    want_ -= part.size();
    left_ -= part.size();
    at += part.size();
  }
  return at;
}

std::optional<std::string_view> FieldScanner::model_name() const {
  WireReader fields(form_);
  std::string_view name;
  if (fields.done() || fields.tag() != wire_tag(1, kWireBytes) || !fields.bytes(name)) {
    return std::nullopt;
  }
  return name;
}

std::string_view FieldScanner::form() const {
  if (left_ != 0 || want_ != 0 || !pending_.empty() || depth_ != 0) {
    throw MessageFault{"it ends within a field"};
  }
  return form_;
}

std::string_view FieldScanner::identifier() const {
  if (!is_utf8(identifier_)) throw kNoText;
  return identifier_;
}

// Begins a field once its tag, and its length or number, are there.
void FieldScanner::take_header() {
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
void FieldScanner::begin(std::uint64_t number, std::uint64_t length) {
  if (++fields_ > kMostFields) throw MessageFault{};
  if (number == kRaw) {
    raw_ = length;
  } else if (number == kId) {
    if (length > kLongestId) throw MessageFault{{}, length};
    // The last one counts, but each has to be one.
    if (!is_utf8(identifier_)) throw kNoText;
    identifier_.clear();
    sink_ = &identifier_;
    want_ = length;
  } else {
    inputs_ += number == kInputs ? 1 : 0;
    form_ += pending_;
    // Growing by and by would move what is there again and again; what is not filled costs nothing.
    if (length > kLong) form_.reserve(form_.size() + left_);
    sink_ = &form_;
    want_ = length;
  }
  pending_.clear();
}

}  // namespace gpubridge
