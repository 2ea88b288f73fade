// What of a request's record is known to Python.
#pragma once

#include "net/access_log.h"
#include "python_object.h"

namespace gpubridge {

// A request that is one of several on a call: logged by its last answer, or as cancelled.
class RequestRecord {
 public:
  RequestRecord(std::shared_ptr<AccessLog> log, std::unique_ptr<AccessRecord> record)
      : log_(std::move(log)), record_(std::move(record)) {}
  RequestRecord(RequestRecord&&) = default;
  RequestRecord& operator=(RequestRecord&&) = delete;
  ~RequestRecord() { answer(0, kCancelled); }

  void note(nb::handle statistics, std::string identifier);
  // Some bytes of answers are sent; with a status it ends, once.
  void answer(std::uint64_t sent, std::optional<int> status);
  [[nodiscard]] std::uint64_t number() const { return number_; }

 private:
  static constexpr int kCancelled = 1;

  std::shared_ptr<AccessLog> log_;
  std::unique_ptr<AccessRecord> record_;
  std::uint64_t number_ = record_->number;
};

// Notes the model of a request by its statistics (ModelStatistics).
void note_model(AccessRecord& record, nb::handle statistics);
// Notes the id of an InferRequest.
void note_identifier(AccessRecord& record, nb::handle request);

}  // namespace gpubridge
