#include "schedule/request_dispatch_binding.h"

#include "clock.h"
#include "ipc/in_flight_binding.h"
#include "ipc/infer_request_binding.h"
#include "ipc/memory_ranges_binding.h"

namespace gpubridge {

using at_stub::RequestsAtStub;
using Admission = DynamicBatcher::Admission;

// A stub that begins nothing for so long holds up what it was sent.
constexpr Nanoseconds kPatience = 4'000'000;
// No request gets from its arrival to a model in less: one that asks for that is late.
constexpr Nanoseconds kHandOver = 10'000;

// -- one instance --------------------------------------------------------------------------------

std::size_t InstanceFeed::open_requests() const {
  return at_stub_ == nullptr ? 0 : at_stub_->open_requests();
}

std::size_t InstanceFeed::unstarted() const {
  return at_stub_ == nullptr ? 0 : at_stub_->unstarted();
}

void InstanceFeed::connect(nb::object stub) {
  at_stub_ = nb::cast<RequestsAtStub*>(stub);
  at_stub_->tell_feed(nb::find(this));
  stub_ = std::move(stub);
}

void InstanceFeed::close() {
  load_.close();
  at_stub_ = nullptr;
  stub_.reset();
}

void InstanceFeed::submit(nb::handle requests) {
  if (at_stub_ == nullptr) throw nb::value_error("the instance has no stub");
  const auto unsent = at_stub_->submit(requests);
  const std::size_t sent = nb::len(requests) - unsent.size();
  if (sent != 0) load_.sent(sent);
  const nb::object listener = listener_;
  for (const auto& [request, error] : unsent) listener.attr("fail_unsent")(request, error);
}

std::size_t InstanceFeed::free_tickets() const {
  return at_stub_ == nullptr ? 0 : at_stub_->free_tickets();
}

bool InstanceFeed::soon_done() const {
  return load_.least_window() == 1 && at_stub_ != nullptr &&
         load_.soon_done(at_stub_->processors_busy()) && at_stub_->claims() &&
         at_stub_->open_requests() == 0;
}

bool InstanceFeed::holds_up() {
  const auto before = std::exchange(begun_, std::nullopt);
  if (at_stub_ == nullptr || load_.batches() < 2) return false;
  begun_ = at_stub_->started();
  return begun_ == before;
}

nb::list InstanceFeed::withdraw() {
  nb::list requests = at_stub_->withdraw();
  if (const std::size_t count = nb::len(requests); count != 0) load_.withdrawn(count);
  return requests;
}

static nb::list list_of(const std::vector<nb::object>& objects) {
  nb::list list;
  for (const nb::object& object : objects) list.append(object);
  return list;
}

void InstanceFeed::answered(const AnsweredBatches& answered, Nanoseconds now) {
  load_.answered(answered.batches, answered.requests, answered.execute_ns);
  const bool plain = answered.returning.empty() && answered.traced.empty();
  if (plain && dispatch_ != nullptr) {
    const nb::object held = nb::find(dispatch_);
    dispatch_->dispatch(now);
  } else if (!listener_.is_none()) {
    listener_.attr("on_batches")(list_of(answered.returning), list_of(answered.traced), now);
  }
}

int InstanceFeed::traverse(visitproc visit, void* arg) const {
  Py_VISIT(listener_.ptr());
  Py_VISIT(stub_.ptr());
  return 0;
}

// -- the dispatch --------------------------------------------------------------------------------

RequestDispatch::RequestDispatch(nb::object owner, nb::object batcher, bool ahead, bool ordered,
                                 nb::object counters, nb::object shapes, nb::object clock)
    : owner_(std::move(owner)),
      batcher_object_(std::move(batcher)),
      counters_object_(std::move(counters)),
      shapes_(std::move(shapes)),
      clock_(std::move(clock)),
      ahead_(ahead),
      ordered_(ordered) {}

void RequestDispatch::prepare_with(nb::object prepare, nb::object sampling, nb::object untraced,
                                   bool always) {
  prepare_ = std::move(prepare);
  sampling_object_ = std::move(sampling);
  sampling_ = &nb::cast<TraceSampling&>(sampling_object_);
  untraced_ = std::move(untraced);
  always_ = always;
}

void RequestDispatch::serve(nb::handle feeds) {
  for (InstanceFeed* feed : std::exchange(feeds_, {})) feed->leave(this);
  feed_objects_.clear();
  for (nb::handle object : feeds) {
    feeds_.push_back(nb::cast<InstanceFeed*>(object));
    feed_objects_.push_back(nb::borrow(object));
    feeds_.back()->serve(this);
  }
}

Nanoseconds RequestDispatch::now() const {
  if (!clock_.is_none()) return nb::cast<Nanoseconds>(clock_());
  return monotonic_ns();
}

std::size_t RequestDispatch::pending() const {
  std::size_t count = batcher_->pending();
  for (const InstanceFeed* feed : feeds_) count += feed->load().in_flight() + feed->open_requests();
  return count;
}

void RequestDispatch::submit(nb::handle object, nb::handle origin) {
  if (!prepare_.is_none()) {
    const InferRequest& request = infer_request(object);
    // Inputs of clients, or on a GPU, may have to be copied first.
    const bool elsewhere =
        request.has(InferRequest::kRanges) &&
        (request.has(InferRequest::kClient) || !are_on_host(request.get(InferRequest::kRanges)));
    const bool out_of_the_ordinary =
        always_ || elsewhere || (sampling_->active && !origin.is_none() && !origin.is(untraced_));
    if (!out_of_the_ordinary) {
      if (origin.is_none()) sampling_->count();
    } else if (!nb::cast<bool>(prepare_(object, origin))) {
      return;
    }
  }
  enqueue(object);
}

void RequestDispatch::enqueue(nb::handle object) {
  InferRequest& request = infer_request(object);
  const Nanoseconds now = this->now();
  request.arrived = now;
  request.set(InferRequest::kCancelled, cancel_);
  if (request.copied != 0) counters_->copied(static_cast<std::uint64_t>(request.copied));
  bool hurried = false;
  QueuedRequest queued;
  queued.size = static_cast<std::uint64_t>(request.batch_size);
  queued.arrived = now;
  if (!ahead_) {
    try {
      read_options(request.get(InferRequest::kOptions));
    } catch (nb::python_error& error) {
      owner_.attr("fail_unsent")(object, error.value());
      return;
    }
    queued.shape = latest_.shape;
    queued.priority = latest_.priority;
    queued.timeout = latest_.timeout;
    hurried = latest_.timeout != 0 && latest_.timeout < kHandOver;
    if (hurried) queued.timeout = 1;
  }
  const Admission admission = batcher_->add(object, queued, now);
  if (admission != Admission::kAccepted) {
    owner_.attr("refuse_new")(object, admission == Admission::kStopped);
    return;
  }
  if (ordered_) owner_.attr("order_outcome")(object);
  // It is late by the time that has passed since.
  dispatch(hurried ? 0 : now);
}

void RequestDispatch::read_options(nb::handle options) {
  if (latest_.object.is(options)) return;
  latest_ = {};
  if (!shapes_.is_none()) latest_.shape = nb::cast<std::uint64_t>(shapes_(options));
  latest_.priority = nb::cast<std::uint64_t>(options.attr("priority"));
  latest_.timeout = from_microseconds(nb::cast<std::uint64_t>(options.attr("timeout_us")));
  latest_.object = nb::borrow(options);
}

void RequestDispatch::dispatch(Nanoseconds now) {
  if (ahead_) {
    feed_ahead();
  } else {
    if (now == 0) now = this->now();
    if (const nb::list late = batcher_->refused(now); late.size() != 0) {
      owner_.attr("refuse_late")(late);
    }
    feed(now);
    if (const auto due = batcher_->next_wakeup(now)) set_timer(*due);
  }
  if (stopping_ && pending() == 0) owner_.attr("on_idle")();
}

// One that is soon done with what it has, else the least loaded.
InstanceFeed* RequestDispatch::best_instance() const {
  const bool stuck = std::any_of(feeds_.begin(), feeds_.end(),
                                 [](const InstanceFeed* feed) { return feed->load().stuck(); });
  InstanceFeed* best = nullptr;
  for (InstanceFeed* feed : feeds_) {
    const std::size_t load = feed->load().in_flight();
    if (load >= feed->load().window() || feed->free_tickets() == 0) continue;
    if (!stuck && feed->soon_done()) return feed;
    if (best == nullptr || load < best->load().in_flight()) best = feed;
  }
  return best;
}

void RequestDispatch::feed_ahead() {
  while (batcher_->pending() != 0) {
    InstanceFeed* best = best_instance();
    if (best == nullptr) {
      refuse_unservable();
      report_full_stubs();
      return;
    }
    best->submit(batcher_->take(0, 1));
    if (feeds_.size() > 1 && timer_ == 0 && best->load().batches() > 1)
      set_timer(now() + kPatience);
  }
}

// Withdraws what waits behind a request that takes long, where another instance is not held up.
void RequestDispatch::relieve() {
  std::vector<InstanceFeed*> slow;
  bool waiting = false;
  std::size_t able = 0;
  for (InstanceFeed* feed : feeds_) {
    waiting = waiting || feed->load().batches() > 1;
    if (feed->holds_up()) {
      slow.push_back(feed);
    } else if (feed->load().window() != 0 && !feed->load().stuck()) {
      ++able;
    }
  }
  for (InstanceFeed* feed : slow) {
    if (able == 0) break;
    if (const nb::list requests = feed->withdraw(); requests.size() != 0) {
      owner_.attr("queue_again")(requests);
    }
  }
  if (waiting) set_timer(now() + kPatience);
}

// Each batch as late as possible: to instances that have nothing to do. Those that copy the inputs
// of a batch while they execute another get it before, if it is full.
void RequestDispatch::feed(Nanoseconds now) {
  const auto is_free = [](const InstanceLoad& load) {
    return load.window() != 0 && load.in_flight() == 0;
  };
  bool found = false;
  bool more = true;
  for (InstanceFeed* feed : feeds_) {
    // A batch of which nothing can be sent leaves it free.
    while (more && is_free(feed->load())) {
      found = true;
      const nb::object batch = batcher_->take(now, feed->free_tickets());
      more = !batch.is_none();
      if (!more) break;
      if (nb::len(batch) == 0) {
        report_full_stubs();
        break;
      }
      feed->submit(batch);
    }
  }
  if (!found) refuse_unservable();
  for (InstanceFeed* feed : feeds_) {
    const InstanceLoad& load = feed->load();
    while (load.window() != 0 && load.batches() != 0 && load.batches() < load.least_window()) {
      const nb::object batch = batcher_->take_ahead(now, feed->free_tickets());
      if (batch.is_none() || nb::len(batch) == 0) break;
      feed->submit(batch);
    }
  }
}

void RequestDispatch::set_timer(Nanoseconds due) {
  if (timer_ != 0 && timer_ <= due) return;
  timer_ = due;
  owner_.attr("set_timer")(timer_);
}

void RequestDispatch::on_timer() {
  timer_ = 0;
  if (ahead_ && feeds_.size() > 1) relieve();
  dispatch(0);
}

// Has what waits refused when no instance is going to take it.
void RequestDispatch::refuse_unservable() {
  if (batcher_->pending() == 0) return;
  for (const InstanceFeed* feed : feeds_) {
    if (feed->load().window() != 0) return;
  }
  owner_.attr("refuse_unservable")();
}

// Tells of instances that would take requests, but whose stubs have no ticket left for one.
void RequestDispatch::report_full_stubs() {
  for (std::size_t index = 0; index < feeds_.size(); ++index) {
    const InstanceFeed& feed = *feeds_[index];
    const bool has_window = feed.load().in_flight() < feed.load().window();
    if (has_window && feed.free_tickets() == 0) owner_.attr("stub_full")(index);
  }
}

int RequestDispatch::traverse(visitproc visit, void* arg) const {
  for (const nb::object* held :
       {&owner_, &cancel_, &batcher_object_, &counters_object_, &shapes_, &clock_, &prepare_,
        &sampling_object_, &untraced_, &latest_.object}) {
    Py_VISIT(held->ptr());
  }
  for (const nb::object& feed : feed_objects_) Py_VISIT(feed.ptr());
  return 0;
}

void bind_request_dispatch(nb::module_& module) {
  nb::class_<InstanceFeed>(module, "InstanceFeed", nb::type_slots(collected<InstanceFeed>()))
      .def(nb::init<nb::object>(), nb::arg().none())
      .def("listen", &InstanceFeed::listen)
      .def("connect", &InstanceFeed::connect)
      .def("open", &InstanceFeed::open)
      .def("close", &InstanceFeed::close)
      .def("submit", &InstanceFeed::submit)
      .def_prop_ro("open_requests", &InstanceFeed::open_requests)
      .def_prop_ro("unstarted", &InstanceFeed::unstarted)
      .def_prop_ro("in_flight", [](const InstanceFeed& feed) { return feed.load().in_flight(); })
      .def_prop_ro("free_tickets", &InstanceFeed::free_tickets)
      .def_prop_ro("batches", [](const InstanceFeed& feed) { return feed.load().batches(); })
      .def_prop_ro("window", [](const InstanceFeed& feed) { return feed.load().window(); })
      .def_prop_ro("least_window",
                   [](const InstanceFeed& feed) { return feed.load().least_window(); });
  nb::class_<RequestDispatch>(module, "RequestDispatch",
                              nb::type_slots(collected<RequestDispatch>()))
      .def(nb::init<nb::object, nb::object, bool, bool, nb::object, nb::object, nb::object>(),
           nb::arg("owner"), nb::arg("batcher"), nb::arg("ahead"), nb::arg("ordered"),
           nb::arg("counters"), nb::arg("shapes").none(), nb::arg("clock").none())
      .def("prepare_with", &RequestDispatch::prepare_with)
      .def("serve", &RequestDispatch::serve)
      .def("submit", &RequestDispatch::submit, nb::arg(), nb::arg() = nb::none())
      .def("enqueue", &RequestDispatch::enqueue)
      .def("dispatch", &RequestDispatch::dispatch, nb::arg() = 0)
      .def("on_timer", &RequestDispatch::on_timer)
      .def("stop", &RequestDispatch::stop)
      .def_prop_ro("pending", &RequestDispatch::pending);
}

}  // namespace gpubridge
