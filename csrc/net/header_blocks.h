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
  explicit HeaderBlocks(State& state)
      : state_(state),
        decoder_(static_cast<std::size_t>(state.limits().header_list_bytes * kHardLimitFactor)),
        kept_(state.kept) {}

  // The stream whose header block is not complete, else 0.
  [[nodiscard]] std::uint32_t unfinished() const { return unfinished_; }
  // Take a frame with its payload. Throw ConnectionFault and StreamFault.
  void begin(const FrameHeader& header, std::span<const std::uint8_t> payload) {
    payload = without_padding(header.flags, payload);
    if ((header.flags & kPriorityFields) != 0) {
      if (payload.size() < kPriorityBytes) {
        throw ConnectionFault(ErrorCode::kFrameSizeError,
                              "HEADERS: expected 5 bytes of priority, got ", payload.size());
      }
      payload = payload.subspan(kPriorityBytes);
    }
    if (header.stream == 0) {
      throw ConnectionFault(ErrorCode::kProtocolError,
                            "HEADERS: expected a stream, got the connection");
    }
    if ((header.flags & kEndHeaders) != 0) {
      take(header.stream, header.flags, payload);
      return;
    }
    unfinished_ = header.stream;
    flags_ = header.flags;
    frames_ = 0;
    block_ = text_of(payload);
    count_kept();
  }

  void proceed(const FrameHeader& header, std::span<const std::uint8_t> payload) {
    if (unfinished_ == 0) {
      throw ConnectionFault(ErrorCode::kProtocolError,
                            "CONTINUATION: expected only after HEADERS without END_HEADERS");
    }
    const Limits& limits = state_.limits();
    block_ += text_of(payload);
    if (++frames_ > limits.continuation_frames) {
      throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "header block: expected at most ",
                            limits.continuation_frames, " CONTINUATION frames, got more");
    }
    if (block_.size() > static_cast<std::size_t>(limits.header_block_bytes)) {
      throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "header block: expected at most ",
                            limits.header_block_bytes, " bytes, got ", block_.size(), " or more");
    }
    count_kept();
    if ((header.flags & kEndHeaders) == 0) return;
    unfinished_ = 0;
    const std::string block = std::exchange(block_, {});
    count_kept();
    take(header.stream, flags_,
         {reinterpret_cast<const std::uint8_t*>(block.data()), block.size()});
  }

 private:
  static constexpr std::size_t kPriorityBytes = 5;
  // A list larger than announced costs the stream, one this many times larger the connection.
  static constexpr std::int64_t kHardLimitFactor = 4;
  // Bytes of memory that known blocks may have with what they mean: all together, and one.
  static constexpr std::size_t kKnownBytes = std::size_t{1} << 16U;
  static constexpr std::size_t kKnownBlockBytes = kKnownBytes / 8;

  // Takes the padding off a HEADERS frame.
  static std::span<const std::uint8_t> without_padding(std::uint8_t flags,
                                                       std::span<const std::uint8_t> payload) {
    if ((flags & kPadded) == 0) return payload;
    if (payload.empty()) {
      throw ConnectionFault(ErrorCode::kFrameSizeError,
                            "HEADERS: expected the length of its padding");
    }
    const std::size_t padding = payload[0];
    if (padding + 1 > payload.size()) {
      throw ConnectionFault(ErrorCode::kProtocolError, "HEADERS: expected padding within its ",
                            payload.size(), " bytes, got ", padding);
    }
    return payload.subspan(1, payload.size() - 1 - padding);
  }

  struct Known {
    std::shared_ptr<const RequestHeaders> headers;
    bool independent;          // of what is in the table
    std::uint64_t generation;  // of the table, for which this holds if it is not independent
    std::vector<HpackTable::Entry> added;
    std::size_t memory = 0;
  };

  // Takes a complete header block: of a new stream, or of an open one's trailers.
  void take(std::uint32_t id, std::uint8_t flags, std::span<const std::uint8_t> block) {
    if (id <= state_.highest_id || (id & 1U) == 0) {
      take_known_stream(id, flags, block);
      return;
    }
    state_.highest_id = id;
    if (state_.refusing ||
        state_.streams.size() >= static_cast<std::size_t>(state_.limits().max_concurrent_streams)) {
      skip(block);
      throw StreamFault{id, ErrorCode::kRefusedStream};
    }
    open(id, flags, request(id, block));
  }

  // Takes a header block of a stream that is not new.
  void take_known_stream(std::uint32_t id, std::uint8_t flags,
                         std::span<const std::uint8_t> block) {
    Stream* stream = state_.find(id);
    if (stream != nullptr) {
      take_trailers(*stream, flags, block);
    } else if (state_.forgiven.holds(id, state_.now)) {
      skip(block);
    } else if ((id & 1U) != 0) {
      throw ConnectionFault(ErrorCode::kStreamClosed, "HEADERS: expected a stream above ",
                            state_.highest_id, ", got ", id, ", which is closed");
    } else {
      throw ConnectionFault(ErrorCode::kProtocolError, "HEADERS: expected an odd stream id, got ",
                            id);
    }
  }

  void take_trailers(Stream& stream, std::uint8_t flags, std::span<const std::uint8_t> block) {
    if (stream.ended || (flags & kEndStream) == 0) {
      skip(block);
      throw StreamFault{stream.id,
                        stream.ended ? ErrorCode::kStreamClosed : ErrorCode::kProtocolError};
    }
    const HeaderList fields = decode(block);
    if (fields.size() > static_cast<std::size_t>(state_.limits().header_list_bytes)) {
      throw StreamFault{stream.id, ErrorCode::kEnhanceYourCalm};
    }
    std::optional<std::uint64_t> length;
    if (!check_fields(fields, 0, length) || stream.expected.value_or(0) != 0) {
      throw StreamFault{stream.id, ErrorCode::kProtocolError};
    }
    stream.ended = true;
    stream.target = {};
    stream.reader.take({}, true);
  }

  void open(std::uint32_t id, std::uint8_t flags,
            const std::shared_ptr<const RequestHeaders>& headers) {
    const bool end = (flags & kEndStream) != 0;
    if (end && headers->content_length().value_or(0) != 0) {
      throw StreamFault{id, ErrorCode::kProtocolError};
    }
    const int method = headers->method();
    const GrpcMethod* known = method == GrpcMethods::kUnknown ? nullptr : &state_.methods()[method];
    const bool control = known != nullptr && known->kind == GrpcKind::kControl;
    GrpcReader reader(known, id, headers, state_.events,
                      control ? state_.kept_by_control : state_.kept);
    Stream& stream = state_.streams
                         .try_emplace(id, id, state_.limits().stream_window, state_.peer_window,
                                      std::move(reader), state_.queued)
                         .first->second;
    stream.expected = headers->content_length();
    stream.ended = end;
    stream.access = state_.methods().counts()->record(true, state_.client);
    state_.opened();
    state_.last_stream_id = id;
    if (known == nullptr || known->kind == GrpcKind::kStream) {
      stream.reader.announce(end);
      if (known == nullptr) return;
    } else {
      state_.untold.push_back(id);
    }
    if (end) stream.reader.take({}, true);
  }

  // Returns what a block says that begins a request.
  std::shared_ptr<const RequestHeaders> request(std::uint32_t id,
                                                std::span<const std::uint8_t> block) {
    if (const Known* known = repeat(block)) return known->headers;
    const std::uint64_t generation = decoder_.generation();
    HeaderList fields = decode(block);
    if (fields.size() > static_cast<std::size_t>(state_.limits().header_list_bytes)) {
      throw StreamFault{id, ErrorCode::kEnhanceYourCalm};
    }
    auto headers = RequestHeaders::read(std::move(fields), state_.methods());
    if (headers == nullptr) throw StreamFault{id, ErrorCode::kProtocolError};
    const bool independent = decoder_.independent();
    const bool lasting = independent || decoder_.generation() == generation;
    if (lasting) remember(block, {headers, independent, generation, decoder_.added()});
    return headers;
  }

  void remember(std::span<const std::uint8_t> block, Known known) {
    known.memory = block.size() + sizeof(Known) + known.headers->memory();
    for (const HpackTable::Entry& entry : known.added) known.memory += HpackTable::memory(entry);
    if (known.memory > kKnownBlockBytes) return;
    if (const auto old = known_.find(text_of(block)); old != known_.end()) {
      known_bytes_ -= old->second.memory;
      known_.erase(old);
    }
    if (known_bytes_ + known.memory > kKnownBytes) {
      known_.clear();
      known_bytes_ = 0;
    }
    known_bytes_ += known.memory;
    known_.emplace(text_of(block), std::move(known));
    count_kept();
  }

  void count_kept() { kept_.set(block_.size() + known_bytes_); }

  // Returns what is known of a block, if that still holds, with the table changed as by the block.
  const Known* repeat(std::span<const std::uint8_t> block) {
    const auto found = known_.find(text_of(block));
    if (found == known_.end()) return nullptr;
    const Known& known = found->second;
    if (!known.independent && known.generation != decoder_.generation()) return nullptr;
    decoder_.add(known.added);
    return &known;
  }

  HeaderList decode(std::span<const std::uint8_t> block) {
    try {
      return decoder_.decode(block);
    } catch (const CompressionError& error) {
      throw ConnectionFault(ErrorCode::kCompressionError, error.what());
    } catch (const HeaderListTooLarge&) {
      const std::int64_t limit = state_.limits().header_list_bytes;
      throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "header list: expected at most ", limit,
                            " bytes, got more than ", limit * kHardLimitFactor);
    }
  }

  // Decodes a block only for its effect on the table.
  void skip(std::span<const std::uint8_t> block) {
    if (repeat(block) == nullptr) decode(block);
  }

  State& state_;
  HpackDecoder decoder_;
  std::unordered_map<std::string, Known, TextHash, std::equal_to<>> known_;
  std::size_t known_bytes_ = 0;
  KeptBytes kept_;
  std::uint32_t unfinished_ = 0;
  std::uint8_t flags_ = 0;
  std::int64_t frames_ = 0;
  std::string block_;
};

}  // namespace gpubridge::http2
