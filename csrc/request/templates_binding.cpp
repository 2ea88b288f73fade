#include "request/templates_binding.h"

#include "buffer_view.h"
#include "ipc/infer_request_binding.h"
#include "python_object.h"
#include "request/scan.h"

namespace gpubridge {
namespace {

// Of inputs in a slot of their own.
constexpr std::size_t kAlignment = 64;

std::span<unsigned char> memory_of(const BufferView& view) {
  return {static_cast<unsigned char*>(view.data()), view.size()};
}

TemplateRules rules_of(std::uint64_t max_batch_size, std::uint64_t alignment,
                       std::vector<InputFields> inputs) {
  TemplateRules rules{.max_batch_size = max_batch_size, .alignment = alignment, .inputs = {}};
  rules.inputs.reserve(inputs.size());
  for (auto& [dims, reshape, item_size, region_bytes, datatype] : inputs) {
    InputRule rule;
    rule.dims = std::move(dims);
    rule.reshaped = reshape.has_value();
    if (reshape) rule.reshape = std::move(*reshape);
    rule.item_size = item_size;
    if (datatype) rule.json = json_type(*datatype);
    rule.in_region = region_bytes >= 0;
    rule.region_bytes = rule.in_region ? static_cast<std::uint64_t>(region_bytes) : 0;
    rules.inputs.push_back(std::move(rule));
  }
  return rules;
}

// More bytes of strings are a worker's to check (gpubridge/protocol/body.py).
constexpr std::size_t kLongStrings = std::size_t{32} << 20U;

bool strings_fit(const InputPlace& place, std::span<const unsigned char> content) {
  return place.item_size != 0 ||
         (content.size() <= kLongStrings && holds_strings(content, place.strings));
}

// Copies inputs to their places: JSON values, which are packed, and binary ones. False where those
// are other strings than the shape says.
bool copy_inputs(const MatchedRequest& matched, std::string_view packed,
                 std::span<const unsigned char> binary, std::span<unsigned char> memory) {
  std::span<const unsigned char> values(reinterpret_cast<const unsigned char*>(packed.data()),
                                        packed.size());
  auto json = matched.json.begin();
  for (std::size_t i = 0; i < matched.places.size(); ++i) {
    const InputPlace& place = matched.places[i];
    const auto size = static_cast<std::size_t>(place.nbytes);
    const bool is_json = json != matched.json.end() && json->place == i;
    std::span<const unsigned char>& from = is_json ? values : binary;
    if (size > from.size()) return false;
    const auto to = memory.subspan(static_cast<std::size_t>(place.at), size);
    if (size != 0) std::memcpy(to.data(), from.data(), size);
    from = from.subspan(size);
    if (is_json) {
      ++json;
      continue;
    }
    // In the copy: a process that has the body mapped may write to it meanwhile.
    if (!strings_fit(place, to)) return false;
  }
  return true;
}

// The shapes of a request's inputs by their names, for the schedulers that ask: those of the first
// request of its template, with its own dims.
class RequestShapes {
 public:
  RequestShapes(nb::object first, const nb::bytes& dims) : first_(std::move(first)), dims_(dims) {}

  [[nodiscard]] nb::object iterate() const {
    const std::string_view bytes = view_of(dims_);
    std::size_t at = 0;
    nb::list shapes;
    for (const nb::handle named : first_) {
      const nb::object dims = tuple_of(nb::len(nb::object(named[1])), [&](std::size_t) {
        std::int64_t dim = 0;
        if (bytes.size() - at < sizeof dim) throw nb::value_error("expected dims of each input");
        std::memcpy(&dim, bytes.data() + at, sizeof dim);
        at += sizeof dim;
        return nb::object(nb::int_(dim));
      });
      shapes.append(nb::make_tuple(named[0], dims));
    }
    return nb::iter(shapes);
  }

 private:
  nb::object first_;
  nb::bytes dims_;
};

template <AttributeName... Names>
void copy_attributes(nb::handle from, nb::handle to) {
  (set_attribute<Names>(to, attribute<Names>(from)), ...);
}

// The options of a request with the shapes of another; `form` is that of its template.
nb::object with_shapes(const nb::object& form, const nb::object& given, const nb::object& dims) {
  const nb::object first = attribute<"options">(form);
  auto* const type = reinterpret_cast<PyTypeObject*>(given.type().ptr());
  const auto create = reinterpret_cast<newfunc>(PyType_GetSlot(type, Py_tp_new));
  nb::object options = checked(create(type, nb::tuple().ptr(), nullptr));
  copy_attributes<"priority", "timeout_us", "correlation_id", "start", "end">(given, options);
  set_attribute<"shape_id">(options, nb::none());
  set_attribute<"shapes">(
      options, nb::cast(RequestShapes(attribute<"shapes">(first), nb::borrow<nb::bytes>(dims))));
  return options;
}

// Texts of one request that a template keeps, in case the next one has the same.
constexpr std::size_t kKeptTexts = 1024;

std::size_t text_bytes(const std::vector<ScannedValue>& values) {
  std::size_t nbytes = 0;
  for (const ScannedValue& value : values) nbytes += value.text.size();
  return nbytes;
}

bool same_places(const std::vector<InputPlace>& some, const std::vector<InputPlace>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const InputPlace& one, const InputPlace& other) {
                      return one.at == other.at && one.nbytes == other.nbytes;
                    });
}

}  // namespace

// -- adding ---------------------------------------------------------------------------------------

void PythonTemplates::add(std::uint64_t max_batch_size, std::vector<InputFields> inputs,
                          nb::handle given) {
  const nb::object varying = tuple_of(scan_.others.size(), [&](std::size_t i) {
    const ScannedValue& value = scan_.others[i];
    return nb::object(
        nb::make_tuple(static_cast<int>(value.role), value.owner, text_object(value.name)));
  });
  if (!nb::cast<bool>(attribute<"vary">(given)(varying, scan_.outputs))) return;
  templates_.add(scan_, rules_of(max_batch_size, alignment_, std::move(inputs)),
                 std::make_shared<KnownTemplate>(nb::borrow(given)));
}

void PythonTemplates::remove_if(nb::handle is_gone) {
  templates_.remove_if([&](const std::shared_ptr<void>& owner) {
    return nb::cast<bool>(is_gone(static_cast<KnownTemplate*>(owner.get())->given));
  });
}

// -- matching -------------------------------------------------------------------------------------

MadeRequest PythonTemplates::take_json(const RequestTarget& target, std::uint64_t begin,
                                       std::uint64_t size, std::uint64_t following) {
  MadeRequest made = match_json(target, begin, size, following);
  for (std::string* const text : {&header_, &packed_}) {
    // What one long request needed is not kept for the next.
    if (text->capacity() > kLongestScanned) *text = {};
  }
  return made;
}

// The header is copied: a process that has the memory mapped may write to it meanwhile.
MadeRequest PythonTemplates::match_json(const RequestTarget& target, std::uint64_t begin,
                                        std::uint64_t size, std::uint64_t following) {
  const BufferView view(attribute<"memory">(target.slot), PyBUF_WRITABLE);
  const std::span<unsigned char> bytes = memory_of(view);
  if (begin > bytes.size() || size > bytes.size() - begin || size > kLongestJson) return {};
  const std::uint64_t start = begin + size;
  if (following > bytes.size() - start) return {};
  header_.assign(reinterpret_cast<const char*>(bytes.data() + begin),
                 static_cast<std::size_t>(size));
  if (!scan(header_) || !templates_.match(scan_, matched_)) return {};
  if (!matched_.json.empty()) {
    return pack(target, bytes.subspan(start, static_cast<std::size_t>(following)));
  }
  if (matched_.end != following || !strings_fit(bytes.subspan(start))) return {};
  const std::optional<std::uint64_t> moved = align_inputs(bytes, start, matched_.places);
  if (!moved) return {};
  return make({target.slot, target.on_done, target.copied + *moved}, start, scan_.id);
}

MadeRequest PythonTemplates::pack(const RequestTarget& target,
                                  std::span<const unsigned char> binary) {
  // More is copied in turns of the event loop (gpubridge/protocol/body.py).
  if (binary.size() > kLongStrings) return {};
  packed_.clear();
  // JSON values first, which say how much memory is needed.
  for (const JsonInput& json : matched_.json) {
    const std::size_t begin = packed_.size();
    const auto count = static_cast<std::size_t>(json.count);
    if (json.values.starts_with('[') ? !pack_values(json.values, json.type, count, packed_)
                                     : !pack_value(json.values, json.type, packed_)) {
      return {};
    }
    matched_.places[json.place].nbytes = packed_.size() - begin;
  }
  std::uint64_t nbytes = 0;
  std::uint64_t end = 0;
  for (InputPlace& place : matched_.places) {
    nbytes += place.nbytes;
    if (nbytes > packed_.size() + binary.size()) return {};
    place.at = (end + kAlignment - 1) / kAlignment * kAlignment;
    end = place.at + place.nbytes;
  }
  if (nbytes != packed_.size() + binary.size()) return {};
  const nb::object slot = attribute<"allocate">(target.arena)(std::max<std::uint64_t>(end, 1));
  MadeRequest made;
  try {
    const BufferView view(attribute<"memory">(slot), PyBUF_WRITABLE);
    if (copy_inputs(matched_, packed_, binary, memory_of(view))) {
      made = make({slot, target.on_done, target.copied + nbytes}, 0, scan_.id);
    }
  } catch (...) {
    attribute<"free">(target.arena)(slot);
    throw;
  }
  const bool fits = made.known != nullptr;
  const nb::object charged = attribute<"body">(target.slot);
  attribute<"free">(target.arena)(fits ? target.slot : slot);
  if (fits && !charged.is_none()) attribute<"charge">(slot)(charged);
  return made;
}

MadeRequest PythonTemplates::take_message(std::string_view message, nb::handle on_done) {
  if (!scan_message(message, scan_, offsets_) || !templates_.match(scan_, matched_)) return {};
  const auto content = [&](std::size_t index) {
    const auto bytes = message.substr(static_cast<std::size_t>(offsets_[index]),
                                      static_cast<std::size_t>(matched_.places[index].nbytes));
    return std::span(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  };
  for (std::size_t i = 0; i < matched_.places.size(); ++i) {
    if (!gpubridge::strings_fit(matched_.places[i], content(i))) return {};
  }
  const auto& known = *static_cast<const KnownTemplate*>(matched_.owner.get());
  const nb::object allocate = attribute<"allocate">(attribute<"arena">(known.given));
  const nb::object slot = allocate(std::max<std::uint64_t>(matched_.end, 1));
  const BufferView view(attribute<"memory">(slot), PyBUF_WRITABLE);
  for (std::size_t i = 0; i < matched_.places.size(); ++i) {
    const std::span<const unsigned char> from = content(i);
    const std::span<unsigned char> to =
        memory_of(view).subspan(static_cast<std::size_t>(matched_.places[i].at), from.size());
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
  }
  return make({slot, on_done, matched_.nbytes}, 0, scan_.id);
}

MadeRequest PythonTemplates::take_fields(const RequestTarget& target, std::string_view fields,
                                         std::string_view identifier,
                                         const std::vector<std::uint64_t>& sizes,
                                         const std::vector<std::uint64_t>& offsets) {
  if (!scan_fields(fields, sizes, scan_) || !templates_.match(scan_, matched_)) return {};
  for (std::size_t i = 0; i < matched_.places.size(); ++i) {
    // Where they are not received in their places, they have to be copied there first.
    if (i >= offsets.size() || offsets[i] != matched_.places[i].at) return {};
  }
  const BufferView view(attribute<"memory">(target.slot), PyBUF_SIMPLE);
  if (!strings_fit(memory_of(view))) return {};
  return make(target, 0, identifier);
}

// Checks the elements of BYTES inputs, in memory that begins where the first place does.
bool PythonTemplates::strings_fit(std::span<const unsigned char> memory) const {
  return std::all_of(matched_.places.begin(), matched_.places.end(), [&](const InputPlace& place) {
    return place.at <= memory.size() && place.nbytes <= memory.size() - place.at &&
           gpubridge::strings_fit(place, memory.subspan(static_cast<std::size_t>(place.at),
                                                        static_cast<std::size_t>(place.nbytes)));
  });
}

// -- the request ----------------------------------------------------------------------------------

MadeRequest PythonTemplates::make(const RequestTarget& target, std::uint64_t start,
                                  std::string_view identifier) {
  MadeRequest made{std::static_pointer_cast<KnownTemplate>(std::exchange(matched_.owner, nullptr)),
                   {},
                   nb::none()};
  KnownTemplate& known = *made.known;
  const std::string_view dims(reinterpret_cast<const char*>(matched_.dims.data()),
                              matched_.dims.size() * sizeof(std::int64_t));
  const bool same_dims = view_of(nb::borrow<nb::bytes>(known.dims)) == dims;
  if (!same_dims) known.dims = bytes_object(dims);
  if (known.place_objects.is_none() || !same_places(known.places, matched_.places)) {
    known.places = matched_.places;
    known.place_objects = tuple_of(known.places.size(), [&](std::size_t i) {
      return nb::object(nb::make_tuple(known.places[i].at, known.places[i].nbytes));
    });
  }
  nb::object context = known.context;
  nb::object options = known.options;
  const nb::object values = others();
  if (!known.values.equal(values)) {
    const nb::object varied = attribute<"varied">(known.given)(known.dims, values);
    context = varied[0];
    options = varied[1];
    known.values = nb::none();
    if (text_bytes(scan_.others) <= kKeptTexts) {
      known.values = values;
      known.context = context;
      known.options = options;
    }
  } else if (!same_dims) {
    options = known.options = with_shapes(known.form, known.options, known.dims);
  }
  if (known.shared) made.regions = attribute<"regions">(known.given)(values);
  const nb::object id = text_object(identifier);
  made.request = make_infer_request({.signature = known.signature.ptr(),
                                     .slot = target.slot.ptr(),
                                     .places = known.place_objects.ptr(),
                                     .on_done = target.on_done.ptr(),
                                     .identifier = id.ptr(),
                                     .context = context.ptr(),
                                     .options = options.ptr(),
                                     .dims = known.dims.ptr(),
                                     .start = static_cast<long long>(start),
                                     .copied = static_cast<long long>(target.copied),
                                     .batch_size = static_cast<long long>(matched_.batch_size)});
  return made;
}

nb::object PythonTemplates::others() const {
  if (scan_.others.empty()) return nb::none();
  return tuple_of(scan_.others.size(), [&](std::size_t i) {
    const ScannedValue& value = scan_.others[i];
    if (is_text(value.role)) return text_object(value.text);
    return checked(PyLong_FromUnsignedLongLong(value.number));
  });
}

// A template that a request has is shown by none: the request is not for the collector alone.
int PythonTemplates::traverse(visitproc visit, void* arg) const {
  int result = 0;
  templates_.visit([&](const std::shared_ptr<void>& owner) {
    if (result == 0 && owner.use_count() == 1) {
      result = static_cast<const KnownTemplate*>(owner.get())->traverse(visit, arg);
    }
  });
  return result;
}

void PythonTemplates::clear() {
  std::vector<std::shared_ptr<void>> dropped;
  templates_.visit([&](const std::shared_ptr<void>& owner) { dropped.push_back(owner); });
  templates_.remove_if([](const std::shared_ptr<void>&) { return true; });
}

void bind_templates(nb::module_& module) {
  using Self = PythonTemplates;
  nb::class_<RequestShapes>(module, "RequestShapes")
      .def(nb::init<nb::object, nb::bytes>())
      .def("__iter__", &RequestShapes::iterate);
  nb::class_<Self>(module, "RequestTemplates", nb::type_slots(collected<Self>()))
      .def(nb::init<std::size_t, std::uint64_t, std::optional<std::vector<std::string>>>(),
           nb::arg(), nb::arg(), nb::arg().none() = nb::none())
      .def("add_json", &Self::add_json)
      .def("add_fields", &Self::add_fields)
      .def("remove_if", &Self::remove_if)
      .def("take_json",
           [](Self& self, nb::handle slot, std::uint64_t begin, std::uint64_t header,
              std::uint64_t following, nb::handle on_done, std::uint64_t copied, nb::handle arena) {
             return self.take_json({slot, on_done, copied, arena}, begin, header, following)
                 .as_python();
           })
      .def("take_message",
           [](Self& self, const nb::bytes& message, nb::handle on_done) {
             return self.take_message(view_of(message), on_done).as_python();
           })
      .def("__len__", &Self::count)
      .def_prop_ro("nbytes", &Self::bytes);
}

}  // namespace gpubridge
