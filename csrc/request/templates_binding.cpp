#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "little_endian.h"
#include "request/json_scanner.h"
#include "request/protobuf_scanner.h"
#include "request/request_bindings.h"
#include "request/templates.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::object text_of(std::string_view text) {
  return checked(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

template <typename Number>
nb::object bytes_of(const std::vector<Number>& numbers) {
  return checked(
      PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()),
                                static_cast<Py_ssize_t>(numbers.size() * sizeof(Number))));
}

// Makes a tuple of what `make` returns for each index.
template <typename Make>
nb::object tuple_of(std::size_t count, Make make) {
  nb::object made = checked(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t index = 0; index < count; ++index) {
    nb::object item = make(index);
    // Takes the reference over, even when it fails.
    if (PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(index), item.release().ptr()) != 0) {
      throw nb::python_error();
    }
  }
  return made;
}

nb::object places_of(const std::vector<InputPlace>& places) {
  return tuple_of(places.size(),
                  [&](std::size_t i) { return nb::make_tuple(places[i].at, places[i].nbytes); });
}

nb::object value_of(const ScannedValue& value) {
  if (is_text(value.role)) return text_of(value.text);
  return checked(PyLong_FromUnsignedLongLong(value.number));
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

std::span<unsigned char> memory_of(const BufferView& view) {
  return {static_cast<unsigned char*>(view.data()), view.size()};
}

// Dims, dims after the batch dim that the model sees or None, item size, and bytes in a region or
// -1.
using InputFields = std::tuple<std::vector<std::int64_t>, std::optional<std::vector<std::int64_t>>,
                               std::uint32_t, std::int64_t>;

TemplateRules rules_of(std::uint64_t max_batch_size, std::uint64_t alignment,
                       std::vector<InputFields> inputs) {
  TemplateRules rules{.max_batch_size = max_batch_size, .alignment = alignment, .inputs = {}};
  rules.inputs.reserve(inputs.size());
  for (auto& [dims, reshape, item_size, region_bytes] : inputs) {
    InputRule rule;
    rule.dims = std::move(dims);
    rule.reshaped = reshape.has_value();
    if (reshape) rule.reshape = std::move(*reshape);
    rule.item_size = item_size;
    rule.in_region = region_bytes >= 0;
    rule.region_bytes = rule.in_region ? static_cast<std::uint64_t>(region_bytes) : 0;
    rules.inputs.push_back(std::move(rule));
  }
  return rules;
}

// Request templates of HTTP (JSON headers) or of gRPC (protobuf messages).
class Templates {
 public:
  Templates(std::size_t limit, std::uint64_t alignment)
      : templates_(limit), alignment_(alignment) {}

  nb::object add_json(const nb::bytes& header, std::uint64_t handle, std::uint64_t max_batch_size,
                      std::vector<InputFields> inputs) {
    if (!scan_json(view_of(header), scan_)) return nb::none();
    return add(handle, max_batch_size, std::move(inputs));
  }

  nb::object add_fields(const nb::bytes& fields, const std::vector<std::uint64_t>& sizes,
                        std::uint64_t handle, std::uint64_t max_batch_size,
                        std::vector<InputFields> inputs) {
    if (!scan_fields(view_of(fields), sizes, scan_)) return nb::none();
    return add(handle, max_batch_size, std::move(inputs));
  }

  void remove(std::uint64_t handle) { templates_.remove(handle); }

  // The header is copied: a process that has the memory mapped may write to it meanwhile.
  nb::object match_json(nb::handle memory, std::uint64_t begin, std::uint64_t size,
                        std::uint64_t following) {
    const BufferView view(memory, PyBUF_WRITABLE);
    const std::span<unsigned char> bytes = memory_of(view);
    if (begin > bytes.size() || size > bytes.size() - begin || size > kLongestScanned) {
      return nb::none();
    }
    const std::uint64_t start = begin + size;
    if (following > bytes.size() - start) return nb::none();
    header_.assign(reinterpret_cast<const char*>(bytes.data() + begin),
                   static_cast<std::size_t>(size));
    if (!scan_json(header_, scan_) || !templates_.match(scan_, matched_)) return nb::none();
    if (matched_.end != following || !strings_fit(bytes.subspan(start))) return nb::none();
    const std::optional<std::uint64_t> moved = align_inputs(bytes, start, matched_.places);
    if (!moved) return nb::none();
    return nb::make_tuple(matched_.handle, text_of(scan_.id), bytes_of(matched_.dims),
                          places_of(matched_.places), matched_.batch_size, *moved, others());
  }

  // A whole message; its inputs are copied by `copy_inputs`.
  nb::object match_message(const nb::bytes& message) {
    const std::string_view bytes = view_of(message);
    if (!scan_message(bytes, scan_, offsets_) || !templates_.match(scan_, matched_)) {
      return nb::none();
    }
    pieces_.clear();
    for (std::size_t i = 0; i < matched_.places.size(); ++i) {
      const InputPlace& place = matched_.places[i];
      pieces_.insert(pieces_.end(), {offsets_[i], place.at, place.nbytes});
      const std::string_view content = bytes.substr(static_cast<std::size_t>(offsets_[i]),
                                                    static_cast<std::size_t>(place.nbytes));
      if (!strings_fit(place,
                       {reinterpret_cast<const unsigned char*>(content.data()), content.size()})) {
        return nb::none();
      }
    }
    return nb::make_tuple(matched_.handle, text_of(scan_.id), bytes_of(matched_.dims),
                          places_of(matched_.places), matched_.batch_size, matched_.nbytes,
                          others(), matched_.end, bytes_of(pieces_));
  }

  // The fields of a message whose raw contents have been received into memory.
  nb::object match_fields(const nb::bytes& fields, const std::vector<std::uint64_t>& sizes,
                          const std::vector<std::uint64_t>& offsets, nb::handle memory) {
    if (!scan_fields(view_of(fields), sizes, scan_) || !templates_.match(scan_, matched_)) {
      return nb::none();
    }
    const BufferView view(memory, PyBUF_SIMPLE);
    const std::span<unsigned char> bytes = memory_of(view);
    for (std::size_t i = 0; i < matched_.places.size(); ++i) {
      // Where they are not received in their places, they have to be copied there first.
      if (i >= offsets.size() || offsets[i] != matched_.places[i].at) return nb::none();
    }
    if (!strings_fit(bytes)) return nb::none();
    return nb::make_tuple(matched_.handle, bytes_of(matched_.dims), places_of(matched_.places),
                          matched_.batch_size, others());
  }

  [[nodiscard]] std::size_t count() const { return templates_.size(); }
  [[nodiscard]] std::size_t bytes() const { return templates_.bytes(); }

 private:
  nb::object add(std::uint64_t handle, std::uint64_t max_batch_size,
                 std::vector<InputFields> inputs) {
    std::vector<std::uint64_t> evicted;
    if (!templates_.add(scan_, handle, rules_of(max_batch_size, alignment_, std::move(inputs)),
                        evicted)) {
      return nb::none();
    }
    nb::object others = tuple_of(scan_.others.size(), [&](std::size_t i) {
      const ScannedValue& value = scan_.others[i];
      return nb::make_tuple(static_cast<int>(value.role), value.owner, text_of(value.name));
    });
    return nb::make_tuple(evicted, std::move(others), scan_.outputs);
  }

  static bool strings_fit(const InputPlace& place, std::span<const unsigned char> content) {
    return place.item_size != 0 || holds_strings(content, place.strings);
  }

  // Whether the BYTES inputs in memory that begins where the first place does are what they have to
  // be.
  bool strings_fit(std::span<const unsigned char> memory) const {
    for (const InputPlace& place : matched_.places) {
      if (place.at > memory.size() || place.nbytes > memory.size() - place.at) return false;
      if (!strings_fit(place, memory.subspan(static_cast<std::size_t>(place.at),
                                             static_cast<std::size_t>(place.nbytes)))) {
        return false;
      }
    }
    return true;
  }

  nb::object others() const {
    if (scan_.others.empty()) return nb::none();
    return tuple_of(scan_.others.size(), [&](std::size_t i) { return value_of(scan_.others[i]); });
  }

  RequestTemplates templates_;
  std::uint64_t alignment_;
  std::string header_;
  RequestScan scan_;
  MatchedRequest matched_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> pieces_;
};

// Each piece is where it begins in the source, where in memory, and its size.
void copy_pieces(const nb::bytes& source, const nb::bytes& pieces, nb::handle memory) {
  constexpr std::size_t kNumber = sizeof(std::uint64_t);
  const std::string_view from = view_of(source);
  const BufferView view(memory, PyBUF_WRITABLE);
  const std::span<unsigned char> to = memory_of(view);
  for (std::size_t at = 0; at + 3 * kNumber <= pieces.size(); at += 3 * kNumber) {
    const char* piece = pieces.c_str() + at;
    const auto begin = get_number<std::uint64_t>(piece);
    const auto there = get_number<std::uint64_t>(piece + kNumber);
    const auto nbytes = get_number<std::uint64_t>(piece + 2 * kNumber);
    if (begin > from.size() || nbytes > from.size() - begin || there > to.size() ||
        nbytes > to.size() - there) {
      throw nb::value_error("a piece does not fit");
    }
    if (nbytes != 0) std::memcpy(to.data() + there, from.data() + begin, nbytes);
  }
}

}  // namespace

void bind_templates(nb::module_& module) {
  nb::class_<Templates>(module, "RequestTemplates")
      .def(nb::init<std::size_t, std::uint64_t>())
      .def("add_json", &Templates::add_json)
      .def("add_fields", &Templates::add_fields)
      .def("remove", &Templates::remove)
      .def("match_json", &Templates::match_json)
      .def("match_message", &Templates::match_message)
      .def("match_fields", &Templates::match_fields)
      .def("__len__", &Templates::count)
      .def_prop_ro("nbytes", &Templates::bytes);
  module.def("copy_pieces", &copy_pieces);
}

}  // namespace gpubridge
