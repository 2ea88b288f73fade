#include "memory/lease_book.h"

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
  bool read_only;
};

int export_bytes(PyObject* self, Py_buffer* view, int flags) {
  const auto* lent = nb::inst_ptr<LentBytes>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, lent->data, lent->size, lent->read_only ? 1 : 0, flags);
}

PyType_Slot lent_bytes_slots[] = {// NOLINT: the C API's own form
                                  {Py_bf_getbuffer, reinterpret_cast<void*>(export_bytes)},
                                  {0, nullptr}};

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// The slots of a Tensor.
struct SlotNames {
  PyObject* name = PyUnicode_InternFromString("_name");
  PyObject* datatype = PyUnicode_InternFromString("_datatype");
  PyObject* shape = PyUnicode_InternFromString("_shape");
  PyObject* source = PyUnicode_InternFromString("_source");
  PyObject* array = PyUnicode_InternFromString("_array");
  PyObject* place = PyUnicode_InternFromString("_place");
};

void set(nb::handle object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw nb::python_error();
}

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
  nb::object tensors(nb::handle refs, nb::handle specs, nb::handle shapes, nb::handle kind,
                     bool placed, bool read_only);

 private:
  static std::vector<Place> read(nb::handle refs);
  std::vector<nb::object> lend(nb::handle refs, bool read_only);
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

std::vector<nb::object> LeaseBook::lend(nb::handle refs, bool read_only) {
  const std::vector<Place> places = read(refs);
  std::vector<nb::object> views;
  views.reserve(places.size());
  std::shared_ptr<Loan> loan;
  std::uint64_t region = 0;
  std::uint64_t lease = kNoLease;
  for (const Place& place : places) {
    nb::object exporter;
    if (place.lease == kNoLease && place.nbytes == 0) {
      exporter = nb::bytes("");
    } else {
      auto bytes = check(place);
      // The tensors of a record mostly share slot and lease.
      if (loan == nullptr || region != place.region || lease != place.lease) {
        loan = std::make_shared<Loan>(table_, std::move(bytes), place.lease);
        region = place.region;
        lease = place.lease;
      }
      exporter = nb::cast(
          LentBytes{loan, loan->take(place), static_cast<Py_ssize_t>(place.nbytes), read_only});
    }
    views.push_back(checked(PyMemoryView_FromObject(exporter.ptr())));
  }
  return views;
}

nb::object LeaseBook::views(nb::handle refs) {
  nb::list views;
  for (nb::object& view : lend(refs, false)) views.append(std::move(view));
  return views;
}

// The same as views, each in a `gpubridge.pb_utils.Tensor`, as its `_received` makes them.
nb::object LeaseBook::tensors(nb::handle refs, nb::handle specs, nb::handle shapes, nb::handle kind,
                              bool placed, bool read_only) {
  static const SlotNames names;
  auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  const std::vector<nb::object> views = lend(refs, read_only);
  nb::list tensors;
  for (std::size_t index = 0; index < views.size(); ++index) {
    const nb::object tensor = checked(allocate(type, 0));
    const nb::object spec =
        checked(PySequence_GetItem(specs.ptr(), static_cast<Py_ssize_t>(index)));
    const auto fields = nb::cast<nb::tuple>(spec);
    set(tensor, names.name, fields[0]);
    set(tensor, names.datatype, fields[1]);
    const nb::object shape =
        checked(PySequence_GetItem(shapes.ptr(), static_cast<Py_ssize_t>(index)));
    set(tensor, names.shape, shape);
    set(tensor, names.source, views[index]);
    set(tensor, names.array, nb::none());
    set(tensor, names.place, placed ? nb::object(refs[index]) : nb::none());
    tensors.append(tensor);
  }
  return tensors;
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
      .def("tensors", &LeaseBook::tensors)
      .def_prop_ro("held", &LeaseBook::held)
      .def_prop_ro("held_bytes", &LeaseBook::held_bytes);
}

}  // namespace gpubridge
