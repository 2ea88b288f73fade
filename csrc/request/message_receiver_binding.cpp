
#include "heap_type.h"
#include "memory/lease_book.h"
#include "request/message_receiver.h"

namespace gpubridge {
namespace {

// Inputs begin at multiples of this.
constexpr std::uint64_t kAlignment = 64;
// A longer form is not copied for Python (LONG_FORM_BYTES in gpubridge/protocol/grpc).
constexpr std::size_t kLongForm = std::size_t{1} << 20U;

// Calls what may find that bytes are no message, which Python words.
template <typename Call>
auto checked_message(Call&& call) {
  try {
    return call();
  } catch (const MessageFault& fault) {
    const nb::object fields = nb::module_::import_("gpubridge.protocol.fields");
    const nb::object error = fault.id_bytes != 0 ? fields.attr("long_id")(fault.id_bytes)
                             : fault.reason.empty()
                                 ? fields.attr("too_many_fields")(FieldScanner::kMostFields)
                                 : fields.attr("malformed")(text_object(fault.reason));
    PyErr_SetObject(bridge_error().ptr(), error.ptr());
    throw nb::python_error();
  }
}

}  // namespace

void MessageReceiver::feed(std::string_view data) {
  do {
    std::size_t taken = 0;
    if (const std::span<std::uint8_t> target = this->target(); !target.empty()) {
      taken = std::min(data.size(), target.size());
      std::copy_n(data.data(), taken, target.data());
      copied += taken;
      at_ += taken;
      if (at_ == piece_end_) filled();
    } else {
      taken = checked_message([&] { return scanner_.feed(data); });
      charge_form();
      if (scanner_.raw()) begin_raw();
    }
    data.remove_prefix(taken);
  } while (!data.empty());
}

// Has Python charge the form once it is long, as it comes.
void MessageReceiver::charge_form() {
  if (scanner_.kept() <= granted_form_) return;
  const nb::object granted =
      attribute<"charge_form">(nb::find(*this))(scanner_.kept(), scanner_.left());
  granted_form_ = nb::cast<std::uint64_t>(granted);
}

void MessageReceiver::filled() {
  if (piece_end_ < end_) {
    aim(piece_end_);
  } else {
    at_ = piece_end_;
    scanner_.pass_raw();
  }
}

std::span<std::uint8_t> MessageReceiver::target() const {
  if (!scanner_.raw() || view_ == nullptr) return {};
  return {static_cast<std::uint8_t*>(view_->data()) + at_,
          static_cast<std::size_t>(piece_end_ - at_)};
}

std::uint64_t MessageReceiver::arrived(std::uint64_t missing) const {
  std::uint64_t left = scanner_.left();
  if (scanner_.raw()) left += end_ - piece_end_ + missing - *scanner_.raw();
  return nbytes_ - left;
}

// Finds a place for a raw content: aligned, as inputs are in the form.
void MessageReceiver::begin_raw() {
  const std::uint64_t nbytes = *scanner_.raw();
  const std::uint64_t left = scanner_.left();
  if (!std::exchange(started_, true)) {
    reserve(std::max<std::uint64_t>(left, 1) + kAlignment * scanner_.inputs());
  }
  std::uint64_t at = (end_ + kAlignment - 1) / kAlignment * kAlignment;
  if (at + left > space_) at = end_;
  sizes_.push_back(nbytes);
  offsets_.push_back(at);
  end_ = at + nbytes;
  if (nbytes != 0) {
    aim(at);
  } else {
    at_ = piece_end_ = end_;
    scanner_.pass_raw();
  }
}

// Has the raw content go on at an offset: to memory that is there by now.
void MessageReceiver::aim(std::uint64_t at) {
  at_ = piece_end_ = at;
  if (slot.is_none()) {
    // It may have to move, unless somebody looks at it.
    view_.reset();
    memory_ = nb::none();
    piece_end_ = nb::cast<std::uint64_t>(attribute<"grow">(private_)(at, end_));
    view();
  } else {
    piece_end_ = nb::cast<std::uint64_t>(attribute<"grow">(arena)(slot, at, end_));
  }
  if (piece_end_ <= at || piece_end_ > std::min(end_, std::uint64_t{view_->size()})) {
    throw nb::value_error("expected memory for more of the message");
  }
}

// Finds memory for all raw contents: of the model that the message names, if it can be.
void MessageReceiver::reserve(std::uint64_t nbytes) {
  if (const auto name = scanner_.model_name()) {
    arena = arena_of_(checked(
        PyUnicode_DecodeUTF8(name->data(), static_cast<Py_ssize_t>(name->size()), "replace")));
  }
  if (arena.is_none()) {
    const nb::object module = nb::module_::import_("gpubridge.host_shm.private_memory");
    private_ = module.attr("PrivateMemory")(nbytes, body);
  } else {
    slot = attribute<"reserve">(arena)(nbytes, body);
  }
  space_ = nbytes;
  view();
}

// Looks at the memory that there is.
void MessageReceiver::view() {
  memory_ = slot.is_none() ? checked(PyMemoryView_FromObject(attribute<"memory">(private_).ptr()))
                           : attribute<"memory">(slot);
  view_ = std::make_shared<const BufferView>(memory_, PyBUF_WRITABLE);
}

nb::object MessageReceiver::form_object() const {
  const std::string_view text = form();
  if (text.size() <= kLongForm) return bytes_object(text);
  const auto& memory = scanner_.form_memory();
  return LentSpan{memory, memory->data(), memory->size(), true}.object();
}

std::string_view MessageReceiver::form() const {
  return checked_message([&] { return scanner_.form(); });
}

std::string_view MessageReceiver::identifier() const {
  return checked_message([&] { return scanner_.identifier(); });
}

MadeRequest MessageReceiver::take(PythonTemplates& templates, nb::handle on_done,
                                  std::uint64_t elsewhere) {
  if (slot.is_none() || form_bytes() > kLongestScanned) return {};
  MadeRequest made = templates.take_fields({slot, on_done, copied + elsewhere}, form(),
                                           identifier(), sizes_, offsets_);
  // It was resolved for the model as it is now; the memory is that of the name that came first.
  if (made.known == nullptr || !attribute<"arena">(made.known->given).is(arena)) return {};
  give_away();
  return made;
}

void MessageReceiver::give_away() {
  if (const nb::object given = std::exchange(slot, nb::none()); !given.is_none()) {
    attribute<"complete">(arena)(given);
  }
  body = nb::none();
}

void MessageReceiver::drop_memory() {
  view_.reset();
  memory_ = nb::none();
  if (const nb::object lent = std::exchange(slot, nb::none()); !lent.is_none()) {
    attribute<"free">(arena)(lent);
  }
  if (const nb::object kept = std::exchange(private_, nb::none()); !kept.is_none()) {
    attribute<"close">(kept)();
  }
}

void MessageReceiver::close() {
  drop_memory();
  arena = arena_of_ = nb::none();
  if (const nb::object charged = std::exchange(form_charge, nb::none()); !charged.is_none()) {
    attribute<"close">(charged)();
  }
  if (const nb::object charged = std::exchange(body, nb::none()); !charged.is_none()) {
    attribute<"release">(charged)();
  }
}

int MessageReceiver::traverse(visitproc visit, void* arg) const {
  return visit_all({&body, &form_charge, &arena, &slot, &arena_of_, &private_, &memory_}, visit,
                   arg);
}

void MessageReceiver::clear() {
  view_.reset();
  drop_all({&body, &form_charge, &arena, &slot, &arena_of_, &private_, &memory_});
}

namespace {

// Form, id, and sizes and offsets of the raw contents of a whole message.
nb::object read_fields(const nb::bytes& given) {
  const std::string_view message = view_of(given);
  FieldScanner scanner(message.size());
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> offsets;
  return checked_message([&]() -> nb::object {
    for (std::size_t at = 0; at < message.size();) {
      at += scanner.feed(message.substr(at));
      if (!scanner.raw()) continue;
      sizes.push_back(*scanner.raw());
      offsets.push_back(at);
      at += static_cast<std::size_t>(*scanner.raw());
      scanner.pass_raw();
    }
    return nb::make_tuple(bytes_object(scanner.form()), text_object(scanner.identifier()), sizes,
                          offsets);
  });
}

}  // namespace

void bind_message_receiver(nb::module_& module) {
  using Self = MessageReceiver;
  module.def("read_fields", &read_fields);
  nb::class_<Self>(module, "MessageReceiver", nb::type_slots(collected<Self>()))
      .def(nb::init<std::uint64_t, nb::object, nb::object>())
      .def("feed",
           [](Self& self, nb::handle data) { self.feed(BufferView(data, PyBUF_SIMPLE).text()); })
      .def("filled", &Self::filled)
      .def_prop_ro("target",
                   [](const Self& self) -> nb::object {
                     const std::span<std::uint8_t> target = self.target();
                     if (target.empty()) return nb::none();
                     const BufferView all(self.memory(), PyBUF_SIMPLE);
                     const auto at = static_cast<std::uint64_t>(
                         target.data() - static_cast<const std::uint8_t*>(all.data()));
                     return slice_of(self.memory(), at, at + target.size());
                   })
      .def_prop_ro("complete", &Self::complete)
      .def_prop_ro("form_bytes", &Self::form_bytes)
      .def("arrived", &Self::arrived)
      .def("take",
           [](Self& self, nb::handle templates, nb::handle on_done) {
             return self.take(nb::cast<PythonTemplates&>(templates), on_done, 0).as_python();
           })
      .def("give_away", &Self::give_away)
      .def("drop_memory", &Self::drop_memory)
      .def("close", &Self::close)
      .def_prop_ro("form", &Self::form_object)
      .def_prop_ro("identifier", [](const Self& self) { return text_object(self.identifier()); })
      .def_prop_ro("sizes", &Self::sizes)
      .def_prop_ro("offsets", &Self::offsets)
      .def_prop_ro("memory", &Self::memory)
      .def_rw("copied", &Self::copied)
      .def_rw("body", &Self::body, nb::for_setter(nb::arg().none()))
      .def_rw("form_charge", &Self::form_charge, nb::for_setter(nb::arg().none()))
      .def_rw("arena", &Self::arena, nb::for_setter(nb::arg().none()))
      .def_rw("slot", &Self::slot, nb::for_setter(nb::arg().none()));
}

}  // namespace gpubridge
