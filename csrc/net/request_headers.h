// The headers of a request: what a valid list says, and what makes one malformed (RFC 9113,
// section 8).
#pragma once

#include "net/hpack.h"
#include "net/request_counts.h"
#include "net/required_field.h"
#include "std.h"
#include "text.h"

namespace gpubridge {

// Message pattern of a method.
enum class GrpcKind : std::uint8_t {
  kUnary = 0,   // one message; a large one is handed on in pieces
  kStream = 1,  // any number of messages
  kControl = 2  // as kUnary; what its calls keep does not count as requests do
};

struct GrpcMethod {
  GrpcKind kind;
  std::uint64_t limit;  // bytes of the longest message
  // A field that its calls must have, if any.
  std::shared_ptr<const RequiredField> required{};
};

// The methods of a server, by path; what a path stands for is its number here.
class GrpcMethods {
 public:
  static constexpr int kUnknown = -1;

  // Returns the method's number.
  int add(std::string path, GrpcMethod method);
  [[nodiscard]] int find(std::string_view path) const {
    const auto found = numbers_.find(path);
    return found == numbers_.end() ? kUnknown : found->second;
  }
  // Has a method's calls refused that do not have a field, once.
  void require(int number, std::shared_ptr<const RequiredField> field);
  [[nodiscard]] const GrpcMethod& operator[](int number) const {
    return methods_[static_cast<std::size_t>(number)];
  }

  // Their answered calls: of each at its number and one, of an unknown one at 0.
  [[nodiscard]] const std::shared_ptr<RequestCounts>& counts() const { return counts_; }

 private:
  std::unordered_map<std::string, int, TextHash, std::equal_to<>> numbers_;
  std::vector<GrpcMethod> methods_;
  std::shared_ptr<RequestCounts> counts_ = std::make_shared<RequestCounts>(1);
};

class RequestHeaders {
  struct Key {};

 public:
  RequestHeaders(Key, HeaderList fields) : fields_(std::move(fields)) {}

  // None where the list is malformed.
  static std::shared_ptr<const RequestHeaders> read(HeaderList fields, const GrpcMethods& methods);

  [[nodiscard]] const HeaderList& fields() const { return fields_; }
  // Bytes of memory.
  [[nodiscard]] std::size_t memory() const { return sizeof(*this) + fields_.memory(); }
  [[nodiscard]] std::string_view path() const { return path_; }
  // The number of the path's method, or GrpcMethods::kUnknown.
  [[nodiscard]] int method() const { return method_; }
  [[nodiscard]] std::optional<std::uint64_t> content_length() const { return content_length_; }
  // The method's required field is there, if it has one, once and with a value that counts now.
  [[nodiscard]] bool admitted() const {
    return required_ == nullptr || (required_fields_ == 1 && required_->admits(required_value_));
  }
  // grpc-encoding and grpc-accept-encoding; empty where there are none.
  [[nodiscard]] std::string_view coding() const { return coding_; }
  [[nodiscard]] std::string_view accepted_codings() const { return accepted_codings_; }
  // grpc-timeout as it came; none where there is none.
  [[nodiscard]] std::optional<std::string_view> timeout() const { return timeout_; }
  // The W3C trace context as it came; none where there is none.
  [[nodiscard]] std::optional<std::string_view> traceparent() const { return traceparent_; }
  // A POST with a content type of gRPC, with neither compression nor a time-out.
  [[nodiscard]] bool plain() const {
    return post_ && typed_ && !timeout_ && (coding_.empty() || coding_ == "identity");
  }

 private:
  [[nodiscard]] bool read_pseudo(std::size_t& next);
  void note(std::string_view name, std::string_view value);

  HeaderList fields_;
  std::string_view path_;
  int method_ = GrpcMethods::kUnknown;
  std::shared_ptr<const RequiredField> required_;
  std::string_view required_value_;
  std::size_t required_fields_ = 0;
  bool post_ = false;
  bool typed_ = false;
  std::optional<std::uint64_t> content_length_;
  std::string_view coding_;
  std::string_view accepted_codings_;
  std::optional<std::string_view> timeout_;
  std::optional<std::string_view> traceparent_;
};

// Checks that the fields from the `first` on are valid and no pseudo-header fields; sets their
// content-length if there is one.
[[nodiscard]] bool check_fields(const HeaderList& fields, std::size_t first,
                                std::optional<std::uint64_t>& content_length);

}  // namespace gpubridge
