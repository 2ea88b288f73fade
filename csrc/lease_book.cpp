#include "lease_book.h"

#include <cstdint>
#include <memory>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint64_t kNoLease = 0xFFFFFFFFU;

struct Place {
  std::uint64_t region;
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t lease;
};

// The lease bytes of the control page, and how many loans there are under each.
struct Table {
  explicit Table(nb::handle buffer)
      : bytes(std::make_unique<BufferView>(buffer, PyBUF_WRITABLE)), loans(bytes->size(), 0) {}

  std::unique_ptr<BufferView> bytes;
  std::vector<std::uint32_t> loans;
  std::size_t held = 0;
  std::size_t held_bytes = 0;
};

// A mapped region. The memoryview of its own keeps the caller's free to be released.
struct Region {
  explicit Region(nb::handle buffer)
      : view(nb::steal(PyMemoryView_FromObject(buffer.ptr()))), bytes(view, PyBUF_WRITABLE) {}

  nb::object view;
  BufferView bytes;
};

// What all views of a record's tensors share: it ends the lease when the last of them is gone.
class Loan {
 public:
  Loan(std::shared_ptr<Table> table, std::shared_ptr<Region> region, std::uint64_t lease)
      : table_(std::move(table)),
        region_(std::move(region)),
        lease_(static_cast<std::size_t>(lease)) {
    if (table_->loans[lease_]++ == 0) ++table_->held;
  }
  ~Loan() {
    table_->held_bytes -= nbytes_;
    if (--table_->loans[lease_] == 0) {
      --table_->held;
      static_cast<unsigned char*>(table_->bytes->data())[lease_] = 0;
    }
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  char* take(const Place& place) {
    nbytes_ += static_cast<std::size_t>(place.nbytes);
    table_->held_bytes += static_cast<std::size_t>(place.nbytes);
    return static_cast<char*>(region_->bytes.data()) + place.offset;
  }

 private:
  std::shared_ptr<Table> table_;
  std::shared_ptr<Region> region_;
  std::size_t lease_;
  std::size_t nbytes_ = 0;
};

// Exports the bytes of one tensor. NumPy, uvloop and memoryviews all refer to this object.
struct LentBytes {
  std::shared_ptr<Loan> loan;
  char* data;
  Py_ssize_t size;
};

int export_bytes(PyObject* self, Py_buffer* view, int flags) {
  const auto* lent = nb::inst_ptr<LentBytes>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, lent->data, lent->size, 0, flags);
}

PyType_Slot lent_bytes_slots[] = {// NOLINT: the C API's own form
                                  {Py_bf_getbuffer, reinterpret_cast<void*>(export_bytes)},
                                  {0, nullptr}};

class LeaseBook {
 public:
  explicit LeaseBook(nb::handle table) : table_(std::make_shared<Table>(table)) {}

  void add(std::uint64_t region, nb::handle buffer) {
    regions_[region] = std::make_shared<Region>(buffer);
  }
  void remove(std::uint64_t region) { regions_.erase(region); }

  void forget(nb::handle table) {
    table_->bytes = std::make_unique<BufferView>(table, PyBUF_WRITABLE);
  }

  [[nodiscard]] std::size_t held() const { return table_->held; }
  [[nodiscard]] std::size_t held_bytes() const { return table_->held_bytes; }

  nb::object views(nb::handle refs);

 private:
  static std::vector<Place> read(nb::handle refs);
  [[nodiscard]] std::shared_ptr<Region> check(const Place& place) const;

  std::shared_ptr<Table> table_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Region>> regions_;
};

std::vector<Place> LeaseBook::read(nb::handle refs) {
  std::vector<Place> places;
  places.reserve(nb::len(refs));
  for (nb::handle ref : refs) {
    const auto fields = nb::cast<nb::tuple>(ref);
    places.push_back({nb::cast<std::uint64_t>(fields[0]), nb::cast<std::uint64_t>(fields[1]),
                      nb::cast<std::uint64_t>(fields[2]), nb::cast<std::uint64_t>(fields[3])});
  }
  return places;
}

std::shared_ptr<Region> LeaseBook::check(const Place& place) const {
  const auto found = regions_.find(place.region);
  if (found != regions_.end()) {
    const std::uint64_t size = found->second->bytes.size();
    if (place.nbytes <= size && place.offset <= size - place.nbytes &&
        place.lease < table_->loans.size()) {
      return found->second;
    }
  }
  std::ostringstream text;
  text << place.nbytes << " bytes at " << place.offset << " of region 0x" << std::hex
       << place.region << std::dec << " under lease " << place.lease << " do not exist";
  throw nb::value_error(text.str().c_str());
}

nb::object LeaseBook::views(nb::handle refs) {
  const std::vector<Place> places = read(refs);
  nb::list views;
  std::shared_ptr<Loan> loan;
  std::uint64_t region = 0;
  std::uint64_t lease = kNoLease;
  for (const Place& place : places) {
    if (place.lease == kNoLease && place.nbytes == 0) {
      views.append(nb::steal(PyMemoryView_FromObject(nb::bytes("").ptr())));
      continue;
    }
    auto bytes = check(place);
    // The tensors of a record mostly share slot and lease.
    if (loan == nullptr || region != place.region || lease != place.lease) {
      loan = std::make_shared<Loan>(table_, std::move(bytes), place.lease);
      region = place.region;
      lease = place.lease;
    }
    nb::object lent =
        nb::cast(LentBytes{loan, loan->take(place), static_cast<Py_ssize_t>(place.nbytes)});
    nb::object view = nb::steal(PyMemoryView_FromObject(lent.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    views.append(std::move(view));
  }
  return views;
}

}  // namespace

void bind_lease_book(nb::module_& module) {
  nb::class_<LentBytes>(module, "LentBytes", nb::type_slots(lent_bytes_slots));
  nb::class_<LeaseBook>(module, "LeaseBook")
      .def(nb::init<nb::handle>())
      .def("add", &LeaseBook::add)
      .def("remove", &LeaseBook::remove)
      .def("forget", &LeaseBook::forget)
      .def("views", &LeaseBook::views)
      .def_prop_ro("held", &LeaseBook::held)
      .def_prop_ro("held_bytes", &LeaseBook::held_bytes);
}

}  // namespace gpubridge
