#include "net/http1_reader.h"

namespace gpubridge::http1 {
namespace {

constexpr std::size_t kMethodLimit = 32;
constexpr std::size_t kUsualHead = 256;
constexpr std::size_t kUsualFields = 12;
constexpr std::size_t kLengthDigits = 18;
constexpr std::string_view kVersionText = "HTTP/x.y";

using CharacterSet = std::array<bool, 256>;

constexpr CharacterSet characters(bool (*holds)(unsigned)) {
  CharacterSet set{};
  for (unsigned i = 0; i < set.size(); ++i) set[i] = holds(i);
  return set;
}

constexpr bool is_digit(unsigned c) { return c >= '0' && c <= '9'; }
constexpr bool is_alpha(unsigned c) { return (c | 0x20U) >= 'a' && (c | 0x20U) <= 'z' && c < 128; }

// tchar of RFC 9110, 5.6.2.
constexpr CharacterSet kToken = characters([](unsigned c) {
  return is_digit(c) || is_alpha(c) ||
         (c != 0 && c < 128 &&
          std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string_view::npos);
});
constexpr CharacterSet kAlpha = characters(is_alpha);
constexpr CharacterSet kVisible = characters([](unsigned c) { return c > 0x20 && c < 0x7f; });
constexpr CharacterSet kValueSet =
    characters([](unsigned c) { return c == '\t' || (c >= 0x20 && c != 0x7f); });

// The first character from `at` on that is not in a set.
const char* pass(const char* at, const char* end, const CharacterSet& set) {
  while (at != end && set[static_cast<unsigned char>(*at)]) ++at;
  return at;
}

constexpr char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c; }

// Compares a text with one in lower case, without regard to case.
bool same(std::string_view text, std::string_view lower_case) {
  return text.size() == lower_case.size() &&
         std::equal(text.begin(), text.end(), lower_case.begin(),
                    [](char a, char b) { return lower(a) == b; });
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Takes the text up to the next separator off a list.
std::string_view next_item(std::string_view& list, char separator) {
  const std::size_t end = std::min(list.find(separator), list.size());
  const std::string_view item = trimmed(list.substr(0, end));
  list.remove_prefix(std::min(end + 1, list.size()));
  return item;
}

// The weight in thousandths that a coding has by its parameter, 0 for one that is malformed.
int weight(std::string_view parameter) {
  if (parameter.empty()) return 1000;
  const std::size_t sign = parameter.find('=');
  if (sign == std::string_view::npos || !same(trimmed(parameter.substr(0, sign)), "q")) return 1000;
  const std::string_view number = trimmed(parameter.substr(sign + 1));
  if (number.empty() || number.size() > 5 || (number[0] != '0' && number[0] != '1')) return 0;
  if (number.size() > 1 && number[1] != '.') return 0;
  int thousandths = (number[0] - '0') * 1000;
  int unit = 100;
  for (const char c : number.substr(std::min<std::size_t>(2, number.size()))) {
    if (!is_digit(static_cast<unsigned char>(c))) return 0;
    thousandths += (c - '0') * unit;
    unit /= 10;
  }
  return thousandths <= 1000 ? thousandths : 0;
}

// Checks that a target is a path, `*`, or a scheme with what follows it.
bool is_target(std::string_view method, std::string_view target) {
  if (target.empty()) return false;
  if (target[0] == '/' || target == "*" || method == "CONNECT") return true;
  const char* const begin = target.data();
  const char* const scheme_end = pass(begin, begin + target.size(), kAlpha);
  const auto scheme = static_cast<std::size_t>(scheme_end - begin);
  return scheme != 0 && target.substr(scheme, 3) == "://";
}

constexpr unsigned kSizeDigits = 15;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char letter = static_cast<char>(c | 0x20);
  return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

}  // namespace

// -- heads

std::optional<std::string_view> Head::field(std::string_view name) const {
  for (auto field = fields_.rbegin(); field != fields_.rend(); ++field) {
    if (field->name.size == name.size() && same(view(field->name), name)) return view(field->value);
  }
  return std::nullopt;
}

std::optional<std::string_view> Head::sole_field(std::string_view name) const {
  const auto named = [&](const Field& field) { return same(view(field.name), name); };
  return std::ranges::count_if(fields_, named) == 1 ? field(name) : std::nullopt;
}

std::vector<std::pair<std::string_view, std::string_view>> Head::fields() const {
  std::vector<std::pair<std::string_view, std::string_view>> all;
  all.reserve(fields_.size());
  for (const Field& field : fields_) all.emplace_back(view(field.name), view(field.value));
  return all;
}

Coding accepted_coding(std::string_view value) {
  Coding best = Coding::kNone;
  int best_weight = 0;
  while (!value.empty()) {
    std::string_view item = next_item(value, ',');
    const std::string_view name = next_item(item, ';');
    const Coding coding = same(name, "gzip")      ? Coding::kGzip
                          : same(name, "deflate") ? Coding::kDeflate
                                                  : Coding::kNone;
    if (coding == Coding::kNone) continue;
    const int here = weight(item);
    if (here > best_weight) {
      best = coding;
      best_weight = here;
    }
  }
  return best;
}

HeadParser::Result HeadParser::parse(const char*& at, const char* end) {
  if (failed_) return Result::kFault;
  piece_ = at;
  const std::size_t size = head_.bytes_.size();
  const bool cut = static_cast<std::size_t>(end - at) > kHeadLimit - size;
  const char* const stop = cut ? at + (kHeadLimit - size) : end;
  while (at != stop && state_ != State::kDone) {
    at = step(at, stop);
    if (at == nullptr) {
      at = end;
      return Result::kFault;
    }
  }
  absorb(at);
  if (state_ == State::kDone) return Result::kDone;
  if (!cut) return Result::kMore;
  fail(Fault::kHeadTooLong);
  at = end;
  return Result::kFault;
}

Head HeadParser::take() {
  Head head = std::move(head_);
  *this = HeadParser();
  return head;
}

const char* HeadParser::step(const char* at, const char* end) {
  switch (state_) {
    case State::kStart:
      return start(at, end);
    case State::kMethod:
      return method(at, end);
    case State::kTarget:
      return target(at, end);
    case State::kVersion:
      return version(at, end);
    case State::kRequestLineEnd:
    case State::kValueEnd:
      return line_end(at, State::kFieldStart);
    case State::kFieldStart:
      return field_start(at);
    case State::kName:
      return name(at, end);
    case State::kBeforeValue:
      return before_value(at, end);
    case State::kValue:
      return value(at, end);
    case State::kHeadEnd:
      return line_end(at, State::kDone);
    case State::kDone:
      break;
  }
  return at;
}

const char* HeadParser::start(const char* at, const char* end) {
  // RFC 9112, 2.2: empty lines before a request are ignored.
  while (at != end && (*at == '\r' || *at == '\n')) ++at;
  piece_ = at;
  if (at == end) return at;
  head_.bytes_.reserve(kUsualHead);
  head_.fields_.reserve(kUsualFields);
  state_ = State::kMethod;
  return at;
}

const char* HeadParser::method(const char* at, const char* end) {
  at = pass(at, end, kToken);
  const std::uint32_t size = offset(at);
  if (size > kMethodLimit) return fail(Fault::kMethod);
  if (at == end) return at;
  if (*at != ' ' || size == 0) return fail(Fault::kMethod);
  head_.method_ = {0, size};
  head_.target_.at = size + 1;
  state_ = State::kTarget;
  return at + 1;
}

const char* HeadParser::target(const char* at, const char* end) {
  at = pass(at, end, kVisible);
  if (at == end) return at;
  if (*at != ' ' && *at != '\r') return fail(Fault::kTarget);
  head_.target_.size = offset(at) - head_.target_.at;
  absorb(at);
  if (!is_target(head_.method(), head_.target())) return fail(Fault::kTarget);
  if (*at == ' ') {
    state_ = State::kVersion;
  } else {
    // HTTP/0.9, which has no version.
    major_ = '0';
    minor_ = '9';
    state_ = State::kRequestLineEnd;
  }
  return at + 1;
}

const char* HeadParser::version(const char* at, const char* end) {
  for (; at != end; ++at) {
    const char c = *at;
    if (version_size_ == kVersionText.size()) {
      if (c != '\r') return fail(Fault::kVersion);
      const bool known = (major_ == '1' && (minor_ == '0' || minor_ == '1')) ||
                         (major_ == '0' && minor_ == '9') || (major_ == '2' && minor_ == '0');
      if (!known) return fail(Fault::kVersion);
      absorb(at);
      if (head_.method() == "PRI") return fail(Fault::kHttp2);
      state_ = State::kRequestLineEnd;
      return at + 1;
    }
    if (version_size_ == 5) {
      major_ = c;
    } else if (version_size_ == 7) {
      minor_ = c;
    } else if (c != kVersionText[version_size_]) {
      return fail(Fault::kVersion);
    }
    ++version_size_;
  }
  return at;
}

const char* HeadParser::line_end(const char* at, State next) {
  if (*at != '\n') return fail(Fault::kLineEnd);
  state_ = next;
  if (next == State::kDone) {
    finish();
    if (failed_) return nullptr;
  }
  return at + 1;
}

const char* HeadParser::field_start(const char* at) {
  if (*at == '\r') {
    state_ = State::kHeadEnd;
    return at + 1;
  }
  if (*at == ' ' || *at == '\t') return fail(Fault::kFolding);
  if (head_.fields_.size() == kFieldLimit) return fail(Fault::kTooManyFields);
  field_.name.at = offset(at);
  state_ = State::kName;
  return at;
}

const char* HeadParser::name(const char* at, const char* end) {
  at = pass(at, end, kToken);
  if (at == end) return at;
  field_.name.size = offset(at) - field_.name.at;
  if (*at != ':' || field_.name.size == 0) return fail(Fault::kFieldName);
  state_ = State::kBeforeValue;
  return at + 1;
}

const char* HeadParser::before_value(const char* at, const char* end) {
  while (at != end && (*at == ' ' || *at == '\t')) ++at;
  if (at == end) return at;
  field_.value.at = offset(at);
  state_ = State::kValue;
  return at;
}

const char* HeadParser::value(const char* at, const char* end) {
  at = pass(at, end, kValueSet);
  if (at == end) return at;
  if (*at != '\r') return fail(*at == '\n' ? Fault::kLineEnd : Fault::kFieldValue);
  field_.value.size = offset(at) - field_.value.at;
  absorb(at);
  end_field();
  if (failed_) return nullptr;
  state_ = State::kValueEnd;
  return at + 1;
}

const char* HeadParser::fail(Fault fault) {
  failed_ = true;
  fault_ = fault;
  return nullptr;
}

void HeadParser::end_field() {
  const std::string_view value = trimmed(head_.view(field_.value));
  field_.value.size = static_cast<std::uint32_t>(value.size());
  head_.fields_.push_back(field_);
  const std::string_view name = head_.view(field_.name);
  if (!trailer_) {
    mean(name, value);
  } else if (same(name, "content-length") || same(name, "transfer-encoding")) {
    // RFC 9110, 6.5.1: a trailer has nothing that frames a message.
    fail(Fault::kTwoFramings);
  }
}

void HeadParser::mean(std::string_view name, std::string_view value) {
  switch (name.size()) {
    case 4:
      if (same(name, "host")) {
        head_.host_ = field_.value;
        ++head_.hosts_;
      }
      break;
    case 6:
      if (same(name, "expect")) expects_ = same(value, "100-continue");
      if (same(name, "origin")) head_.from_page_ = true;
      break;
    case 10:
      if (same(name, "connection")) mean_connection(value);
      break;
    case 14:
      if (same(name, "content-length")) mean_length(value);
      if (same(name, "sec-fetch-site")) head_.from_page_ = true;
      break;
    case 15:
      if (same(name, "accept-encoding")) {
        head_.accepts = accepted_coding(value);
        head_.accepts_one = value.find(',') == std::string_view::npos;
      }
      break;
    case 16:
      if (same(name, "content-encoding")) head_.coded = value != "identity";
      break;
    case 17:
      if (same(name, "transfer-encoding")) mean_transfer_coding(value);
      break;
    default:
      break;
  }
}

void HeadParser::mean_transfer_coding(std::string_view value) {
  if (head_.chunked || !same(value, "chunked")) fail(Fault::kTransferCoding);
  head_.chunked = true;
}

void HeadParser::mean_length(std::string_view value) {
  if (has_length_) {
    fail(Fault::kContentLengthTwice);
    return;
  }
  has_length_ = true;
  const bool number = std::all_of(value.begin(), value.end(),
                                  [](char c) { return is_digit(static_cast<unsigned char>(c)); });
  if (value.empty() || !number) {
    fail(Fault::kContentLength);
    return;
  }
  if (value.size() > kLengthDigits) {
    head_.length = std::numeric_limits<std::uint64_t>::max();
    return;
  }
  for (const char c : value) head_.length = head_.length * 10 + static_cast<unsigned>(c - '0');
}

void HeadParser::mean_connection(std::string_view value) {
  while (!value.empty()) {
    const std::string_view option = next_item(value, ',');
    if (same(option, "close")) head_.close = true;
    if (same(option, "keep-alive")) keep_alive_ = true;
  }
}

void HeadParser::finish() {
  if (trailer_) return;
  head_.modern = major_ == '1' && minor_ == '1';
  if (head_.chunked && has_length_) {
    fail(Fault::kTwoFramings);
  } else if (head_.chunked && !head_.modern) {
    // RFC 9112, 6.1: the sender may not know the coding.
    fail(Fault::kTransferCoding);
  }
  const bool lasts = head_.modern || keep_alive_;
  head_.close = head_.close || !lasts || head_.method() == "CONNECT";
  head_.expects = expects_ && head_.modern && (head_.chunked || head_.length != 0);
}

// -- messages

Reader::Step Reader::step(const char*& at, const char* end) {
  while (true) {
    switch (state_) {
      case State::kHead:
        return read_head(at, end);
      case State::kBody:
        return read_piece(at, end, State::kHead);
      case State::kChunk:
        if (missing_ != 0) return read_piece(at, end, State::kAfterChunk);
        state_ = State::kAfterChunk;
        break;
      case State::kTrailer:
        return read_trailer(at, end);
      default:
        if (at == end) return Step::kMore;
        if (read_framing(*at++) == Step::kFault) return Step::kFault;
    }
  }
}

Reader::Step Reader::read_head(const char*& at, const char* end) {
  const HeadParser::Result result = parser_.parse(at, end);
  if (result == HeadParser::Result::kMore) return Step::kMore;
  if (result == HeadParser::Result::kFault) return fail(parser_.fault());
  head_ = parser_.take();
  missing_ = head_.length;
  framing_ = 0;
  digits_ = 0;
  state_ = head_.chunked ? State::kChunkSize : State::kBody;
  return Step::kHead;
}

Reader::Step Reader::read_piece(const char*& at, const char* end, State next) {
  if (missing_ == 0) {
    state_ = next;
    return Step::kEnd;
  }
  const auto here = static_cast<std::size_t>(
      std::min<std::uint64_t>(missing_, static_cast<std::size_t>(end - at)));
  if (here == 0) return Step::kMore;
  body_ = {at, here};
  at += here;
  missing_ -= here;
  framing_ = 0;
  return Step::kBody;
}

Reader::Step Reader::read_trailer(const char*& at, const char* end) {
  const HeadParser::Result result = parser_.parse(at, end);
  if (result == HeadParser::Result::kMore) return Step::kMore;
  if (result == HeadParser::Result::kFault) return fail(parser_.fault());
  parser_ = HeadParser();
  state_ = State::kHead;
  return Step::kEnd;
}

Reader::Step Reader::read_framing(char c) {
  if (++framing_ > kHeadLimit) return fail(Fault::kHeadTooLong);
  switch (state_) {
    case State::kChunkSize:
      if (const int digit = hex_digit(c); digit >= 0 && digits_ < kSizeDigits) {
        missing_ = missing_ * 16 + static_cast<unsigned>(digit);
        ++digits_;
        return Step::kMore;
      }
      if (digits_ == 0 || (c != ';' && c != '\r')) return fail(Fault::kChunkSize);
      state_ = c == ';' ? State::kChunkExtension : State::kChunkLineEnd;
      return Step::kMore;
    case State::kChunkExtension:
      // Its contents are ignored.
      if (c == '\r') {
        state_ = State::kChunkLineEnd;
      } else if ((static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f) {
        return fail(Fault::kChunkSize);
      }
      return Step::kMore;
    case State::kChunkLineEnd:
      if (c != '\n') return fail(Fault::kLineEnd);
      if (missing_ == 0) {
        parser_.begin_trailer();
        state_ = State::kTrailer;
      } else {
        state_ = State::kChunk;
      }
      return Step::kMore;
    case State::kAfterChunk:
      if (c != '\r') return fail(Fault::kChunkEnd);
      state_ = State::kChunkEnd;
      return Step::kMore;
    default:
      if (c != '\n') return fail(Fault::kChunkEnd);
      digits_ = 0;
      state_ = State::kChunkSize;
      return Step::kMore;
  }
}

}  // namespace gpubridge::http1
