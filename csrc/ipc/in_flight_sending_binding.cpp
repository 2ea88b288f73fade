// How requests enter a stub, and what is written of them.
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ipc/in_flight_binding.h"

namespace gpubridge::at_stub {
namespace {

constexpr std::size_t kFrameBytes = 64UL * 1024;
constexpr std::size_t kFrameBatches = 6;

}  // namespace

bool has_bytes(nb::handle ranges) {
  for (nb::handle part : ranges) {
    if (nb::cast<std::uint64_t>(part[2]) != 0) return true;
  }
  return false;
}

// What is lent for a request.
Held held_for(nb::handle request) {
  Held held;
  held.request = nb::borrow(request);
  if (nb::object slot = names().slot.of(request); !slot.is_none()) held.slot = std::move(slot);
  held.traced = !names().trace.of(request).is_none();
  held.size = nb::cast<std::uint64_t>(names().batch_size.of(request));
  held.arrived = nb::cast<Duration>(names().arrived.of(request));
  nb::object ranges = names().ranges.of(request);
  held.in_slot = ranges.is_none();
  held.of_client = !names().client.of(request).is_none();
  if (!held.in_slot && has_bytes(ranges)) held.kept = std::move(ranges);
  return held;
}

bool RequestsAtStub::enter(nb::handle requests, nb::handle owner) {
  if (!buffers_ || nb::len(requests) > core_.free_tickets()) {
    throw nb::value_error("the stub has no ticket left for a request");
  }
  std::vector<InFlightRequests::Entering> entering;
  std::vector<Held> lent;
  for (nb::handle request : requests) {
    lent.push_back(held_for(request));
    // The stub says that it is done with what it was lent, if there is something.
    const bool has_memory =
        lent.back().in_slot ? lent.back().slot.is_valid() : lent.back().kept.is_valid();
    entering.push_back({has_memory, static_cast<std::uint32_t>(
                                        nb::cast<std::int64_t>(names().unsent.of(request)))});
  }
  const std::uint64_t sequence = ++sequence_;
  const std::span<const Ticket> tickets = core_.enter(sequence, entering);
  for (std::size_t index = 0; index < lent.size(); ++index) {
    const nb::object request = lent[index].request;
    held_[tickets[index]] = std::move(lent[index]);
    names().ticket.set(request, nb::int_(tickets[index]));
    names().instance.set(request, owner);
  }
  std::string records;
  for (nb::handle request : requests) write(request, records);
  frame_.add(sequence, lent.size(), records);
  return frame_.batches() >= kFrameBatches || frame_.size() > kFrameBytes;
}

void RequestsAtStub::write(nb::handle request, std::string& records) {
  const nb::object pattern = names().pattern.of(request);
  const nb::handle source = pattern.is_none() ? request : nb::handle(pattern);
  const nb::object signature = names().signature.of(request);
  const nb::object dims = names().dims.of(request);
  const nb::object identifier = names().identifier.of(request);
  RecordParts parts;
  parts.ticket = nb::cast<Ticket>(names().ticket.of(request));
  parts.signature = bytes_of(signature);
  parts.dims = bytes_of(dims);
  parts.identifier = text_of(identifier);
  if (!names().ranges.of(source).is_none()) {
    write_references(request, parts, records);
    return;
  }
  const nb::object context = names().context.of(request);
  nb::object encoded;
  if (!context.is(hooks_->no_context)) {
    encoded = names().encoded.of(context)();
    parts.context = bytes_of(encoded);
  }
  write_slot(source, parts, records);
}

// Makes room for a record at the end of `records`, and writes all but its references.
char* write_head(const RecordParts& parts, std::string& records) {
  const std::size_t at = records.size();
  records.resize(at + parts.size());
  return parts.write(records.data() + at);
}

void RequestsAtStub::write_slot(nb::handle source, RecordParts& parts, std::string& records) {
  const nb::object slot = names().slot.of(source);
  if (slot.is_none()) {
    write_head(parts, records);
    return;
  }
  const nb::object segment = names().segment.of(slot);
  const nb::object region = names().region.of(segment);
  const int announced = PySet_Contains(hooks_->announced.ptr(), region.ptr());
  if (announced < 0) throw nb::python_error();
  if (announced == 0) hooks_->announce(segment);
  const nb::object places = names().places.of(source);
  const auto base = nb::cast<std::uint64_t>(names().offset.of(slot)) +
                    nb::cast<std::uint64_t>(names().start.of(source));
  const auto lease = nb::cast<Ticket>(names().ticket.of(source));
  const auto number = nb::cast<std::uint64_t>(region);
  parts.tensors = static_cast<std::uint32_t>(nb::len(places));
  char* at = write_head(parts, records);
  for (nb::handle place : places) {
    const auto offset = nb::cast<std::int64_t>(place[0]);
    at = write_ref(at, {number, base + static_cast<std::uint64_t>(offset),
                        nb::cast<std::uint64_t>(place[1]), lease});
  }
}

// The fields of references come flat: region, offset, size, lease of each, one after another.
void RequestsAtStub::write_references(nb::handle request, RecordParts& parts,
                                      std::string& records) {
  const nb::object made = hooks_->references(request);
  const nb::object refs = made[0];
  const nb::object context = made[1];
  parts.context = bytes_of(context);
  std::vector<std::uint64_t> fields;
  for (nb::handle field : refs) fields.push_back(nb::cast<std::uint64_t>(field));
  parts.tensors = static_cast<std::uint32_t>(fields.size() / 4);
  char* at = write_head(parts, records);
  for (std::size_t index = 0; index < 4UL * parts.tensors; index += 4) {
    at = write_ref(at, {fields[index], fields[index + 1], fields[index + 2],
                        static_cast<std::uint32_t>(fields[index + 3])});
  }
}

}  // namespace gpubridge::at_stub
