#include "net/access_log.h"

#include <poll.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <thread>

#include "clock.h"

namespace gpubridge {
namespace {

using Clock = std::chrono::system_clock;

// Records that wait: less than 4 MiB with the longest names.
constexpr std::size_t kMostWaiting = 8192;
// Of a client's text in a line.
constexpr std::size_t kShown = 128;
// Bytes of one write, which a pipe takes as a whole: lines of others come between lines.
constexpr std::size_t kTogether = 4096;
constexpr int kPollMilliseconds = 100;
constexpr std::chrono::seconds kClosing{1};
constexpr std::string_view kPlace = "access";

// A character of UTF-8 at the begin of a text, which is cut off; U+FFFD for a byte that begins
// none.
std::uint32_t take_character(std::string_view& text) {
  const auto first = static_cast<unsigned char>(text.front());
  const std::size_t size = first < 0x80   ? 1
                           : first < 0xC2 ? 0
                           : first < 0xE0 ? 2
                           : first < 0xF0 ? 3
                           : first < 0xF5 ? 4
                                          : 0;
  std::uint32_t character = size <= 1 ? first : first & (0xFFU >> (size + 1));
  bool whole = size != 0 && size <= text.size();
  for (std::size_t at = 1; whole && at < size; ++at) {
    const auto next = static_cast<unsigned char>(text[at]);
    whole = (next & 0xC0U) == 0x80;
    character = character << 6U | (next & 0x3FU);
  }
  text.remove_prefix(whole ? size : 1);
  return whole ? character : 0xFFFD;
}

void append_unit(std::uint32_t unit, std::string& out) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "\\u%04x", static_cast<unsigned>(unit & 0xFFFFU));
  out.append(text.data());
}

struct Entry {
  AccessRecord record;
  std::int64_t ended_ns;
  Clock::time_point time;
};

std::string time_text(Clock::time_point when, AccessLog::Format format) {
  const bool local = format == AccessLog::Format::kDefault;
  const std::time_t seconds = Clock::to_time_t(when);
  const auto part = std::chrono::duration_cast<std::chrono::microseconds>(when.time_since_epoch());
  std::tm parts{};
  if (local) {
    localtime_r(&seconds, &parts);
  } else {
    gmtime_r(&seconds, &parts);
  }
  std::array<char, 64> text{};
  const std::size_t size = std::strftime(text.data(), text.size(),
                                         local ? "%m%d %H:%M:%S" : "%Y-%m-%dT%H:%M:%S", &parts);
  std::string made(text.data(), size);
  if (format != AccessLog::Format::kIso) {
    std::snprintf(text.data(), text.size(), ".%06d", static_cast<int>(part.count() % 1'000'000));
    made.append(text.data());
  }
  return local ? made : made.append("Z");
}

// The begin of a line, as gpubridge/telemetry/logs.py has it.
std::string line_head(Clock::time_point when, AccessLog::Format format, char letter) {
  const std::string process = std::to_string(getpid());
  const std::string time = time_text(when, format);
  if (format == AccessLog::Format::kIso) {
    return time + " " + letter + " " + process + " " + std::string(kPlace) + "] ";
  }
  return letter + time + " " + process + " " + std::string(kPlace) + "] ";
}

std::string json_head(Clock::time_point when, std::string_view level, std::string_view message) {
  std::string line = "{\"time\": \"" + time_text(when, AccessLog::Format::kJson);
  line.append("\", \"level\": \"").append(level).append("\", \"message\": \"").append(message);
  line.append("\", \"file\": \"").append(kPlace).append("\", \"process\": ");
  return line.append(std::to_string(getpid()));
}

std::string shown_milliseconds(std::int64_t nanoseconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", static_cast<double>(nanoseconds) * 1e-6);
  return text.data();
}

// One line, and its end.
std::string line_of(const Entry& entry, AccessLog::Format format, const AccessLog::Names& names) {
  const AccessRecord& record = entry.record;
  const std::vector<std::string>& endpoints = record.grpc ? names.grpc : names.http;
  const std::string_view endpoint =
      record.endpoint < endpoints.size() ? std::string_view(endpoints[record.endpoint]) : "other";
  // A request without an id gets one, for the log alone.
  const std::string given = "#" + std::to_string(record.number);
  const std::string_view identifier = record.identifier.empty() ? given : record.identifier;
  const std::array<std::pair<std::string_view, std::string_view>, 6> texts{{
      {"id", identifier},
      {"model", record.model},
      {"version", record.version},
      {"client", record.client == nullptr ? std::string_view() : *record.client},
      {"protocol", record.grpc ? "grpc" : "http"},
      {"endpoint", endpoint},
  }};
  const std::array<std::pair<std::string_view, std::string>, 4> numbers{{
      {"status", std::to_string(record.status)},
      {"bytes_in", std::to_string(record.received)},
      {"bytes_out", std::to_string(record.sent)},
      {"ms", shown_milliseconds(entry.ended_ns - record.began_ns)},
  }};
  const bool json = format == AccessLog::Format::kJson;
  std::string line = json ? json_head(entry.time, "info", "request")
                          : line_head(entry.time, format, 'I') + "request";
  for (const auto& [name, value] : texts) {
    line.append(json ? ", \"" : " ").append(name).append(json ? "\": \"" : "=\"");
    append_escaped(value.substr(0, kShown), line);
    line.push_back('"');
  }
  for (const auto& [name, value] : numbers) {
    line.append(json ? ", \"" : " ").append(name).append(json ? "\": " : "=").append(value);
  }
  return line.append(json ? "}\n" : "\n");
}

std::string dropped_line(std::uint64_t count, AccessLog::Format format) {
  const std::string text = std::to_string(count) +
                           " requests are missing in the access log: it takes lines too slowly, or "
                           "could not be written";
  const auto now = Clock::now();
  if (format == AccessLog::Format::kJson) return json_head(now, "warning", text) + "}\n";
  return line_head(now, format, 'W') + text + "\n";
}

}  // namespace

void append_escaped(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const std::uint32_t character = take_character(text);
    if (character == '"' || character == '\\') out.push_back('\\');
    if (character >= 0x20 && character < 0x7F) {
      out.push_back(static_cast<char>(character));
    } else if (character < 0x10000) {
      append_unit(character, out);
    } else {
      append_unit(0xD800 + ((character - 0x10000) >> 10U), out);
      append_unit(0xDC00 + ((character - 0x10000) & 0x3FFU), out);
    }
  }
}

// Of the two threads; the writing one keeps it if it is still blocked in a write when all is
// closed.
struct AccessLog::Shared {
  Shared(int descriptor, Format format, Names names)
      : descriptor(descriptor), format(format), names(std::move(names)) {}

  // Writes lines of at most `kTogether` bytes at a time; false where the log does not take them.
  [[nodiscard]] bool write(std::string_view lines) {
    while (!lines.empty()) {
      std::size_t size = std::min(lines.size(), kTogether);
      if (size < lines.size()) {
        const std::size_t end = lines.rfind('\n', size - 1);
        if (end != std::string_view::npos) size = end + 1;
      }
      const ssize_t written = ::write(descriptor, lines.data(), size);
      if (written > 0) {
        lines.remove_prefix(static_cast<std::size_t>(written));
      } else if (written < 0 && errno == EAGAIN) {
        pollfd writable{descriptor, POLLOUT, 0};
        ::poll(&writable, 1, kPollMilliseconds);
      } else if (written == 0 || errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  const int descriptor;
  std::mutex mutex;
  std::condition_variable changed;
  // What follows is guarded.
  Format format;
  const Names names;
  std::vector<Entry> waiting;
  std::uint64_t dropped = 0;
  bool closing = false;
  bool ended = false;
};

AccessLog::AccessLog(int descriptor, Format format, Names names)
    : shared_(std::make_shared<Shared>(descriptor, format, std::move(names))) {
  std::thread(write_all, shared_).detach();
}

AccessLog::~AccessLog() { close(); }

void AccessLog::add(AccessRecord record) {
  Entry entry{std::move(record), monotonic_ns(), Clock::now()};
  const std::lock_guard lock(shared_->mutex);
  if (shared_->waiting.size() >= kMostWaiting || shared_->closing) {
    ++shared_->dropped;
    return;
  }
  shared_->waiting.push_back(std::move(entry));
  if (shared_->waiting.size() == 1) shared_->changed.notify_all();
}

void AccessLog::set_format(Format format) {
  const std::lock_guard lock(shared_->mutex);
  shared_->format = format;
}

std::uint64_t AccessLog::dropped() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->dropped;
}

void AccessLog::close() {
  std::unique_lock lock(shared_->mutex);
  shared_->closing = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kClosing, [this] { return shared_->ended; });
}

void AccessLog::write_all(const std::shared_ptr<Shared>& shared) {
  std::uint64_t told = 0;
  std::unique_lock lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return !shared->waiting.empty() || shared->closing; });
    if (shared->waiting.empty()) break;
    const std::vector<Entry> entries = std::exchange(shared->waiting, {});
    const Format format = shared->format;
    const std::uint64_t dropped = shared->dropped;
    lock.unlock();
    std::string lines;
    for (const Entry& entry : entries) lines += line_of(entry, format, shared->names);
    const bool taken = shared->write(lines);
    if (taken && dropped != told && shared->write(dropped_line(dropped - told, format))) {
      told = dropped;
    }
    lock.lock();
    if (!taken) shared->dropped += entries.size();
  }
  ::close(shared->descriptor);
  shared->ended = true;
  shared->changed.notify_all();
}

}  // namespace gpubridge
