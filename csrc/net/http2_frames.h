// Frames of HTTP/2 (RFC 9113): types, flags, error codes, and the nine bytes of a header.
//
//   0        3      4       5             9             9 + length
//   | length | type | flags | stream id   | payload ... |
//      24 bit  8 bit  8 bit   1 + 31 bit
#pragma once

#include "std.h"

namespace gpubridge::http2 {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr std::size_t kHeaderBytes = 9;
constexpr std::uint32_t kMaxStreamId = 0x7FFFFFFFU;
constexpr std::int64_t kMaxWindow = 0x7FFFFFFF;
constexpr std::int64_t kDefaultWindow = 65'535;
constexpr std::size_t kDefaultFrameSize = std::size_t{1} << 14U;
constexpr std::size_t kLargestFrameSize = (std::size_t{1} << 24U) - 1;

enum FrameType : std::uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kRstStream = 3,
  kSettings = 4,
  kPushPromise = 5,
  kPing = 6,
  kGoaway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};

constexpr std::array<std::string_view, 10> kFrameNames = {
    "DATA",         "HEADERS", "PRIORITY", "RST_STREAM",    "SETTINGS",
    "PUSH_PROMISE", "PING",    "GOAWAY",   "WINDOW_UPDATE", "CONTINUATION"};

constexpr std::uint8_t kEndStream = 0x01;
constexpr std::uint8_t kAck = 0x01;
constexpr std::uint8_t kEndHeaders = 0x04;
constexpr std::uint8_t kPadded = 0x08;
constexpr std::uint8_t kPriorityFields = 0x20;

enum Setting : std::uint16_t {
  kHeaderTableSize = 1,
  kEnablePush = 2,
  kMaxConcurrentStreams = 3,
  kInitialWindowSize = 4,
  kMaxFrameSize = 5,
  kMaxHeaderListSize = 6,
};

enum class ErrorCode : std::uint32_t {
  kNoError = 0,
  kProtocolError = 1,
  kInternalError = 2,
  kFlowControlError = 3,
  kSettingsTimeout = 4,
  kStreamClosed = 5,
  kFrameSizeError = 6,
  kRefusedStream = 7,
  kCancel = 8,
  kCompressionError = 9,
  kEnhanceYourCalm = 11,
};

struct FrameHeader {
  std::size_t length;
  std::uint8_t type;
  std::uint8_t flags;
  std::uint32_t stream;
};

inline std::string_view text_of(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::uint32_t read_u32(const std::uint8_t* at) {
  return std::uint32_t{at[0]} << 24U | std::uint32_t{at[1]} << 16U | std::uint32_t{at[2]} << 8U |
         at[3];
}

inline FrameHeader read_header(const std::uint8_t* at) {
  return {read_u32(at) >> 8U, at[3], at[4], read_u32(at + 5) & kMaxStreamId};
}

inline void append_u32(std::uint32_t number, std::string& out) {
  for (const unsigned shift : {24U, 16U, 8U, 0U}) out.push_back(static_cast<char>(number >> shift));
}

inline void append_header(const FrameHeader& header, std::string& out) {
  append_u32(static_cast<std::uint32_t>(header.length << 8U) | header.type, out);
  out.push_back(static_cast<char>(header.flags));
  append_u32(header.stream, out);
}

}  // namespace gpubridge::http2
