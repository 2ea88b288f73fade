// The requests that were answered, by endpoint and status, and where they are logged.
#pragma once

#include "clock.h"
#include "net/access_log.h"
#include "std.h"

namespace gpubridge {

// Counts of the event loop's thread. Endpoints are numbered by Python, which names them; number 0
// is for requests that no endpoint took.
class RequestCounts {
 public:
  struct Row {
    std::size_t endpoint;
    int status;
    std::uint64_t count;
  };

  explicit RequestCounts(std::size_t endpoints) : statuses_(std::max<std::size_t>(endpoints, 1)) {}

  void add_endpoint() { statuses_.emplace_back(); }
  // Few statuses occur at an endpoint, all of them the server's own.
  void count(std::size_t endpoint, int status) {
    auto& statuses = statuses_[endpoint < statuses_.size() ? endpoint : 0];
    for (auto& [known, count] : statuses) {
      if (known == status) {
        ++count;
        return;
      }
    }
    statuses.emplace_back(status, 1);
  }

  // Logs a request that ends now, if it has a record.
  void log(std::unique_ptr<AccessRecord> record) const {
    if (record != nullptr && access_log != nullptr) access_log->add(std::move(*record));
  }
  // A record of a request that begins now; none without an access log.
  [[nodiscard]] std::unique_ptr<AccessRecord> record(
      bool grpc, const std::shared_ptr<const std::string>& client) const {
    if (access_log == nullptr) return nullptr;
    auto record = std::make_unique<AccessRecord>();
    record->grpc = grpc;
    record->number = access_log->next_number();
    record->began_ns = monotonic_ns();
    record->client = client;
    return record;
  }

  [[nodiscard]] std::vector<Row> rows() const {
    std::vector<Row> rows;
    for (std::size_t endpoint = 0; endpoint < statuses_.size(); ++endpoint) {
      for (const auto& [status, count] : statuses_[endpoint]) {
        rows.push_back({endpoint, status, count});
      }
    }
    return rows;
  }

  std::shared_ptr<AccessLog> access_log;

 private:
  std::vector<std::vector<std::pair<int, std::uint64_t>>> statuses_;
};

}  // namespace gpubridge
