// Heads of HTTP/1 responses, and the chunks of those whose length is not known.
#pragma once

#include "std.h"

namespace gpubridge::http1 {

// What a head says of its connection, beside the version.
enum class Persistence : std::uint8_t { kDefault, kKeepAlive, kClose };

// How the end of a body is found.
struct Framing {
  // Its length, if that is known.
  std::optional<std::uint64_t> length;
  // It comes in chunks; otherwise one without a length ends with the connection.
  bool chunked = false;
};

inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// What comes before and after the fields of a response: head = begin + fields + end.
class ResponseHead {
 public:
  ResponseHead(int status, Framing framing, Persistence persistence);

  [[nodiscard]] std::string_view begin() const { return begin_; }
  [[nodiscard]] std::string_view end() const { return {end_, end_size_}; }

 private:
  void append(std::string_view text);
  void append(std::uint64_t number);

  std::string_view begin_;
  std::size_t end_size_ = 0;
  char end_[96];
};

// The line before a chunk's bytes; a line end follows them.
std::string chunk_line(std::size_t nbytes);

}  // namespace gpubridge::http1
