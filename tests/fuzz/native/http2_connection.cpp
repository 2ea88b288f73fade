// HTTP/2 connections: frames of a client in pieces of any size, answers to its calls, and frames
// behind those. What is sent is frames, and no more data than the client's windows allow.
#include "net/http2_connection.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
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
  made->add("/i", {gpubridge::GrpcKind::kUnary, std::uint64_t{1} << 31U});
  made->add("/s", {gpubridge::GrpcKind::kStream, 4096});
  return made;
}

// Calls `take` with each frame until it returns false; returns what is left.
template <typename Take>
std::string_view for_frames(std::string_view bytes, Take&& take) {
  while (bytes.size() >= kHeaderBytes) {
    const FrameHeader frame = read_header(reinterpret_cast<const std::uint8_t*>(bytes.data()));
    if (frame.length > bytes.size() - kHeaderBytes) break;
    if (!take(frame, bytes.substr(kHeaderBytes, frame.length))) break;
    bytes.remove_prefix(kHeaderBytes + frame.length);
  }
  return bytes;
}

// The most bytes that a client may have let the server send, in all and on any stream.
std::pair<std::uint64_t, std::uint64_t> windows(std::string_view frames) {
  std::uint64_t all = kDefaultWindow;
  std::uint64_t initial = kDefaultWindow;
  std::uint64_t stream = 0;
  for_frames(frames, [&](const FrameHeader& frame, std::string_view payload) {
    const auto* at = reinterpret_cast<const std::uint8_t*>(payload.data());
    if (frame.type == kWindowUpdate && frame.length == 4) {
      (frame.stream == 0 ? all : stream) += read_u32(at) & kMaxWindow;
    } else if (frame.type == kSettings) {
      for (std::size_t i = 0; i + 6 <= payload.size(); i += 6) {
        if (at[i] == 0 && at[i + 1] == 4)
          initial = std::max<std::uint64_t>(initial, read_u32(at + i + 2));
      }
    }
    return true;
  });
  return {all, initial + stream};
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
  void answer_calls() {
    for (const std::uint32_t stream : calls_) answer(stream);
  }

  // Sends all that may be sent; returns the bytes of DATA, by stream.
  std::map<std::uint32_t, std::uint64_t> flush() {
    std::string sent;
    std::array<iovec, 16> pieces;
    while (connection_.output().fill()) {
      std::size_t size = 0;
      const std::size_t count = connection_.output().gather(pieces);
      for (const iovec& piece : std::span(pieces).first(count)) {
        sent.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
        size += piece.iov_len;
      }
      expect(size != 0, "what waits has bytes");
      connection_.output().sent(size);
    }
    std::map<std::uint32_t, std::uint64_t> data;
    for_frames(sent, [&](const FrameHeader& frame, std::string_view) {
      expect(frame.type <= kContinuation && frame.length <= kLargestFrameSize, "a frame is one");
      if (frame.type == kData) data[frame.stream] += frame.length;
      return true;
    });
    return data;
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
    static const std::array<std::uint8_t, 40'000> kBody{};
    const std::size_t size = stream % 8 == 1 ? kBody.size() : 64;
    const std::array<Segment, 1> body{Segment{kBody.data(), size, nullptr}};
    try {
      connection_.send_response(stream, kHeaders, body, kTrailers);
    } catch (const std::logic_error&) {
      // The stream has been answered.
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
  const std::size_t frames_before = input.byte() % 32;
  const std::string text = std::string("\0\0\0\4\0\0\0\0\0", 9) + std::string(input.text());
  // Answers come behind some of the frames.
  std::size_t frames = 0;
  const std::string_view behind = for_frames(
      text, [&](const FrameHeader&, std::string_view) { return ++frames <= frames_before; });
  Served whole;
  Served pieces;
  const auto feed = [&](std::string_view part) {
    whole.take(part);
    while (!part.empty()) {
      cuts = cuts * 1664525U + 1013904223U;
      const std::size_t length = std::min<std::size_t>(1 + (cuts >> 24U) % 61, part.size());
      pieces.take(part.substr(0, length));
      part.remove_prefix(length);
    }
  };
  feed(kPreface);
  feed(std::string_view(text).substr(0, text.size() - behind.size()));
  whole.answer_calls();
  pieces.answer_calls();
  feed(behind);
  expect(whole.seen() == pieces.seen(), "pieces mean what the whole means");
  const auto sent = whole.flush();
  expect(sent == pieces.flush(), "pieces are answered as the whole is");
  const auto [all, stream] = windows(text);
  std::uint64_t total = 0;
  for (const auto& [id, nbytes] : sent) {
    expect(nbytes <= stream, "no stream sends more than its window");
    total += nbytes;
  }
  expect(total <= all, "no connection sends more than its window");
  return 0;
}
