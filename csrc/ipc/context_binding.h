// Contexts as Python sees them: objects of the classes of gpubridge/transport/context.py.
#pragma once

#include "ipc/context.h"
#include "python_object.h"
#include "text.h"

namespace gpubridge {

// Encodes and decodes the contexts of one class, which are immutable: short ones that repeat are
// decoded once.
class ContextCodec {
 public:
  // `layout` has the fields of `kind` with their defaults, `empty` is a context without any. JSON
  // is made by `dump` and read by `load`.
  ContextCodec(nb::type_object kind, nb::object empty, nb::handle layout, nb::object dump,
               nb::object load);

  [[nodiscard]] nb::object encode(nb::handle context) const;
  // Throws MalformedContext, or what `load` raises.
  nb::object decode(std::string_view raw);

 private:
  struct Member {
    ContextField field;
    ContextKind kind;
    nb::object name;
    nb::object initial;
  };

  [[nodiscard]] nb::object made(std::string_view raw) const;
  [[nodiscard]] nb::object value(const Context& context, const Member& member) const;
  void take(Context& context, const Member& member, nb::handle value,
            std::vector<nb::object>& held) const;

  nb::type_object kind_;
  nb::object empty_;
  nb::object dump_;
  nb::object load_;
  std::uint32_t known_ = 0;
  std::vector<Member> members_;
  std::unordered_map<std::string, nb::object, TextHash, std::equal_to<>> decoded_;
};

}  // namespace gpubridge
