// One HTTP/2 connection of a gRPC server (RFC 9113), without a socket.
//
//   socket --memory, received--> frames --> events --> application --headers, data--> Sender
//      ^                           | SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, GOAWAY   |
//      `------gather, sent---------+-----------------------------------------------------'
//
// The socket's owner asks `memory` where to receive, receives, and tells `received` how much came.
// Between frames that is the buffer here. Within a DATA frame of a stream that has a place
// (`receive_into`), once the buffer is used up, it is the place itself: the kernel writes the
// payload where it belongs.
//
//   buffer:  [ used | frame | frame | first part of DATA ]  then  place: [ ....rest of DATA.... ]
//
// The connection owns its parser, its unsent bytes and the messages that are still arriving; of the
// caller's memory it holds the owners. What belongs to a stream that is closed, by either side,
// is ignored: the caller cannot know yet. Not for several threads.
#pragma once

#include <sys/uio.h>

#include "net/frame_layout.h"
#include "net/header_blocks.h"
#include "net/http2_payload.h"
#include "net/http2_sender.h"
#include "net/http2_state.h"
#include "std.h"

namespace gpubridge::http2 {

class Connection {
 public:
  Connection(std::shared_ptr<const GrpcMethods> methods, const Limits& limits);

  // -- the socket's owner

  // Where the next bytes are to be received: memory of ours (without an owner), or a place of the
  // caller's.
  Place memory();
  // Takes bytes that were received there, at a time in seconds.
  void received(std::size_t nbytes, double now);
  // Where several frames are to be received at once instead; empty where they cannot. `placed` must
  // follow.
  std::span<const iovec> places();
  [[nodiscard]] std::size_t places_size() const { return layout_.size(); }
  void placed(std::size_t nbytes, double now);
  // Events since the last call. Views in them last until more is received.
  Events take_events() { return std::exchange(state_.events, {}); }

  // The connection's receive buffer, for views of it.
  [[nodiscard]] const std::shared_ptr<std::uint8_t[]>& buffer() const { return buffer_; }
  // Memory that views of the last events refer to: the buffer, or bytes that came beside their
  // predicted place.
  [[nodiscard]] const std::shared_ptr<const void>& received_memory() const { return viewed_; }

  // Bytes for the socket: see Sender.
  Sender& output() { return sender_; }

  // The peer sends no more: requests that have not ended do so now.
  void end_input();

  // The socket is gone: forget all streams and their memory.
  void lost();

  [[nodiscard]] bool closed() const { return state_.closed; }
  [[nodiscard]] bool has_events() const { return !state_.events.empty(); }
  // True if the client's preface is there, and the beginning of its settings.
  [[nodiscard]] bool started() const { return !starting_; }
  [[nodiscard]] std::uint32_t highest_stream() const { return state_.highest_id; }
  // Grows with the DATA frames sent, and with the streams ended.
  [[nodiscard]] std::uint64_t frames_sent() const { return state_.data_frames + state_.completed; }
  [[nodiscard]] std::size_t open_streams() const { return state_.streams.size(); }
  // Bytes of header blocks, calls, their open requests and unfinished messages that the peer has us
  // keep.
  [[nodiscard]] std::uint64_t kept() const { return state_.kept + state_.kept_by_control; }
  // Those of them that control calls keep.
  [[nodiscard]] std::uint64_t kept_by_control() const { return state_.kept_by_control; }
  // The stream whose header block is not complete, else 0.
  [[nodiscard]] std::uint32_t open_block() const { return blocks_.unfinished(); }
  // The time of the last `received`.
  [[nodiscard]] double heard() const { return state_.now; }

  // -- streams; one that is not open is passed over

  void receive_into(std::uint32_t id, Place place) {
    if (Stream* stream = state_.find(id)) payload_.receive_into(*stream, std::move(place));
  }
  // Bytes that the place of `receive_into` still lacks.
  std::size_t missing(std::uint32_t id) {
    const Stream* stream = state_.find(id);
    return stream == nullptr ? 0 : stream->target.size;
  }
  // Bytes of all places of a stream that were copied on their way.
  std::uint64_t copied(std::uint32_t id) {
    const Stream* stream = state_.find(id);
    return stream == nullptr ? 0 : stream->copied;
  }
  // Bytes of a stream's unfinished message that are kept here; those of a place are not.
  std::uint64_t unfinished(std::uint32_t id) {
    const Stream* stream = state_.find(id);
    return stream == nullptr ? 0 : stream->reader.unfinished();
  }
  // Body bytes of the response that are not framed yet.
  std::uint64_t queued(std::uint32_t id) {
    const Stream* stream = state_.find(id);
    return stream == nullptr ? 0 : stream->queued.nbytes();
  }
  // Of all streams.
  [[nodiscard]] std::uint64_t all_queued() const { return state_.queued; }
  void keep(std::uint32_t id, std::uint64_t nbytes) {
    if (Stream* stream = state_.find(id)) stream->reader.keep(nbytes);
  }
  void throttle(std::uint32_t id) {
    if (Stream* stream = state_.find(id)) stream->throttled = true;
  }
  void consume(std::uint32_t id, std::int64_t nbytes) {
    if (Stream* stream = state_.find(id)) payload_.consume(*stream, nbytes);
  }
  // What the access log is to tell of a stream; none without one.
  AccessRecord* access(std::uint32_t id) {
    Stream* stream = state_.find(id);
    return stream == nullptr ? nullptr : stream->access.get();
  }
  // A record of one of the requests on a stream, of so many bytes, in place of the stream's own;
  // none without an access log.
  std::unique_ptr<AccessRecord> begin_request(std::uint32_t id, std::uint64_t received) {
    Stream* stream = state_.find(id);
    if (stream == nullptr) return nullptr;
    stream->access.reset();
    auto record = state_.methods().counts()->record(true, state_.client);
    if (record == nullptr) return nullptr;
    record->endpoint = static_cast<std::size_t>(stream->reader.headers()->method() + 1);
    record->received = received;
    return record;
  }
  [[nodiscard]] const std::shared_ptr<AccessLog>& access_log() const {
    return state_.methods().counts()->access_log;
  }
  void set_client(std::string client) {
    state_.client = std::make_shared<const std::string>(std::move(client));
  }
  // These throw std::logic_error, as Sender does.
  void send_headers(std::uint32_t id, const std::shared_ptr<const HeaderFields>& fields, bool end) {
    if (Stream* stream = state_.find(id)) sender_.headers(*stream, fields, end);
  }
  void send_data(std::uint32_t id, std::span<const Segment> segments, bool end) {
    if (Stream* stream = state_.find(id)) sender_.data(*stream, segments, end);
  }
  void send_response(std::uint32_t id, const std::shared_ptr<const HeaderFields>& headers,
                     std::span<const Segment> body,
                     const std::shared_ptr<const HeaderFields>& trailers);
  // The streams with body bytes that the peer's windows do not allow, once all output is taken, and
  // how many bytes of each have been framed so far.
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint64_t>> held_back() const;
  void reset(std::uint32_t id, std::uint32_t code) {
    if (state_.find(id) != nullptr) sender_.reset(id, static_cast<ErrorCode>(code));
  }

  // -- the connection

  void ping(std::string_view payload) { sender_.control(kPing, 0, 0, payload); }
  // Asks the peer for no more streams; when it knows (a PING later), accepts none any more.
  void drain();
  // Accepts no more streams; when those that are open have ended, the connection is closed.
  void goaway() { sender_.refuse_streams(); }
  // Ends the connection now, with GOAWAY; open streams are dropped.
  void close(ErrorCode code, std::string_view text);

 private:
  void parse(std::span<const std::uint8_t> bytes);
  void parse_frames(std::span<const std::uint8_t> bytes);
  [[nodiscard]] bool parse_frame(std::span<const std::uint8_t> bytes);
  [[nodiscard]] bool start(std::span<const std::uint8_t> bytes);
  void check_frame(const FrameHeader& header) const;
  void take_control(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_settings(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_ping(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_reset(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_window_update(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void check_not_idle(const FrameHeader& header) const;
  void reset_faulty(const StreamFault& fault);
  void take_pong(std::span<const std::uint8_t> payload);
  void tell_untold();

  State state_;
  Sender sender_;
  PayloadReceiver payload_;
  HeaderBlocks blocks_;
  FrameLayout layout_;
  std::size_t size_;
  std::shared_ptr<std::uint8_t[]> buffer_;
  std::size_t begin_ = 0;  // of what is not parsed in the buffer
  std::size_t end_ = 0;
  std::size_t position_ = 0;  // of what is not parsed in the bytes being parsed
  bool starting_ = true;
  bool draining_ = false;
  bool lent_ = false;  // `memory` has handed out a place
  std::shared_ptr<const void> viewed_;
};

}  // namespace gpubridge::http2
