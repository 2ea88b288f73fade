// DLPack capsules: making, reading and consuming them. The rules of what may be imported are in
// gpubridge/tensor/dlpack.py.

#include "python_object.h"

namespace gpubridge {
namespace {

// -- the C structures of DLPack 1.x, as its public header lays them out

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

// A strided view of memory; strides count elements and may be null (C order).
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

// A consumer that knows another major version may touch nothing but `deleter`.
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};

// -- capsules

template <typename Managed>
constexpr bool kVersioned = std::is_same_v<Managed, DLManagedTensorVersioned>;
template <typename Managed>
constexpr const char* kFreshName = kVersioned<Managed> ? "dltensor_versioned" : "dltensor";
template <typename Managed>
constexpr const char* kUsedName = kVersioned<Managed> ? "used_dltensor_versioned" : "used_dltensor";

template <typename Managed>
Managed* managed_in(PyObject* capsule) {
  const char* name = kFreshName<Managed>;
  if (PyCapsule_IsValid(capsule, name) == 0) return nullptr;
  return static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
}

[[noreturn]] void refuse_capsule() {
  throw nb::value_error(
      "expected a DLPack capsule that has not been consumed, got another capsule or one that "
      "was consumed before");
}

// One exported tensor: the structure a consumer sees, its dimensions and its owner.
template <typename Managed>
struct Export {
  Managed managed{};
  std::vector<int64_t> dims;
  PyObject* owner = nullptr;

  // Called by the consumer, from any thread, with or without the GIL.
  static void release(Managed* self) {
    auto* exported = static_cast<Export*>(self->manager_ctx);
    // A consumer that outlives the interpreter gets its memory back from the process's end.
    if (Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    // A deleter may be called while an exception is on its way.
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(exported->owner);
    PyErr_Restore(type, value, trace);
    delete exported;
    PyGILState_Release(state);
  }

  // The capsule's destructor: frees the tensor unless it was consumed.
  static void discard(PyObject* capsule) {
    if (Managed* managed = managed_in<Managed>(capsule)) managed->deleter(managed);
  }
};

template <typename Managed>
nb::object make(nb::object owner, const DLTensor& tensor, std::vector<int64_t> dims,
                uint64_t flags) {
  auto exported = std::make_unique<Export<Managed>>();
  exported->dims = std::move(dims);
  exported->managed.dl_tensor = tensor;
  // Shape and strides lie one after the other in `dims`.
  exported->managed.dl_tensor.shape = exported->dims.data();
  exported->managed.dl_tensor.strides = exported->dims.data() + tensor.ndim;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = Export<Managed>::release;
  if constexpr (kVersioned<Managed>) {
    exported->managed.version = {1, 0};
    exported->managed.flags = flags;
  }
  nb::object capsule =
      checked(PyCapsule_New(&exported->managed, kFreshName<Managed>, Export<Managed>::discard));
  exported->owner = owner.release().ptr();
  exported.release();
  return capsule;
}

nb::object dims_tuple(const int64_t* dims, int32_t ndim) {
  nb::list items;
  for (int32_t axis = 0; axis < ndim; ++axis) items.append(dims[axis]);
  return nb::tuple(items);
}

nb::tuple fields(const DLTensor& tensor, uint64_t flags) {
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    throw nb::value_error(("expected a DLPack tensor with a shape, got " +
                           std::to_string(tensor.ndim) + " dimensions")
                              .c_str());
  }
  const bool strided = tensor.ndim > 0 && tensor.strides != nullptr;
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(tensor.data), tensor.device.device_type,
                        tensor.device.device_id, tensor.dtype.code, tensor.dtype.bits,
                        tensor.dtype.lanes, dims_tuple(tensor.shape, tensor.ndim),
                        strided ? dims_tuple(tensor.strides, tensor.ndim) : nb::none(),
                        tensor.byte_offset, flags);
}

// Calls the producer's deleter when the last view of a consumed tensor is gone.
template <typename Managed>
void release_producer(PyObject* holder) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(holder, nullptr));
  // With the GIL: deleters of NumPy before 1.24 rely on it, and no other minds.
  if (managed->deleter != nullptr) managed->deleter(managed);
}

template <typename Managed>
nb::object take(PyObject* capsule, Managed* managed) {
  nb::object holder = checked(PyCapsule_New(managed, nullptr, release_producer<Managed>));
  if (PyCapsule_SetName(capsule, kUsedName<Managed>) != 0) throw nb::python_error();
  return holder;
}

nb::tuple capsule_read(nb::handle capsule) {
  if (const auto* managed = managed_in<DLManagedTensor>(capsule.ptr())) {
    return fields(managed->dl_tensor, 0);
  }
  if (const auto* managed = managed_in<DLManagedTensorVersioned>(capsule.ptr())) {
    // Beyond this field a foreign major version may look different.
    if (managed->version.major != 1) {
      throw nb::value_error(("expected a DLPack capsule of version 1, got version " +
                             std::to_string(managed->version.major))
                                .c_str());
    }
    return fields(managed->dl_tensor, managed->flags);
  }
  refuse_capsule();
}

nb::object capsule_take(nb::handle capsule) {
  if (auto* managed = managed_in<DLManagedTensor>(capsule.ptr())) {
    return take(capsule.ptr(), managed);
  }
  if (auto* managed = managed_in<DLManagedTensorVersioned>(capsule.ptr())) {
    return take(capsule.ptr(), managed);
  }
  refuse_capsule();
}

nb::object capsule_make(nb::object owner, std::uintptr_t address, nb::sequence shape,
                        nb::tuple dtype, nb::tuple device, uint64_t flags, bool versioned) {
  std::vector<int64_t> dims;
  for (nb::handle dim : shape) dims.push_back(nb::cast<int64_t>(dim));
  const std::size_t ndim = dims.size();
  dims.resize(2 * ndim);
  int64_t stride = 1;
  for (std::size_t axis = ndim; axis-- > 0; stride *= dims[axis]) dims[ndim + axis] = stride;

  DLTensor tensor{};
  tensor.data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  tensor.device = {nb::cast<int32_t>(device[0]), nb::cast<int32_t>(device[1])};
  tensor.ndim = static_cast<int32_t>(ndim);
  tensor.dtype = {nb::cast<uint8_t>(dtype[0]), nb::cast<uint8_t>(dtype[1]), 1};
  return versioned
             ? make<DLManagedTensorVersioned>(std::move(owner), tensor, std::move(dims), flags)
             : make<DLManagedTensor>(std::move(owner), tensor, std::move(dims), flags);
}

}  // namespace

void bind_dlpack_capsule(nb::module_& module) {
  // Producers give anything, also None.
  module.def("capsule_read", &capsule_read, nb::arg().none());
  module.def("capsule_take", &capsule_take);
  module.def("capsule_make", &capsule_make);
}

}  // namespace gpubridge
