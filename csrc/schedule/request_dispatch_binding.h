// The way of requests from a model's queue to its instances, and back to what follows from answers.
#pragma once

#include "ipc/model_counters.h"
#include "python_object.h"
#include "request/trace_sampling.h"
#include "schedule/instance_load.h"
#include "schedule/item_batcher_binding.h"

namespace gpubridge {

namespace at_stub {
class RequestsAtStub;
}  // namespace at_stub

class RequestDispatch;

// Results of the batches of a message.
struct AnsweredBatches {
  std::size_t batches = 0;
  std::size_t requests = 0;
  std::uint64_t execute_ns = 0;
  std::vector<nb::object> returning;  // requests to be executed again
  std::vector<nb::object> traced;     // batches of requests that are followed
};

// Leads batches to one model instance, to whichever stub it has; knows how many are there.
class InstanceFeed {
 public:
  // `listener` hears what the dispatch of a model has no part in, and everything where there is
  // none: a model of sequences.
  explicit InstanceFeed(nb::object listener) : listener_(std::move(listener)) {}
  InstanceFeed(const InstanceFeed&) = delete;
  InstanceFeed& operator=(const InstanceFeed&) = delete;

  [[nodiscard]] const InstanceLoad& load() const { return load_; }
  [[nodiscard]] std::size_t open_requests() const;
  [[nodiscard]] std::size_t unstarted() const;
  void listen(nb::object listener) { listener_ = std::move(listener); }

  // Sends batches to a stub, whose instance may not take any by itself yet.
  void connect(nb::object stub);
  void open(std::size_t least_window) { load_.open(least_window); }
  void close();
  // Sends a batch; the listener fails the requests of which that is not possible.
  void submit(nb::handle requests);
  // Number of requests that it can be sent, however long they would wait there.
  [[nodiscard]] std::size_t free_tickets() const;

  // True if a request is answered sooner after the stub's present work than by waking another stub:
  // nothing of that work takes long, and if something does, the request can be withdrawn. Not where
  // inputs are uploaded, or a model answers after its batches: what that takes is not known.
  [[nodiscard]] bool soon_done() const;
  // True if batches wait at the stub, some waited at the last call, and it has begun none since.
  bool holds_up();
  // Withdraws what the stub has not begun; returns the requests in order.
  nb::list withdraw();

  // Batches were answered, or a request ended after its batch.
  void answered(const AnsweredBatches& answered, Nanoseconds now);

  // The dispatch that serves it; outlives that, or is told.
  void serve(RequestDispatch* dispatch) { dispatch_ = dispatch; }
  void leave(const RequestDispatch* dispatch) {
    if (dispatch_ == dispatch) dispatch_ = nullptr;
  }
  int traverse(visitproc visit, void* arg) const;
  void clear() {
    listener_ = nb::none();
    close();
  }

 private:
  InstanceLoad load_;
  nb::object listener_;
  nb::object stub_;
  at_stub::RequestsAtStub* at_stub_ = nullptr;  // in `stub_`
  RequestDispatch* dispatch_ = nullptr;
  // The last batch that was begun when `holds_up` was asked last, if others waited.
  std::optional<std::uint64_t> begun_;
};

// The dispatch loop of a model without sequences: its queue, and which instance gets what. The
// Python object that owns it has the policies, and words all errors.
class RequestDispatch {
 public:
  // `ahead`: requests are batches by themselves, and may wait at a stub as well as here. `shapes`
  // gives the number of a request's options, or is None where shapes do not matter.
  RequestDispatch(nb::object owner, nb::object batcher, bool ahead, bool ordered,
                  nb::object counters, nb::object shapes, nb::object clock);
  RequestDispatch(const RequestDispatch&) = delete;
  RequestDispatch& operator=(const RequestDispatch&) = delete;
  ~RequestDispatch() { clear(); }

  // Has `prepare` called for each request, or only for those that may be traced by `sampling`,
  // which are from elsewhere than `untraced`, and for requests of clients' or a GPU's memory; it
  // says whether the request goes on.
  void prepare_with(nb::object prepare, nb::object sampling, nb::object untraced, bool always);
  void serve(nb::handle feeds);

  void submit(nb::handle request, nb::handle origin);
  void enqueue(nb::handle request);
  void dispatch(Nanoseconds now);
  // The timer that the owner was asked to set is due.
  void on_timer();
  // Calls `on_idle` of the owner whenever nothing is pending, from now on.
  void stop() { stopping_ = true; }
  [[nodiscard]] std::size_t pending() const;

  int traverse(visitproc visit, void* arg) const;
  void clear() {
    serve(nb::tuple());
    owner_ = cancel_ = shapes_ = clock_ = prepare_ = sampling_object_ = untraced_ = latest_.object =
        nb::none();
  }

 private:
  struct Options {
    nb::object object;
    std::uint64_t shape = 0;
    std::uint64_t priority = 0;
    Nanoseconds timeout = 0;
  };

  [[nodiscard]] Nanoseconds now() const;
  [[nodiscard]] InstanceFeed* best_instance() const;
  void read_options(nb::handle options);
  void feed_ahead();
  void feed(Nanoseconds now);
  void set_timer(Nanoseconds due);
  void relieve();
  void refuse_unservable();
  void report_full_stubs();

  nb::object owner_;
  nb::object cancel_ = owner_.attr("cancel");
  nb::object batcher_object_;
  ItemBatcher* batcher_ = nb::cast<ItemBatcher*>(batcher_object_);
  nb::object counters_object_;
  ModelCounters* counters_ = nb::cast<ModelCounters*>(counters_object_);
  nb::object shapes_;
  nb::object clock_;
  nb::object prepare_ = nb::none();
  nb::object sampling_object_ = nb::none();
  TraceSampling* sampling_ = nullptr;
  nb::object untraced_ = nb::none();
  bool always_ = false;
  bool ahead_;
  bool ordered_;
  bool stopping_ = false;
  std::vector<nb::object> feed_objects_;
  std::vector<InstanceFeed*> feeds_;
  Options latest_;  // requests of one form share their options
  Nanoseconds timer_ = 0;
};

}  // namespace gpubridge
