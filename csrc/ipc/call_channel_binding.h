// The calls of a stub's model: from the message that brings them to the called models, and back to
// the message with the answers. gpubridge/_native.pyi says what the parts mean.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ipc/in_flight_binding.h"
#include "ipc/records_binding.h"

namespace gpubridge {

class CallChannel;

// What calls of one signature and context have in common; `given` is a CallForm
// (gpubridge/frontend/bls/requests.py).
struct KnownCall {
  KnownCall(nanobind::object given, nanobind::handle caller);

  // Whether some instance of each model that is needed waits for no call itself.
  [[nodiscard]] bool can_end() const;

  nanobind::object given;
  nanobind::object submit;
  nanobind::object home;
  nanobind::object context;
  nanobind::object shared;
  nanobind::object origin;
  nanobind::object needed;
  bool decoupled;
  // Of each needed model, what its instances wait for; but for the caller.
  std::vector<std::vector<nanobind::object>> waiting;
  // Of the last call, since the next mostly has the same.
  nanobind::object shapes;
  std::vector<std::uint64_t> sizes;
  nanobind::object fitted;
};

// A call on its way; it gets the outcome of its request.
struct Call {
  void respond(nanobind::object outcome);
  void finish(nanobind::object outcome);

  CallChannel* channel;  // null when that is closed, or the call is over
  std::uint32_t number;
  std::int64_t began;  // CLOCK_MONOTONIC ns
  std::shared_ptr<KnownCall> form;
  nanobind::object request;
};

class CallChannel {
 public:
  // `requests` are those at the stub, `descriptor` is the channel's, which stays the caller's.
  CallChannel(nanobind::object requests, nanobind::object reader, nanobind::handle hooks,
              int descriptor);
  CallChannel(const CallChannel&) = delete;
  CallChannel& operator=(const CallChannel&) = delete;
  ~CallChannel() { close(); }

  // Takes one message; returns whether there was one.
  bool receive();
  // Gives calls to the called models.
  void take(nanobind::handle records);
  // Sends what has been answered in this turn of the event loop, in one message.
  void flush();
  // Answers a call that is under way, if it is.
  void end(std::uint32_t number, nanobind::object outcome);
  void respond(std::uint32_t number, nanobind::object outcome);

  void forget() { known_.clear(); }
  void block(bool blocked) { blocked_ = blocked; }
  [[nodiscard]] nanobind::object call(std::uint32_t number) const;
  // Answers nothing any more.
  void mute() { mute_ = true; }
  // Is of no use any more; returns the calls that are under way.
  nanobind::list close();
  [[nodiscard]] nanobind::list calls() const;

 private:
  struct Hooks {
    explicit Hooks(nanobind::handle hooks);

    RegionNames names;
    nanobind::object model;
    nanobind::object caller;
    nanobind::object waits_for;
    nanobind::object link;
    nanobind::object form;
    nanobind::object check;
    nanobind::object failed;
    nanobind::object describe;
    nanobind::object long_text;
    nanobind::object send_long;
    nanobind::object signature;
    nanobind::object receive;
    nanobind::object refuse;
    nanobind::object send;
    nanobind::object call_soon;
  };
  using Key = std::pair<PyObject*, PyObject*>;
  struct KeyHash {
    std::size_t operator()(const Key& key) const {
      return std::hash<PyObject*>{}(key.first) * 31 + std::hash<PyObject*>{}(key.second);
    }
  };
  // The signature and the context of calls, and what they say.
  struct Kept {
    nanobind::object signature;
    nanobind::object context;
    std::shared_ptr<KnownCall> form;
  };

  void begin(const Hooks& hooks, nanobind::handle record);
  void submit(const Hooks& hooks, std::uint32_t number, nanobind::handle record);
  nanobind::object ranges(const Hooks& hooks, nanobind::handle record);
  std::shared_ptr<KnownCall> form(const Hooks& hooks, nanobind::handle record);

  void answer(const Hooks& hooks, std::uint32_t number, nanobind::object outcome,
              std::uint32_t flags);
  void write_response(const Hooks& hooks, RecordParts parts, nanobind::handle response);
  void append(const Hooks& hooks, RecordParts parts, nanobind::handle ranges, std::uint32_t lease,
              bool read_only);
  std::string_view signature(const Hooks& hooks, nanobind::handle signature);

  nanobind::object requests_object_;
  at_stub::RequestsAtStub& requests_;
  nanobind::object reader_object_;
  RecordReader& reader_;
  // What calls Python holds them: it may close this.
  std::shared_ptr<const Hooks> hooks_;
  int descriptor_;
  bool mute_ = false;
  bool blocked_ = false;
  std::map<std::uint32_t, nanobind::object> calls_;
  std::unordered_map<Key, Kept, KeyHash> known_;
  // Encoded signatures of answers, which readers have one object of.
  std::unordered_map<PyObject*, std::pair<nanobind::object, nanobind::object>> signatures_;
  std::string answers_;
  std::uint32_t answered_ = 0;
};

}  // namespace gpubridge
