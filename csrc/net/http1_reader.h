// The receiving half of an HTTP/1 connection: bytes in, messages out, one after the other.
//
//   START -> HEAD -> BODY (by length) -----------------> START
//                 -> CHUNK SIZE <-> CHUNK -> TRAILER --> START
//
// Bytes of bodies are only pointed at: who drives the reader puts them where they belong, or
// receives a body by length without the reader, which then is told how much came (`skip`).
//
// Strict where a lenient reading would let two servers see different requests: lines end in CRLF,
// nothing is folded, a length is given once and not beside chunks. docs/reference/protocol.md has
// the rules.
#pragma once

#include "std.h"

namespace gpubridge::http1 {

// Reasons to refuse what a client sends. gpubridge/frontend/http/message.py words them, by number.
enum class Fault : std::uint8_t {
  kMethod,
  kTarget,
  kVersion,
  kHttp2,
  kLineEnd,
  kFieldName,
  kFieldValue,
  kFolding,
  kHeadTooLong,
  kTooManyFields,
  kContentLength,
  kContentLengthTwice,
  kTransferCoding,
  kTwoFramings,
  kChunkSize,
  kChunkEnd,
  kBodyTooLong,
  kChunksTooLong,
};

inline constexpr std::size_t kHeadLimit = std::size_t{64} << 10U;
inline constexpr std::size_t kFieldLimit = 1024;

// A content coding that answers may have.
enum class Coding : std::uint8_t { kNone, kGzip, kDeflate };

// The request line, the header fields, and what those mean for the message. Views are of the head.
class Head {
 public:
  [[nodiscard]] std::string_view method() const { return view(method_); }
  [[nodiscard]] std::string_view target() const { return view(target_); }
  // The value of the last field of a name, which is given in lower case.
  [[nodiscard]] std::optional<std::string_view> field(std::string_view name) const;

  // The same, nothing where there are several.
  [[nodiscard]] std::optional<std::string_view> sole_field(std::string_view name) const;

  // Bytes of memory.
  [[nodiscard]] std::size_t memory() const {
    return sizeof(*this) + bytes_.capacity() + fields_.capacity() * sizeof(Field);
  }

  // The value of the last Host, empty where there is none, and how many there are.
  [[nodiscard]] std::string_view host() const { return view(host_); }
  [[nodiscard]] std::uint32_t hosts() const { return hosts_; }
  // A browser sent it for a page: it has Origin or Sec-Fetch-Site.
  [[nodiscard]] bool from_page() const { return from_page_; }

  // Names and values of all fields, in their order, as they came.
  [[nodiscard]] std::vector<std::pair<std::string_view, std::string_view>> fields() const;

  // Bytes of the body by its Content-Length, the greatest number for one of more than 18 digits.
  std::uint64_t length = 0;
  // The body comes in chunks instead.
  bool chunked = false;
  // The body has a Content-Encoding.
  bool coded = false;
  // The connection ends with this message.
  bool close = false;
  // The client can read chunks and interim answers.
  bool modern = true;
  // The client waits for an interim answer before it sends the body.
  bool expects = false;
  // Compression that the client prefers for the answer.
  Coding accepts = Coding::kNone;
  // It accepts this coding and names no other: clients with a list accept what their library can.
  bool accepts_one = false;

 private:
  friend class HeadParser;

  // A piece of `bytes_`; a head is shorter than 4 GiB.
  struct Span {
    std::uint32_t at = 0;
    std::uint32_t size = 0;
  };
  struct Field {
    Span name;
    Span value;
  };

  [[nodiscard]] std::string_view view(Span span) const {
    return std::string_view(bytes_).substr(span.at, span.size);
  }

  std::string bytes_;
  Span method_;
  Span target_;
  Span host_;
  std::uint32_t hosts_ = 0;
  bool from_page_ = false;
  std::vector<Field> fields_;
};

// Reads one head after the other, and the trailers of chunked bodies.
class HeadParser {
 public:
  enum class Result : std::uint8_t { kMore, kDone, kFault };

  // Takes bytes from `at` on, up to the end of the head, and moves `at` behind them.
  Result parse(const char*& at, const char* end);

  // Returns the head that is done; the next bytes begin another.
  Head take();

  // Has the next bytes read as a trailer: fields, which mean nothing, and an empty line.
  void begin_trailer() {
    trailer_ = true;
    state_ = State::kFieldStart;
  }

  // A byte of a head has come, and not all of it.
  [[nodiscard]] bool begun() const { return state_ != State::kStart; }
  [[nodiscard]] Fault fault() const { return fault_; }
  // Bytes of memory of the head so far.
  [[nodiscard]] std::size_t memory() const { return head_.memory(); }

 private:
  enum class State : std::uint8_t {
    kStart,
    kMethod,
    kTarget,
    kVersion,
    kRequestLineEnd,
    kFieldStart,
    kName,
    kBeforeValue,
    kValue,
    kValueEnd,
    kHeadEnd,
    kDone,
  };

  // Each takes bytes of one state and returns where it stopped, null for a fault.
  const char* start(const char* at, const char* end);
  const char* method(const char* at, const char* end);
  const char* target(const char* at, const char* end);
  const char* version(const char* at, const char* end);
  const char* line_end(const char* at, State next);
  const char* field_start(const char* at);
  const char* name(const char* at, const char* end);
  const char* before_value(const char* at, const char* end);
  const char* value(const char* at, const char* end);
  const char* step(const char* at, const char* end);

  // Notes why the head is refused; returns where the parser stops, which is nowhere.
  const char* fail(Fault fault);
  // Adds to the head what has come of it up to `at`.
  void absorb(const char* at) {
    head_.bytes_.append(piece_, at);
    piece_ = at;
  }
  void end_field();
  void mean(std::string_view name, std::string_view value);
  void mean_length(std::string_view value);
  void mean_transfer_coding(std::string_view value);
  void mean_connection(std::string_view value);
  void finish();
  // The place of a byte of this piece within the head.
  [[nodiscard]] std::uint32_t offset(const char* at) const {
    return static_cast<std::uint32_t>(head_.bytes_.size() + static_cast<std::size_t>(at - piece_));
  }

  State state_ = State::kStart;
  bool failed_ = false;
  bool trailer_ = false;
  Fault fault_ = Fault::kMethod;
  Head head_;
  Head::Field field_;
  // Characters of the version that have come, and its numbers.
  std::size_t version_size_ = 0;
  char major_ = 0;
  char minor_ = 0;
  bool has_length_ = false;
  bool keep_alive_ = false;
  bool expects_ = false;
  // The first byte that the head does not have yet.
  const char* piece_ = nullptr;
};

// Returns what an Accept-Encoding prefers of gzip and deflate.
Coding accepted_coding(std::string_view value);

class Reader {
 public:
  // The event at which `step` stopped.
  enum class Step : std::uint8_t {
    kMore,   // all bytes are taken
    kHead,   // `take_head` has one
    kBody,   // `body` is a piece of the body
    kEnd,    // the message is whole; the next bytes begin another
    kFault,  // nothing after it can be read
  };

  // Takes bytes from `at` on, and moves `at` behind what it took.
  Step step(const char*& at, const char* end);

  [[nodiscard]] Head take_head() { return std::move(head_); }
  [[nodiscard]] std::string_view body() const { return body_; }
  [[nodiscard]] Fault fault() const { return fault_; }

  // Bytes of a body by length that are still to come.
  [[nodiscard]] std::uint64_t missing() const { return missing_; }
  // Notes that so many of them came elsewhere.
  void skip(std::uint64_t nbytes) { missing_ -= nbytes; }

  // No message is on its way.
  [[nodiscard]] bool at_start() const { return state_ == State::kHead && !parser_.begun(); }
  // Bytes of memory of a head, or a trailer, that is not done.
  [[nodiscard]] std::size_t unfinished() const { return parser_.begun() ? parser_.memory() : 0; }
  // Part of a head is there.
  [[nodiscard]] bool in_head() const { return state_ == State::kHead && parser_.begun(); }

 private:
  enum class State : std::uint8_t {
    kHead,
    kBody,
    kChunkSize,
    kChunkExtension,
    kChunkLineEnd,
    kChunk,
    kAfterChunk,
    kChunkEnd,
    kTrailer,
  };

  Step read_head(const char*& at, const char* end);
  Step read_piece(const char*& at, const char* end, State next);
  Step read_trailer(const char*& at, const char* end);
  // Reads a byte of what frames chunks; kMore for going on.
  Step read_framing(char c);
  Step fail(Fault fault) {
    fault_ = fault;
    return Step::kFault;
  }

  State state_ = State::kHead;
  HeadParser parser_;
  Head head_;
  std::string_view body_;
  std::uint64_t missing_ = 0;
  unsigned digits_ = 0;
  // Bytes that framed chunks since the last piece of body: extensions have an end.
  std::size_t framing_ = 0;
  Fault fault_ = Fault::kMethod;
};

}  // namespace gpubridge::http1
