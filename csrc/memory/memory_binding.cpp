#include "dataplane.h"
#include "memory/lease_book.h"
#include "memory/place.h"
#include "memory/result_arena.h"
#include "memory/slot_lists_binding.h"

namespace gpubridge {

void bind_memory(nanobind::module_& module) {
  bind_lease_book(module);
  bind_slot_lists(module);
  module.def("arena_set", &arena_set);
  module.def("arena_state", &arena_state);
  module.def("offset_within", &offset_within);
  module.def("place", &place);
}

}  // namespace gpubridge
