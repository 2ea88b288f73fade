#include "net/grpc_framing.h"

#include "net/http2_frames.h"

namespace gpubridge::http2 {

GrpcReader::GrpcReader(const GrpcMethod* method, std::uint32_t stream,
                       std::shared_ptr<const RequestHeaders> headers, Events& events)
    : method_(method),
      stream_(stream),
      headers_(std::move(headers)),
      events_(events),
      mode_(method == nullptr ? Mode::kDirect : Mode::kMessages) {
  if (method == nullptr) left_ = std::numeric_limits<std::uint64_t>::max();
}

void GrpcReader::take(std::span<const std::uint8_t> data, bool end) {
  if (mode_ == Mode::kFailed) return;
  if (mode_ == Mode::kDirect) {
    hand_on(data, end);
  } else if (method_->kind == GrpcKind::kStream) {
    take_many(data, end);
  } else {
    take_one(data, end);
  }
  if (mode_ == Mode::kFailed) tell_fault();
}

void GrpcReader::announce(bool end) {
  if (std::exchange(announced_, true)) return;
  events_.push_back(
      {.kind = EventKind::kBegin, .stream = stream_, .end = end, .headers = headers_});
}

// Takes the data of a method of one message.
void GrpcReader::take_one(std::span<const std::uint8_t> data, bool end) {
  if (!has_message_) {
    auto whole = take_message(data);
    if (mode_ == Mode::kFailed) return;
    if (mode_ == Mode::kDirect) {
      announce();
      events_.push_back({.kind = EventKind::kLarge, .stream = stream_, .value = left_});
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
void GrpcReader::take_many(std::span<const std::uint8_t> data, bool end) {
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
void GrpcReader::hand_on(std::span<const std::uint8_t> data, bool end) {
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

// Takes the beginning of a message; false while it is not all there, or is wrong.
bool GrpcReader::begin_message(std::span<const std::uint8_t>& data) {
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
  } else if (method_->kind == GrpcKind::kInfer && prefix_[0] == 0 && left_ > kDirectBytes) {
    mode_ = Mode::kDirect;
  }
  return mode_ == Mode::kMessages;
}

// Takes data up to the end of a message; returns the message when it is complete.
std::optional<GrpcReader::Whole> GrpcReader::take_message(std::span<const std::uint8_t>& data) {
  if (!begin_message(data)) return std::nullopt;
  const auto taken =
      data.first(static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), left_)));
  data = data.subspan(taken.size());
  left_ -= taken.size();
  Whole whole{.message = {}, .compressed = prefix_[0] == 1};
  if (left_ == 0 && part_.empty()) {
    whole.message.view = taken;
  } else {
    part_.append(reinterpret_cast<const char*>(taken.data()), taken.size());
    if (left_ != 0) return std::nullopt;
    whole.message.owned = std::exchange(part_, {});
  }
  prefix_size_ = 0;
  return whole;
}

void GrpcReader::fail(FramingFault fault, std::uint64_t value) {
  mode_ = Mode::kFailed;
  fault_ = fault;
  fault_value_ = value;
  part_ = {};
}

void GrpcReader::tell_fault() {
  announce();
  events_.push_back({.kind = EventKind::kFailed,
                     .stream = stream_,
                     .fault = fault_,
                     .value = fault_value_,
                     .limit = method_ == nullptr ? 0 : method_->limit});
}

}  // namespace gpubridge::http2
