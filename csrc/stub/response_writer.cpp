#include "stub/response_writer.h"

#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "buffer_view.h"
#include "ipc/context.h"
#include "ipc/records.h"
#include "stub/heap_type.h"
#include "stub/response.h"
#include "stub/tensor.h"

namespace nb = nanobind;

namespace gpubridge::stub {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSignaturesKept = 4096;
constexpr std::uint32_t kNoLease = 0xFFFFFFFFU;

std::size_t aligned(std::size_t size) { return (size + kAlignment - 1) & ~(kAlignment - 1); }

// What is said of a response besides its tensors, encoded.
std::string context_of(PyObject* response) {
  PyObject* parameters = as<Response>(response)->fields[kResponseParameters];
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(parameters, &size);
  if (text == nullptr) throw nb::python_error();
  const std::string_view json(text, static_cast<std::size_t>(size));
  Context context;
  if (json != "{}") context.set_text(ContextField::kParameters, json);
  std::string encoded(context.size(), '\0');
  context.write(encoded.data());
  return encoded;
}

// Appends a record but for its references; returns where these go.
char* append_record(const RecordParts& parts, std::string& out) {
  const std::size_t begin = out.size();
  out.resize(begin + parts.size());
  return parts.write(out.data() + begin);
}

// What exports the bytes that are sent of a tensor.
PyObject* exporter(const Tensor* tensor) {
  for (const TensorField field : {kSource, kLent, kArray}) {
    if (tensor->fields[field] != nullptr) return tensor->fields[field];
  }
  return nullptr;
}

}  // namespace

// A tensor that is sent, and its bytes for as long as they are looked at.
struct ResponseWriter::Output {
  Tensor* tensor;
  BufferView bytes;
};

ResponseWriter::ResponseWriter(nb::object encode_signature, nb::type_object tensor,
                               OutputPool& pool)
    : encode_signature_(std::move(encode_signature)), tensor_(std::move(tensor)), pool_(pool) {}

bool ResponseWriter::write(const ResponseTarget& target, PyObject* response, std::string& out,
                           std::uint64_t& copied) {
  std::vector<Output> outputs;
  if (!gather(response, target.wanted, outputs)) return false;
  std::size_t total = 0;
  std::size_t sent = 0;
  for (const Output& output : outputs) {
    sent += output.bytes.size();
    total += aligned(output.bytes.size());
  }
  if (total > OutputPool::kMostBytes) return false;
  // First what may fail: a slot that was lent must be sent.
  SignatureKey key;
  for (const Output& output : outputs) key.add(output.tensor);
  const std::string signature = this->signature(outputs, key);
  const std::string context = context_of(response);
  std::optional<OutputPool::Slot> slot;
  if (total != 0) {
    slot = pool_.lend(total, target.consumer);
    if (!slot) return false;
  }
  char* to = append_record({.ticket = target.ticket,
                            .word = target.flags,
                            .tensors = static_cast<std::uint32_t>(outputs.size()),
                            .signature = signature,
                            .context = context,
                            .identifier = {},
                            .dims = key.dims},
                           out);
  std::size_t at = 0;
  for (const Output& output : outputs) {
    const std::size_t size = output.bytes.size();
    TensorRef ref{0, 0, 0, kNoLease};
    if (slot) {
      if (size != 0) std::memcpy(slot->data + at, output.bytes.data(), size);
      ref = {slot->place.region, slot->place.offset + at, size, slot->place.lease};
    }
    to = write_ref(to, ref);
    at += aligned(size);
  }
  copied += sent;
  return true;
}

bool ResponseWriter::gather(PyObject* response, nb::handle wanted, std::vector<Output>& outputs) {
  const auto& fields = as<Response>(response)->fields;
  if (fields[kError] != Py_None || PyList_CheckExact(fields[kTensors]) == 0) return false;
  const Py_ssize_t count = PyList_Size(fields[kTensors]);
  outputs.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* item = PyList_GetItem(fields[kTensors], index);
    // Tensors of derived classes have places of their own.
    if (reinterpret_cast<PyObject*>(Py_TYPE(item)) != tensor_.ptr()) return false;
    auto* tensor = as<Tensor>(item);
    const int sent = PySequence_Contains(wanted.ptr(), tensor->fields[kName]);
    if (sent < 0) throw nb::python_error();
    if (sent == 0) continue;
    PyObject* from = exporter(tensor);
    if (from == nullptr) return false;
    try {
      outputs.push_back({tensor, BufferView(from, PyBUF_SIMPLE)});
    } catch (nb::python_error&) {
      // As of ml_dtypes' bfloat16, which has no buffer format.
      return false;
    }
  }
  return true;
}

// Returns the signature of tensors that have such a key.
std::string ResponseWriter::signature(const std::vector<Output>& outputs, const SignatureKey& key) {
  const auto found = signatures_.find(key.kinds);
  if (found != signatures_.end()) return found->second;
  nb::list described;
  for (const Output& output : outputs) {
    const auto& fields = output.tensor->fields;
    described.append(nb::make_tuple(nb::handle(fields[kName]), nb::handle(fields[kDatatype]),
                                    PyTuple_Size(fields[kShape])));
  }
  const auto made = nb::cast<nb::bytes>(encode_signature_(described));
  if (signatures_.size() >= kSignaturesKept) signatures_.clear();
  return signatures_.emplace(key.kinds, std::string(made.c_str(), made.size())).first->second;
}

void ResponseWriter::write_nothing(std::uint32_t ticket, std::uint32_t flags, std::string& out) {
  const std::string signature = this->signature({}, {});
  RecordParts parts;
  parts.ticket = ticket;
  parts.word = flags;
  parts.signature = signature;
  append_record(parts, out);
}

}  // namespace gpubridge::stub
