// HEADERS and CONTINUATION: streams begin, and requests end with trailers.
#pragma once

#include "net/hpack.h"
#include "net/http2_state.h"
#include "std.h"

namespace gpubridge::http2 {

// Takes header blocks, in one frame or several. The same bytes come again and again: a client's
// requests soon have blocks of nothing but indexes, which mean the same for as long as the dynamic
// table is the same. A proxy may send literals without end, and have each added to the table; such
// a block always means the same, and is remembered with what it adds.
class HeaderBlocks {
 public:
  explicit HeaderBlocks(State& state);

  // The stream whose header block is not complete, else 0.
  [[nodiscard]] std::uint32_t unfinished() const { return unfinished_; }
  // Take a frame with its payload. Throw ConnectionFault and StreamFault.
  void begin(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void proceed(const FrameHeader& header, std::span<const std::uint8_t> payload);

 private:
  struct Known {
    std::shared_ptr<const RequestHeaders> headers;
    bool independent;          // of what is in the table
    std::uint64_t generation;  // of the table, for which this holds if it is not independent
    std::vector<HpackTable::Entry> added;
  };

  void take(std::uint32_t id, std::uint8_t flags, std::span<const std::uint8_t> block);
  void take_known_stream(std::uint32_t id, std::uint8_t flags, std::span<const std::uint8_t> block);
  void take_trailers(Stream& stream, std::uint8_t flags, std::span<const std::uint8_t> block);
  void open(std::uint32_t id, std::uint8_t flags,
            const std::shared_ptr<const RequestHeaders>& headers);
  std::shared_ptr<const RequestHeaders> request(std::uint32_t id,
                                                std::span<const std::uint8_t> block);
  const Known* repeat(std::span<const std::uint8_t> block);
  HeaderList decode(std::span<const std::uint8_t> block);
  // Decodes a block only for its effect on the table.
  void skip(std::span<const std::uint8_t> block) {
    if (repeat(block) == nullptr) decode(block);
  }

  State& state_;
  HpackDecoder decoder_;
  std::unordered_map<std::string, Known, TextHash, std::equal_to<>> known_;
  std::uint32_t unfinished_ = 0;
  std::uint8_t flags_ = 0;
  std::int64_t frames_ = 0;
  std::string block_;
};

}  // namespace gpubridge::http2
