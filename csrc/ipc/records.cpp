#include "ipc/records.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::size_t kWord = sizeof(std::uint32_t);
constexpr std::size_t kHead = 5 * kWord;
constexpr std::size_t kRef = 3 * sizeof(std::uint64_t) + kWord;
constexpr std::size_t kMaxTensors = 4096;

template <typename Number>
Number get(const char* at) {
  Number number = 0;
  for (std::size_t byte = 0; byte < sizeof(Number); ++byte) {
    number |= static_cast<Number>(static_cast<unsigned char>(at[byte])) << (8U * byte);
  }
  return number;
}

template <typename Number>
char* put(char* at, Number number) {
  for (std::size_t byte = 0; byte < sizeof(Number); ++byte) {
    *at++ = static_cast<char>((number >> (8U * byte)) & 0xFFU);
  }
  return at;
}

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// Hands out pieces of a message; a piece that is not all there is an error.
class Pieces {
 public:
  Pieces(const nb::bytes& message, std::size_t at)
      : data_(message.c_str()), size_(message.size()), at_(at) {}

  const char* take(std::size_t count) {
    if (at_ > size_ || count > size_ - at_) {
      throw nb::value_error("it ends in the middle of a record");
    }
    const char* piece = data_ + at_;
    at_ += count;
    return piece;
  }
  nb::object bytes(std::size_t count) {
    const char* piece = take(count);
    return checked(PyBytes_FromStringAndSize(piece, static_cast<Py_ssize_t>(count)));
  }
  [[nodiscard]] std::size_t at() const { return at_; }

 private:
  const char* data_;
  std::size_t size_;
  std::size_t at_;
};

// Takes records apart. `signatures` gives what a signature's bytes say, `parse_extras` the dict
// that the bytes of extras are; `record` is the tuple type of the results.
class RecordReader {
 public:
  RecordReader(nb::object signatures, nb::object parse_extras, nb::type_object record)
      : signatures_(std::move(signatures)),
        parse_extras_(std::move(parse_extras)),
        record_(std::move(record)),
        new_tuple_(reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new))) {}

  nb::tuple read(const nb::bytes& message, std::size_t at, std::size_t count, bool named) {
    Pieces pieces(message, at);
    nb::list records;
    for (std::size_t index = 0; index < count; ++index) records.append(record(pieces, named));
    return nb::make_tuple(std::move(records), pieces.at());
  }

 private:
  nb::object record(Pieces& pieces, bool named) {
    const char* head = pieces.take(kHead);
    std::array<std::uint32_t, 5> words{};
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = get<std::uint32_t>(head + kWord * i);
    const auto [ticket, signed_size, extra_size, word, tensors] = words;
    if (tensors > kMaxTensors) {
      throw nb::value_error(("a record of " + std::to_string(tensors) + " tensors came (limit " +
                             std::to_string(kMaxTensors) + ")")
                                .c_str());
    }
    nb::object signature =
        checked(PyObject_GetItem(signatures_.ptr(), pieces.bytes(signed_size).ptr()));
    nb::object extras = nb::none();
    if (extra_size != 0) extras = parse_extras_(pieces.bytes(extra_size));
    nb::object identifier = nb::str("");
    if (named && word != 0) {
      const char* text = pieces.take(word);
      identifier = checked(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(word), nullptr));
    }
    nb::object refs = this->refs(pieces, tensors);
    const auto described = nb::len(nb::handle(PyTuple_GetItem(signature.ptr(), 0)));
    if (described != tensors) {
      throw nb::value_error(("a record of " + std::to_string(tensors) +
                             " tensors came with a signature of " + std::to_string(described))
                                .c_str());
    }
    const nb::tuple fields = nb::make_tuple(ticket, std::move(signature), std::move(extras), word,
                                            std::move(identifier), std::move(refs));
    const nb::tuple arguments = nb::make_tuple(fields);
    return checked(
        new_tuple_(reinterpret_cast<PyTypeObject*>(record_.ptr()), arguments.ptr(), nullptr));
  }

  static nb::object refs(Pieces& pieces, std::size_t count) {
    nb::object refs = checked(PyList_New(static_cast<Py_ssize_t>(count)));
    for (std::size_t index = 0; index < count; ++index) {
      const char* at = pieces.take(kRef);
      nb::tuple ref = nb::make_tuple(get<std::uint64_t>(at), get<std::uint64_t>(at + 8),
                                     get<std::uint64_t>(at + 16), get<std::uint32_t>(at + 24));
      // Takes the reference over, even when it fails.
      if (PyList_SetItem(refs.ptr(), static_cast<Py_ssize_t>(index), ref.release().ptr()) != 0) {
        throw nb::python_error();
      }
    }
    return refs;
  }

  nb::object signatures_;
  nb::object parse_extras_;
  nb::type_object record_;
  newfunc new_tuple_;
};

char* put_bytes(char* at, const nb::bytes& bytes) {
  std::memcpy(at, bytes.c_str(), bytes.size());
  return at + bytes.size();
}

// Fields of references come flat: region, offset, size, lease of each, one after another.
nb::object encode_record(std::uint32_t ticket, const nb::bytes& signature, nb::handle refs,
                         std::uint32_t word, const nb::bytes& identifier, const nb::bytes& extras) {
  const std::size_t tensors = nb::len(refs) / 4;
  const std::size_t size =
      kHead + signature.size() + extras.size() + identifier.size() + kRef * tensors;
  nb::object record = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  char* at = PyBytes_AsString(record.ptr());
  at = put(at, ticket);
  at = put(at, static_cast<std::uint32_t>(signature.size()));
  at = put(at, static_cast<std::uint32_t>(extras.size()));
  at = put(at, identifier.size() == 0 ? word : static_cast<std::uint32_t>(identifier.size()));
  at = put(at, static_cast<std::uint32_t>(tensors));
  at = put_bytes(put_bytes(put_bytes(at, signature), extras), identifier);
  for (std::size_t field = 0; field < 4 * tensors; ++field) {
    const auto number = nb::cast<std::uint64_t>(refs[field]);
    at = field % 4 == 3 ? put(at, static_cast<std::uint32_t>(number)) : put(at, number);
  }
  return record;
}

}  // namespace

void bind_records(nb::module_& module) {
  nb::class_<RecordReader>(module, "RecordReader")
      .def(nb::init<nb::object, nb::object, nb::type_object>())
      .def("read", &RecordReader::read);
  module.def("encode_record", &encode_record, nb::arg("ticket"), nb::arg("signature"),
             nb::arg("refs"), nb::arg("word") = 0, nb::arg("identifier") = nb::bytes(""),
             nb::arg("extras") = nb::bytes(""));
}

}  // namespace gpubridge
