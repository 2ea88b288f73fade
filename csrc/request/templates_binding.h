// Request templates with what Python knows of them: requests for the engine are made here.
#pragma once

#include <tuple>

#include "heap_type.h"
#include "python_object.h"
#include "request/templates.h"

namespace gpubridge {

// Values that requests with one template share in the engine, from `given`, a RequestTemplate
// (gpubridge/protocol/request_templates.py).
struct KnownTemplate {
  explicit KnownTemplate(nb::object given) : given(std::move(given)) {}

  // The template of answers with a signature; None for those that Python has to encode. `make` is
  // asked for that of a signature other than the last one's.
  template <typename Make>
  const nb::object& answer(nb::handle signature, Make&& make) {
    if (!answer_signature.is(signature)) {
      answer_template = make();
      answer_signature = nb::borrow(signature);
    }
    return answer_template;
  }

  int traverse(visitproc visit, void* arg) const {
    return visit_all({&given, &form, &signature, &context, &options, &values, &dims, &place_objects,
                      &answer_signature, &answer_template},
                     visit, arg);
  }

  nb::object given;
  nb::object form = attribute<"form">(given);
  nb::object signature = attribute<"signature">(form);
  bool shared = nb::cast<bool>(attribute<"shared">(form));
  // Of the last request, since the next mostly has the same. Context and options are those of its
  // values beside ids, dims and sizes, if it has any.
  nb::object context = attribute<"context">(form);
  nb::object options = attribute<"options">(form);
  nb::object values = nb::none();
  nb::object dims = attribute<"dims">(form);
  std::vector<InputPlace> places;
  nb::object place_objects = nb::none();
  nb::object answer_signature = nb::none();
  nb::object answer_template = nb::none();
};

// A request that was not submitted yet; none without `known`.
struct MadeRequest {
  std::shared_ptr<KnownTemplate> known;
  nb::object request;
  nb::object regions;  // RequestRegions, or None

  // The tuple that Python gets, or None.
  [[nodiscard]] nb::object as_python() const {
    if (known == nullptr) return nb::none();
    return nb::make_tuple(known->given, request, regions);
  }
};

// Where a request's inputs are to lie, and who gets its outcome.
struct RequestTarget {
  nb::handle slot;
  nb::handle on_done;
  std::uint64_t copied = 0;
  nb::handle arena{};  // Of the slot, for inputs that need another one.
};

// Dims, dims after the batch dim that the model sees or None, item size, bytes in a region or -1,
// and the datatype of values that are JSON, or None.
using InputFields = std::tuple<std::vector<std::int64_t>, std::optional<std::vector<std::int64_t>>,
                               std::uint32_t, std::int64_t, std::optional<std::string>>;

// Request templates of HTTP (JSON headers, or generate requests to a model with these inputs) or of
// gRPC (protobuf messages).
class PythonTemplates {
 public:
  PythonTemplates(std::size_t limit, std::uint64_t alignment,
                  std::optional<std::vector<std::string>> generated_inputs)
      : templates_(limit), alignment_(alignment), generated_inputs_(std::move(generated_inputs)) {}

  // Adds a RequestTemplate, if it accepts what varies.
  void add_json(const nb::bytes& header, std::uint64_t max_batch_size,
                std::vector<InputFields> inputs, nb::handle given) {
    if (scan(view_of(header))) add(max_batch_size, std::move(inputs), given);
  }
  void add_fields(const nb::bytes& fields, const std::vector<std::uint64_t>& sizes,
                  std::uint64_t max_batch_size, std::vector<InputFields> inputs, nb::handle given) {
    if (scan_fields(view_of(fields), sizes, scan_)) add(max_batch_size, std::move(inputs), given);
  }
  void remove_if(nb::handle is_gone);

  // A header of `size` bytes at `begin` in the slot, and the inputs behind it, which are moved to
  // where they are aligned. Where some of them are JSON, all get a slot of their own, and the one
  // of the body is freed.
  MadeRequest take_json(const RequestTarget& target, std::uint64_t begin, std::uint64_t size,
                        std::uint64_t following);
  // A whole message, whose inputs are copied into a slot of its model's arena.
  MadeRequest take_message(std::string_view message, nb::handle on_done);
  // The fields of a message whose raw contents have been received into the slot.
  MadeRequest take_fields(const RequestTarget& target, std::string_view fields,
                          std::string_view identifier, const std::vector<std::uint64_t>& sizes,
                          const std::vector<std::uint64_t>& offsets);

  int traverse(visitproc visit, void* arg) const;
  void clear();

  [[nodiscard]] std::size_t count() const { return templates_.size(); }
  [[nodiscard]] std::size_t bytes() const { return templates_.bytes(); }

 private:
  [[nodiscard]] bool scan(std::string_view json) {
    return generated_inputs_ ? scan_generated(json, *generated_inputs_, scan_)
                             : scan_json(json, scan_);
  }
  void add(std::uint64_t max_batch_size, std::vector<InputFields> inputs, nb::handle given);
  MadeRequest match_json(const RequestTarget& target, std::uint64_t begin, std::uint64_t size,
                         std::uint64_t following);
  MadeRequest pack(const RequestTarget& target, std::span<const unsigned char> binary);
  [[nodiscard]] bool strings_fit(std::span<const unsigned char> memory) const;
  // Makes the request that was matched last; its inputs begin at `start` in the slot.
  MadeRequest make(const RequestTarget& target, std::uint64_t start, std::string_view identifier);
  [[nodiscard]] nb::object others() const;

  RequestTemplates templates_;
  std::uint64_t alignment_;
  std::optional<std::vector<std::string>> generated_inputs_;
  std::string header_;
  std::string packed_;
  RequestScan scan_;
  MatchedRequest matched_;
  std::vector<std::uint64_t> offsets_;
};

}  // namespace gpubridge
