// The events of a connection, in the order in which they happened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "net/request_headers.h"

namespace gpubridge::http2 {

enum class EventKind : std::uint8_t {
  kCall = 0,      // a call with all of its only message
  kBegin = 1,     // a stream has begun; its message or body follows
  kMessages = 2,  // messages of a stream
  kData = 3,      // part of a body, or of a large message
  kFilled = 4,    // the memory given to `receive_into` is full
  kFailed = 5,    // what came is no gRPC of that method
  kReset = 6,     // the stream is gone
  kWritable = 7,  // all that was queued for the stream has been framed
  kPing = 8,      // the peer has sent a PING, which is answered
  kPong = 9,      // our PING was answered
  kClosed = 10,   // the connection is over and its streams are gone
  kLarge = 11,    // a message of `value` bytes begins, which comes as kData
};

// What is wrong with the messages of a call.
enum class FramingFault : std::uint8_t {
  kFlag = 0,           // the flag before a message is neither 0 nor 1; `value` is it
  kTooLong = 1,        // a message of `value` bytes, where `limit` are allowed
  kSecondMessage = 2,  // the method takes one
  kIncomplete = 3,     // the stream ends within a message
  kNoMessage = 4,      // the stream ends before any
};

// Bytes that a connection has received. Without memory of their own they are a view, valid until
// more is received.
struct Message {
  std::span<const std::uint8_t> view;
  std::string owned;

  [[nodiscard]] std::span<const std::uint8_t> bytes() const {
    return owned.empty()
               ? view
               : std::span(reinterpret_cast<const std::uint8_t*>(owned.data()), owned.size());
  }
};

struct Event {
  EventKind kind;
  std::uint32_t stream = 0;
  bool end = false;
  bool compressed = false;
  FramingFault fault = FramingFault::kFlag;
  std::uint32_t code = 0;
  std::uint64_t value = 0;
  std::uint64_t limit = 0;
  std::shared_ptr<const RequestHeaders> headers = nullptr;
  std::span<const std::uint8_t> data = {};
  std::vector<Message> messages = {};
  std::string text = {};
};

using Events = std::vector<Event>;

}  // namespace gpubridge::http2
