// Records of responses: their tensors placed, their signatures known by names and datatypes.
#pragma once

#include <unordered_set>

#include "buffer_view.h"
#include "heap_type.h"
#include "ipc/context.h"
#include "ipc/records.h"
#include "list_items.h"
#include "memory/lease_book.h"
#include "python_object.h"
#include "stub/output_pool.h"
#include "stub/response.h"
#include "stub/tensor.h"

namespace gpubridge::stub {

// The large inputs of a request whose memory is its alone.
class OwnInputs {
 public:
  OwnInputs() = default;
  // Of inputs of at least so many bytes. The memory of the record's tensors exists.
  OwnInputs(const RecordView& record, const Context& context, const LeaseBook& book,
            std::uint64_t least)
      : least_(least) {
    // Others may still read the inputs: the receiver of an output may write to it.
    if (context.has(ContextField::kShared)) return;
    for (std::size_t index = 0; index < record.tensors(); ++index) {
      const TensorRef ref = record.ref(index);
      const bool of_server = ref.region >> 32U == 0;
      if (ref.nbytes < least || !of_server || ref.lease != record.ticket()) continue;
      const char* const begin = book.address(ref);
      inputs_.push_back({begin, begin + ref.nbytes, ref});
    }
    std::ranges::sort(inputs_, {}, &Input::begin);
    for (std::size_t index = 1; index < inputs_.size(); ++index) {
      inputs_[index].end = std::max(inputs_[index].end, inputs_[index - 1].end);
    }
  }

  // Where bytes lie in one of them.
  [[nodiscard]] std::optional<TensorRef> find(const char* data, std::size_t size) const {
    if (size < least_) return std::nullopt;
    const auto after = std::ranges::upper_bound(inputs_, data, {}, &Input::begin);
    if (after == inputs_.begin()) return std::nullopt;
    const Input& input = *(after - 1);
    if (data >= input.end || size > static_cast<std::size_t>(input.end - data)) return std::nullopt;
    const auto offset = static_cast<std::uint64_t>(data - input.begin);
    return TensorRef{input.ref.region, input.ref.offset + offset, size, input.ref.lease};
  }

  [[nodiscard]] bool empty() const { return inputs_.empty(); }

 private:
  struct Input {
    const char* begin;
    // The furthest end of all that begin up to there: inputs may overlap.
    const char* end;
    TensorRef ref;
  };

  std::uint64_t least_ = 0;
  std::vector<Input> inputs_;
};

// Where a response goes. `wanted` holds the names of the outputs that are sent; `consumer` is whose
// processes take them, empty for the server. An output may stay in one of the `inputs`, whose lease
// has the byte `lent`; in none where there are none.
struct ResponseTarget {
  std::uint32_t ticket = 0;
  std::uint32_t flags = 0;
  nb::handle wanted;
  std::string_view consumer;
  const OwnInputs* inputs = nullptr;
  const unsigned char* lent = nullptr;
};

// Writes responses of plain tensors in host memory; everything else is left to Python. Any thread
// that has the interpreter's lock may, also while another one has let go of it in here.
class ResponseWriter {
 public:
  // `check` is an OutputCheck, which makes signatures and hears of outputs that are not sent.
  ResponseWriter(nb::object check, nb::type_object tensor, OutputPool& pool)
      : check_(std::move(check)), tensor_(std::move(tensor)), pool_(pool) {}

  // Appends the record of a response to `out` and counts what it copied; false where it is none
  // that is written here. Lets go of the response, and of what its memory is for, where outputs
  // stay in inputs, even if it throws then.
  [[nodiscard]] bool write(const ResponseTarget& target, nb::object& response, std::string& out,
                           std::uint64_t& copied) {
    std::vector<Output> outputs;
    if (!gather(response.ptr(), target.wanted, outputs)) return false;
    std::size_t total = 0;
    for (const Output& output : outputs) total += OutputPool::aligned(output.bytes.size());
    // Large ones may lie in a slot that their model was given to write to, which Python knows.
    if (total > OutputPool::kMostBytes || (total > OutputPool::kLarge && pool_.shown()))
      return false;
    // First what may fail: a slot that was lent must be sent.
    SignatureKey key;
    for (Output& output : outputs) {
      output.elements = key.add(output.name, output.datatype, output.shape);
    }
    const std::shared_ptr<const Form> form = this->form(outputs, key, target.wanted);
    if (!sizes_fit(outputs, *form)) return false;
    const auto parameters = nb::borrow(as<Response>(response.ptr())->fields[kResponseParameters]);
    const std::string_view json = view_of_text(parameters);
    const std::vector<Stays> stay = passed_on(outputs, target);
    std::vector<TensorRef> refs(outputs.size(), TensorRef{0, 0, 0, kNoLease});
    copied += pool_.copy(others(outputs, stay), target.consumer, refs);
    bool passed_on = false;
    if (!stay.empty()) {
      outputs.clear();
      response.reset();
      passed_on = pass_on(target, stay, refs, copied);
    }
    const std::string context = encoded_context(json, passed_on);
    const RecordParts parts{.ticket = target.ticket,
                            .word = target.flags,
                            .tensors = static_cast<std::uint32_t>(refs.size()),
                            .signature = form->signature,
                            .context = context,
                            .identifier = {},
                            .dims = key.dims};
    char* to = parts.append_to(out);
    for (const TensorRef& ref : refs) to = write_ref(to, ref);
    return true;
  }

  // Appends a record without tensors, with flags.
  void write_nothing(std::uint32_t ticket, std::uint32_t flags, std::string& out) {
    if (nothing_.empty()) {
      const auto made = nb::cast<nb::bytes>(check_.attr("encode")(nb::list(), nb::none()));
      nothing_.assign(made.c_str(), made.size());
    }
    RecordParts parts;
    parts.ticket = ticket;
    parts.word = flags;
    parts.signature = nothing_;
    parts.append_to(out);
  }

 private:
  static constexpr std::size_t kSignaturesKept = 4096;

  // The encoded context of a response; `parameters` are JSON.
  static std::string encoded_context(std::string_view parameters, bool passed_on) {
    Context context;
    if (parameters != "{}") context.set_text(ContextField::kParameters, parameters);
    if (passed_on) context.set_flag(ContextField::kPassedOn);
    return context.encoded();
  }

  // True if two of the things, whose places `place` returns, share a byte: the receiver of one
  // may write to the other.
  template <typename Thing>
  static bool overlap(std::vector<Thing> things, TensorRef Thing::* place) {
    const auto order = [place](const Thing& thing) {
      return std::pair((thing.*place).region, (thing.*place).offset);
    };
    std::ranges::sort(things, {}, order);
    const auto shared = [](const TensorRef& one, const TensorRef& other) {
      return one.region == other.region && one.offset + one.nbytes > other.offset;
    };
    return std::ranges::adjacent_find(things, shared, place) != things.end();
  }

  // A tensor that is sent, as it was at one moment: the model may change the response and its
  // tensors whenever Python code runs, or bytes are copied.
  struct Output {
    nb::object name;
    nb::object datatype;
    nb::object shape;
    BufferView bytes;
    std::uint64_t elements = 0;

    [[nodiscard]] bool is_bytes() const {
      return PyUnicode_CompareWithASCIIString(datatype.ptr(), "BYTES") == 0;
    }
  };
  // What responses with the same key have: the encoded signature, and the size of an element of
  // each output, 0 for BYTES.
  struct Form {
    std::string signature;
    std::vector<std::uint64_t> itemsizes;
  };
  // An output that stays, without a reference to it, and where it lies.
  struct Stays {
    OutputPool::Piece piece;
    TensorRef place;
  };

  [[nodiscard]] bool gather(PyObject* response, nb::handle wanted, std::vector<Output>& outputs) {
    const auto& fields = as<Response>(response)->fields;
    if (fields[kError] != Py_None || PyList_CheckExact(fields[kTensors]) == 0) return false;
    std::vector<nb::object> tensors = items_of(fields[kTensors]);
    outputs.reserve(tensors.size());
    for (nb::object& item : tensors) {
      // Tensors of derived classes have places of their own.
      if (reinterpret_cast<PyObject*>(Py_TYPE(item.ptr())) != tensor_.ptr()) return false;
      const auto* tensor = as<Tensor>(item.ptr());
      if (!is_initialized(tensor)) return false;
      PyObject* from = exporter(tensor);
      if (from == nullptr) return false;
      nb::object name = nb::borrow(tensor->fields[kName]);
      nb::object datatype = nb::borrow(tensor->fields[kDatatype]);
      nb::object shape = nb::borrow(tensor->fields[kShape]);
      const nb::object exporting = nb::borrow(from);
      const int sent = PySequence_Contains(wanted.ptr(), name.ptr());
      if (sent < 0) throw nb::python_error();
      if (sent == 0) {
        if (dropped_.size() < kSignaturesKept && dropped_.emplace(view_of_text(name)).second) {
          check_.attr("dropped")(name);
        }
        continue;
      }
      try {
        outputs.push_back({std::move(name), std::move(datatype), std::move(shape),
                           BufferView(exporting, PyBUF_SIMPLE)});
      } catch (nb::python_error&) {
        // As of ml_dtypes' bfloat16, which has no buffer format.
        return false;
      }
    }
    return true;
  }

  // The outputs that lie in an input of their request; none where two of them overlap.
  static std::vector<Stays> passed_on(const std::vector<Output>& outputs,
                                      const ResponseTarget& target) {
    std::vector<Stays> found;
    if (target.inputs == nullptr || target.inputs->empty()) return found;
    for (std::size_t index = 0; index < outputs.size(); ++index) {
      const BufferView& bytes = outputs[index].bytes;
      const auto* const data = static_cast<const char*>(bytes.data());
      const auto place = target.inputs->find(data, bytes.size());
      if (place && !outputs[index].is_bytes()) {
        found.push_back({{index, data, bytes.size()}, *place});
      }
    }
    return overlap(found, &Stays::place) ? std::vector<Stays>() : found;
  }

  // All outputs but those that stay, which are in order.
  static std::vector<OutputPool::Piece> others(const std::vector<Output>& outputs,
                                               std::span<const Stays> stay) {
    std::vector<OutputPool::Piece> others;
    others.reserve(outputs.size());
    for (std::size_t index = 0; index < outputs.size(); ++index) {
      if (!stay.empty() && stay.front().piece.index == index) {
        stay = stay.subspan(1);
        continue;
      }
      const BufferView& bytes = outputs[index].bytes;
      others.push_back({index, static_cast<const char*>(bytes.data()), bytes.size()});
    }
    return others;
  }

  // Leaves outputs where they are, if no reference to them is left now that the response is gone;
  // returns whether that is so. With one left they may be written to: then they are copied.
  [[nodiscard]] bool pass_on(const ResponseTarget& target, std::span<const Stays> stay,
                             std::span<TensorRef> refs, std::uint64_t& copied) {
    if (__atomic_load_n(target.lent, __ATOMIC_ACQUIRE) == 0) {
      for (const Stays& output : stay) refs[output.piece.index] = output.place;
      return true;
    }
    std::vector<OutputPool::Piece> pieces;
    for (const Stays& output : stay) pieces.push_back(output.piece);
    try {
      copied += pool_.copy(pieces, target.consumer, refs);
    } catch (nb::python_error&) {
      pool_.take_back(refs);
      throw;
    }
    return false;
  }

  // Returns the form of outputs that have such a key; it is kept while other threads make forms.
  std::shared_ptr<const Form> form(const std::vector<Output>& outputs, const SignatureKey& key,
                                   nb::handle wanted) {
    const auto found = forms_.find(key.kinds);
    if (found != forms_.end()) return found->second;
    nb::list described;
    Form form;
    for (const Output& output : outputs) {
      described.append(
          nb::make_tuple(output.name, output.datatype, PyTuple_Size(output.shape.ptr())));
      const nb::object itemsize = item_size_(output.datatype);
      form.itemsizes.push_back(itemsize.is_none() ? 0 : nb::cast<std::uint64_t>(itemsize));
    }
    const auto made = nb::cast<nb::bytes>(check_.attr("encode")(described, wanted));
    form.signature.assign(made.c_str(), made.size());
    if (forms_.size() >= kSignaturesKept) forms_.clear();
    return forms_.emplace(key.kinds, std::make_shared<const Form>(std::move(form))).first->second;
  }

  // True if each output has as many bytes as its shape needs: a model may have resized an array
  // that it had made a tensor of.
  static bool sizes_fit(const std::vector<Output>& outputs, const Form& form) {
    for (std::size_t index = 0; index < outputs.size(); ++index) {
      const std::uint64_t itemsize = form.itemsizes[index];
      const Output& output = outputs[index];
      if (itemsize != 0 && output.elements * itemsize != output.bytes.size()) return false;
    }
    return true;
  }

  nb::object check_;
  nb::object item_size_ = nb::module_::import_("gpubridge.tensor.datatypes").attr("item_size");
  nb::type_object tensor_;
  OutputPool& pool_;
  std::unordered_map<std::string, std::shared_ptr<const Form>> forms_;
  std::unordered_set<std::string> dropped_;
  std::string nothing_;
};

}  // namespace gpubridge::stub
