#include "net/http2_connection.h"

namespace gpubridge::http2 {
namespace {

constexpr std::string_view kDrainPing = "draining";
constexpr std::size_t kGoawayBytes = 8;
constexpr std::size_t kSettingBytes = 6;

// Bytes of the payload of frames whose size is fixed; 0 for others.
constexpr std::array<std::size_t, 10> kSizes = {0, 0, 5, 4, 0, 0, 8, 0, 4, 0};

struct SettingRange {
  Setting setting;
  std::string_view name;
  std::uint32_t least;
  std::uint32_t most;
  ErrorCode code;
};

constexpr std::array<SettingRange, 3> kRanges = {{
    {kEnablePush, "ENABLE_PUSH", 0, 1, ErrorCode::kProtocolError},
    {kInitialWindowSize, "INITIAL_WINDOW_SIZE", 0, kMaxWindow, ErrorCode::kFlowControlError},
    {kMaxFrameSize, "MAX_FRAME_SIZE", kDefaultFrameSize, kLargestFrameSize,
     ErrorCode::kProtocolError},
}};

std::string quoted(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string shown = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\r') {
      shown += "\\r";
    } else if (c == '\n') {
      shown += "\\n";
    } else if (byte < 0x20 || byte >= 0x7F) {
      shown += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
    } else {
      shown += c;
    }
  }

  return shown + "'";
}

void check_setting(std::uint16_t setting, std::uint32_t value) {
  for (const SettingRange& range : kRanges) {
    if (range.setting != setting || (value >= range.least && value <= range.most)) continue;
    throw ConnectionFault(range.code, "SETTINGS: ", range.name, ": expected ", range.least, " to ",
                          range.most, ", got ", value);
  }
}

}  // namespace

Connection::Connection(std::shared_ptr<const GrpcMethods> methods, const Limits& limits)
    : state_(limits, std::move(methods)),
      sender_(state_),
      payload_(state_, sender_),
      blocks_(state_),
      layout_(state_, payload_),
      size_(static_cast<std::size_t>(limits.receive_bytes)),
      buffer_(std::make_shared_for_overwrite<std::uint8_t[]>(size_)) {
  sender_.announce_settings();
}

// -- memory

Place Connection::memory() {
  lent_ = false;
  if (begin_ != 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }

  if (end_ != 0) return {buffer_.get() + end_, size_ - end_, nullptr};
  Place target = payload_.target();
  if (target.size != 0) {
    lent_ = true;
    return target;
  }
  return {buffer_.get(), payload_.awaits_large() ? kHeaderBytes : size_, nullptr};
}

void Connection::received(std::size_t nbytes, double now) {
  state_.now = now;
  if (state_.closed) return;
  if (std::exchange(lent_, false)) {
    payload_.received(nbytes);
    tell_untold();
    return;
  }

  end_ += nbytes;
  viewed_ = buffer_;
  parse({buffer_.get() + begin_, end_ - begin_});
  begin_ += position_;
  if (begin_ == end_ || state_.closed) begin_ = end_ = 0;
}

std::span<const iovec> Connection::places() {
  if (end_ != begin_ || state_.closed) return {};
  return layout_.places();
}

void Connection::placed(std::size_t nbytes, double now) {
  state_.now = now;
  const auto rest = std::make_shared<std::vector<std::uint8_t>>();
  try {
    *rest = layout_.received(nbytes);
  } catch (const ConnectionFault& fault) {
    close(fault.code, fault.text);
    return;
  }

  viewed_ = rest;
  parse(*rest);
  const std::size_t left = state_.closed ? 0 : rest->size() - position_;
  // Never much: of DATA nothing is left, and other frames are shorter than the buffer.
  std::copy_n(rest->begin() + static_cast<std::ptrdiff_t>(position_), left, buffer_.get());
  begin_ = 0;
  end_ = left;
}

// -- frames

// Takes all frames that the bytes have; `position_` is where it stops.
void Connection::parse(std::span<const std::uint8_t> bytes) {
  position_ = 0;
  while (true) {
    try {
      try {
        parse_frames(bytes);
        break;
      } catch (const StreamFault& fault) {
        reset_faulty(fault);
      }
    } catch (const ConnectionFault& fault) {
      close(fault.code, fault.text);
      break;
    }
  }

  tell_untold();
}

void Connection::parse_frames(std::span<const std::uint8_t> bytes) {
  if (starting_ && !start(bytes)) return;
  while (!state_.closed) {
    if (payload_.within_frame()) {
      position_ += payload_.take(bytes.subspan(position_));
      if (payload_.within_frame()) return;
    }
    if (!parse_frame(bytes.subspan(position_))) return;
  }
}

// Takes a frame, or its header and what has come of its payload; false while that is not there.
bool Connection::parse_frame(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes) return false;
  const FrameHeader header = read_header(bytes.data());
  check_frame(header);
  if (header.type == kData) {
    const bool padded = (header.flags & kPadded) != 0 && header.length != 0;
    if (padded && bytes.size() == kHeaderBytes) return false;
    position_ += kHeaderBytes + (padded ? 1 : 0);
    payload_.begin(header, padded ? bytes[kHeaderBytes] : 0);
    return true;
  }

  if (header.type > kContinuation) {
    // Unknown types are ignored, whatever their size.
    position_ += kHeaderBytes;
    payload_.skip(header.length);
    state_.spend_idle_frame();
    return true;
  }

  if (bytes.size() - kHeaderBytes < header.length) return false;
  position_ += kHeaderBytes + header.length;
  const auto payload = bytes.subspan(kHeaderBytes, header.length);
  if (header.type == kHeaders) {
    blocks_.begin(header, payload);
  } else if (header.type == kContinuation) {
    blocks_.proceed(header, payload);
  } else {
    take_control(header, payload);
  }

  return true;
}

// Checks the connection's first bytes; returns whether they are all there.
bool Connection::start(std::span<const std::uint8_t> bytes) {
  const auto got = text_of(bytes.first(std::min(bytes.size(), kPreface.size())));
  if (!kPreface.starts_with(got)) {
    throw ConnectionFault(ErrorCode::kProtocolError, "expected the client preface of HTTP/2, got ",
                          quoted(got), ": is this an HTTP/1 client?");
  }
  if (bytes.size() < kPreface.size() + kHeaderBytes) return false;
  const FrameHeader first = read_header(bytes.data() + kPreface.size());
  if (first.type != kSettings || (first.flags & kAck) != 0) {
    throw ConnectionFault(ErrorCode::kProtocolError,
                          "expected SETTINGS as the first frame, got type ", first.type, ", flags ",
                          first.flags);
  }

  position_ = kPreface.size();
  starting_ = false;
  return true;
}

// Checks what a frame's header says before its payload is there.
void Connection::check_frame(const FrameHeader& header) const {
  const Limits& limits = state_.limits();
  const std::uint32_t unfinished = blocks_.unfinished();
  if (unfinished != 0 && (header.type != kContinuation || header.stream != unfinished)) {
    throw ConnectionFault(ErrorCode::kProtocolError, "expected CONTINUATION of stream ", unfinished,
                          ", got type ", header.type, " of stream ", header.stream);
  }
  if (header.length > static_cast<std::size_t>(limits.max_frame_size)) {
    throw ConnectionFault(ErrorCode::kFrameSizeError, "frame: expected at most ",
                          limits.max_frame_size, " bytes, got ", header.length);
  }
  if (header.type == kData || header.type > kContinuation) return;
  const std::size_t size = kSizes[header.type];
  if (size != 0 && header.length != size) {
    throw ConnectionFault(ErrorCode::kFrameSizeError, kFrameNames[header.type], ": expected ", size,
                          " bytes, got ", header.length);
  }
  // The others are parsed as a whole, from the buffer.
  if (header.length > static_cast<std::size_t>(limits.header_block_bytes)) {
    throw ConnectionFault(ErrorCode::kEnhanceYourCalm, kFrameNames[header.type],
                          ": expected at most ", limits.header_block_bytes, " bytes, got ",
                          header.length);
  }
}

// -- control frames

void Connection::take_control(const FrameHeader& header, std::span<const std::uint8_t> payload) {
  const bool of_connection =
      header.type == kSettings || header.type == kPing || header.type == kGoaway;
  if (header.type != kWindowUpdate && of_connection != (header.stream == 0)) {
    throw ConnectionFault(ErrorCode::kProtocolError, kFrameNames[header.type], ": expected ",
                          (of_connection ? "no" : "a"), " stream, got ", header.stream);
  }

  switch (header.type) {
    case kSettings:
      return take_settings(header, payload);
    case kPing:
      return take_ping(header, payload);
    case kRstStream:
      return take_reset(header, payload);
    case kWindowUpdate:
      return take_window_update(header, payload);
    case kPushPromise:
      throw ConnectionFault(ErrorCode::kProtocolError, "PUSH_PROMISE: expected none from a client");
    default:
      // GOAWAY: the peer opens no more streams, and will close when it has what it asked for.
      // PRIORITY: deprecated by RFC 9113, which leaves it to us.
      state_.spend_idle_frame();
      if (header.type == kGoaway && payload.size() < kGoawayBytes) {
        throw ConnectionFault(ErrorCode::kFrameSizeError, "GOAWAY: expected at least 8 bytes, got ",
                              payload.size());
      }
  }
}

void Connection::take_settings(const FrameHeader& header, std::span<const std::uint8_t> payload) {
  state_.spend_idle_frame();
  if ((header.flags & kAck) != 0) {
    if (payload.empty()) return;
    throw ConnectionFault(ErrorCode::kFrameSizeError,
                          "SETTINGS: expected an empty acknowledgement, got ", payload.size(),
                          " bytes");
  }

  if (payload.size() % kSettingBytes != 0) {
    throw ConnectionFault(ErrorCode::kFrameSizeError,
                          "SETTINGS: expected a multiple of 6 bytes, got ", payload.size());
  }
  const std::int64_t window = state_.peer_window;
  std::optional<std::uint32_t> smallest_table;
  std::uint32_t last_table = 0;
  for (std::size_t at = 0; at < payload.size(); at += kSettingBytes) {
    const auto setting = static_cast<std::uint16_t>(payload[at] << 8U | payload[at + 1]);
    const std::uint32_t value = read_u32(payload.data() + at + 2);
    check_setting(setting, value);
    if (setting == kInitialWindowSize) state_.peer_window = value;
    if (setting == kMaxFrameSize) state_.peer_frame_size = value;
    if (setting == kHeaderTableSize) {
      last_table = value;
      smallest_table = std::min(smallest_table.value_or(value), value);
    }
  }

  if (state_.peer_window != window) sender_.change_initial_window(state_.peer_window - window);
  if (smallest_table) sender_.limit_table(*smallest_table, last_table);
  sender_.control(kSettings, kAck, 0, {});
  sender_.check_answers();
}

void Connection::take_ping(const FrameHeader& header, std::span<const std::uint8_t> payload) {
  state_.spend_idle_frame();
  if ((header.flags & kAck) != 0) {
    take_pong(payload);
    return;
  }
  sender_.control(kPing, kAck, 0, text_of(payload));
  sender_.check_answers();
  state_.events.push_back({.kind = EventKind::kPing});
}

void Connection::take_pong(std::span<const std::uint8_t> payload) {
  if (!draining_ || text_of(payload) != kDrainPing) {
    state_.events.push_back({.kind = EventKind::kPong, .text = std::string(text_of(payload))});
    return;
  }
  // The peer knows that it is to open no more streams.
  sender_.refuse_streams();
}

void Connection::take_reset(const FrameHeader& header, std::span<const std::uint8_t> payload) {
  check_not_idle(header);
  const Stream* stream = state_.find(header.stream);
  if (stream == nullptr) {
    state_.spend_idle_frame();
    return;
  }
  state_.spend_reset();
  const bool announced = stream->reader.announced();
  if (announced) {
    state_.events.push_back(
        {.kind = EventKind::kReset, .stream = header.stream, .code = read_u32(payload.data())});
  }
  sender_.forget(header.stream);
}

void Connection::take_window_update(const FrameHeader& header,
                                    std::span<const std::uint8_t> payload) {
  state_.spend_idle_frame();
  const std::int64_t increment = read_u32(payload.data()) & kMaxStreamId;
  if (header.stream == 0) {
    if (increment == 0) {
      throw ConnectionFault(ErrorCode::kProtocolError, "WINDOW_UPDATE: expected at least 1, got 0");
    }
    sender_.widen(increment);
    return;
  }

  check_not_idle(header);
  Stream* stream = state_.find(header.stream);
  if (stream == nullptr) return;
  if (increment == 0) throw StreamFault{header.stream, ErrorCode::kProtocolError};
  sender_.widen_stream(*stream, increment);
}

void Connection::check_not_idle(const FrameHeader& header) const {
  if ((header.stream & 1U) != 0 && header.stream <= state_.highest_id) return;
  throw ConnectionFault(ErrorCode::kProtocolError, kFrameNames[header.type],
                        ": expected a stream that was opened, got ", header.stream);
}

// -- ends

// Asks the peer for no more streams; the PING says when it knows.
void Connection::drain() {
  if (draining_ || state_.refusing || state_.closed) return;
  draining_ = true;
  sender_.goaway(kMaxStreamId, ErrorCode::kNoError, "");
  ping(kDrainPing);
}

void Connection::reset_faulty(const StreamFault& fault) {
  state_.spend_reset();
  const Stream* stream = state_.find(fault.stream);
  if (stream != nullptr && stream->reader.announced()) {
    state_.events.push_back({.kind = EventKind::kReset,
                             .stream = fault.stream,
                             .code = static_cast<std::uint32_t>(fault.code)});
  }

  sender_.reset(fault.stream, fault.code);
}

void Connection::close(ErrorCode code, std::string_view text) {
  if (state_.closed) return;
  sender_.goaway(state_.last_stream_id, code, text);
  state_.closed = true;
  sender_.close();
  state_.events.push_back({.kind = EventKind::kClosed,
                           .code = static_cast<std::uint32_t>(code),
                           .text = std::string(text)});
}

// Tells of requests that have begun, and whose message did not come as a whole.
void Connection::tell_untold() {
  for (const std::uint32_t id : state_.untold) {
    Stream* stream = state_.find(id);
    if (stream != nullptr) stream->reader.announce();
  }
  state_.untold.clear();
}

void Connection::end_input() {
  // A frame may have said that it is the last one, and its payload never come.
  const std::uint32_t cut_short = payload_.cut_short();
  for (auto& [id, stream] : state_.streams) {
    if (std::exchange(stream.ended, true) && id != cut_short) continue;
    stream.target = {};
    stream.reader.take({}, true);
  }
}

void Connection::lost() {
  sender_.count_open();
  state_.closed = true;
  sender_.close();
  sender_.take_all();
}

// -- responses

void Connection::send_response(std::uint32_t id, const std::shared_ptr<const HeaderFields>& headers,
                               std::span<const Segment> body,
                               const std::shared_ptr<const HeaderFields>& trailers) {
  Stream* stream = state_.find(id);
  if (stream == nullptr) return;
  sender_.headers(*stream, headers, false);
  sender_.data(*stream, body, false);
  sender_.headers(*stream, trailers, true);
}

std::vector<std::pair<std::uint32_t, std::uint64_t>> Connection::held_back() const {
  std::vector<std::pair<std::uint32_t, std::uint64_t>> found;
  for (const auto& [id, stream] : state_.streams) {
    if (stream.queued.nbytes() != 0) found.emplace_back(id, stream.unqueued);
  }
  return found;
}

}  // namespace gpubridge::http2
