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
               nb::object load)
      : kind_(std::move(kind)),
        empty_(std::move(empty)),
        dump_(std::move(dump)),
        load_(std::move(load)) {
    for (nb::handle entry : layout) {
      const nb::object spec = entry[0];
      const auto tag = nb::cast<std::size_t>(spec[1]);
      if (tag >= kContextFields.size()) throw nb::value_error("a context field that is not known");
      members_.push_back({static_cast<ContextField>(tag), kContextFields[tag].kind,
                          nb::object(spec[0]), nb::object(entry[1])});
      known_ |= context_bit(members_.back().field);
    }
  }

  [[nodiscard]] nb::object encode(nb::handle context) const {
    Context parts;
    std::vector<nb::object> held;
    for (const Member& member : members_) {
      const nb::object value = checked(PyObject_GetAttr(context.ptr(), member.name.ptr()));
      // A long text is put in by who sends it.
      if (PyMemoryView_Check(value.ptr())) continue;
      if (!value.equal(member.initial)) take(parts, member, value, held);
    }
    return bytes_object(parts.encoded());
  }

  // Throws MalformedContext, or what `load` raises.
  nb::object decode(std::string_view raw) {
    if (raw.empty()) return empty_;
    const auto found = decoded_.find(raw);
    if (found != decoded_.end()) return found->second;
    nb::object context = made(raw);
    if (raw.size() <= kShort) {
      if (decoded_.size() >= kKept) decoded_.clear();
      decoded_.emplace(raw, context);
    }
    return context;
  }

 private:
  static constexpr std::size_t kShort = 256;
  static constexpr std::size_t kKept = 256;

  [[noreturn]] static void refuse(nb::handle name, nb::handle value) {
    PyErr_Format(PyExc_ValueError, "context field '%U': got %R", name.ptr(), value.ptr());
    throw nb::python_error();
  }

  struct Member {
    ContextField field;
    ContextKind kind;
    nb::object name;
    nb::object initial;
  };

  [[nodiscard]] nb::object made(std::string_view raw) const {
    const Context context = Context::read(raw, known_);
    auto* type = reinterpret_cast<PyTypeObject*>(kind_.ptr());
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    nb::object object = checked(allocate(type, 0));
    for (const Member& member : members_) {
      const nb::object found = context.has(member.field) ? value(context, member) : member.initial;
      // The class refuses changes; this object is still being made.
      if (PyObject_GenericSetAttr(object.ptr(), member.name.ptr(), found.ptr()) != 0) {
        throw nb::python_error();
      }
    }
    return object;
  }

  [[nodiscard]] nb::object value(const Context& context, const Member& member) const {
    switch (member.kind) {
      case ContextKind::kFlag:
        return nb::bool_(true);
      case ContextKind::kU64:
        return nb::int_(context.number(member.field));
      case ContextKind::kI64:
        return nb::int_(static_cast<std::int64_t>(context.number(member.field)));
      case ContextKind::kText:
        return text_object(context.text(member.field));
      case ContextKind::kJson:
        break;
    }
    return load_(text_object(context.text(member.field)));
  }

  void take(Context& context, const Member& member, nb::handle value,
            std::vector<nb::object>& held) const {
    switch (member.kind) {
      case ContextKind::kFlag:
        context.set_flag(member.field);
        return;
      case ContextKind::kU64:
      case ContextKind::kI64: {
        const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
        std::uint64_t number = 0;
        if (integer.is_valid()) {
          number = member.kind == ContextKind::kU64
                       ? PyLong_AsUnsignedLongLong(integer.ptr())
                       : static_cast<std::uint64_t>(PyLong_AsLongLong(integer.ptr()));
        }
        if (PyErr_Occurred() != nullptr) {
          PyErr_Clear();
          refuse(member.name, value);
        }
        context.set_number(member.field, number);
        return;
      }
      case ContextKind::kText:
      case ContextKind::kJson: {
        const nb::object text =
            member.kind == ContextKind::kJson ? nb::object(dump_(value)) : nb::borrow(value);
        if (!PyUnicode_Check(text.ptr())) refuse(member.name, value);
        // Models make texts with lone surrogates, which are no Unicode.
        held.push_back(checked(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace")));
        context.set_text(member.field, view_of_bytes(held.back()));
      }
    }
  }

  nb::type_object kind_;
  nb::object empty_;
  nb::object dump_;
  nb::object load_;
  std::uint32_t known_ = 0;
  std::vector<Member> members_;
  std::unordered_map<std::string, nb::object, TextHash, std::equal_to<>> decoded_;
};

}  // namespace gpubridge
