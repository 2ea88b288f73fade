// Records as Python sees them: gpubridge/transport/records.py says what the parts mean.
#include "ipc/records_binding.h"

#include "dataplane.h"
#include "ipc/context_binding.h"
#include "python_object.h"

namespace gpubridge {
namespace {

constexpr std::size_t kSignaturesKept = 4096;
constexpr std::size_t kContextsKept = 512;
constexpr std::size_t kShortContext = 256;
constexpr std::size_t kFieldsOfRef = 4;

}  // namespace

RecordReader::RecordReader(nb::object parse_signature, nb::object codec, nb::type_object record)
    : parse_signature_(std::move(parse_signature)),
      codec_(std::move(codec)),
      record_(std::move(record)),
      new_tuple_(reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new))) {}

nb::tuple RecordReader::read(const nb::bytes& message, std::size_t at, std::size_t count,
                             bool named) {
  nb::list records;
  for (std::size_t index = 0; index < count; ++index) {
    records.append(record(RecordView::read(view_of(message), at, named)));
  }
  return nb::make_tuple(std::move(records), at);
}

nb::object RecordReader::record(const RecordView& view) {
  KnownSignature& known = signature(view.signature());
  nb::object context = this->context(view.context());
  nb::object identifier = text_object(view.identifier());
  nb::object shapes = this->shapes(view, known);
  const nb::tuple fields =
      nb::make_tuple(view.ticket(), known.signature, std::move(shapes), std::move(context),
                     view.word(), std::move(identifier), refs(view));
  const nb::tuple arguments = nb::make_tuple(fields);
  return checked(
      new_tuple_(reinterpret_cast<PyTypeObject*>(record_.ptr()), arguments.ptr(), nullptr));
}

RecordReader::Tensors RecordReader::tensors(const RecordView& view) {
  KnownSignature& known = signature(view.signature());
  nb::object shapes = this->shapes(view, known);
  return {known.kinds, known.signature, std::move(shapes)};
}

RecordReader::KnownSignature& RecordReader::signature(std::string_view raw) {
  const auto found = known_.find(raw);
  if (found != known_.end()) return found->second;
  KnownSignature made{parse_signature_(bytes_object(raw)), {}, {}, {}};
  const auto tensors = nb::cast<nb::tuple>(made.signature[0]);
  for (nb::handle spec : tensors) {
    const nb::object itemsize = spec[3];
    made.kinds.push_back({nb::cast<std::uint32_t>(spec[2]),
                          itemsize.is_none() ? 0 : nb::cast<std::uint32_t>(itemsize)});
  }
  if (known_.size() >= kSignaturesKept) known_.clear();
  return known_.emplace(std::string(raw), std::move(made)).first->second;
}

nb::object RecordReader::context(std::string_view raw) {
  const auto found = contexts_.find(raw);
  if (found != contexts_.end()) return found->second;
  nb::object context = nb::cast<ContextCodec&>(codec_).decode(raw);
  if (raw.size() > kShortContext) return context;
  if (contexts_.size() >= kContextsKept) contexts_.clear();
  return contexts_.emplace(raw, std::move(context)).first->second;
}

nb::object RecordReader::shapes(const RecordView& view, KnownSignature& known) {
  if (known.shapes.is_valid() && known.dims == view.dims() &&
      known.kinds.size() == view.tensors()) {
    return known.shapes;
  }
  view.check(known.kinds);
  std::size_t dim = 0;
  const auto shape_of = [&](const TensorKind& kind) {
    return tuple_of(kind.rank,
                    [&](std::size_t) { return checked(PyLong_FromLongLong(view.dim(dim++))); });
  };
  nb::object shapes =
      tuple_of(known.kinds.size(), [&](std::size_t index) { return shape_of(known.kinds[index]); });
  known.dims = view.dims();
  known.shapes = shapes;
  return shapes;
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
    const auto field = [&](std::size_t number) {
      return nb::object(refs[kFieldsOfRef * tensor + number]);
    };
    at = write_ref(at, {nb::cast<std::uint64_t>(field(0)), nb::cast<std::uint64_t>(field(1)),
                        nb::cast<std::uint64_t>(field(2)), nb::cast<std::uint32_t>(field(3))});
  }
  return record;
}

}  // namespace

void bind_records(nb::module_& module) {
  nb::class_<RecordReader>(module, "RecordReader")
      .def(nb::init<nb::object, nb::object, nb::type_object>())
      .def("read", &RecordReader::read);
  module.def("encode_record", &encode_record, nb::arg("ticket"), nb::arg("signature"),
             nb::arg("dims"), nb::arg("refs"), nb::arg("word") = 0,
             nb::arg("identifier") = nb::bytes(""), nb::arg("context") = nb::bytes(""));
}

}  // namespace gpubridge
