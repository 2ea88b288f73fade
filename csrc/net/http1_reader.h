// The receiving half of an HTTP/1 connection: bytes in, messages out, one after the other.
//
//   START -> HEAD -> BODY (by length) -----------------> START
//                 -> CHUNK SIZE <-> CHUNK -> TRAILER --> START
//
// Bytes of bodies are only pointed at: who drives the reader puts them where they belong, or
// receives a body by length without the reader, which then is told how much came (`skip`).
#pragma once

#include "net/http1_head.h"
#include "std.h"

namespace gpubridge::http1 {

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
  Step fail(Fault fault);

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
