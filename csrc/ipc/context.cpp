#include "ipc/context.h"

#include <sstream>

#include "little_endian.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMask = sizeof(std::uint32_t);
constexpr std::size_t kLength = sizeof(std::uint32_t);
constexpr std::size_t kNumber = sizeof(std::uint64_t);

std::string_view take(std::string_view message, std::size_t& at, std::size_t count) {
  return take_bytes<MalformedContext>(message, at, count,
                                      "a context that ends in the middle of a field");
}

}  // namespace

Context Context::read(std::string_view raw, std::uint32_t known) {
  Context context;
  if (raw.empty()) return context;
  std::size_t at = 0;
  context.mask_ = get_number<std::uint32_t>(take(raw, at, kMask).data());
  if ((context.mask_ & ~known) != 0) {
    std::ostringstream text;
    text << "a context with unknown fields, of the bits 0x" << std::hex << context.mask_;
    throw MalformedContext(text.str());
  }
  for (std::size_t field = 0; field < kContextFields.size(); ++field) {
    if ((context.mask_ >> field & 1U) == 0) continue;
    switch (kContextFields[field].kind) {
      case ContextKind::kFlag:
        break;
      case ContextKind::kU64:
      case ContextKind::kI64:
        context.numbers_[field] = get_number<std::uint64_t>(take(raw, at, kNumber).data());
        break;
      case ContextKind::kText:
      case ContextKind::kJson: {
        const auto length = get_number<std::uint32_t>(take(raw, at, kLength).data());
        context.texts_[field] = take(raw, at, length);
        if (!is_utf8(context.texts_[field])) {
          throw MalformedContext("a context with text that is no UTF-8");
        }
      }
    }
  }
  if (at != raw.size()) {
    throw MalformedContext("a context with " + std::to_string(raw.size() - at) +
                           " bytes after its end");
  }
  return context;
}

std::string Context::encoded() const {
  std::string encoded;
  if (mask_ == 0) return encoded;
  append_number(encoded, mask_);
  for (std::size_t field = 0; field < kContextFields.size(); ++field) {
    if ((mask_ >> field & 1U) == 0) continue;
    switch (kContextFields[field].kind) {
      case ContextKind::kFlag:
        break;
      case ContextKind::kU64:
      case ContextKind::kI64:
        append_number(encoded, numbers_[field]);
        break;
      case ContextKind::kText:
      case ContextKind::kJson:
        append_number(encoded, static_cast<std::uint32_t>(texts_[field].size()));
        encoded += texts_[field];
    }
  }
  return encoded;
}

}  // namespace gpubridge
