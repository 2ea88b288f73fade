// Heads of HTTP/1 responses, and the chunks of those whose length is not known.
#pragma once

#include "std.h"

namespace gpubridge::http1 {

// The `Connection` field of a head.
enum class Persistence : std::uint8_t { kDefault, kKeepAlive, kClose };

// Framing of a body: how the client finds its end.
struct Framing {
  // Its length, if that is known.
  std::optional<std::uint64_t> length;
  // It comes in chunks; otherwise one without a length ends with the connection.
  bool chunked = false;
};

inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// The constant parts of a response's head: head = begin + fields + end.
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
