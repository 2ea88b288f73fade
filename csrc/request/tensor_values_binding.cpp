// Tensor data as JSON and as typed fields, for Python: gpubridge/_native.pyi has the functions.

#include "buffer_view.h"
#include "python_object.h"
#include "request/json_values.h"
#include "request/message_values.h"

namespace gpubridge {
namespace {

ElementType type_of(std::string_view datatype) {
  if (const auto type = json_type(datatype)) return *type;
  throw nb::value_error("expected a datatype that JSON can carry");
}

// Returns as bytes the text that `make` appends to without the lock; None if it returns false.
template <typename Make>
nb::object made_unlocked(Make&& make) {
  std::string bytes;
  bool good = false;
  {
    const nb::gil_scoped_release unlocked;
    good = make(bytes);
  }
  return good ? long_bytes_object(bytes) : nb::none();
}

// Returns the skeleton of a document and the places of its taken values; None where there is none.
template <std::optional<SplitDocument> (*split_document)(std::string_view)>
nb::object split_json(nb::handle document) {
  const BufferView buffer(document, PyBUF_SIMPLE);
  std::optional<SplitDocument> split;
  {
    const nb::gil_scoped_release unlocked;
    split = split_document(buffer.text());
  }
  if (!split) return nb::none();
  nb::list ranges;
  for (const std::string_view value : split->values) {
    ranges.append(nb::make_tuple(value.data() - buffer.text().data(), value.size()));
  }
  return nb::make_tuple(long_bytes_object(split->skeleton), ranges);
}

std::string_view part_of(const BufferView& document, std::size_t start, std::size_t size) {
  if (start > document.size() || size > document.size() - start) {
    throw nb::value_error("expected a range inside the document");
  }
  return document.text().substr(start, size);
}

nb::object pack_json_values(nb::handle document, std::size_t start, std::size_t size,
                            std::string_view datatype, std::size_t count) {
  const BufferView buffer(document, PyBUF_SIMPLE);
  const ElementType type = type_of(datatype);
  const std::string_view values = part_of(buffer, start, size);
  return made_unlocked([&](std::string& bytes) { return pack_values(values, type, count, bytes); });
}

nb::object plain_json_string(nb::handle document, std::size_t start, std::size_t size) {
  const BufferView buffer(document, PyBUF_SIMPLE);
  const std::string_view raw = part_of(buffer, start, size);
  return made_unlocked([&](std::string& json) { return append_plain_string(raw, json); });
}

nb::object format_json_values(nb::handle data, std::string_view datatype, std::size_t count) {
  const BufferView buffer(data, PyBUF_SIMPLE);
  const ElementType type = type_of(datatype);
  return made_unlocked(
      [&](std::string& json) { return format_values(buffer.text(), type, count, json); });
}

nb::object format_json_string(std::string_view before, nb::handle text, std::string_view after) {
  const BufferView buffer(text, PyBUF_SIMPLE);
  return made_unlocked([&](std::string& json) {
    json.reserve(before.size() + buffer.size() + after.size() + 2);
    json.append(before);
    if (!format_string(buffer.text(), json)) return false;
    json.append(after);
    return true;
  });
}

nb::object split_long_form(nb::handle form) {
  const BufferView buffer(form, PyBUF_SIMPLE);
  std::optional<SplitForm> split;
  {
    const nb::gil_scoped_release unlocked;
    split = split_form(buffer.text());
  }
  if (!split) return nb::none();
  const nb::object contents = tuple_of(split->contents.size(), [&](std::size_t i) -> nb::object {
    const std::string_view view = split->contents[i];
    if (view.empty()) return nb::none();
    return nb::make_tuple(view.data() - buffer.text().data(), view.size());
  });
  return nb::make_tuple(long_bytes_object(split->skeleton), long_bytes_object(split->parameters),
                        contents);
}

nb::object pack_json_parameters(nb::handle object) {
  const BufferView buffer(object, PyBUF_SIMPLE);
  return made_unlocked([&](std::string& fields) { return pack_parameters(buffer.text(), fields); });
}

nb::object pack_contents(nb::handle message, unsigned field, std::string_view form,
                         std::size_t size) {
  const BufferView buffer(message, PyBUF_SIMPLE);
  const WireForm wire = form == "bytes"    ? WireForm::kBytes
                        : form == "varint" ? WireForm::kVarint
                                           : WireForm::kFixed;
  if (wire != WireForm::kBytes && (size == 0 || size > sizeof(std::uint64_t))) {
    throw nb::value_error("expected elements of 1 to 8 bytes");
  }
  return made_unlocked([&](std::string& bytes) {
    return pack_typed_contents(buffer.text(), field, wire, size, bytes);
  });
}

nb::object count_json_parts(nb::handle document) {
  const BufferView buffer(document, PyBUF_SIMPLE);
  JsonParts parts;
  {
    const nb::gil_scoped_release unlocked;
    parts = count_parts(buffer.text());
  }
  return nb::make_tuple(parts.members, parts.arrays, parts.divided);
}

}  // namespace

void bind_tensor_values(nb::module_& module) {
  module.def("pack_typed_contents", &pack_contents);
  module.def("split_form", &split_long_form);
  module.def("count_json_parts", &count_json_parts);
  module.def("split_json_data", &split_json<split_data>);
  module.def("split_long_strings", &split_json<split_long_strings>);
  module.def("plain_json_string", &plain_json_string);
  module.def("pack_json_parameters", &pack_json_parameters);
  module.def("pack_json_values", &pack_json_values);
  module.def("format_json_string", &format_json_string);
  module.def("format_json_values", &format_json_values);
}

}  // namespace gpubridge
