// The access log: a line for each request, written by a thread of its own.
//
// The event loop's thread adds records, which wait in a bounded queue; the writing thread makes
// lines of them and owns the descriptor. Where the log takes lines more slowly than requests end,
// records are dropped and counted, and a line says how many.
#pragma once

#include <condition_variable>
#include <mutex>

#include "std.h"

namespace gpubridge {

struct AccessRecord {
  bool grpc = false;
  std::size_t endpoint = 0;  // its number among the protocol's
  int status = 0;
  std::int64_t began_ns = 0;   // CLOCK_MONOTONIC
  std::uint64_t received = 0;  // bytes of its body
  std::uint64_t sent = 0;      // bytes of the bodies of its responses
  std::string model;
  std::string version;
  std::string identifier;    // the client's
  std::uint64_t number = 0;  // the log's, told where there is no identifier
  std::shared_ptr<const std::string> client;
};

class AccessLog {
 public:
  enum class Format : std::uint8_t { kDefault, kIso, kJson };
  // Names of endpoints by number.
  struct Names {
    std::vector<std::string> http;
    std::vector<std::string> grpc;
  };

  // Takes the descriptor over.
  AccessLog(int descriptor, Format format, Names names);
  // Closes it.
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  // Numbers a request that begins; of the event loop's thread.
  [[nodiscard]] std::uint64_t next_number() { return ++numbered_; }
  // A request ends now.
  void add(AccessRecord record);
  void set_format(Format format);
  // Records for which there was no room, and lines that the log did not take.
  [[nodiscard]] std::uint64_t dropped() const;
  // Writes what waits, for a second at most: what the log does not take by then is lost.
  // Idempotent.
  void close();

 private:
  struct Shared;
  static void write_all(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_;
  std::uint64_t numbered_ = 0;
};

// Appends a text as the inside of a JSON string: in ASCII, so that no client can begin a line.
void append_escaped(std::string_view text, std::string& out);

}  // namespace gpubridge
