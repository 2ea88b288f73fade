#include "net/http2_connection.h"

namespace gpubridge::http2 {

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

// -- the socket's owner

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
  state_.closed = true;
  sender_.close();
  sender_.take_all();
}

// -- requests

void Connection::receive_into(std::uint32_t id, Place place) {
  Stream* stream = state_.find(id);
  if (stream != nullptr) payload_.receive_into(*stream, std::move(place));
}

std::size_t Connection::missing(std::uint32_t id) {
  const Stream* stream = state_.find(id);
  return stream == nullptr ? 0 : stream->target.size;
}

std::uint64_t Connection::copied(std::uint32_t id) {
  const Stream* stream = state_.find(id);
  return stream == nullptr ? 0 : stream->copied;
}

void Connection::hold(std::uint32_t id) {
  Stream* stream = state_.find(id);
  if (stream != nullptr) stream->holding = true;
}

void Connection::consume(std::uint32_t id, std::int64_t nbytes) {
  Stream* stream = state_.find(id);
  if (stream != nullptr) payload_.consume(*stream, nbytes);
}

// -- responses

void Connection::send_headers(std::uint32_t id, const std::shared_ptr<const HeaderFields>& fields,
                              bool end) {
  Stream* stream = state_.find(id);
  if (stream != nullptr) sender_.headers(*stream, fields, end);
}

void Connection::send_data(std::uint32_t id, std::span<const Segment> segments, bool end) {
  Stream* stream = state_.find(id);
  if (stream != nullptr) sender_.data(*stream, segments, end);
}

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
    if (stream.queued != 0) found.emplace_back(id, stream.unqueued);
  }
  return found;
}

std::uint64_t Connection::queued(std::uint32_t id) {
  const Stream* stream = state_.find(id);
  return stream == nullptr ? 0 : stream->queued;
}

void Connection::reset(std::uint32_t id, std::uint32_t code) {
  if (state_.find(id) != nullptr) sender_.reset(id, static_cast<ErrorCode>(code));
}

}  // namespace gpubridge::http2
