
#include <tuple>

#include "ipc/model_counters.h"
#include "python_object.h"

namespace gpubridge {
namespace {

using ThreeNumbers = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

constexpr std::array<std::string_view, kFailureReasons> kReasons{"OTHER", "BACKEND", "CANCELED",
                                                                 "REJECTED"};

RequestSums sums_of(const ThreeNumbers& numbers) {
  return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

Steps steps_of(const ThreeNumbers& numbers) {
  return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

void failed(ModelCounters& counters, std::string_view reason, std::uint64_t spent) {
  for (std::size_t index = 0; index < kReasons.size(); ++index) {
    if (kReasons[index] == reason) {
      counters.failed(static_cast<FailureReason>(index), spent);
      return;
    }
  }
  throw nb::value_error("expected one of Triton's reasons for a failure");
}

nb::dict failures(const ModelCounters& counters) {
  nb::dict failures;
  for (std::size_t index = 0; index < kReasons.size(); ++index) {
    failures[nb::str(kReasons[index].data(), kReasons[index].size())] = counters.failures[index];
  }
  return failures;
}

nb::dict batch_rows(const ModelCounters& counters) {
  nb::dict rows;
  for (const auto& [size, batch] : counters.batches) {
    rows[nb::int_(size)] =
        nb::make_tuple(batch.executions, batch.steps.input, batch.steps.infer, batch.steps.output);
  }
  return rows;
}

nb::list take_observations(ModelCounters& counters) {
  nb::list taken;
  for (const Observation& each : std::exchange(counters.observations, {})) {
    taken.append(nb::make_tuple(each.now, nb::make_tuple(each.spent, each.queued, each.steps.input,
                                                         each.steps.infer, each.steps.output)));
  }
  return taken;
}

nb::list duration_bounds() {
  nb::list bounds;
  for (const Duration bound : kDurations) bounds.append(bound);
  return bounds;
}

nb::list duration_counts(const ModelCounters& counters) {
  nb::list counts;
  for (std::size_t index = 0; index < counters.durations.size(); ++index) {
    if (counters.durations[index] != 0) {
      counts.append(nb::make_tuple(index, counters.durations[index]));
    }
  }
  return counts;
}

nb::list slow_requests(ModelCounters& counters, std::uint64_t now) {
  nb::list found;
  for (const SlowRequest& each : counters.slow.latest(now)) {
    const Observation& seen = each.observed;
    found.append(nb::make_tuple(each.identifier, seen.now, seen.spent, seen.queued,
                                seen.steps.input, seen.steps.infer, seen.steps.output,
                                each.answer));
  }
  return found;
}

void passed_on(ModelCounters& counters, const std::string& identifier, std::uint64_t now,
               std::uint64_t spent, std::uint64_t infer, std::uint64_t answer) {
  const Observation observed{now, spent, 0, {0, infer, 0}};
  if (counters.passed_on(observed, answer)) counters.slow.add({observed, answer, identifier});
}

}  // namespace

void bind_model_counters(nb::module_& module) {
  nb::class_<CallCounts>(module, "CallCounts")
      .def(nb::init<>())
      .def_ro("ended", &CallCounts::ended)
      .def_ro("spent_ns", &CallCounts::spent);
  nb::class_<ModelCounters>(module, "ModelCounters")
      .def(nb::init<>())
      .def_ro("inferences", &ModelCounters::inferences)
      .def_ro("executions", &ModelCounters::executions)
      .def_rw("last_ended_ns", &ModelCounters::last_ended)
      .def_prop_ro("success_count", [](const ModelCounters& c) { return c.succeeded.done; })
      .def_prop_ro("success_ns", [](const ModelCounters& c) { return c.succeeded.spent; })
      .def_prop_ro("queue_ns", [](const ModelCounters& c) { return c.succeeded.queued; })
      .def_ro("fail_ns", &ModelCounters::failed_spent)
      .def_prop_ro("input_ns", [](const ModelCounters& c) { return c.steps.input; })
      .def_prop_ro("infer_ns", [](const ModelCounters& c) { return c.steps.infer; })
      .def_prop_ro("output_ns", [](const ModelCounters& c) { return c.steps.output; })
      .def_ro("answer_ns", &ModelCounters::answer)
      .def_prop_ro_static("duration_bounds", [](nb::handle) { return duration_bounds(); })
      .def_prop_ro("duration_counts", &duration_counts)
      .def("slow_requests", &slow_requests)
      .def("passed_on", &passed_on)
      .def_prop_ro("cache_hits", [](const ModelCounters& c) { return c.hits.done; })
      .def_prop_ro("cache_hit_ns", [](const ModelCounters& c) { return c.hits.spent; })
      .def_prop_ro("cache_misses", [](const ModelCounters& c) { return c.misses.done; })
      .def_prop_ro("cache_miss_ns", [](const ModelCounters& c) { return c.misses.spent; })
      .def("cache_hit", &ModelCounters::cache_hit)
      .def("cache_missed", &ModelCounters::cache_missed)
      .def_ro("copied_bytes", &ModelCounters::copied_bytes)
      .def_ro("copies", &ModelCounters::copies)
      .def_rw("observes", &ModelCounters::observes)
      .def_prop_ro("failures", &failures)
      .def_prop_ro("batch_rows", &batch_rows)
      .def("take_observations", &take_observations)
      .def("copied", &ModelCounters::copied)
      .def("failed", &failed)
      .def("executed",
           [](ModelCounters& counters, std::uint64_t count, std::uint64_t size,
              const ThreeNumbers& requests, const ThreeNumbers& steps) {
             counters.executed(count, size, sums_of(requests), steps_of(steps), 0);
           })
      .def("observe", [](ModelCounters& counters, std::uint64_t now, std::uint64_t spent,
                         std::uint64_t queued, const ThreeNumbers& steps) {
        counters.observe({now, spent, queued, steps_of(steps)});
      });
}

}  // namespace gpubridge
