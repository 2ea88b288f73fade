// BYTES tensors: each element is a little-endian uint32 length followed by its bytes.

#include "buffer_view.h"
#include "list_items.h"
#include "little_endian.h"
#include "python_object.h"

namespace gpubridge {
namespace {

constexpr std::size_t kLengthSize = sizeof(uint32_t);
constexpr std::size_t kLongest = UINT32_MAX;
// More than that is counted without the interpreter's lock.
constexpr std::size_t kLong = std::size_t{1} << 20U;

// Walks a buffer that another process may be writing.
class StringReader {
 public:
  explicit StringReader(const BufferView& view) : left_(view.text()) {}

  [[nodiscard]] bool done() const { return left_.empty(); }

  std::string_view next() {
    if (const auto text = take_string(left_)) return *text;
    throw nb::value_error(left_.size() < kLengthSize
                              ? "Invalid bytes tensor data: incomplete length field"
                              : "Invalid bytes tensor data: string extends beyond buffer");
  }

 private:
  std::string_view left_;
};

// The slots of a NumPy object array, which may hold null for None.
class ObjectSlots {
 public:
  ObjectSlots(nb::handle array, int flags) : view_(array, flags | PyBUF_FORMAT | PyBUF_ND) {
    if (view_.format() == nullptr || std::strcmp(view_.format(), "O") != 0) {
      throw nb::type_error("expected a C-contiguous array of dtype object");
    }
  }
  [[nodiscard]] PyObject** begin() const { return static_cast<PyObject**>(view_.data()); }
  [[nodiscard]] std::size_t count() const { return view_.size() / sizeof(PyObject*); }

 private:
  BufferView view_;
};

// The element's own bytes, or those of str(element) in UTF-8. The result holds what was viewed.
struct Element {
  nb::object holder;
  std::string_view text;
};

Element element_of(nb::object holder) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_Check(holder.ptr())) {
    if (PyBytes_AsStringAndSize(holder.ptr(), &data, &size) != 0) throw nb::python_error();
    return {std::move(holder), {data, static_cast<std::size_t>(size)}};
  }
  // Also of what is a kind of str: an enumeration's member says something else than it holds.
  if (PyUnicode_CheckExact(holder.ptr()) == 0) holder = checked(PyObject_Str(holder.ptr()));
  const std::string_view text = view_of_text(holder);
  return {std::move(holder), text};
}

std::size_t count_strings(nb::handle buffer) {
  const BufferView view(buffer, PyBUF_SIMPLE);
  std::optional<nb::gil_scoped_release> unlocked;
  if (view.size() > kLong) unlocked.emplace();
  StringReader reader(view);
  std::size_t count = 0;
  for (; !reader.done(); ++count) reader.next();
  return count;
}

// The elements of a list or an array as they are now: str() of one may run any code, even code that
// replaces others in it, or resizes it.
std::vector<Element> elements_of(nb::handle items) {
  std::vector<Element> elements;
  if (PyList_Check(items.ptr())) {
    for (nb::object& item : items_of(items)) elements.push_back({std::move(item), {}});
    return elements;
  }
  const ObjectSlots slots(items, 0);
  elements.reserve(slots.count());
  for (std::size_t index = 0; index < slots.count(); ++index) {
    PyObject* item = slots.begin()[index];
    elements.push_back({nb::borrow(item == nullptr ? Py_None : item), {}});
  }
  return elements;
}

nb::object encode_strings(nb::handle items) {
  std::vector<Element> elements = elements_of(items);
  std::size_t total = 0;
  for (Element& element : elements) {
    element = element_of(std::move(element.holder));
    const std::size_t size = element.text.size();
    if (size > kLongest) {
      PyErr_SetString(PyExc_OverflowError,
                      ("expected strings of at most " + std::to_string(kLongest) +
                       " bytes in a BYTES tensor, got one of " + std::to_string(size) + " bytes")
                          .c_str());
      throw nb::python_error();
    }
    total += kLengthSize + size;
  }
  nb::object encoded = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total)));
  char* at = PyBytes_AsString(encoded.ptr());
  for (const Element& element : elements) {
    at = put_bytes(put_number(at, static_cast<std::uint32_t>(element.text.size())), element.text);
  }
  return encoded;
}

void decode_strings(nb::handle buffer, nb::handle items) {
  const BufferView view(buffer, PyBUF_SIMPLE);
  const ObjectSlots slots(items, PyBUF_WRITABLE);
  StringReader reader(view);
  for (std::size_t index = 0; index < slots.count(); ++index) {
    if (reader.done()) throw nb::value_error("Invalid bytes tensor data: too few strings");
    const std::string_view text = reader.next();
    PyObject* string = PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    if (string == nullptr) throw nb::python_error();
    PyObject* previous = std::exchange(slots.begin()[index], string);
    Py_XDECREF(previous);
  }
  if (!reader.done()) throw nb::value_error("Invalid bytes tensor data: too many strings");
}

}  // namespace

void bind_bytes_codec(nb::module_& module) {
  module.def("bytes_count", &count_strings);
  module.def("bytes_encode", &encode_strings);
  module.def("bytes_decode", &decode_strings);
}

}  // namespace gpubridge
