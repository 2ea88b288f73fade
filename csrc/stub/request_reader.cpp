#include "stub/request_reader.h"

#include <utility>

#include "ipc/context.h"
#include "little_endian.h"
#include "stub/arrival.h"
#include "stub/heap_type.h"
#include "stub/request.h"
#include "stub/tensor.h"

namespace nb = nanobind;

namespace gpubridge::stub {
namespace {

constexpr std::size_t kFormsKept = 4096;

PyTypeObject* type_of(const nb::type_object& type) {
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

bool says_only_shared(std::string_view context) {
  return context.size() == sizeof(std::uint32_t) &&
         get_number<std::uint32_t>(context.data()) == context_bit(ContextField::kShared);
}

}  // namespace

TensorReader::TensorReader(nb::object parse_signature, nb::object outputs, nb::type_object tensor,
                           LeaseBook& book)
    : parse_signature_(std::move(parse_signature)),
      outputs_(std::move(outputs)),
      tensor_(std::move(tensor)),
      book_(book) {}

RecordForm& TensorReader::form(const RecordView& record) {
  auto found = known_.find(record.signature());
  if (found == known_.end()) {
    const std::string_view raw = record.signature();
    const nb::object signature = parse_signature_(nb::bytes(raw.data(), raw.size()));
    RecordForm made;
    for (nb::handle spec : nb::cast<nb::tuple>(signature[0])) {
      const nb::object itemsize = spec[3];
      made.names.push_back(spec[0]);
      made.datatypes.push_back(spec[1]);
      made.kinds.push_back({nb::cast<std::uint32_t>(spec[2]),
                            itemsize.is_none() ? 0 : nb::cast<std::uint32_t>(itemsize)});
    }
    const nb::object requested = signature[1];
    made.wanted = nb::len(requested) == 0 ? outputs_ : checked(PyFrozenSet_New(requested.ptr()));
    if (known_.size() >= kFormsKept) known_.clear();
    found = known_.emplace(std::string(raw), std::move(made)).first;
  }
  take_shapes(record, found->second);
  return found->second;
}

void TensorReader::take_shapes(const RecordView& record, RecordForm& form) const {
  if (form.dims == record.dims() && form.shapes.size() == record.tensors()) return;
  record.check(form.kinds);
  form.shapes.clear();
  std::size_t dim = 0;
  for (const TensorKind& kind : form.kinds) {
    nb::object shape = checked(PyTuple_New(static_cast<Py_ssize_t>(kind.rank)));
    for (std::uint32_t axis = 0; axis < kind.rank; ++axis) {
      nb::object value = checked(PyLong_FromLongLong(record.dim(dim++)));
      // Takes the item over, even when it fails.
      if (PyTuple_SetItem(shape.ptr(), axis, value.release().ptr()) != 0) throw nb::python_error();
    }
    form.shapes.push_back(std::move(shape));
  }
  form.dims = record.dims();
}

bool TensorReader::exists(const RecordView& record) const {
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    if (!book_.exists(place_of(record.ref(index)))) return false;
  }
  return true;
}

nb::object TensorReader::tensors(const RecordView& record, const RecordForm& form, bool read_only) {
  places_.clear();
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    places_.push_back(place_of(record.ref(index)));
  }
  std::vector<nb::object> lent = book_.lend(places_, read_only);
  nb::object tensors = checked(PyList_New(static_cast<Py_ssize_t>(lent.size())));
  for (std::size_t index = 0; index < lent.size(); ++index) {
    nb::object tensor =
        received_tensor(type_of(tensor_), form.names[index], form.datatypes[index],
                        form.shapes[index], std::move(lent[index]), &places_[index]);
    if (PyList_SetItem(tensors.ptr(), static_cast<Py_ssize_t>(index), tensor.release().ptr()) !=
        0) {
      throw nb::python_error();
    }
  }
  return tensors;
}

RequestReader::RequestReader(TensorReader reader, nb::object make_origin, ModelWords model,
                             nb::type_object request)
    : TensorReader(std::move(reader)),
      make_origin_(std::move(make_origin)),
      model_(std::move(model)),
      request_(std::move(request)) {}

bool RequestReader::is_plain(const RecordView& record) const {
  return (record.context().empty() || says_only_shared(record.context())) && exists(record);
}

nb::object RequestReader::arrival(nb::handle message, std::size_t at) const {
  return make_arrival(message, at, make_origin_);
}

nb::object RequestReader::request(const RecordView& record, const RecordForm& form,
                                  nb::handle arrival) {
  nb::object inputs = tensors(record, form, !record.context().empty());
  const std::string_view id = record.identifier();
  nb::object identifier;
  if (!id.empty()) {
    identifier =
        checked(PyUnicode_DecodeUTF8(id.data(), static_cast<Py_ssize_t>(id.size()), nullptr));
  }
  return received_request(type_of(request_), {std::move(inputs), std::move(identifier), form.wanted,
                                              model_.name, model_.version, nb::borrow(arrival)});
}

}  // namespace gpubridge::stub
