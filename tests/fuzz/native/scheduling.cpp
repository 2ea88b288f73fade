// The default queue and the dynamic batcher: whatever comes, they do what a plain list of requests,
// looked at anew each time, says; and each request leaves in one way.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "schedule/dynamic_batcher.h"
#include "schedule/instance_load.h"

namespace {

using namespace gpubridge;
using fuzz::expect;

// A queued request of the model.
struct Item {
  QueuedRequest request;
  std::uint64_t level = 0;
  Nanoseconds deadline = 0;
  std::int64_t serial = 0;
  bool delayed = false;
  // Those that come later are smaller where requests are put back.
  std::int64_t place = 0;
};

// The rules of queue and batches, without anything that is kept between two looks.
class Model {
 public:
  explicit Model(BatchingSettings settings) : settings_(std::move(settings)) {}

  bool add(const QueuedRequest& request, Nanoseconds now) {
    age(now);
    const std::uint64_t level = level_of(request);
    const QueuePolicy& policy = policy_of(level);
    const auto same = [&](const Item& item) { return item.level == level; };
    const auto there = std::count_if(items_.begin(), items_.end(), same);
    if (policy.most != 0 && std::cmp_greater_equal(there, policy.most)) return false;
    Item item{.request = request, .level = level, .serial = ++serial_, .place = serial_};
    if (policy.timeout != 0) {
      Nanoseconds timeout = policy.timeout;
      if (policy.may_be_shorter && request.timeout > 0) {
        timeout = std::min(timeout, request.timeout);
      }
      item.deadline = now + timeout;
    }
    items_.push_back(item);
    return true;
  }

  void put_back(const std::vector<QueuedRequest>& requests) {
    for (std::size_t i = requests.size(); i-- > 0;) {
      items_.push_back({.request = requests[i], .level = level_of(requests[i]), .place = --front_});
    }
  }

  // Whether the time changes anything.
  bool age(Nanoseconds now) {
    std::vector<Item*> due;
    for (Item& item : items_) {
      if (item.deadline != 0 && item.deadline <= now) due.push_back(&item);
    }
    std::ranges::sort(due, {},
                      [](const Item* item) { return std::pair(item->deadline, item->serial); });
    for (Item* item : due) {
      item->deadline = 0;
      if (policy_of(item->level).delays_late) {
        item->delayed = true;
        item->place = ++serial_;
      } else {
        late_.push_back(item->request.handle);
      }
    }
    std::erase_if(items_, [&](const Item& item) {
      return std::ranges::find(late_, item.request.handle) != late_.end();
    });
    return !due.empty();
  }

  struct Batch {
    std::vector<Handle> handles;
    bool closed = false;
    Nanoseconds oldest = 0;
  };

  // The longest batch that the front of the queue makes, and how much of it is due.
  std::pair<Batch, std::size_t> due(Nanoseconds now) {
    sort();
    const std::uint64_t most = std::max<std::uint64_t>(settings_.max_batch_size, 1);
    const auto& preferred = settings_.preferred;
    const std::uint64_t largest = preferred.empty() ? most : *std::ranges::max_element(preferred);
    Batch batch;
    std::uint64_t size = 0;
    std::size_t best = 0;
    for (const Item& item : items_) {
      const QueuedRequest& request = item.request;
      if (!batch.handles.empty()) {
        if (size + request.size > largest && best == 0) best = batch.handles.size();
        if (size + request.size > most || request.shape != items_.front().request.shape) {
          batch.closed = true;
        }
      } else {
        batch.oldest = request.arrived;
      }
      if (batch.closed) break;
      batch.handles.push_back(request.handle);
      batch.oldest = std::min(batch.oldest, request.arrived);
      size += request.size;
      if (std::ranges::find(preferred, size) != preferred.end()) best = batch.handles.size();
      if (size >= most) batch.closed = true;
      if (batch.closed) break;
    }
    if (batch.handles.empty()) return {batch, 0};
    const bool waited = now - batch.oldest >= settings_.max_delay;
    std::size_t count = waited || batch.closed || size >= largest ? batch.handles.size() : 0;
    if (best != 0 && !(waited && settings_.max_delay != 0)) count = best;
    return {batch, count};
  }

  // Takes the batch that is due, or as much of it as may be; returns whether one is.
  bool take(Nanoseconds now, std::size_t most, std::vector<Handle>& taken) {
    age(now);
    auto [batch, count] = due(now);
    taken = std::move(batch.handles);
    taken.resize(std::min(count, most));
    for (const Handle handle : taken) remove(handle);
    return count != 0;
  }

  bool remove(Handle handle) {
    return std::erase_if(items_, [&](const Item& item) { return item.request.handle == handle; }) !=
           0;
  }

  std::vector<Handle> refused(Nanoseconds now) {
    age(now);
    return std::exchange(late_, {});
  }

  std::vector<Handle> clear() {
    sort();
    std::vector<Handle> handles = std::exchange(late_, {});
    for (const Item& item : items_) handles.push_back(item.request.handle);
    items_.clear();
    return handles;
  }

  [[nodiscard]] std::size_t pending() const { return items_.size() + late_.size(); }
  [[nodiscard]] bool has_late() const { return !late_.empty(); }

  // The requests' handles, first those that are late.
  std::vector<Handle> queued() {
    sort();
    std::vector<Handle> handles;
    for (const Item& item : items_) handles.push_back(item.request.handle);
    return handles;
  }

 private:
  void sort() {
    std::ranges::sort(items_, {}, [](const Item& item) {
      return std::tuple(item.level, item.delayed, item.place);
    });
  }
  [[nodiscard]] std::uint64_t level_of(const QueuedRequest& request) const {
    if (settings_.levels == 0) return 0;
    const bool known = request.priority >= 1 && request.priority <= settings_.levels;
    return known ? request.priority : settings_.default_level;
  }
  [[nodiscard]] const QueuePolicy& policy_of(std::uint64_t level) const {
    const auto own = settings_.policies.find(level);
    return settings_.levels == 0 || own == settings_.policies.end() ? settings_.policy
                                                                    : own->second;
  }

  BatchingSettings settings_;
  std::vector<Item> items_;
  std::vector<Handle> late_;
  std::int64_t serial_ = 0;
  std::int64_t front_ = 0;
};

QueuePolicy policy(fuzz::Input& input) {
  const std::uint8_t kind = input.byte();
  QueuePolicy made;
  made.delays_late = (kind & 1U) != 0;
  made.may_be_shorter = (kind & 2U) != 0;
  if ((kind & 4U) != 0) made.timeout = input.byte() % 32 + 1;
  if (kind == 255) made.timeout = kLongest;
  if ((kind & 8U) != 0) made.most = input.byte() % 4 + 1;
  return made;
}

BatchingSettings settings(fuzz::Input& input) {
  BatchingSettings made;
  const std::uint8_t kind = input.byte();
  made.max_batch_size = kind % 9;
  made.keep_order = (kind & 64U) != 0;
  for (int count = input.byte() % 3; count > 0 && made.max_batch_size != 0; --count) {
    made.preferred.push_back(input.byte() % made.max_batch_size + 1);
  }
  made.max_delay = (kind & 128U) != 0 ? input.byte() % 32 : 0;
  made.levels = input.byte() % 3;
  made.default_level = made.levels;
  made.policy = policy(input);
  if (made.levels != 0 && (kind & 32U) != 0) made.policies.emplace(1, policy(input));
  return made;
}

// A batcher and its model, to which the same happens.
class Play {
 public:
  explicit Play(fuzz::Input input)
      : input_(input), settings_(settings(input_)), batcher_(settings_), model_(settings_) {}

  void run() {
    while (!input_.rest().empty()) {
      step();
      check_wakeup();
      expect(batcher_.pending() == model_.pending(), "as many are pending");
    }
    gone(batcher_.clear(), model_.clear());
    released(batcher_.abandon_order(), true);
    if (!settings_.keep_order) over_ += taken_.size();
    expect(over_ == added_, "each request leaves once");
  }

 private:
  void step() {
    switch (input_.byte() % 16) {
      default:
        add();
        break;
      case 0:
      case 1:
        take();
        break;
      case 2:
        take_ahead();
        break;
      case 3:
        gone(batcher_.refused(now_), model_.refused(now_));
        released(batcher_.release(), false);
        break;
      case 4:
        cancel();
        break;
      case 5:
        put_back();
        break;
      case 6:
      case 7:
        answer();
        break;
      case 8:
      case 9:
        now_ += input_.byte() % 16;
        break;
      case 10:
        gone(batcher_.clear(), model_.clear());
        released(batcher_.release(), false);
        break;
    }
  }

  void add() {
    const std::uint8_t kind = input_.byte();
    QueuedRequest request{.handle = ++added_,
                          .size = 1U + kind % 3U,
                          .shape = (kind >> 2U) % 2U,
                          .priority = (kind >> 3U) % 4U,
                          .timeout = (kind >> 5U) * 4,
                          .arrived = now_};
    if (settings_.max_batch_size == 0) request.size = 1;
    const bool accepted = batcher_.add(request, now_) == DynamicBatcher::Admission::kAccepted;
    expect(accepted == model_.add(request, now_), "a request is accepted where a place is free");
    if (accepted) {
      requests_[request.handle] = request;
    } else {
      --added_;
    }
  }

  // How many requests there are tickets for.
  std::size_t most() {
    const std::uint8_t kind = input_.byte();
    return kind % 4 == 0 ? kind / 4 % 4U : kind;
  }

  void take() {
    std::vector<Handle> batch;
    const std::size_t most = this->most();
    const bool due = batcher_.take(now_, most, batch);
    expect(due == model_.take(now_, most, taken_by_model_), "a batch is due");
    expect(batch == taken_by_model_, "the batch is the one that is due");
    take_out(batch);
  }

  void take_ahead() {
    std::vector<Handle> batch;
    const std::size_t most = this->most();
    const bool due = batcher_.take_ahead(now_, most, batch);
    const QueuePolicy& policy = settings_.policy;
    const bool may = settings_.levels == 0 && policy.most == 0 && policy.timeout == 0;
    const bool closed = may && model_.due(now_).first.closed;
    taken_by_model_.clear();
    expect(due == (closed && model_.take(now_, most, taken_by_model_)), "a batch may go ahead");
    expect(batch == taken_by_model_, "a batch that cannot change goes ahead");
    take_out(batch);
  }

  void take_out(const std::vector<Handle>& batch) {
    for (const Handle handle : batch) {
      taken_.insert(handle);
      const bool known = std::ranges::find(order_, handle) != order_.end();
      if (settings_.keep_order && !known) order_.push_back(handle);
    }
  }

  void cancel() {
    const auto queued = model_.queued();
    const std::uint8_t which = input_.byte();
    const Handle handle = queued.empty() || which == 0 ? which : queued[which % queued.size()];
    const bool there = model_.remove(handle);
    expect(batcher_.cancel(handle) == there, "who is queued is cancelled");
    if (there) leave(handle);
    released(batcher_.release(), false);
  }

  void put_back() {
    std::vector<QueuedRequest> requests;
    for (const Handle handle : std::set(taken_)) {
      if (answered_.contains(handle) || input_.byte() % 2 == 0) continue;
      requests.push_back(requests_.at(handle));
      taken_.erase(handle);
    }
    batcher_.put_back(requests);
    model_.put_back(requests);
  }

  void answer() {
    std::vector<Handle> open;
    std::ranges::set_difference(taken_, answered_, std::back_inserter(open));
    if (open.empty()) return;
    const Handle handle = open[input_.byte() % open.size()];
    if (settings_.keep_order) answered_.insert(handle);
    const auto out = batcher_.answered(handle);
    if (settings_.keep_order) {
      released(out, false);
    } else {
      expect(out.due == std::vector{handle} && out.dropped.empty(), "an answer goes out");
      taken_.erase(handle);
      ++over_;
    }
  }

  // A request that was not taken leaves.
  void leave(Handle handle) {
    ++over_;
    if (std::ranges::find(order_, handle) != order_.end()) dropped_.insert(handle);
  }

  void gone(const std::vector<Handle>& found, const std::vector<Handle>& wanted) {
    expect(found == wanted, "those leave who have to, in their order");
    for (const Handle handle : found) leave(handle);
  }

  void released(const ReleaseOrder::Released& found, bool all) {
    ReleaseOrder::Released wanted;
    while (!order_.empty()) {
      const Handle handle = order_.front();
      const bool dropped = dropped_.erase(handle) != 0;
      const bool answered = answered_.erase(handle) != 0;
      if (!all && !dropped && !answered) break;
      (answered ? wanted.due : wanted.dropped).push_back(handle);
      if (!dropped) ++over_;
      taken_.erase(handle);
      order_.erase(order_.begin());
    }
    expect(found.due == wanted.due && found.dropped == wanted.dropped,
           "outcomes leave in the order of their requests");
  }

  // A wake-up comes when something is to be done, and not before.
  void check_wakeup() {
    const auto found = batcher_.next_wakeup(now_);
    const auto changes = [this](Nanoseconds then) {
      Model model = model_;
      return model.age(then) || model.has_late() || model.due(then).second != 0;
    };
    if (!found) {
      expect(!changes(kLongest) || model_.due(now_).second != 0, "who waits for time is woken");
      return;
    }
    expect(*found >= now_ && changes(*found), "at a wake-up there is something to be done");
    if (*found > now_ && model_.due(now_).second == 0) {
      expect(!changes(*found - 1), "no wake-up comes too late");
    }
  }

  fuzz::Input input_;
  BatchingSettings settings_;
  DynamicBatcher batcher_;
  Model model_;
  Nanoseconds now_ = 1;
  std::map<Handle, QueuedRequest> requests_;
  std::set<Handle> taken_;
  std::vector<Handle> taken_by_model_;
  std::set<Handle> answered_;
  std::set<Handle> dropped_;
  std::vector<Handle> order_;
  std::uint64_t added_ = 0;
  std::uint64_t over_ = 0;
};

// However a stub answers, it gets no more than it may have.
void check_load(fuzz::Input input) {
  InstanceLoad load;
  load.open(input.byte() % 4 + 1U);
  while (!input.rest().empty()) {
    const std::uint8_t kind = input.byte();
    if (kind % 8 == 0) {
      load.close();
      expect(load.window() == 0 && load.in_flight() == 0, "nothing is at a stub that is gone");
      load.open(input.byte() % 4 + 1U);
    } else if (kind % 2 == 0) {
      load.sent(input.byte());
    } else {
      load.answered(input.byte() % 4, input.byte(), std::uint64_t{1} << input.byte() % 64U);
      expect(load.window() <= 64, "little is sent ahead");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  if (input.byte() % 16 == 0) {
    check_load(input);
  } else {
    Play(input).run();
  }
  return 0;
}
