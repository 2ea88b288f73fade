// gRPC messages in the DATA of a stream: each comes after five bytes, a flag and its length.
#pragma once

#include <new>

#include "memory/growing_memory.h"
#include "memory/kept_bytes.h"
#include "net/http2_frames.h"
#include "net/request_headers.h"
#include "std.h"

namespace gpubridge::http2 {

// -- events, in the order in which they happened

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
  kClosed = 10,   // the connection has ended, with all its streams
  kLarge = 11,    // a message of `value` bytes begins, which comes as kData, maybe compressed
};

// Errors in the messages of a call.
enum class FramingFault : std::uint8_t {
  kFlag = 0,           // the flag before a message is neither 0 nor 1; `value` is it
  kTooLong = 1,        // a message of `value` bytes, where `limit` are allowed
  kSecondMessage = 2,  // the method takes one
  kIncomplete = 3,     // the stream ends within a message
  kNoMessage = 4,      // the stream ends before any
  kNoMemory = 5,       // there is no memory for the message
};

// Bytes that a connection has received. Without memory of their own they are a view, valid until
// more is received.
struct Message {
  std::span<const std::uint8_t> view;
  GrowingMemory owned;

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

// -- messages

// Puts the messages of one stream together, by its method; of a stream without one the DATA is
// handed on as it comes.
class GrpcReader {
 public:
  // A longer message, where the method takes one, is handed on in pieces, so that it can be
  // received where it stays.
  static constexpr std::uint64_t kDirectBytes = std::uint64_t{1} << 16U;

  // `method` is null for none. `events` gets the stream's events, `kept` what it keeps.
  GrpcReader(const GrpcMethod* method, std::uint32_t stream,
             std::shared_ptr<const RequestHeaders> headers, Events& events, std::uint64_t& kept)
      : method_(method),
        stream_(stream),
        headers_(std::move(headers)),
        events_(events),
        kept_(kept),
        mode_(method == nullptr ? Mode::kDirect : Mode::kMessages) {
    if (method == nullptr) left_ = std::numeric_limits<std::uint64_t>::max();
    count_kept();
  }

  [[nodiscard]] const std::shared_ptr<const RequestHeaders>& headers() const { return headers_; }
  // True if the stream's DATA is handed on as it comes.
  [[nodiscard]] bool direct() const { return mode_ == Mode::kDirect; }

  // Takes part of the DATA, with `end` the last.
  void take(std::span<const std::uint8_t> data, bool end) {
    if (mode_ == Mode::kFailed) return;
    try {
      if (mode_ == Mode::kDirect) {
        hand_on(data, end);
      } else if (method_->kind == GrpcKind::kStream) {
        take_many(data, end);
      } else {
        take_one(data, end);
      }
    } catch (const std::bad_alloc&) {
      fail(FramingFault::kNoMemory);
    }
    count_kept();
    if (mode_ == Mode::kFailed) tell_fault();
  }

  // Notes how many bytes the open requests of the stream keep beside their messages.
  void keep(std::uint64_t nbytes) {
    of_requests_ = nbytes;
    count_kept();
  }

  // Takes DATA that was received elsewhere, into its place.
  void pass(std::size_t nbytes) { left_ -= std::min<std::uint64_t>(nbytes, left_); }

  // Bytes of an unfinished message that are kept here, its prefix included.
  [[nodiscard]] std::uint64_t unfinished() const {
    return mode_ == Mode::kMessages ? prefix_size_ + part_.size() : 0;
  }

  // The most bytes that are still wanted of the stream: of an only message the rest.
  [[nodiscard]] std::uint64_t wanted() const {
    return direct() && method_ != nullptr ? left_ : std::numeric_limits<std::uint64_t>::max();
  }

  // Tells of the stream, if that has not been done: what follows belongs to it.
  void announce(bool end = false) {
    if (std::exchange(announced_, true)) return;
    events_.push_back(
        {.kind = EventKind::kBegin, .stream = stream_, .end = end, .headers = headers_});
  }

  [[nodiscard]] bool announced() const { return announced_; }

 private:
  enum class Mode : std::uint8_t { kMessages, kDirect, kFailed };
  // Bytes of memory of an open stream and its call, about.
  static constexpr std::uint64_t kOfStream = 1024;

  // The message that has become complete with a piece of data, if any.
  struct Whole {
    Message message;
    bool compressed;
  };

  // Takes the beginning of a message; false while it is not all there, or is wrong.
  [[nodiscard]] bool begin_message(std::span<const std::uint8_t>& data) {
    if (prefix_size_ == prefix_.size()) return true;
    const std::size_t taken = std::min(prefix_.size() - prefix_size_, data.size());
    std::copy_n(data.begin(), taken, prefix_.begin() + static_cast<std::ptrdiff_t>(prefix_size_));
    prefix_size_ += taken;
    data = data.subspan(taken);
    if (prefix_size_ < prefix_.size()) return false;
    left_ = read_u32(prefix_.data() + 1);
    if (prefix_[0] > 1) {
      fail(FramingFault::kFlag, prefix_[0]);
    } else if (left_ > method_->limit) {
      fail(FramingFault::kTooLong, left_);
    } else if (method_->kind != GrpcKind::kStream && left_ > kDirectBytes) {
      mode_ = Mode::kDirect;
    }
    return mode_ == Mode::kMessages;
  }

  // Takes data up to the end of a message; returns the message when it is complete.
  [[nodiscard]] std::optional<Whole> take_message(std::span<const std::uint8_t>& data) {
    if (!begin_message(data)) return std::nullopt;
    const auto taken =
        data.first(static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), left_)));
    data = data.subspan(taken.size());
    left_ -= taken.size();
    Whole whole{.message = {}, .compressed = prefix_[0] == 1};
    if (left_ == 0 && part_.empty()) {
      whole.message.view = taken;
    } else {
      part_.append(text_of(taken));
      if (left_ != 0) return std::nullopt;
      whole.message.owned = std::exchange(part_, {});
    }
    prefix_size_ = 0;
    return whole;
  }

  // Takes the data of a method of one message.
  void take_one(std::span<const std::uint8_t> data, bool end) {
    if (!has_message_) {
      auto whole = take_message(data);
      if (mode_ == Mode::kFailed) return;
      if (mode_ == Mode::kDirect) {
        announce();
        events_.push_back({.kind = EventKind::kLarge,
                           .stream = stream_,
                           .compressed = prefix_[0] == 1,
                           .value = left_});
        hand_on(data, end);
        return;
      }
      if (whole) {
        has_message_ = true;
        if (data.empty()) {
          Event event{.kind = announced_ ? EventKind::kMessages : EventKind::kCall,
                      .stream = stream_,
                      .end = true,
                      .compressed = whole->compressed,
                      .headers = headers_};
          event.messages.push_back(std::move(whole->message));
          events_.push_back(std::move(event));
          announced_ = true;
        }
      } else if (end) {
        fail(within_message() ? FramingFault::kIncomplete : FramingFault::kNoMessage);
      }
    }
    if (!data.empty()) fail(FramingFault::kSecondMessage);
  }

  // Takes the data of a method of any number of messages.
  void take_many(std::span<const std::uint8_t> data, bool end) {
    Event event{.kind = EventKind::kMessages, .stream = stream_, .value = data.size()};
    while (mode_ == Mode::kMessages && (!data.empty())) {
      auto whole = take_message(data);
      if (!whole) continue;
      if (!event.messages.empty() && whole->compressed != event.compressed) {
        Event next{.kind = EventKind::kMessages, .stream = stream_};
        events_.push_back(std::exchange(event, std::move(next)));
      }
      event.compressed = whole->compressed;
      event.messages.push_back(std::move(whole->message));
    }
    if (end && mode_ == Mode::kMessages && within_message()) fail(FramingFault::kIncomplete);
    event.end = end && mode_ == Mode::kMessages;
    events_.push_back(std::move(event));
  }

  // Hands on the data of a body, or what belongs to a large message.
  void hand_on(std::span<const std::uint8_t> data, bool end) {
    const auto part =
        data.first(static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), left_)));
    if (part.size() < data.size()) fail(FramingFault::kSecondMessage);
    pass(part.size());
    if (part.empty() && !end) return;
    events_.push_back({.kind = EventKind::kData,
                       .stream = stream_,
                       .end = end && mode_ != Mode::kFailed,
                       .data = part});
  }

  void fail(FramingFault fault, std::uint64_t value = 0) {
    mode_ = Mode::kFailed;
    fault_ = fault;
    fault_value_ = value;
    part_ = {};
  }

  void tell_fault() {
    announce();
    events_.push_back({.kind = EventKind::kFailed,
                       .stream = stream_,
                       .fault = fault_,
                       .value = fault_value_,
                       .limit = method_ == nullptr ? 0 : method_->limit});
  }

  [[nodiscard]] bool within_message() const { return prefix_size_ != 0; }
  // A large part, of a stream's message, is charged by its call.
  void count_kept() {
    const std::uint64_t part = part_.size() > kDirectBytes ? 0 : part_.size();
    kept_.set(kOfStream + headers_->memory() + part + of_requests_);
  }

  const GrpcMethod* method_;
  std::uint32_t stream_;
  std::shared_ptr<const RequestHeaders> headers_;
  Events& events_;
  KeptBytes kept_;
  std::uint64_t of_requests_ = 0;
  Mode mode_;
  bool announced_ = false;
  bool has_message_ = false;
  FramingFault fault_ = FramingFault::kFlag;
  std::uint64_t fault_value_ = 0;
  std::array<std::uint8_t, 5> prefix_{};
  std::size_t prefix_size_ = 0;  // 0 between messages
  std::uint64_t left_ = 0;       // bytes of the message, or of what is handed on, to come
  GrowingMemory part_;
};

}  // namespace gpubridge::http2
