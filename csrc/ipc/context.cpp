#include "ipc/context.h"

#include <sstream>

#include "little_endian.h"
#include "utf8.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMask = sizeof(std::uint32_t);
constexpr std::size_t kLength = sizeof(std::uint32_t);
constexpr std::size_t kNumber = sizeof(std::uint64_t);

std::string_view take(std::string_view raw, std::size_t& at, std::size_t count) {
  if (count > raw.size() - at) {
    throw MalformedContext("a context that ends in the middle of a field");
  }
  const std::string_view piece = raw.substr(at, count);
  at += count;
  return piece;
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

std::size_t Context::size() const {
  if (mask_ == 0) return 0;
  std::size_t size = kMask;
  for (std::size_t field = 0; field < kContextFields.size(); ++field) {
    if ((mask_ >> field & 1U) == 0) continue;
    const ContextKind kind = kContextFields[field].kind;
    if (kind == ContextKind::kU64 || kind == ContextKind::kI64) size += kNumber;
    if (kind == ContextKind::kText || kind == ContextKind::kJson) {
      size += kLength + texts_[field].size();
    }
  }
  return size;
}

char* Context::write(char* at) const {
  if (mask_ == 0) return at;
  at = put_number(at, mask_);
  for (std::size_t field = 0; field < kContextFields.size(); ++field) {
    if ((mask_ >> field & 1U) == 0) continue;
    const ContextKind kind = kContextFields[field].kind;
    if (kind == ContextKind::kU64 || kind == ContextKind::kI64)
      at = put_number(at, numbers_[field]);
    if (kind == ContextKind::kText || kind == ContextKind::kJson) {
      at = put_number(at, static_cast<std::uint32_t>(texts_[field].size()));
      at = put_bytes(at, texts_[field]);
    }
  }
  return at;
}

}  // namespace gpubridge
