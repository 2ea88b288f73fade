#include "memory/lease_book.h"

#include <sstream>

#include "buffer_view.h"
#include "heap_type.h"
#include "ipc/records_binding.h"

namespace gpubridge {

// The lease bytes of the control page, and how many loans there are under each.
struct LeaseTable {
  explicit LeaseTable(nb::handle buffer)
      : bytes(std::make_unique<BufferView>(buffer, PyBUF_WRITABLE)) {}

  // Of a lease that exists; few do of those that there may be.
  std::uint32_t& loans_of(std::size_t lease) {
    if (lease >= loans.size()) loans.resize(std::max(lease + 1, 2 * loans.size()));
    return loans[lease];
  }

  std::unique_ptr<BufferView> bytes;
  std::vector<std::uint32_t> loans;
  std::size_t held = 0;
  std::size_t held_bytes = 0;
};

// A mapped region. The memoryview of its own keeps the caller's free to be released.
struct LentRegion {
  explicit LentRegion(nb::handle buffer)
      : view(nb::steal(PyMemoryView_FromObject(buffer.ptr()))), bytes(view, PyBUF_SIMPLE) {}

  nb::object view;
  BufferView bytes;
};

// Shared by all views of a record's tensors: ends the lease when the last of them is gone.
class Loan {
 public:
  Loan(std::shared_ptr<LeaseTable> table, std::shared_ptr<LentRegion> region, std::uint32_t lease)
      : table_(std::move(table)), region_(std::move(region)), lease_(lease) {
    if (table_->loans_of(lease_)++ == 0) ++table_->held;
  }
  ~Loan() {
    table_->held_bytes -= nbytes_;
    if (--table_->loans[lease_] == 0) {
      --table_->held;
      // The lender uses the memory again once it reads this.
      __atomic_store_n(static_cast<unsigned char*>(table_->bytes->data()) + lease_, 0,
                       __ATOMIC_RELEASE);
    }
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  // True if a write to the memory would end this process.
  [[nodiscard]] bool read_only() const { return region_->bytes.read_only(); }

  char* take(const TensorRef& place) {
    nbytes_ += static_cast<std::size_t>(place.nbytes);
    table_->held_bytes += static_cast<std::size_t>(place.nbytes);
    return static_cast<char*>(region_->bytes.data()) + place.offset;
  }

 private:
  std::shared_ptr<LeaseTable> table_;
  std::shared_ptr<LentRegion> region_;
  std::size_t lease_;
  std::size_t nbytes_ = 0;
};

namespace {

// Exports the bytes of one span. NumPy, uvloop and memoryviews all refer to this object.
int export_bytes(PyObject* self, Py_buffer* view, int flags) {
  const auto& span = unboxed<LentSpan>(self);
  return PyBuffer_FillInfo(view, self, span.data, static_cast<Py_ssize_t>(span.size),
                           span.read_only ? 1 : 0, flags);
}

// The exporter of the bytes of a span.
nb::object exporter(LentSpan span, bool read_only) {
  if (span.keep == nullptr) return nb::bytes("");
  static PyTypeObject* const type =
      boxed_type<LentSpan>("gpubridge._native.LentBytes", {{Py_bf_getbuffer, slot(export_bytes)}});
  span.read_only = span.read_only || read_only;
  return box(type, std::move(span));
}

// The place of a tensor without bytes.
bool is_nowhere(const TensorRef& place) { return place.lease == kNoLease && place.nbytes == 0; }

[[noreturn]] void throw_unknown(const TensorRef& place, std::uint64_t lease) {
  std::ostringstream text;
  text << place.nbytes << " bytes at " << place.offset << " of region 0x" << std::hex
       << place.region << std::dec << " under lease " << lease << " do not exist";
  throw nb::value_error(text.str().c_str());
}

std::vector<TensorRef> places_of(nb::handle refs) {
  std::vector<TensorRef> places;
  places.reserve(nb::len(refs));
  if (const auto* known = TensorRefs::of(refs)) {
    return {known->begin(), known->end()};
  }
  for (nb::handle ref : refs) {
    const auto fields = nb::cast<nb::tuple>(ref);
    const auto lease = nb::cast<std::uint64_t>(fields[3]);
    places.push_back({nb::cast<std::uint64_t>(fields[0]), nb::cast<std::uint64_t>(fields[1]),
                      nb::cast<std::uint64_t>(fields[2]), static_cast<std::uint32_t>(lease)});
    // Records carry none of more than 32 bits.
    if (places.back().lease != lease) throw_unknown(places.back(), lease);
  }
  return places;
}

}  // namespace

LeaseBook::LeaseBook(nb::handle table) : table_(std::make_shared<LeaseTable>(table)) {}

void LeaseBook::add(std::uint64_t region, nb::handle buffer) {
  regions_[region] = std::make_shared<LentRegion>(buffer);
}

void LeaseBook::forget(nb::handle table) {
  table_->bytes = std::make_unique<BufferView>(table, PyBUF_WRITABLE);
}

std::size_t LeaseBook::held() const { return table_->held; }
std::size_t LeaseBook::held_bytes() const { return table_->held_bytes; }

const std::shared_ptr<LentRegion>* LeaseBook::region_of(const TensorRef& place) const {
  const auto found = regions_.find(place.region);
  if (found == regions_.end()) return nullptr;
  const std::uint64_t size = found->second->bytes.size();
  const bool inside = place.nbytes <= size && place.offset <= size - place.nbytes;
  return inside && place.lease < table_->bytes->size() ? &found->second : nullptr;
}

bool LeaseBook::exists(const TensorRef& place) const {
  return is_nowhere(place) || region_of(place) != nullptr;
}

const char* LeaseBook::address(const TensorRef& place) const {
  const auto* region = region_of(place);
  if (region == nullptr) return nullptr;
  return static_cast<const char*>((*region)->bytes.data()) + place.offset;
}

std::vector<LentSpan> LeaseBook::spans(std::span<const TensorRef> places) {
  std::vector<LentSpan> spans;
  spans.reserve(places.size());
  std::shared_ptr<Loan> loan;
  std::uint64_t region = 0;
  std::uint32_t lease = kNoLease;
  for (const TensorRef& place : places) {
    if (is_nowhere(place)) {
      spans.emplace_back();
      continue;
    }
    const auto* bytes = region_of(place);
    if (bytes == nullptr) throw_unknown(place, place.lease);
    // The tensors of a record mostly share slot and lease.
    if (loan == nullptr || region != place.region || lease != place.lease) {
      loan = std::make_shared<Loan>(table_, *bytes, place.lease);
      region = place.region;
      lease = place.lease;
    }
    spans.push_back(
        {loan, loan->take(place), static_cast<std::size_t>(place.nbytes), loan->read_only()});
  }
  return spans;
}

nb::object LentSpan::object() const {
  return checked(PyMemoryView_FromObject(exporter(*this, false).ptr()));
}

std::vector<nb::object> LeaseBook::lend(std::span<const TensorRef> places, bool read_only) {
  std::vector<nb::object> exporters;
  exporters.reserve(places.size());
  for (LentSpan& span : spans(places)) exporters.push_back(exporter(std::move(span), read_only));
  return exporters;
}

nb::object LeaseBook::views(nb::handle refs) { return LentBuffers::make(spans(places_of(refs))); }

// The same as views, each in a `gpubridge.pb_utils.Tensor` or a class derived from it.
nb::object LeaseBook::tensors(nb::handle refs, nb::handle specs, nb::handle shapes, nb::handle kind,
                              bool placed, bool read_only) {
  auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
  if (PyType_IsSubtype(type, stub::tensor_type()) == 0) {
    throw nb::type_error("expected a class derived from the compiled tensors");
  }
  const std::vector<TensorRef> places = places_of(refs);
  std::vector<nb::object> exporters = lend(places, read_only);
  nb::list tensors;
  for (std::size_t index = 0; index < exporters.size(); ++index) {
    const auto at = static_cast<Py_ssize_t>(index);
    const auto spec = nb::cast<nb::tuple>(checked(PySequence_GetItem(specs.ptr(), at)));
    const nb::object shape = checked(PySequence_GetItem(shapes.ptr(), at));
    tensors.append(stub::received_tensor(type, spec[0], spec[1], shape, std::move(exporters[index]),
                                         placed ? &places[index] : nullptr));
  }
  return tensors;
}

// Bytes with an object that keeps them as they are, until the last view of them is gone.
struct OwnedBytes {
  OwnedBytes(nb::handle buffer, nb::object owner) : owner(std::move(owner)), region(buffer) {}

  nb::object owner;  // let go of after the bytes
  LentRegion region;
};

nb::object owned_view(nb::handle buffer, nb::object owner) {
  const auto keep = std::make_shared<OwnedBytes>(buffer, std::move(owner));
  const BufferView& bytes = keep->region.bytes;
  return LentSpan{keep, static_cast<char*>(bytes.data()), bytes.size(), bytes.read_only()}.object();
}

void bind_lease_book(nb::module_& module) {
  module.def("owned_view", &owned_view, nb::arg(), nb::arg().none());
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
