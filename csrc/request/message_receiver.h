// Receives a large ModelInferRequest: its raw contents straight into an arena's slot.
#pragma once

#include "buffer_view.h"
#include "python_object.h"
#include "request/field_scanner.h"
#include "request/templates_binding.h"

namespace gpubridge {

// Takes one message in pieces; owns the memory of its raw contents until the request is made. The
// base of RequestReceiver (gpubridge/protocol/grpc/receiver.py), which says more.
class MessageReceiver {
 public:
  MessageReceiver(std::uint64_t nbytes, nb::object arena_of, nb::object body)
      : body(std::move(body)), nbytes_(nbytes), scanner_(nbytes), arena_of_(std::move(arena_of)) {}

  // Takes the next bytes of the message.
  void feed(std::string_view data);
  // The target has been filled: the next one is more of the same raw content, if there is more.
  void filled();
  // Where the rest of the raw content that has begun belongs; empty between raw contents.
  [[nodiscard]] std::span<std::uint8_t> target() const;
  // Keeps the memory of the target.
  [[nodiscard]] std::shared_ptr<const void> owner() const { return view_; }

  [[nodiscard]] bool complete() const { return scanner_.left() == 0; }
  // Bytes of the message that are there; `missing` are those of the target that are not.
  [[nodiscard]] std::uint64_t arrived(std::uint64_t missing) const;

  // Makes the request of the complete message by its template, and gives the slot away with it;
  // `elsewhere` bytes were copied by who received them. None without a template.
  MadeRequest take(PythonTemplates& templates, nb::handle on_done, std::uint64_t elsewhere);
  // Leaves the slot, and what it is charged to, to the request.
  void give_away();
  // Gives the memory of the raw contents back that was not given away.
  void drop_memory();
  // The same, and drops what the message is charged to, which leads back to the call.
  void close();

  int traverse(visitproc visit, void* arg) const;
  void clear();

  // Bytes of the form that are there.
  [[nodiscard]] std::size_t form_bytes() const { return scanner_.form_bytes(); }
  // Of the complete message; a long one stays where it is, and lives as long as its views.
  [[nodiscard]] std::string_view form() const;
  [[nodiscard]] nb::object form_object() const;
  [[nodiscard]] std::string_view identifier() const;
  [[nodiscard]] const std::vector<std::uint64_t>& sizes() const { return sizes_; }
  [[nodiscard]] const std::vector<std::uint64_t>& offsets() const { return offsets_; }
  // All raw contents.
  [[nodiscard]] nb::object memory() const { return memory_; }

  // Bytes of raw contents that were copied: those that were fed.
  std::uint64_t copied = 0;
  // What the raw contents are charged to, and the charge of a long form.
  nb::object body;
  nb::object form_charge = nb::none();
  nb::object arena = nb::none();
  nb::object slot = nb::none();

 private:
  // Form and id of at most so many bytes are not charged.
  static constexpr std::uint64_t kUncharged = std::uint64_t{1} << 16U;

  void charge_form();
  void begin_raw();
  void aim(std::uint64_t at);
  void reserve(std::uint64_t nbytes);
  void view();

  std::uint64_t nbytes_;
  FieldScanner scanner_;
  nb::object arena_of_;
  // Memory of this process alone, where the message has not named a model that there is.
  nb::object private_ = nb::none();
  nb::object memory_ = nb::none();
  std::shared_ptr<const BufferView> view_;
  // Bytes that the memory may have for all raw contents.
  std::uint64_t space_ = 0;
  // Bytes of form and id that are charged, or need no charge.
  std::uint64_t granted_form_ = kUncharged;
  bool started_ = false;
  // Of the raw content that has begun: where its next byte belongs, where there is memory up to,
  // and where it ends.
  std::uint64_t at_ = 0;
  std::uint64_t piece_end_ = 0;
  std::uint64_t end_ = 0;
  std::vector<std::uint64_t> sizes_;
  std::vector<std::uint64_t> offsets_;
};

}  // namespace gpubridge
