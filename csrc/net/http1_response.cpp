#include "net/http1_response.h"

namespace gpubridge::http1 {
namespace {

// "Not Allowed" is Triton's word.
constexpr std::array<std::pair<int, std::string_view>, 12> kStatusLines{{
    {200, "HTTP/1.1 200 OK\r\n"},
    {400, "HTTP/1.1 400 Bad Request\r\n"},
    {403, "HTTP/1.1 403 Forbidden\r\n"},
    {404, "HTTP/1.1 404 Not Found\r\n"},
    {405, "HTTP/1.1 405 Not Allowed\r\n"},
    {408, "HTTP/1.1 408 Request Timeout\r\n"},
    {411, "HTTP/1.1 411 Length Required\r\n"},
    {413, "HTTP/1.1 413 Content Too Large\r\n"},
    {431, "HTTP/1.1 431 Request Header Fields Too Large\r\n"},
    {500, "HTTP/1.1 500 Internal Server Error\r\n"},
    {501, "HTTP/1.1 501 Not Implemented\r\n"},
    {503, "HTTP/1.1 503 Service Unavailable\r\n"},
}};

std::string_view status_line(int status) {
  const auto* const line = std::find_if(kStatusLines.begin(), kStatusLines.end(),
                                        [&](const auto& each) { return each.first == status; });
  return line == kStatusLines.end() ? std::string_view{} : line->second;
}

}  // namespace

ResponseHead::ResponseHead(int status, Framing framing, Persistence persistence)
    : begin_(status_line(status)) {
  if (framing.length) {
    append("Content-Length: ");
    append(*framing.length);
    append("\r\n");
  } else if (framing.chunked) {
    append("Transfer-Encoding: chunked\r\n");
  }
  if (persistence == Persistence::kClose) append("Connection: close\r\n");
  if (persistence == Persistence::kKeepAlive) append("Connection: keep-alive\r\n");
  append("\r\n");
}

void ResponseHead::append(std::string_view text) {
  std::memcpy(end_ + end_size_, text.data(), text.size());
  end_size_ += text.size();
}

void ResponseHead::append(std::uint64_t number) {
  const auto result = std::to_chars(end_ + end_size_, end_ + sizeof end_, number);
  end_size_ = static_cast<std::size_t>(result.ptr - end_);
}

std::string chunk_line(std::size_t nbytes) {
  std::array<char, 20> text;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), nbytes, 16);
  return std::string(text.data(), result.ptr).append("\r\n");
}

}  // namespace gpubridge::http1
