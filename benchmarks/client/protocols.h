// The client's side of HTTP/1.1 and of gRPC over HTTP/2, on one connection.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "requests.h"

enum class Progress { kMore, kAnswered, kFailed };

// The client's side of a protocol on one connection: request bytes out, answer bytes in.
class Protocol {
 public:
  virtual ~Protocol() = default;
  // Appends what opens the connection.
  virtual void open(std::string& out) { static_cast<void>(out); }
  virtual void begin(std::string_view request, std::string& out) = 0;
  // Takes what it can from the front of `in`, and may append to `out`.
  virtual Progress receive(std::string& in, std::string& out) = 0;
  // How many responses there have been to the last request.
  [[nodiscard]] virtual std::uint64_t responses() const { return 1; }
};

class Http1 : public Protocol {
 public:
  void begin(std::string_view request, std::string& out) override {
    out.append(request);
    missing_ = 0;
    in_body_ = chunked_ = failed_ = last_ = false;
  }

  Progress receive(std::string& in, std::string&) override {
    if (!in_body_ && !read_head(in)) return Progress::kMore;
    if (chunked_) return read_chunks(in) ? finish() : Progress::kMore;
    const std::size_t taken = std::min(missing_, in.size());
    in.erase(0, taken);
    missing_ -= taken;
    return missing_ == 0 ? finish() : Progress::kMore;
  }

 private:
  bool read_head(std::string& in) {
    const std::size_t end = in.find("\r\n\r\n");
    if (end == std::string::npos) return false;
    std::string head = in.substr(0, end + 2);
    in.erase(0, end + 4);
    std::transform(head.begin(), head.end(), head.begin(),
                   [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
    failed_ = head.compare(0, 12, "http/1.1 200") != 0;
    const std::size_t length = head.find("\r\ncontent-length:");
    chunked_ = head.find("\r\ntransfer-encoding: chunked") != std::string::npos;
    if (length == std::string::npos && !chunked_) fail("an answer without a length: " + head);
    if (!chunked_) missing_ = std::strtoull(head.c_str() + length + 17, nullptr, 10);
    in_body_ = true;
    return true;
  }

  // Takes chunks from the front of `in`; true at the end of the last one.
  bool read_chunks(std::string& in) {
    std::size_t at = 0;
    bool ended = false;
    while (!ended) {
      const std::size_t taken = std::min(missing_, in.size() - at);
      at += taken;
      missing_ -= taken;
      const std::size_t end = missing_ == 0 ? in.find("\r\n", at) : std::string::npos;
      if (end == std::string::npos) break;
      if (last_) {
        ended = end == at;
      } else {
        // Two bytes end the data of a chunk.
        missing_ = std::strtoull(in.c_str() + at, nullptr, 16);
        last_ = missing_ == 0;
        if (!last_) missing_ += 2;
      }
      at = end + 2;
    }
    in.erase(0, at);
    return ended;
  }

  [[nodiscard]] Progress finish() const {
    return failed_ ? Progress::kFailed : Progress::kAnswered;
  }

  std::size_t missing_ = 0;
  bool in_body_ = false;
  bool chunked_ = false;
  bool last_ = false;
  bool failed_ = false;
};

// HTTP/2 as far as a gRPC client needs it that trusts its server.
class Grpc : public Protocol {
 public:
  explicit Grpc(std::string path) : path_(std::move(path)) {}

  void open(std::string& out) override {
    out.append("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    // Streams may send 2^31 - 1 bytes, and so may the connection.
    frame(out, kSettings, 0, 0, std::string("\0\4\x7f\xff\xff\xff", 6));
    frame(out, kWindowUpdate, 0, 0, std::string("\x7f\xff\0\0", 4));
  }

  void begin(std::string_view request, std::string& out) override {
    stream_ += 2;
    responses_ = 0;
    missing_ = 0;
    prefix_.clear();
    stream_window_ = initial_window_;
    frame(out, kHeaders, kEndHeaders, stream_, header_block());
    sent_ = 0;
    unsent_.assign(1, '\0');
    append_number(unsent_, static_cast<std::uint32_t>(request.size()));
    unsent_.append(request);
    send_data(out);
  }

  Progress receive(std::string& in, std::string& out) override {
    std::size_t at = 0;
    Progress progress = Progress::kMore;
    while (progress == Progress::kMore && in.size() - at >= kHeadBytes) {
      const auto byte = [&](std::size_t index) {
        return static_cast<unsigned char>(in[at + index]);
      };
      const std::size_t size = byte(0) << 16U | byte(1) << 8U | byte(2);
      if (in.size() - at < kHeadBytes + size) break;
      const std::uint32_t stream = number_at(in, at + 5) & 0x7FFFFFFFU;
      const std::string_view payload(in.data() + at + kHeadBytes, size);
      progress = take(byte(3), byte(4), stream, payload, out);
      at += kHeadBytes + size;
    }
    in.erase(0, at);
    return progress;
  }

  [[nodiscard]] std::uint64_t responses() const override { return responses_; }

 private:
  static constexpr std::size_t kHeadBytes = 9;
  static constexpr std::size_t kFrameLimit = 16384;
  static constexpr unsigned kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6,
                            kGoAway = 7, kWindowUpdate = 8;
  static constexpr unsigned kEndStream = 1, kAck = 1, kEndHeaders = 4;

  static void append_number(std::string& out, std::uint32_t value) {
    for (unsigned shift : {24U, 16U, 8U, 0U}) out += static_cast<char>(value >> shift);
  }

  static std::uint32_t number_at(std::string_view text, std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t index = 0; index < 4; ++index) {
      value = value << 8U | static_cast<unsigned char>(text[at + index]);
    }
    return value;
  }

  static void frame(std::string& out, unsigned kind, unsigned flags, std::uint32_t stream,
                    std::string_view payload) {
    const auto size = static_cast<std::uint32_t>(payload.size());
    for (unsigned shift : {16U, 8U, 0U}) out += static_cast<char>(size >> shift);
    out += static_cast<char>(kind);
    out += static_cast<char>(flags);
    append_number(out, stream);
    out.append(payload);
  }

  // The fields of a call: the first one teaches them to the server, the others name them.
  std::string header_block() {
    if (stream_ > 1) return "\x83\x86\xc1\xc0\xbf\xbe";
    const auto text = [](std::string_view value) {
      return static_cast<char>(value.size()) + std::string(value);
    };
    return "\x83\x86\x44" + text(path_) + "\x41" + text("127.0.0.1") + "\x5f" +
           text("application/grpc") + "\x40" + text("te") + text("trailers");
  }

  void send_data(std::string& out) {
    while (sent_ < unsent_.size()) {
      const std::int64_t window = std::min(window_, stream_window_);
      if (window <= 0) return;
      const std::string_view part = std::string_view(unsent_).substr(
          sent_, std::min(kFrameLimit, static_cast<std::size_t>(window)));
      sent_ += part.size();
      frame(out, kData, sent_ == unsent_.size() ? kEndStream : 0, stream_, part);
      const std::size_t size = part.size();
      window_ -= static_cast<std::int64_t>(size);
      stream_window_ -= static_cast<std::int64_t>(size);
    }
  }

  Progress take(unsigned kind, unsigned flags, std::uint32_t stream, std::string_view payload,
                std::string& out) {
    const bool mine = stream == stream_;
    if (kind == kData) {
      received_ += payload.size();
      if (received_ > 1U << 24U) {
        std::string credit;
        append_number(credit, static_cast<std::uint32_t>(received_));
        frame(out, kWindowUpdate, 0, 0, credit);
        received_ = 0;
      }
      if (mine) count_messages(payload);
    } else if (kind == kSettings && (flags & kAck) == 0) {
      settings(payload);
      frame(out, kSettings, kAck, 0, "");
      send_data(out);
    } else if (kind == kPing && (flags & kAck) == 0) {
      frame(out, kPing, kAck, 0, payload);
    } else if (kind == kWindowUpdate && payload.size() == 4) {
      if (stream == 0) window_ += number_at(payload, 0);
      if (mine) stream_window_ += number_at(payload, 0);
      send_data(out);
    } else if (kind == kGoAway) {
      fail("the server ended the connection");
    } else if (kind == kReset && mine) {
      return Progress::kFailed;
    }
    if (!mine || (kind != kData && kind != kHeaders) || (flags & kEndStream) == 0) {
      return Progress::kMore;
    }
    return responses_ == 0 ? Progress::kFailed : Progress::kAnswered;
  }

  void settings(std::string_view payload) {
    for (std::size_t at = 0; at + 6 <= payload.size(); at += 6) {
      if (payload[at] != 0 || payload[at + 1] != 4) continue;
      const std::int64_t wanted = number_at(payload, at + 2);
      stream_window_ += wanted - initial_window_;
      initial_window_ = wanted;
    }
  }

  void count_messages(std::string_view data) {
    while (!data.empty()) {
      if (missing_ == 0) {
        const std::size_t taken = std::min<std::size_t>(5 - prefix_.size(), data.size());
        prefix_.append(data.substr(0, taken));
        data.remove_prefix(taken);
        if (prefix_.size() < 5) return;
        missing_ = number_at(prefix_, 1);
        prefix_.clear();
        if (missing_ == 0) ++responses_;
        continue;
      }
      const std::size_t taken = std::min(missing_, data.size());
      data.remove_prefix(taken);
      missing_ -= taken;
      if (missing_ == 0) ++responses_;
    }
  }

  std::string path_;
  std::string unsent_;
  std::size_t sent_ = 0;
  std::string prefix_;
  std::size_t missing_ = 0;
  std::uint64_t responses_ = 0;
  std::uint64_t received_ = 0;
  std::int64_t initial_window_ = 65535;
  std::int64_t window_ = 65535;
  std::int64_t stream_window_ = 65535;
  std::uint32_t stream_ = static_cast<std::uint32_t>(-1);
};
