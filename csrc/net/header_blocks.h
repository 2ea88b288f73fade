// HEADERS and CONTINUATION: streams begin, and requests end with trailers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "net/hpack.h"
#include "net/http2_state.h"

namespace gpubridge::http2 {

// Takes header blocks, in one frame or several. A client's requests soon have blocks of nothing but
// indexes, the same bytes each time; such a block means the same for as long as the dynamic table
// is the same, so blocks are remembered until one changes the table.
class HeaderBlocks {
 public:
  explicit HeaderBlocks(State& state);

  // The stream whose header block is not complete, else 0.
  [[nodiscard]] std::uint32_t unfinished() const { return unfinished_; }
  // Take a frame with its payload. Throw ConnectionFault and StreamFault.
  void begin(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void proceed(const FrameHeader& header, std::span<const std::uint8_t> payload);

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>{}(text);
    }
  };

  void take(std::uint32_t id, std::uint8_t flags, std::span<const std::uint8_t> block);
  void take_known_stream(std::uint32_t id, std::uint8_t flags, std::span<const std::uint8_t> block);
  void take_trailers(Stream& stream, std::uint8_t flags, std::span<const std::uint8_t> block);
  void open(std::uint32_t id, std::uint8_t flags, std::shared_ptr<const RequestHeaders> headers);
  std::shared_ptr<const RequestHeaders> request(std::uint32_t id,
                                                std::span<const std::uint8_t> block);
  HeaderList decode(std::span<const std::uint8_t> block);
  void skip(std::span<const std::uint8_t> block);

  State& state_;
  HpackDecoder decoder_;
  std::unordered_map<std::string, std::shared_ptr<const RequestHeaders>, Hash, std::equal_to<>>
      known_;
  std::uint32_t unfinished_ = 0;
  std::uint8_t flags_ = 0;
  std::int64_t frames_ = 0;
  std::string block_;
};

}  // namespace gpubridge::http2
