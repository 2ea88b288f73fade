// The stub's loop: receives messages, executes their batches, sends the results.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "buffer_view.h"
#include "ipc/records.h"
#include "stub/output_pool.h"
#include "stub/request_reader.h"
#include "stub/response_writer.h"
#include "stub/result_sender.h"

namespace gpubridge::stub {

// What the loop needs of Python.
struct LoopParts {
  nanobind::object channel;   // Channel
  nanobind::object executor;  // Executor: runs what is not plain, and knows the model
  nanobind::object outputs;   // OutputMemory
  nanobind::object control;   // ControlPage
  nanobind::object waits;     // ShortWaits
  nanobind::object reader;    // RecordReader
  nanobind::object decode;    // decode_execute, which words what is wrong with a message
  nanobind::object batch;     // the class Batch
};

// Executes the batches of EXECUTE messages. A batch is plain where its requests are in the server's
// memory, and others look at their inputs at most if the model does not write to these: then Python
// does nothing but the model's own work, unless a response is other than tensors in host memory.
// Other batches are run by the Executor, and other messages are returned. Responses that models
// send by themselves are written here, too.
class StubLoop {
 public:
  StubLoop(LoopParts parts, RequestReader reader, ResponseWriter writer,
           nanobind::type_object response, LeaseBook& book, std::unique_ptr<OutputPool> pool,
           std::int64_t awake_ns, const StubLimits& limits);

  // Receives messages until one comes that holds no batches; returns it and its descriptors.
  nanobind::object next_message();

  // Sends a response of a request that is open; any thread may. False where it is none that is
  // written here. `wanted` holds the names of the outputs that are sent.
  bool respond(std::uint32_t ticket, nanobind::handle response, bool last, nanobind::handle wanted,
               const std::string& consumer);

  // Sends results that wait for a slow batch; returns when the channel is closed.
  void watch();
  // Gives free slots back to the OutputMemory.
  void give_back() { pool_->give_back(); }
  // Leaves what is shared with the server alone: for a forked child.
  void disown();

 private:
  // A batch as it lies in its message.
  struct BatchView {
    std::uint64_t sequence;
    std::size_t first;  // where its records begin
    std::uint32_t requests;
    bool plain;
    bool shared;  // whether others look at the inputs of plain requests, too
    bool called;  // whether other models take the outputs
  };
  // A request that is being executed.
  struct Live {
    std::uint32_t ticket;
    nanobind::object wanted;       // of RecordForm
    nanobind::object arrival;      // its Arrival
    OwnInputs inputs;              // outputs may stay there
    std::string_view outputs_for;  // of its context, in its message
  };

  void attach();
  void run(nanobind::handle message);
  std::vector<BatchView> batches(nanobind::handle message);
  void skip(nanobind::handle message, const BatchView& batch, bool last);
  void run_in_python(nanobind::handle message, const BatchView& batch, bool last);
  void run_plain(nanobind::handle message, const BatchView& batch, bool last);
  nanobind::object take_requests(nanobind::handle message, const BatchView& batch,
                                 std::vector<Live>& live, std::string& skipped);
  nanobind::object execute(nanobind::object requests, std::span<const Live> live);
  void answer_nothing(std::uint32_t ticket, std::string& result);
  void answer(const Live& live, nanobind::handle responses, std::size_t index);
  bool answer_here(const Live& live, nanobind::object& response);
  void finish(const BatchView& batch);
  void send_result(std::string_view result, std::int64_t started, std::int64_t ended, bool last);
  void send(const std::string& message);
  std::int64_t start(std::uint64_t sequence);
  [[nodiscard]] bool is_cancelled(std::uint32_t ticket) const;
  [[nodiscard]] bool is_crowded() const;
  [[nodiscard]] bool shows_shared() const;

  LoopParts parts_;
  LeaseBook& book_;
  std::unique_ptr<OutputPool> pool_;
  RequestReader reader_;
  ResponseWriter writer_;
  StubLimits limits_;
  ResultSender sender_;
  nanobind::type_object response_;
  nanobind::object execute_;
  nanobind::object shared_inputs_;
  nanobind::object scratch_;
  std::int64_t awake_ns_;
  std::int64_t wait_ns_ = 0;  // for how long to stay awake now
  int descriptor_;
  bool plain_;             // whether batches of this model may be plain
  bool decoupled_;         // whether the model sends all responses by itself
  bool soon_ = false;      // whether the next message is likely to come soon
  bool watches_ = false;   // whether there is a thread that watches
  bool reclaims_ = false;  // whether the OutputMemory may have lent slots by itself
  std::unique_ptr<BufferView> words_;
  std::unique_ptr<BufferView> claimed_;
  std::unique_ptr<BufferView> lent_;
  std::unique_ptr<BufferView> cancelled_;

  // Of the batch at hand.
  std::string result_;
  std::uint64_t copied_ = 0;
  std::int64_t started_ = 0;
  std::int64_t called_ = 0;
  std::int64_t ended_ = 0;
};

// Adds the class StubLoop to the module.
void bind_stub_loop(nanobind::module_& module);

}  // namespace gpubridge::stub
