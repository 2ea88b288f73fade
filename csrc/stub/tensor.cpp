#include "stub/tensor.h"

#include "buffer_view.h"
#include "heap_type.h"
#include "ipc/records_binding.h"

namespace gpubridge::stub {
namespace {

// Python objects that the type needs; live as long as the process.
struct Known {
  PyObject* init = nullptr;       // the reference's __init__
  PyObject* kind = nullptr;       // see use_tensor_class
  PyObject* ndarray = nullptr;    // NumPy's class
  PyObject* datatypes = nullptr;  // dict: dtype -> datatype
  PyObject* dtypes = nullptr;     // dict: datatype -> dtype
  PyObject* dtype_name = PyUnicode_InternFromString("dtype");
  PyObject* strings = PyUnicode_InternFromString("BYTES");
  PyObject* view_name = PyUnicode_InternFromString("_view");
  std::vector<Py_ssize_t> dims;  // of the last array that a tensor was made of
  PyObject* shape = PyTuple_New(0);
};

Known& known() {
  static auto* const instance = new Known();
  return *instance;
}

bool is_strings(PyObject* datatype) { return PyUnicode_Compare(datatype, known().strings) == 0; }

// The shape of an array; of arrays with the same one after another, the same tuple.
nb::object shape_of(const BufferView& view) {
  Known& python = known();
  if (!std::ranges::equal(view.shape(), python.dims)) {
    nb::object shape = tuple_of(view.shape().size(), [&](std::size_t axis) {
      return checked(PyLong_FromSsize_t(view.shape()[axis]));
    });
    python.dims.assign(view.shape().begin(), view.shape().end());
    give(python.shape, std::move(shape));
  }
  return nb::borrow(python.shape);
}

// The exporter of an array's buffer; none unless that is C-contiguous.
std::optional<BufferView> contiguous(PyObject* array) {
  try {
    // Without strides: given only of C-contiguous arrays.
    return BufferView(array, PyBUF_ND);
  } catch (nb::python_error&) {
    return std::nullopt;
  }
}

void leave_to_counting(PyObject* tensor) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == known().kind) PyObject_GC_UnTrack(tensor);
}

void tell_collector(PyObject* tensor) {
  if (PyObject_GC_IsTracked(tensor) == 0) PyObject_GC_Track(tensor);
}

// Takes the usual: a name, and a C-contiguous array of numbers. False where the reference has to
// look.
bool take_usual(Tensor* tensor, PyObject* name, PyObject* array) {
  const Known& python = known();
  if (PyUnicode_CheckExact(name) == 0 || PyUnicode_GetLength(name) == 0 ||
      reinterpret_cast<PyObject*>(Py_TYPE(array)) != python.ndarray) {
    return false;
  }
  const nb::object dtype = checked(PyObject_GetAttr(array, python.dtype_name));
  PyObject* datatype = PyDict_GetItemWithError(python.datatypes, dtype.ptr());
  if (datatype == nullptr || is_strings(datatype)) {
    PyErr_Clear();
    return false;
  }
  const std::optional<BufferView> view = contiguous(array);
  if (!view) return false;
  nb::object shape = shape_of(*view);
  assign(tensor->fields[kName], name);
  assign(tensor->fields[kDatatype], datatype);
  give(tensor->fields[kShape], std::move(shape));
  assign(tensor->fields[kArray], array);
  Py_CLEAR(tensor->fields[kSource]);
  Py_CLEAR(tensor->fields[kLent]);
  tensor->placed = false;
  leave_to_counting(reinterpret_cast<PyObject*>(tensor));
  return true;
}

int initialize(PyObject* self, PyObject* args, PyObject* keywords) {
  return guarded(-1, [&] {
    if ((keywords == nullptr || PyDict_Size(keywords) == 0) && PyTuple_Size(args) == 2 &&
        take_usual(as<Tensor>(self), PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1))) {
      return 0;
    }
    return initialize_in_python(known().init, self, args, keywords);
  });
}

// Puts what was made into its field, unless another thread was first.
void keep_first(PyObject*& field, PyObject* made) {
  if (field == nullptr) {
    field = made;
  } else {
    Py_DECREF(made);
  }
}

// The memoryview of what arrived or is to be sent, or None.
PyObject* get_source(PyObject* self, void* /*unused*/) {
  auto& fields = as<Tensor>(self)->fields;
  if (fields[kSource] == nullptr && fields[kLent] != nullptr) {
    // The collector may run other threads, which set other bytes.
    const nb::object lent = nb::borrow(fields[kLent]);
    PyObject* made = PyMemoryView_FromObject(lent.ptr());
    if (made == nullptr) return nullptr;
    keep_first(fields[kSource], made);
  }
  return Py_NewRef(fields[kSource] == nullptr ? Py_None : fields[kSource]);
}

// Other bytes than those that arrived: their lease may end.
int set_source(PyObject* self, PyObject* value, void* /*unused*/) {
  auto& fields = as<Tensor>(self)->fields;
  assign(fields[kSource], value == Py_None ? nullptr : value);
  Py_CLEAR(fields[kLent]);
  tell_collector(self);
  return 0;
}

PyObject* get_array(PyObject* self, void* /*unused*/) {
  PyObject* array = as<Tensor>(self)->fields[kArray];
  return Py_NewRef(array == nullptr ? Py_None : array);
}

int set_array(PyObject* self, PyObject* value, void* /*unused*/) {
  assign(as<Tensor>(self)->fields[kArray], value == Py_None ? nullptr : value);
  tell_collector(self);
  return 0;
}

PyObject* get_place(PyObject* self, void* /*unused*/) {
  const auto* tensor = as<Tensor>(self);
  if (!tensor->placed) return Py_NewRef(Py_None);
  return guarded(static_cast<PyObject*>(nullptr), [&] {
    const TensorRef& place = tensor->place;
    return nb::make_tuple(place.region, place.offset, place.nbytes, place.lease).release().ptr();
  });
}

int set_place(PyObject* self, PyObject* value, void* /*unused*/) {
  auto* tensor = as<Tensor>(self);
  if (value == nullptr || value == Py_None) {
    tensor->placed = false;
    return 0;
  }
  return guarded(-1, [&] {
    tensor->place = ref_at(value);
    tensor->placed = true;
    return 0;
  });
}

// An array over the bytes that arrived, which refers to what exports them; none where the data is
// of another kind, or no array can be made so.
PyObject* array_of_lent(const Tensor* tensor) {
  const auto& fields = tensor->fields;
  if (fields[kLent] == nullptr || is_strings(fields[kDatatype])) return nullptr;
  PyObject* dtype = PyDict_GetItemWithError(known().dtypes, fields[kDatatype]);
  const nb::object shape = nb::borrow(fields[kShape]);
  const nb::object lent = nb::borrow(fields[kLent]);
  PyObject* array = dtype == nullptr ? nullptr
                                     : PyObject_CallFunctionObjArgs(known().ndarray, shape.ptr(),
                                                                    dtype, lent.ptr(), nullptr);
  if (array == nullptr) PyErr_Clear();
  return array;
}

PyObject* as_numpy(PyObject* self, PyObject* /*unused*/) {
  auto* tensor = as<Tensor>(self);
  PyObject*& array = tensor->fields[kArray];
  if (array == nullptr) {
    PyObject* made = array_of_lent(tensor);
    if (made == nullptr) {
      PyObject* source = get_source(self, nullptr);
      if (source == nullptr) return nullptr;
      made = PyObject_CallMethodObjArgs(self, known().view_name, source, nullptr);
      Py_DECREF(source);
      if (made == nullptr) return nullptr;
    }
    keep_first(array, made);
  }
  return Py_NewRef(array);
}

PyMethodDef methods[] = {
    // NOLINT: the C API's own form
    {"name", give_field<Tensor, kName>, METH_NOARGS, "Give the name."},
    {"shape", give_list<Tensor, kShape>, METH_NOARGS, "Give the dimensions as a new list."},
    {"as_numpy", as_numpy, METH_NOARGS, "Give the data as an array, the same one at each call."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {// NOLINT
                            {"_source", get_source, set_source, nullptr, nullptr},
                            {"_array", get_array, set_array, nullptr, nullptr},
                            {"_place", get_place, set_place, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyTypeObject* tensor_type() {
  static PyTypeObject* const type =
      fields_type<Tensor>("gpubridge._native.TensorFields",
                          {{Py_tp_init, slot(initialize)},
                           {Py_tp_methods, methods},
                           {Py_tp_members, field_members<Tensor>({"_name", "_datatype", "_shape"})},
                           {Py_tp_getset, properties}});
  return type;
}

void use_tensor_reference(nb::handle reference) {
  const nb::module_ dtypes = nb::module_::import_("gpubridge.tensor.dtypes");
  known().init = kept_attribute(reference, "__init__");
  known().ndarray = kept_attribute(nb::module_::import_("numpy"), "ndarray");
  known().datatypes = kept_attribute(dtypes, "DATATYPE_OF_DTYPE");
  known().dtypes = kept_attribute(dtypes, "DTYPE_OF_DATATYPE");
}

void use_tensor_class(nb::handle kind) { known().kind = kind.inc_ref().ptr(); }

nb::object received_tensor(PyTypeObject* kind, nb::handle name, nb::handle datatype,
                           nb::handle shape, nb::object lent, const TensorRef* place) {
  nb::object made = allocate<Tensor>(kind);
  auto* tensor = as<Tensor>(made.ptr());
  assign(tensor->fields[kName], name.ptr());
  assign(tensor->fields[kDatatype], datatype.ptr());
  assign(tensor->fields[kShape], shape.ptr());
  give(tensor->fields[kLent], std::move(lent));
  if (place != nullptr) tensor->place = *place;
  tensor->placed = place != nullptr;
  leave_to_counting(made.ptr());
  return made;
}

}  // namespace gpubridge::stub
