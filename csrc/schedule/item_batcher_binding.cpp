
#include "schedule/item_batcher_binding.h"

#include <tuple>

#include "heap_type.h"
#include "python_object.h"

namespace gpubridge {
namespace {

// delays_late, timeout_us, may_be_shorter, most
using PolicyFields = std::tuple<bool, std::uint64_t, bool, std::uint64_t>;

QueuePolicy policy_of(const PolicyFields& fields) {
  const auto [delays_late, timeout_us, may_be_shorter, most] = fields;
  return {delays_late, from_microseconds(timeout_us), may_be_shorter, most};
}

}  // namespace

void bind_item_batcher(nb::module_& module) {
  nb::class_<ItemBatcher>(module, "DynamicBatcher", nb::type_slots(collected<ItemBatcher>()))
      .def(
          "__init__",
          [](ItemBatcher* self, std::uint64_t max_batch_size,
             const std::vector<std::uint64_t>& preferred, std::uint64_t max_delay_us,
             bool keep_order, std::uint64_t levels, std::uint64_t default_level,
             const PolicyFields& policy, const std::map<std::uint64_t, PolicyFields>& policies) {
            BatchingSettings settings{max_batch_size,    preferred, from_microseconds(max_delay_us),
                                      keep_order,        levels,    default_level,
                                      policy_of(policy), {}};
            for (const auto& [level, own] : policies) {
              settings.policies.emplace(level, policy_of(own));
            }
            new (self) ItemBatcher(settings);
          },
          nb::arg("max_batch_size"), nb::arg("preferred") = std::vector<std::uint64_t>(),
          nb::arg("max_delay_us") = 0, nb::arg("keep_order") = false, nb::arg("levels") = 0,
          nb::arg("default_level") = 0, nb::arg("policy") = PolicyFields(false, 0, false, 0),
          nb::arg("policies") = std::map<std::uint64_t, PolicyFields>())
      .def_prop_ro("pending", &ItemBatcher::pending)
      .def("add",
           [](ItemBatcher& self, nb::handle item, std::uint64_t size, std::uint64_t shape,
              std::uint64_t priority, std::uint64_t timeout_us, Nanoseconds now) {
             const Nanoseconds timeout = from_microseconds(timeout_us);
             return static_cast<int>(self.add(item, {0, size, shape, priority, timeout, now}, now));
           })
      .def(
          "take",
          [](ItemBatcher& self, nb::handle, Nanoseconds now, std::size_t most) {
            return self.take(now, most);
          },
          nb::arg(), nb::arg(), nb::arg() = SIZE_MAX)
      .def("take_ahead", [](ItemBatcher& self, nb::handle,
                            Nanoseconds now) { return self.take_ahead(now, SIZE_MAX); })
      .def("next_wakeup", &ItemBatcher::next_wakeup)
      .def("refused", &ItemBatcher::refused)
      .def("cancel", &ItemBatcher::cancel)
      .def("put_back", &ItemBatcher::put_back)
      .def("answered", &ItemBatcher::answered)
      .def("releasable", &ItemBatcher::releasable)
      .def("abandon_order", &ItemBatcher::abandon_order)
      .def("stop", &ItemBatcher::stop)
      .def("clear", &ItemBatcher::take_all);
}

}  // namespace gpubridge
