// A load client that costs little: one thread, one request under way on each connection.
//
//   client http|grpc|grpcs PORT CONNECTIONS SECONDS FILE [PATH [SCHEDULE RECORDS]]
//
// grpcs is gRPC over TLS, whose certificate is not checked; compiled with WITH_TLS only.
// FILE holds requests (benchmarks/traffic.py writes it); the client sends them in turn and writes a
// number that is never the same again into the places that each request names, so that no two
// requests have the same bytes. Prints one line of JSON.
//
// Without a SCHEDULE a connection sends its next request when it has the answer (a closed loop).
// A SCHEDULE holds times in ns after the start, as signed 64-bit numbers in order: one request is
// meant to be sent at each, whether others are answered or not (an open loop); where every
// connection is busy, it waits, and its latency counts from the time that was meant. RECORDS takes
// four times for each, of CLOCK_MONOTONIC in ns: meant, sendable (meant, and a connection was
// free), sent, answered.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "protocols.h"
#include "requests.h"
#include "wire.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Figures {
  std::vector<std::uint32_t> latencies_us;
  std::uint64_t failed = 0;
  std::uint64_t responses = 0;
};

struct Record {
  std::int64_t meant, sendable, sent, answered;
};

std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

struct Connection {
  int descriptor = -1;
  std::unique_ptr<Wire> wire;  // none without TLS
  std::unique_ptr<Protocol> protocol;
  std::string in;
  std::string out;
  std::size_t number = 0;
  char* region = nullptr;
  std::size_t next = 0;
  std::uint64_t sequence = 0;
  Clock::time_point begun;
  Clock::time_point answered;
  std::size_t record = 0;  // the place in the schedule of the request under way
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
    connection->number = connections_.size();
    if (!traffic_.regions.empty()) {
      connection->region = map_region(traffic_.regions, connection->number);
    }
    connection->protocol = std::move(protocol);
    connection->protocol->open(connection->out);
    connections_.push_back(std::move(connection));
  }

  void run() {
    for (auto& connection : connections_) {
      begin(*connection);
      write(*connection);
    }
    const auto patience = end_ + std::chrono::seconds(20);
    while (under_way_ != 0) {
      take_events(1000);
      if (Clock::now() > patience) fail("an answer did not come");
    }
  }

  Figures take_figures() { return std::move(figures_); }

  // Sends one request at each of the times after now; returns when all are answered.
  std::vector<Record> follow(const std::vector<std::int64_t>& schedule) {
    for (auto& connection : connections_) {
      write(*connection);
      free_.push_back(connection.get());
    }
    const auto start = Clock::now();
    const auto meant = [&](std::size_t index) {
      return start + std::chrono::nanoseconds(schedule[index]);
    };
    const auto patience = meant(schedule.size() - 1) + std::chrono::seconds(20);
    records_.resize(schedule.size());
    std::size_t next = 0;
    while (next < schedule.size() || under_way_ != 0) {
      const auto now = Clock::now();
      if (now > patience) fail("an answer did not come");
      while (next < schedule.size() && meant(next) <= now && !free_.empty()) {
        send_meant(meant(next), next);
        ++next;
      }
      // With every connection busy, only an answer lets the next request go.
      const bool timed = next < schedule.size() && !free_.empty();
      wait_until(timed ? meant(next) : now + std::chrono::seconds(1));
      take_events(0);
    }
    return std::move(records_);
  }

 private:
  void send_meant(Clock::time_point meant, std::size_t index) {
    // The one that has been free for longest, as if each request came from another client.
    Connection& connection = *free_.front();
    free_.pop_front();
    connection.record = index;
    const auto sendable = std::max(meant, connection.answered);
    begin(connection);
    records_[index] = {nanoseconds(meant), nanoseconds(sendable), nanoseconds(connection.begun), 0};
    write(connection);
  }

  // Returns at that time, or when there is something to read or to write. A pause of the poller
  // would end at whole milliseconds.
  void wait_until(Clock::time_point end) const {
    const std::int64_t pause =
        std::max<std::int64_t>(0, nanoseconds(end) - nanoseconds(Clock::now()));
    const timespec limit{pause / 1'000'000'000, pause % 1'000'000'000};
    pollfd watched{poller_, POLLIN, 0};
    ::ppoll(&watched, 1, &limit, nullptr);
  }

  void take_events(int milliseconds) {
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(poller_, events.data(), events.size(), milliseconds);
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

  void begin(Connection& connection) {
    std::size_t& next = traffic_.in_order ? connection.next : next_;
    if (next == 0 || !traffic_.in_order) connection.sequence = ++sequence_;
    Request& request = traffic_.requests[next];
    next = (next + 1) % traffic_.requests.size();
    fill_slots(request, {++turn_, connection.sequence, connection.number, connection.region});
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
    connection.answered = now;
    if (!records_.empty()) {
      records_[connection.record].answered = nanoseconds(now);
      free_.push_back(&connection);
      return;
    }
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
  std::vector<Record> records_;  // one for each time of the schedule; empty in a closed loop
  std::deque<Connection*> free_;
  std::size_t next_ = 0;
  std::size_t under_way_ = 0;
  // Numbers of other runs against the same server are others.
  std::uint64_t turn_ =
      static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()) % 1'000'000'007;
  std::uint64_t sequence_ = turn_;
  int poller_ = -1;
};

std::vector<std::int64_t> read_schedule(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::int64_t> schedule(text.size() / sizeof(std::int64_t));
  std::memcpy(schedule.data(), text.data(), schedule.size() * sizeof(std::int64_t));
  if (schedule.empty()) fail("the schedule is empty");
  return schedule;
}

// Puts this thread before the server's where that is allowed: a client on another machine would not
// wait for a processor that the server uses. Returns whether it is.
bool run_first() {
  ::prctl(PR_SET_TIMERSLACK, 1UL);
  const sched_param first{1};
  return ::sched_setscheduler(0, SCHED_FIFO, &first) == 0;
}

void print_figures(Figures figures, double seconds, bool first) {
  auto& latencies = figures.latencies_us;
  std::sort(latencies.begin(), latencies.end());
  double sum = 0;
  for (const std::uint32_t each : latencies) sum += each;
  const auto quantile = [&](std::size_t percent) {
    return latencies[latencies.size() * percent / 100];
  };
  std::printf(
      "{\"requests\":%zu,\"responses\":%llu,\"seconds\":%.3f,\"p50_us\":%u,\"p99_us\":%u,"
      "\"mean_us\":%.1f,\"failed\":%llu,\"first\":%s}\n",
      latencies.size(), static_cast<unsigned long long>(figures.responses), seconds, quantile(50),
      quantile(99), sum / static_cast<double>(latencies.size()),
      static_cast<unsigned long long>(figures.failed), first ? "true" : "false");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 6 || count == 8) {
    fail("usage: client http|grpc|grpcs PORT CONNECTIONS SECONDS FILE [PATH [SCHEDULE RECORDS]]");
  }
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
  bool first = false;
  if (count > 8) {
    const std::vector<std::int64_t> schedule = read_schedule(arguments[7]);
    first = run_first();
    const std::vector<Record> records = load.follow(schedule);
    std::ofstream file(arguments[8], std::ios::binary);
    file.write(reinterpret_cast<const char*>(records.data()),
               static_cast<std::streamsize>(records.size() * sizeof(Record)));
    if (!file.flush()) fail("cannot write the records");
  } else {
    load.run();
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  print_figures(load.take_figures(), seconds.count(), first);
  return 0;
}
