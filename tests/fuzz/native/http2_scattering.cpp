// Large messages over HTTP/2, received into their places: by whatever reads and whatever comes
// between their frames, they are what they are when all comes in small pieces.
#include <sys/uio.h>

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
#include "net/http2_connection.h"
#include "net/http2_frames.h"

namespace {

using gpubridge::fuzz::expect;
using namespace gpubridge::http2;

constexpr std::array<std::size_t, 10> kSizes{0,    1,    100,   4095,  4096,
                                             8192, 9000, 16384, 65536, 70000};

void add_frame(std::string& bytes, std::uint8_t type, std::uint8_t flags, std::uint32_t stream,
               std::string_view payload) {
  append_header({.length = payload.size(), .type = type, .flags = flags, .stream = stream}, bytes);
  bytes += payload;
}

// Bytes that differ from those a frame away.
std::string pattern() {
  std::string made(240'000, '\0');
  for (std::size_t at = 0; at < made.size(); ++at) made[at] = static_cast<char>(at * 7 + at / 251);
  return made;
}

// What clients send: calls with large messages on up to three streams, in frames of any size, and
// other frames between them.
std::string client(gpubridge::fuzz::Input& input) {
  std::string bytes(kPreface);
  add_frame(bytes, kSettings, 0, 0, {});
  static const std::string kPattern = pattern();
  std::map<std::uint32_t, std::string_view> bodies;
  const std::string head = std::string("\x83\x86\x04\x02/i", 6);
  std::vector<std::string> prefixes;
  for (int stream = input.byte() % 3; stream >= 0; --stream) {
    const std::uint32_t id = 1 + 2 * static_cast<std::uint32_t>(bodies.size());
    const std::uint32_t size = 60'000 + input.byte() * 700U;
    bodies[id] = std::string_view(kPattern).substr(id, size);
    add_frame(bytes, kHeaders, kEndHeaders, id, head);
    std::string prefix(1, '\0');
    append_u32(size, prefix);
    add_frame(bytes, kData, 0, id, prefix);
  }
  while (!input.rest().empty()) {
    const std::uint8_t kind = input.byte();
    const std::uint32_t id = 1 + 2 * (kind % 3U);
    std::string_view& body = bodies[id];
    const std::size_t size = kSizes.at(input.byte() % kSizes.size());
    switch (kind / 3 % 16) {
      default: {
        // Several frames of one size, as clients send them.
        const int count = input.byte() % 8;
        for (int frame = 0; frame <= count && !body.empty(); ++frame) {
          const std::string_view part = body.substr(0, size);
          body.remove_prefix(part.size());
          add_frame(bytes, kData, body.empty() && count % 2 == 0 ? kEndStream : 0, id, part);
        }
        break;
      }
      case 0:
        add_frame(bytes, kPing, 0, 0, "12345678");
        break;
      case 1:
        add_frame(bytes, kRstStream, 0, id, std::string("\0\0\0\x8", 4));
        break;
      case 2:
        add_frame(bytes, kData, kEndStream, id, body.substr(0, size));
        body = {};
        break;
      case 3: {
        const std::string part(body.substr(0, size));
        body.remove_prefix(part.size());
        add_frame(bytes, kData, kPadded, id, '\x3' + part + "pad");
        break;
      }
      case 4:
        add_frame(bytes, kData, input.byte() % 2, id, std::string_view(kPattern).substr(9, size));
        break;
      case 5:
        add_frame(bytes, kWindowUpdate, 0, id, std::string("\0\0\1\0", 4));
        break;
    }
  }
  return bytes;
}

// A server of one connection, that has large messages received into memory of their size.
class Server {
 public:
  explicit Server(std::uint32_t cuts) : cuts_(cuts), connection_(methods(), {}) {}

  // Small pieces go through the connection's buffer, and are copied.
  void take_pieces(std::string_view bytes) {
    while (!bytes.empty() && !connection_.closed()) read(bytes, 1 + next() % 2000);
  }

  // As the driver does: as much as there is place for, and then where frames are expected.
  void take(std::string_view bytes) {
    while (!bytes.empty() && !connection_.closed()) {
      read(bytes, next() % 4 == 0 ? 1 + next() % 100 : bytes.size());
      while (!bytes.empty() && !connection_.closed()) {
        const std::span<const iovec> places = connection_.places();
        if (places.empty()) break;
        const std::size_t most = next() % 4 == 0 ? next() % 40'000 : bytes.size();
        std::size_t came = 0;
        for (const iovec& place : places) {
          const std::size_t size = std::min({place.iov_len, bytes.size(), most - came});
          std::memcpy(place.iov_base, bytes.data(), size);
          bytes.remove_prefix(size);
          came += size;
        }
        connection_.placed(came, 1.0);
        handle();
        if (came == 0) break;
      }
    }
  }

  // The bytes of each stream and what became of it.
  std::map<std::uint32_t, std::string> seen() {
    std::map<std::uint32_t, std::string> seen;
    for (auto& [id, stream] : streams_) {
      // Of a stream that is gone before its message began there may be no word.
      if (stream.told == "reset" || stream.told == "lost") continue;
      std::size_t filled = stream.filled;
      if (stream.placed != 0) filled += stream.placed - connection_.missing(id);
      seen[id] = std::string(stream.bytes.begin(),
                             stream.bytes.begin() + static_cast<std::ptrdiff_t>(filled)) +
                 stream.told;
    }
    std::erase_if(seen, [](const auto& stream) { return stream.second.empty(); });
    return seen;
  }

 private:
  struct Large {
    std::vector<std::uint8_t> bytes;
    std::size_t filled = 0;
    std::size_t placed = 0;  // bytes of the place that the connection has
    std::string told;
  };

  static std::shared_ptr<const gpubridge::GrpcMethods> methods() {
    auto made = std::make_shared<gpubridge::GrpcMethods>();
    made->add("/i", {gpubridge::GrpcKind::kUnary, std::uint64_t{1} << 31U});
    return made;
  }

  std::uint32_t next() {
    cuts_ = cuts_ * 1664525U + 1013904223U;
    return cuts_ >> 12U;
  }

  void read(std::string_view& bytes, std::size_t most) {
    const Place place = connection_.memory();
    expect(place.size != 0, "there is memory to receive into");
    const std::size_t size = std::min({place.size, bytes.size(), most});
    std::memcpy(place.data, bytes.data(), size);
    bytes.remove_prefix(size);
    connection_.received(size, 1.0);
    handle();
  }

  void handle() {
    for (const Event& event : connection_.take_events()) {
      Large& stream = streams_[event.stream];
      switch (event.kind) {
        case EventKind::kLarge:
          stream.bytes.resize(event.value);
          break;
        case EventKind::kData:
          if (stream.placed != 0) {
            // The end has come before the place was full.
            expect(event.data.empty() && event.end, "what belongs to a place goes there");
            over(stream, "short");
            break;
          }
          expect(event.data.size() <= stream.bytes.size() - stream.filled,
                 "no more comes than fits");
          std::copy(event.data.begin(), event.data.end(),
                    stream.bytes.begin() + static_cast<std::ptrdiff_t>(stream.filled));
          stream.filled += event.data.size();
          if (event.end && stream.filled < stream.bytes.size()) {
            over(stream, "short");
          } else if (event.end) {
            stream.told += "end";
          }
          break;
        case EventKind::kFilled:
          stream.filled += std::exchange(stream.placed, 0);
          if (event.end) stream.told = "end";
          if (event.end && stream.filled < stream.bytes.size()) over(stream, "short");
          break;
        case EventKind::kCall:
        case EventKind::kMessages:
          stream.told += "message " + std::to_string(event.messages.front().bytes().size());
          break;
        case EventKind::kFailed:
        case EventKind::kReset:
          // What of it came before depends on the reads.
          over(stream, event.kind == EventKind::kReset ? "reset" : "failed");
          break;
        case EventKind::kClosed:
          for (auto& [id, each] : streams_) over(each, "lost");
          stream.told = "closed " + std::to_string(event.code) + event.text;
          return;
          break;
        default:
          break;
      }
    }
    for (auto& [id, stream] : streams_) {
      if (stream.placed != 0 || stream.filled == stream.bytes.size() || !stream.told.empty())
        continue;
      stream.placed =
          std::min<std::size_t>(stream.bytes.size() - stream.filled, 1 + next() % 400'000);
      connection_.receive_into(id, {stream.bytes.data() + stream.filled, stream.placed, nullptr});
    }
  }

  // The memory stays: the connection may have its place for now.
  static void over(Large& stream, std::string told) {
    stream.filled = stream.placed = 0;
    stream.told = std::move(told);
  }

  std::uint32_t cuts_;
  std::map<std::uint32_t, Large> streams_;
  Connection connection_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, std::min<std::size_t>(size, 256));
  const std::uint32_t cuts = input.byte();
  const std::string bytes = client(input);
  Server pieces(cuts);
  pieces.take_pieces(bytes);
  Server scattered(cuts + 1);
  scattered.take(bytes);
  expect(pieces.seen() == scattered.seen(), "reads of any size receive the same");
  return 0;
}
