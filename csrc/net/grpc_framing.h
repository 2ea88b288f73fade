// gRPC messages in the DATA of a stream: each comes after five bytes, a flag and its length.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/http2_events.h"

namespace gpubridge::http2 {

// Puts the messages of one stream together, by its method; of a stream without one the DATA is
// handed on as it comes.
class GrpcReader {
 public:
  // A longer message of inference is handed on in pieces, so that it can be received where it
  // stays.
  static constexpr std::uint64_t kDirectBytes = std::uint64_t{1} << 16U;

  // `method` is null for none.
  explicit GrpcReader(const GrpcMethod* method);

  // Whether the stream's DATA is handed on as it comes.
  [[nodiscard]] bool direct() const { return mode_ == Mode::kDirect; }

  // Takes part of the DATA, with `end` the last.
  void take(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
            std::span<const std::uint8_t> data, bool end, Events& events);

  // Takes DATA that was received elsewhere, into its place.
  void pass(std::size_t nbytes) { left_ -= std::min<std::uint64_t>(nbytes, left_); }

  // The most bytes that are still wanted of the stream: of an only message the rest.
  [[nodiscard]] std::uint64_t wanted() const {
    return direct() && method_ != nullptr ? left_ : std::numeric_limits<std::uint64_t>::max();
  }

  // Tells of the stream, if that has not been done: what follows belongs to it.
  void announce(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
                bool end, Events& events);
  [[nodiscard]] bool announced() const { return announced_; }

 private:
  enum class Mode : std::uint8_t { kMessages, kDirect, kFailed };

  // The message that has become complete with a piece of data, if any.
  struct Whole {
    Message message;
    bool compressed;
  };

  bool begin_message(std::span<const std::uint8_t>& data);
  std::optional<Whole> take_message(std::span<const std::uint8_t>& data);
  void take_one(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
                std::span<const std::uint8_t> data, bool end, Events& events);
  void take_many(std::uint32_t stream, std::span<const std::uint8_t> data, bool end,
                 Events& events);
  void hand_on(std::uint32_t stream, std::span<const std::uint8_t> data, bool end, Events& events);
  void fail(FramingFault fault, std::uint64_t value = 0);
  void tell_fault(std::uint32_t stream, const std::shared_ptr<const RequestHeaders>& headers,
                  Events& events);
  [[nodiscard]] bool within_message() const { return prefix_size_ != 0; }

  const GrpcMethod* method_;
  Mode mode_;
  bool announced_ = false;
  bool has_message_ = false;
  FramingFault fault_ = FramingFault::kFlag;
  std::uint64_t fault_value_ = 0;
  std::array<std::uint8_t, 5> prefix_{};
  std::size_t prefix_size_ = 0;  // 0 between messages
  std::uint64_t left_ = 0;       // bytes of the message, or of what is handed on, to come
  std::string part_;
};

}  // namespace gpubridge::http2
