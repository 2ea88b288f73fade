#include "net/request_headers.h"

namespace gpubridge {
namespace {

constexpr std::array<std::string_view, 5> kOfAConnection = {
    "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"};
// More digits than any length has.
constexpr std::size_t kLengthDigits = 19;

constexpr std::array<bool, 256> name_characters() {
  std::array<bool, 256> allowed{};
  for (const char c : std::string_view("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")) {
    allowed[static_cast<unsigned char>(c)] = true;
  }
  return allowed;
}

constexpr std::array<bool, 256> kNameCharacters = name_characters();

bool is_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return kNameCharacters[static_cast<unsigned char>(c)];
  });
}

// No NUL, CR, LF; no blank at either end.
bool is_value(std::string_view value) {
  if (value.empty()) return true;
  const auto blank = [](char c) { return c == ' ' || c == '\t'; };
  return !blank(value.front()) && !blank(value.back()) &&
         value.find_first_of(std::string_view("\0\r\n", 3)) == std::string_view::npos;
}

bool is_trailers(std::string_view value) {
  constexpr std::string_view kTrailers = "trailers";
  return std::equal(value.begin(), value.end(), kTrailers.begin(), kTrailers.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
}

// Pages may send other types to any server unasked, but none of these.
bool is_grpc_type(std::string_view value) {
  constexpr std::string_view kType = "application/grpc";
  if (!value.starts_with(kType)) return false;
  return value.size() == kType.size() || value[kType.size()] == '+' || value[kType.size()] == ';';
}

// A request names whom it is for: by :authority, by one Host, or by both alike.
bool names_authority(const HeaderList& fields, std::size_t next,
                     std::optional<std::string_view> authority) {
  bool host = false;
  for (; next < fields.count(); ++next) {
    if (fields.name(next) != "host") continue;
    if (host || (authority && *authority != fields.value(next))) return false;
    host = true;
  }
  return host || authority;
}

std::optional<std::uint64_t> read_length(std::string_view text) {
  std::uint64_t length = 0;
  if (text.empty() || text.size() > kLengthDigits) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return length;
}

}  // namespace

int GrpcMethods::add(std::string path, GrpcMethod method) {
  const int number = static_cast<int>(methods_.size());
  numbers_.insert_or_assign(std::move(path), number);
  methods_.push_back(method);
  counts_->add_endpoint();
  return number;
}

void GrpcMethods::require(int number, std::shared_ptr<const RequiredField> field) {
  methods_.at(static_cast<std::size_t>(number)).required = std::move(field);
}

bool check_fields(const HeaderList& fields, std::size_t first,
                  std::optional<std::uint64_t>& content_length) {
  std::optional<std::string_view> length;
  for (std::size_t index = first; index < fields.count(); ++index) {
    const std::string_view name = fields.name(index);
    const std::string_view value = fields.value(index);
    if (!is_name(name) || !is_value(value)) return false;
    if (std::find(kOfAConnection.begin(), kOfAConnection.end(), name) != kOfAConnection.end()) {
      return false;
    }
    if (name == "te" && !is_trailers(value)) return false;
    if (name == "content-length") {
      if (length && *length != value) return false;
      length = value;
    }
  }
  if (!length) return true;
  content_length = read_length(*length);
  return content_length.has_value();
}

std::shared_ptr<const RequestHeaders> RequestHeaders::read(HeaderList fields,
                                                           const GrpcMethods& methods) {
  // Made first: what it says refers to the fields where they stay.
  const auto headers = std::make_shared<RequestHeaders>(Key{}, std::move(fields));
  std::size_t next = 0;
  if (!headers->read_pseudo(next) ||
      !check_fields(headers->fields_, next, headers->content_length_)) {
    return nullptr;
  }
  headers->method_ = methods.find(headers->path_);
  if (headers->method_ != GrpcMethods::kUnknown) {
    headers->required_ = methods[headers->method_].required;
  }
  for (; next < headers->fields_.count(); ++next) {
    const std::string_view name = headers->fields_.name(next);
    const std::string_view value = headers->fields_.value(next);
    headers->note(name, value);
    if (headers->required_ != nullptr && name == headers->required_->name()) {
      headers->required_value_ = value;
      ++headers->required_fields_;
    }
  }
  return headers;
}

// Reads the pseudo-header fields, and Host, which says what one of them says; `next` is the first
// field behind them.
bool RequestHeaders::read_pseudo(std::size_t& next) {
  constexpr std::array<std::string_view, 4> kPseudo = {":method", ":scheme", ":path", ":authority"};
  std::array<std::optional<std::string_view>, kPseudo.size()> values;
  for (; next < fields_.count() && fields_.name(next).starts_with(':'); ++next) {
    const auto known = std::find(kPseudo.begin(), kPseudo.end(), fields_.name(next));
    if (known == kPseudo.end()) return false;
    auto& value = values[static_cast<std::size_t>(known - kPseudo.begin())];
    if (value || !is_value(fields_.value(next))) return false;
    value = fields_.value(next);
  }
  const auto& [method, scheme, path, authority] = values;
  if (!names_authority(fields_, next, authority)) return false;
  if (method == "CONNECT") return !scheme && !path && authority && !authority->empty();
  path_ = path.value_or("");
  post_ = method == "POST";
  return method && !method->empty() && scheme && !scheme->empty() && !path_.empty();
}

// Remembers what a field says to gRPC; the last of a name counts.
void RequestHeaders::note(std::string_view name, std::string_view value) {
  if (name == "grpc-timeout") timeout_ = value;
  if (name == "grpc-encoding") coding_ = value;
  if (name == "grpc-accept-encoding") accepted_codings_ = value;
  if (name == "traceparent") traceparent_ = value;
  if (name == "content-type") typed_ = is_grpc_type(value);
}

}  // namespace gpubridge
