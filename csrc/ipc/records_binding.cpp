// Records as Python sees them: gpubridge/transport/records.py says what the parts mean.
#include "ipc/records_binding.h"

#include "ipc/context_binding.h"
#include "python_object.h"

namespace gpubridge {
namespace {

constexpr std::size_t kSignaturesKept = 4096;
constexpr std::size_t kFieldsOfRef = 4;

}  // namespace

RecordForm& RecordForms::of(const RecordView& view) {
  auto found = known_.find(view.signature());
  if (found == known_.end()) {
    RecordForm made;
    made.signature = parse_signature_(bytes_object(view.signature()));
    for (nb::handle spec : nb::cast<nb::tuple>(made.signature[0])) {
      const nb::object itemsize = spec[3];
      made.kinds.push_back({nb::cast<std::uint32_t>(spec[2]),
                            itemsize.is_none() ? 0 : nb::cast<std::uint32_t>(itemsize)});
    }
    const nb::object requested = made.signature[1];
    made.wanted = nb::len(requested) == 0 ? outputs_ : checked(PyFrozenSet_New(requested.ptr()));
    if (known_.size() >= kSignaturesKept) known_.clear();
    found = known_.emplace(view.signature(), std::move(made)).first;
  }

  RecordForm& form = found->second;
  if (form.shapes.is_valid() && form.dims == view.dims() && form.kinds.size() == view.tensors()) {
    return form;
  }
  view.check(form.kinds);
  std::size_t dim = 0;
  const auto shape_of = [&](const TensorKind& kind) {
    return tuple_of(kind.rank,
                    [&](std::size_t) { return checked(PyLong_FromLongLong(view.dim(dim++))); });
  };
  form.shapes =
      tuple_of(form.kinds.size(), [&](std::size_t index) { return shape_of(form.kinds[index]); });
  form.dims = view.dims();
  return form;
}

RecordReader::RecordReader(nb::object parse_signature, nb::object codec, nb::type_object record)
    : forms_(std::move(parse_signature), nb::none()),
      codec_(std::move(codec)),
      record_(std::move(record)) {}

nb::tuple RecordReader::read(const nb::bytes& message, std::size_t at, std::size_t count,
                             bool named) {
  nb::list records;
  for (std::size_t index = 0; index < count; ++index) {
    records.append(record(RecordView::read(view_of(message), at, named)));
  }
  return nb::make_tuple(std::move(records), at);
}

nb::object RecordReader::record(const RecordView& view) {
  const RecordForm& form = forms_.of(view);
  const nb::object signature = form.signature;
  const nb::object shapes = form.shapes;
  const nb::object context = nb::cast<ContextCodec&>(codec_).decode(view.context());
  return named_tuple(record_, view.ticket(), signature, shapes, context, view.word(),
                     text_object(view.identifier()), refs(view));
}

nb::object RecordReader::refs(const RecordView& view) {
  std::vector<TensorRefItem> refs;
  refs.reserve(view.tensors());
  for (std::size_t index = 0; index < view.tensors(); ++index) refs.push_back({view.ref(index)});
  return TensorRefs::make(std::move(refs));
}

namespace {

// Fields of references come flat: region, offset, size, lease of each, one after another.
nb::object encode_record(std::uint32_t ticket, const nb::bytes& signature, const nb::bytes& dims,
                         nb::handle refs, std::uint32_t word, const nb::bytes& identifier,
                         const nb::bytes& context) {
  const std::size_t tensors = nb::len(refs) / kFieldsOfRef;
  const RecordParts parts{ticket,
                          word,
                          static_cast<std::uint32_t>(tensors),
                          view_of(signature),
                          view_of(context),
                          view_of(identifier),
                          view_of(dims)};
  nb::object record =
      checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(parts.size())));
  char* at = parts.write(PyBytes_AsString(record.ptr()));
  for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
    at = write_ref(at, ref_at(refs, kFieldsOfRef * tensor));
  }
  return record;
}

}  // namespace

void bind_context(nb::module_& module) {
  nb::class_<ContextCodec>(module, "ContextCodec")
      .def(nb::init<nb::type_object, nb::object, nb::handle, nb::object, nb::object>())
      .def("encode", &ContextCodec::encode)
      .def("decode",
           [](ContextCodec& self, const nb::bytes& raw) { return self.decode(view_of(raw)); });
  nb::list fields;
  for (const ContextFieldSpec& spec : kContextFields) {
    constexpr std::array kNames{"u64", "i64", "text", "json", "flag"};
    fields.append(nb::make_tuple(text_object(spec.name), nb::len(fields),
                                 kNames[static_cast<std::size_t>(spec.kind)]));
  }

  module.attr("CONTEXT_FIELDS") = fields;
}

void bind_records(nb::module_& module) {
  nb::class_<RecordReader>(module, "RecordReader")
      .def(nb::init<nb::object, nb::object, nb::type_object>())
      .def("read", &RecordReader::read);
  module.def("encode_record", &encode_record, nb::arg("ticket"), nb::arg("signature"),
             nb::arg("dims"), nb::arg("refs"), nb::arg("word") = 0,
             nb::arg("identifier") = nb::bytes(""), nb::arg("context") = nb::bytes(""));
}

}  // namespace gpubridge
