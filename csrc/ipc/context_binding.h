// Contexts as Python sees them: objects of the classes of gpubridge/transport/context.py.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ipc/context.h"
#include "text.h"

namespace gpubridge {

// Encodes and decodes the contexts of one class, which are immutable: short ones that repeat are
// decoded once.
class ContextCodec {
 public:
  // `layout` has the fields of `kind` with their defaults, `empty` is a context without any. JSON
  // is made by `dump` and read by `load`.
  ContextCodec(nanobind::type_object kind, nanobind::object empty, nanobind::handle layout,
               nanobind::object dump, nanobind::object load);

  [[nodiscard]] nanobind::object encode(nanobind::handle context) const;
  // Throws MalformedContext, or what `load` raises.
  nanobind::object decode(std::string_view raw);

 private:
  struct Member {
    ContextField field;
    ContextKind kind;
    nanobind::object name;
    nanobind::object initial;
  };

  [[nodiscard]] nanobind::object made(std::string_view raw) const;
  [[nodiscard]] nanobind::object value(const Context& context, const Member& member) const;
  void take(Context& context, const Member& member, nanobind::handle value,
            std::vector<nanobind::object>& held) const;

  nanobind::type_object kind_;
  nanobind::object empty_;
  nanobind::object dump_;
  nanobind::object load_;
  std::uint32_t known_ = 0;
  std::vector<Member> members_;
  std::unordered_map<std::string, nanobind::object, TextHash, std::equal_to<>> decoded_;
};

}  // namespace gpubridge
