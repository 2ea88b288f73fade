// HTTP/2 connections: frames of a client in pieces of any size, and answers to its calls behind
// them.
#include "net/http2_connection.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "net/http2_frames.h"

namespace {

using gpubridge::fuzz::expect;
using namespace gpubridge::http2;

std::shared_ptr<const gpubridge::GrpcMethods> methods() {
  auto made = std::make_shared<gpubridge::GrpcMethods>();
  made->add("/u", {gpubridge::GrpcKind::kUnary, 4096});
  made->add("/i", {gpubridge::GrpcKind::kInfer, std::uint64_t{1} << 31U});
  made->add("/s", {gpubridge::GrpcKind::kStream, 4096});
  return made;
}

// A connection with a server that answers each call, and what a client sees of it.
class Served {
 public:
  Served() : connection_(methods(), limits()) {}

  void take(std::string_view bytes) {
    while (!bytes.empty() && !connection_.closed()) {
      const Place place = connection_.memory();
      expect(place.size != 0, "there is memory to receive into");
      const std::size_t size = std::min(place.size, bytes.size());
      std::memcpy(place.data, bytes.data(), size);
      connection_.received(size, 1.0);
      bytes.remove_prefix(size);
      handle();
    }
  }

  // Answers the calls. Not earlier: what may follow on a stream depends on its answer.
  void finish() {
    for (const std::uint32_t stream : calls_) answer(stream);
    flush();
  }

  // What the server saw, by stream; of the connection under 0.
  [[nodiscard]] std::map<std::uint32_t, std::string> seen() const {
    auto seen = streams_;
    std::erase_if(seen, [](const auto& stream) { return stream.second.empty(); });
    return seen;
  }

 private:
  static Limits limits() {
    Limits limits;
    limits.max_concurrent_streams = 8;
    limits.receive_bytes = 3 << 13;
    return limits;
  }

  void handle() {
    for (const Event& event : connection_.take_events()) {
      std::string& text = streams_[event.stream];
      switch (event.kind) {
        case EventKind::kCall:
        case EventKind::kMessages:
          for (const Message& message : event.messages) {
            const auto bytes = message.bytes();
            text += "m" + std::string(bytes.begin(), bytes.end()) + ";";
          }
          if (event.end || event.kind == EventKind::kCall) calls_.push_back(event.stream);
          break;
        case EventKind::kData:
          connection_.consume(event.stream, static_cast<std::int64_t>(event.data.size()));
          if (event.end) calls_.push_back(event.stream);
          break;
        case EventKind::kFailed:
          // Whether messages before the fault are told depends on what came with it.
          text = "failed";
          calls_.push_back(event.stream);
          break;
        case EventKind::kClosed:
          text += "closed " + std::to_string(event.code) + event.text;
          break;
        default:
          break;
      }
    }
  }

  void answer(std::uint32_t stream) {
    static const auto kHeaders = std::make_shared<gpubridge::HeaderFields>(
        std::vector<std::pair<std::string, std::string>>{{":status", "200"}}, true);
    static const auto kTrailers = std::make_shared<gpubridge::HeaderFields>(
        std::vector<std::pair<std::string, std::string>>{{"grpc-status", "0"}}, true);
    static const std::array<std::uint8_t, 64> kBody{};
    const std::array<Segment, 1> body{Segment{kBody.data(), kBody.size(), nullptr}};
    try {
      connection_.send_response(stream, kHeaders, body, kTrailers);
    } catch (const std::logic_error&) {
      // The stream has been answered.
    }
  }

  void flush() {
    std::array<iovec, 16> pieces;
    while (connection_.output().fill()) {
      std::size_t size = 0;
      const std::size_t count = connection_.output().gather(pieces);
      for (std::size_t index = 0; index < count; ++index) size += pieces.at(index).iov_len;
      expect(size != 0, "what waits has bytes");
      connection_.output().sent(size);
    }
  }

  Connection connection_;
  std::map<std::uint32_t, std::string> streams_;
  std::vector<std::uint32_t> calls_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  std::uint32_t cuts = input.byte() | 1U;
  const std::string text =
      std::string(kPreface) + std::string("\0\0\0\4\0\0\0\0\0", 9) + std::string(input.text());
  Served whole;
  whole.take(text);
  Served pieces;
  for (std::size_t at = 0; at < text.size();) {
    cuts = cuts * 1664525U + 1013904223U;
    const std::size_t length = std::min<std::size_t>(1 + (cuts >> 24U) % 61, text.size() - at);
    pieces.take(std::string_view(text).substr(at, length));
    at += length;
  }
  whole.finish();
  pieces.finish();
  expect(whole.seen() == pieces.seen(), "pieces mean what the whole means");
  return 0;
}
