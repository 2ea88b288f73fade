#include "net/http2_payload.h"

namespace gpubridge::http2 {
namespace {

// By how much a receive window is to be widened now: nothing until half of it is to be given back,
// so that small messages cost no WINDOW_UPDATE each.
std::int64_t credit_due(std::int64_t full, std::int64_t window, std::int64_t unconsumed) {
  const std::int64_t due = full - window - unconsumed;
  return 2 * due >= full ? due : 0;
}

}  // namespace

// -- frames

void PayloadReceiver::skip(std::size_t length) {
  left_ = length;
  padding_ = 0;
  stream_ = 0;
  ends_ = false;
}

void PayloadReceiver::begin(const FrameHeader& header, std::size_t padding) {
  check_connection(header, padding);
  const bool padded = (header.flags & kPadded) != 0;
  const std::size_t size = padded ? header.length - 1 - padding : header.length;
  skip(size);
  padding_ = padding;
  window_ -= static_cast<std::int64_t>(header.length);
  replenish_connection();
  const bool ends = (header.flags & kEndStream) != 0;
  if (size == 0 && !ends) state_.spend_idle_frame();
  Stream* stream = state_.find(header.stream);
  if (stream == nullptr) {
    check_closed(header.stream);
    return;
  }
  check_stream(*stream, header.length, size, ends);
  stream->window -= static_cast<std::int64_t>(header.length);
  if (stream->throttled) stream->unconsumed += static_cast<std::int64_t>(size);
  if (ends) stream->ended = true;
  // Not if the windows let all of a place come: to its peer an update is a packet to be read.
  if (stream->target.size == 0 || static_cast<std::int64_t>(stream->target.size) >
                                      stream->window + static_cast<std::int64_t>(size)) {
    replenish(*stream);
  }
  stream_ = stream->id;
  ends_ = ends;
  size_ = header.length;
  finished_ = 0;
  if (size == 0 && ends) end_short(*stream);
}

std::size_t PayloadReceiver::take(std::span<const std::uint8_t> bytes) {
  std::size_t used = 0;
  while (left_ != 0 && used < bytes.size()) {
    std::size_t size = std::min(left_, bytes.size() - used);
    const auto part = bytes.subspan(used);
    Stream* stream = state_.find(stream_);
    if (stream == nullptr) {
      left_ -= size;
    } else if (stream->target.size == 0) {
      left_ -= size;
      stream->reader.take(part.first(size), ends_ && left_ == 0);
    } else {
      size = std::min(size, stream->target.size);
      left_ -= size;
      std::memcpy(stream->target.data, part.data(), size);
      stream->copied += size;
      fill(*stream, size);
    }
    used += size;
  }
  if (left_ == 0) {
    stream_ = 0;
    const std::size_t size = std::min(padding_, bytes.size() - used);
    padding_ -= size;
    used += size;
  }
  return used;
}

// -- places

Place PayloadReceiver::target() {
  const Stream* stream = state_.find(stream_);
  if (stream == nullptr) return {};
  Place place = stream->target;
  place.size = std::min(place.size, left_);
  return place.size >= kPlacedBytes ? place : Place{};
}

void PayloadReceiver::received(std::size_t nbytes) {
  left_ -= nbytes;
  const std::uint32_t id = stream_;
  Stream* stream = state_.find(id);
  if (stream != nullptr) fill(*stream, nbytes);
  if (left_ == 0) {
    stream_ = 0;
    finished_ = id;
  }
}

Stream* PayloadReceiver::recent() {
  if (!within_frame()) return state_.find(finished_);
  if (padding_ != 0 || ends_) return nullptr;
  return state_.find(stream_);
}

std::size_t PayloadReceiver::allowed(const Stream& stream) const {
  const auto window =
      static_cast<std::uint64_t>(std::max<std::int64_t>(0, std::min(window_, stream.window)));
  return static_cast<std::size_t>(std::min(window, stream.expected.value_or(window)));
}

void PayloadReceiver::take_frames(Stream& stream, std::size_t count, std::size_t size) {
  const std::size_t nbytes = count * size;
  skip(0);
  window_ -= static_cast<std::int64_t>(nbytes);
  replenish_connection();
  stream.window -= static_cast<std::int64_t>(nbytes);
  if (stream.expected) *stream.expected -= nbytes;
  if (static_cast<std::int64_t>(stream.target.size) >
      stream.window + static_cast<std::int64_t>(nbytes)) {
    replenish(stream);
  }
  finished_ = stream.id;
  fill(stream, nbytes);
}

void PayloadReceiver::receive_into(Stream& stream, Place place) {
  stream.target = std::move(place);
  std::int64_t missing =
      std::min(static_cast<std::int64_t>(stream.target.size), kMaxWindow) - stream.window;
  if (stream_ == stream.id) missing -= static_cast<std::int64_t>(left_);
  if (missing > 0 && !stream.ended) grant(stream, missing);
}

// Notes that so many bytes of a stream's place have come.
void PayloadReceiver::fill(Stream& stream, std::size_t size) {
  if (stream.throttled) {
    stream.unconsumed =
        std::max<std::int64_t>(0, stream.unconsumed - static_cast<std::int64_t>(size));
  }
  stream.reader.pass(size);
  const bool ends = ends_ && left_ == 0;
  if (size == stream.target.size) {
    stream.target = {};
    replenish(stream);
    state_.events.push_back({.kind = EventKind::kFilled, .stream = stream.id, .end = ends});
  } else if (ends) {
    end_short(stream);
  } else {
    stream.target.data += size;
    stream.target.size -= size;
  }
}

// Tells of an end that comes without bytes, or before the place is full.
void PayloadReceiver::end_short(Stream& stream) {
  stream.target = {};
  stream_ = 0;
  stream.reader.take({}, true);
}

// -- what may be wrong

void PayloadReceiver::check_connection(const FrameHeader& header, std::size_t padding) const {
  if (header.stream == 0) {
    throw ConnectionFault(ErrorCode::kProtocolError, "DATA: expected a stream, got the connection");
  }
  if ((header.flags & kPadded) != 0 && header.length < padding + 1) {
    throw ConnectionFault(ErrorCode::kProtocolError, "DATA: expected padding within its ",
                          header.length, " bytes, got ", padding);
  }
  if (static_cast<std::int64_t>(header.length) > window_) {
    throw ConnectionFault(ErrorCode::kFlowControlError, "DATA: expected at most ", window_,
                          " bytes on the connection, got ", header.length);
  }
}

// Forgives DATA of a stream that we have just reset, no other without a stream.
void PayloadReceiver::check_closed(std::uint32_t id) const {
  if (state_.forgiven.holds(id, state_.now)) return;
  const bool closed = (id & 1U) != 0 && id <= state_.highest_id;
  throw ConnectionFault(closed ? ErrorCode::kStreamClosed : ErrorCode::kProtocolError,
                        "DATA: expected an open stream, got ", id, ", which is ",
                        (closed ? "closed" : "idle"));
}

// Checks a frame's header against its stream's state, window and content-length.
void PayloadReceiver::check_stream(Stream& stream, std::size_t length, std::size_t size,
                                   bool ends) const {
  if (stream.ended) throw StreamFault{stream.id, ErrorCode::kStreamClosed};
  if (static_cast<std::int64_t>(length) > stream.window) {
    throw StreamFault{stream.id, ErrorCode::kFlowControlError};
  }
  if (!stream.expected) return;
  if (size > *stream.expected || (ends && size != *stream.expected)) {
    throw StreamFault{stream.id, ErrorCode::kProtocolError};
  }
  *stream.expected -= size;
}

// -- windows

void PayloadReceiver::replenish_connection() {
  // Also for throttled streams: a slow one must not stop its neighbours.
  const std::int64_t due = credit_due(state_.limits().connection_window, window_, 0);
  if (due <= 0) return;
  window_ += due;
  sender_.window_update(0, due);
  sender_.check_answers();
}

void PayloadReceiver::replenish(Stream& stream) {
  // To its peer an update is a packet to be read.
  if (static_cast<std::int64_t>(std::min<std::uint64_t>(stream.reader.wanted(), kMaxWindow)) <
      stream.window) {
    return;
  }
  const std::int64_t due =
      credit_due(state_.limits().stream_window, stream.window, stream.unconsumed);
  if (due > 0 && !stream.ended) grant(stream, due);
}

}  // namespace gpubridge::http2
