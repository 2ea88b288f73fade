// A load client that costs little: one thread, one request under way on each connection.
//
//   client http|grpc|grpcs PORT CONNECTIONS SECONDS FILE [PATH]
//
// grpcs is gRPC over TLS, whose certificate is not checked; compiled with WITH_TLS only.
// FILE holds requests (benchmarks/traffic.py writes it); the client sends them in turn and writes a
// number that is never the same again into the places that each request names, so that no two
// requests have the same bytes. Prints one line of JSON.
#include <arpa/inet.h>
#ifdef WITH_TLS
#include <fcntl.h>
#endif
#include <netinet/tcp.h>
#ifdef WITH_TLS
#include <openssl/ssl.h>
#endif
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& reason) {
  std::fprintf(stderr, "%s\n", reason.c_str());
  std::exit(1);
}

// ---- requests ----

// What a slot is filled with. A number of decimal digits does not begin with a zero.
enum class Fill : std::uint32_t { kDecimal, kFloat, kSequence };

struct Slot {
  std::uint32_t offset;
  std::uint32_t width;
  Fill fill;
};

struct Request {
  std::vector<Slot> slots;
  std::string bytes;
};

struct Traffic {
  // Each connection sends all requests from the first to the last; else they share one turn.
  bool in_order = false;
  std::vector<Request> requests;
};

Traffic read_traffic(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::size_t at = 0;
  const auto number = [&] {
    std::uint32_t value = 0;
    if (text.size() - at < sizeof(value)) fail("the file of requests is cut off");
    std::memcpy(&value, text.data() + at, sizeof(value));
    at += sizeof(value);
    return value;
  };
  Traffic traffic;
  traffic.in_order = number() != 0;
  traffic.requests.resize(number());
  for (Request& request : traffic.requests) {
    request.slots.resize(number());
    for (Slot& slot : request.slots) slot = {number(), number(), static_cast<Fill>(number())};
    const std::uint32_t size = number();
    if (text.size() - at < size) fail("the file of requests is cut off");
    request.bytes = text.substr(at, size);
    at += size;
  }
  if (traffic.requests.empty()) fail("the file has no request");
  return traffic;
}

void write_decimal(std::uint64_t value, const Slot& slot, std::string& bytes) {
  for (std::uint32_t place = slot.width; place-- > 0; value /= 10) {
    bytes[slot.offset + place] = static_cast<char>('0' + value % 10);
  }
  if (bytes[slot.offset] == '0') bytes[slot.offset] = '9';
}

void fill_slots(Request& request, std::uint64_t turn, std::uint64_t sequence) {
  for (const Slot& slot : request.slots) {
    if (slot.fill == Fill::kDecimal) {
      write_decimal(turn, slot, request.bytes);
    } else if (slot.fill == Fill::kSequence) {
      write_decimal(sequence, slot, request.bytes);
    } else {
      // A float from 1 up to 2.
      const auto bits = static_cast<std::uint32_t>(0x3F800000U | (turn & 0x7FFFFFU));
      std::memcpy(request.bytes.data() + slot.offset, &bits, sizeof(bits));
    }
  }
}

// ---- protocols ----

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
    in_body_ = chunked_ = failed_ = false;
  }

  Progress receive(std::string& in, std::string&) override {
    if (!in_body_ && !read_head(in)) return Progress::kMore;
    if (chunked_) {
      // All that is asked for here ends in an empty chunk, and nothing else contains one.
      const std::size_t end = in.find("0\r\n\r\n");
      if (end == std::string::npos || (end != 0 && in[end - 1] != '\n')) {
        if (in.size() > 1U << 20U) in.erase(0, in.size() - 16);
        return Progress::kMore;
      }
      in.erase(0, end + 5);
      return finish();
    }
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

  [[nodiscard]] Progress finish() const {
    return failed_ ? Progress::kFailed : Progress::kAnswered;
  }

  std::size_t missing_ = 0;
  bool in_body_ = false;
  bool chunked_ = false;
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

// ---- the load ----

struct Figures {
  std::vector<std::uint32_t> latencies_us;
  std::uint64_t failed = 0;
  std::uint64_t responses = 0;
};

#ifdef WITH_TLS

// The bytes of a connected socket, through TLS; as recv and send they fail with EAGAIN.
class Wire {
 public:
  explicit Wire(int descriptor) : ssl_(SSL_new(context())) {
    // What gRPC servers ask for.
    SSL_set_alpn_protos(ssl_, reinterpret_cast<const unsigned char*>("\2h2"), 3);
    SSL_set_fd(ssl_, descriptor);
    if (SSL_connect(ssl_) != 1) fail("the server refused the handshake of TLS");
    ::fcntl(descriptor, F_SETFL, O_NONBLOCK);
  }

  // Takes all records that are there: one alone would cost a look at the socket each.
  ssize_t receive(char* data, std::size_t size) {
    std::size_t got = 0;
    while (got < size) {
      const int count = SSL_read(ssl_, data + got, static_cast<int>(size - got));
      if (count <= 0) return got == 0 ? outcome(count) : static_cast<ssize_t>(got);
      got += static_cast<std::size_t>(count);
    }
    return static_cast<ssize_t>(got);
  }

  // Bytes that the poller does not know of: they have left the socket.
  [[nodiscard]] bool pending() const { return SSL_pending(ssl_) != 0; }

  ssize_t send(const std::string& data) {
    const int count = SSL_write(ssl_, data.data(), static_cast<int>(data.size()));
    return count > 0 ? count : outcome(count);
  }

 private:
  static SSL_CTX* context() {
    static SSL_CTX* const context = [] {
      SSL_CTX* const made = SSL_CTX_new(TLS_client_method());
      // What is unsent moves as more is added to it.
      SSL_CTX_set_mode(made, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
      return made;
    }();
    return context;
  }

  ssize_t outcome(int count) {
    const int error = SSL_get_error(ssl_, count);
    errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
    return -1;
  }

  SSL* ssl_;
};

#else

class Wire {
 public:
  explicit Wire(int) { fail("this client is compiled without TLS"); }
  static ssize_t receive(char*, std::size_t) { return -1; }
  static bool pending() { return false; }
  static ssize_t send(const std::string&) { return -1; }
};

#endif

struct Connection {
  int descriptor = -1;
  std::unique_ptr<Wire> wire;  // none without TLS
  std::unique_ptr<Protocol> protocol;
  std::string in;
  std::string out;
  std::size_t next = 0;
  std::uint64_t sequence = 0;
  Clock::time_point begun;
  bool busy = false;
  bool wants_write = false;
};

class Load {
 public:
  Load(Traffic traffic, Clock::time_point end) : traffic_(std::move(traffic)), end_(end) {
    poller_ = ::epoll_create1(0);
  }

  void add(int port, std::unique_ptr<Protocol> protocol, bool tls) {
    auto connection = std::make_unique<Connection>();
    connection->descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    if (::connect(connection->descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) !=
        0) {
      fail("cannot connect: " + std::string(std::strerror(errno)));
    }
    ::setsockopt(connection->descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (tls) connection->wire = std::make_unique<Wire>(connection->descriptor);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = connection.get();
    ::epoll_ctl(poller_, EPOLL_CTL_ADD, connection->descriptor, &event);
    connection->protocol = std::move(protocol);
    connection->protocol->open(connection->out);
    connections_.push_back(std::move(connection));
  }

  Figures run() {
    for (auto& connection : connections_) {
      begin(*connection);
      write(*connection);
    }
    std::array<epoll_event, 64> events;
    const auto patience = end_ + std::chrono::seconds(20);
    while (under_way_ != 0) {
      const int count = ::epoll_wait(poller_, events.data(), events.size(), 1000);
      if (Clock::now() > patience) fail("an answer did not come");
      for (int index = 0; index < count; ++index) {
        auto& connection =
            *static_cast<Connection*>(events[static_cast<std::size_t>(index)].data.ptr);
        if ((events[static_cast<std::size_t>(index)].events & EPOLLIN) != 0) {
          do {
            read(connection);
          } while (connection.wire != nullptr && connection.wire->pending());
        }
        write(connection);
      }
    }
    return std::move(figures_);
  }

 private:
  void begin(Connection& connection) {
    std::size_t& next = traffic_.in_order ? connection.next : next_;
    if (next == 0 || !traffic_.in_order) connection.sequence = ++sequence_;
    Request& request = traffic_.requests[next];
    next = (next + 1) % traffic_.requests.size();
    fill_slots(request, ++turn_, connection.sequence);
    connection.protocol->begin(request.bytes, connection.out);
    connection.begun = Clock::now();
    connection.busy = true;
    ++under_way_;
  }

  void read(Connection& connection) {
    const ssize_t got =
        connection.wire != nullptr
            ? connection.wire->receive(buffer_.data(), buffer_.size())
            : ::recv(connection.descriptor, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) fail("the server closed a connection");
    connection.in.append(buffer_.data(), static_cast<std::size_t>(got));
    const Progress progress = connection.protocol->receive(connection.in, connection.out);
    if (!connection.busy || progress == Progress::kMore) return;
    const auto now = Clock::now();
    const auto passed =
        std::chrono::duration_cast<std::chrono::microseconds>(now - connection.begun);
    connection.busy = false;
    --under_way_;
    if (progress == Progress::kFailed) ++figures_.failed;
    figures_.latencies_us.push_back(static_cast<std::uint32_t>(passed.count()));
    figures_.responses += connection.protocol->responses();
    // A sequence that has begun is ended, so that the next load finds its slot free.
    if (now < end_ || (traffic_.in_order && connection.next != 0)) begin(connection);
  }

  void write(Connection& connection) {
    while (!connection.out.empty()) {
      const ssize_t sent = connection.wire != nullptr
                               ? connection.wire->send(connection.out)
                               : ::send(connection.descriptor, connection.out.data(),
                                        connection.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno != EAGAIN && errno != EINTR) fail("the server closed a connection");
      if (sent < 0) break;
      connection.out.erase(0, static_cast<std::size_t>(sent));
    }
    if (connection.wants_write == connection.out.empty()) {
      connection.wants_write = !connection.out.empty();
      epoll_event event{};
      event.events = connection.wants_write ? EPOLLIN | EPOLLOUT : EPOLLIN;
      event.data.ptr = &connection;
      ::epoll_ctl(poller_, EPOLL_CTL_MOD, connection.descriptor, &event);
    }
  }

  Traffic traffic_;
  Clock::time_point end_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<char> buffer_ = std::vector<char>(1U << 18U);
  Figures figures_;
  std::size_t next_ = 0;
  std::size_t under_way_ = 0;
  // Numbers of other runs against the same server are others.
  std::uint64_t turn_ =
      static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()) % 1'000'000'007;
  std::uint64_t sequence_ = turn_;
  int poller_ = -1;
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 6) fail("usage: client http|grpc|grpcs PORT CONNECTIONS SECONDS FILE [PATH]");
  const bool tls = std::string_view(arguments[1]) == "grpcs";
  const bool grpc = tls || std::string_view(arguments[1]) == "grpc";
  const auto start = Clock::now();
  Load load(read_traffic(arguments[5]), start + std::chrono::seconds(std::atoi(arguments[4])));
  for (int index = 0; index < std::atoi(arguments[3]); ++index) {
    std::unique_ptr<Protocol> protocol;
    if (grpc) {
      protocol = std::make_unique<Grpc>(count > 6 ? arguments[6] : "/");
    } else {
      protocol = std::make_unique<Http1>();
    }
    load.add(std::atoi(arguments[2]), std::move(protocol), tls);
  }
  Figures figures = load.run();
  const std::chrono::duration<double> seconds = Clock::now() - start;
  auto& latencies = figures.latencies_us;
  std::sort(latencies.begin(), latencies.end());
  double sum = 0;
  for (const std::uint32_t each : latencies) sum += each;
  const auto quantile = [&](std::size_t percent) {
    return latencies[latencies.size() * percent / 100];
  };
  std::printf(
      "{\"requests\":%zu,\"responses\":%llu,\"seconds\":%.3f,\"p50_us\":%u,\"p99_us\":%u,"
      "\"mean_us\":%.1f,\"failed\":%llu}\n",
      latencies.size(), static_cast<unsigned long long>(figures.responses), seconds.count(),
      quantile(50), quantile(99), sum / static_cast<double>(latencies.size()),
      static_cast<unsigned long long>(figures.failed));
  return 0;
}
