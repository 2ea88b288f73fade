// The calls of a stub's model: from the message that brings them to the called models, and back to
// the message with the answers. gpubridge/_native.pyi says what the parts mean.
#pragma once

#include "ipc/in_flight_binding.h"
#include "ipc/records_binding.h"
#include "python_object.h"

namespace gpubridge {

class CallChannel;

// Values that calls of one signature and context share; `given` is a CallForm
// (gpubridge/frontend/bls/requests.py).
struct KnownCall {
  KnownCall(nb::object given, nb::handle caller);

  // True if some instance of each model that is needed waits for no call itself.
  [[nodiscard]] bool can_end() const;

  nb::object given;
  nb::object submit = given.attr("submit");
  nb::object home = given.attr("home");
  nb::object context = given.attr("context");
  nb::object shared = given.attr("shared");
  nb::object origin = given.attr("origin");
  nb::object needed = given.attr("needed");
  bool decoupled = nb::cast<bool>(given.attr("decoupled"));
  // Of each needed model, what its instances wait for; but for the caller.
  std::vector<std::vector<nb::object>> waiting;
  // Of the last call, since the next mostly has the same.
  nb::object shapes;
  std::vector<std::uint64_t> sizes;
  nb::object fitted;
};

// A call on its way; it gets the outcome of its request.
struct Call {
  void respond(nb::object outcome);
  void finish(nb::object outcome);

  CallChannel* channel;  // null when that is closed, or the call is over
  std::uint32_t number;
  std::int64_t began;  // CLOCK_MONOTONIC ns
  std::shared_ptr<KnownCall> form;
  nb::object request;
};

class CallChannel {
 public:
  // `requests` are those at the stub, `descriptor` is the channel's, which stays the caller's.
  CallChannel(nb::object requests, nb::object reader, nb::handle hooks, int descriptor);
  CallChannel(const CallChannel&) = delete;
  CallChannel& operator=(const CallChannel&) = delete;
  ~CallChannel() { close(); }

  // Takes one message; returns whether there was one.
  bool receive();
  // Gives calls to the called models.
  void take(nb::handle records);
  // Sends what has been answered in this turn of the event loop, in one message.
  void flush();
  // Answers a call that is under way, if it is.
  void end(std::uint32_t number, nb::object outcome);
  void respond(std::uint32_t number, nb::object outcome);

  void forget() { known_.clear(); }
  void block(bool blocked) { blocked_ = blocked; }
  [[nodiscard]] nb::object call(std::uint32_t number) const;
  // Answers nothing any more.
  void mute() { mute_ = true; }
  // Is of no use any more; returns the calls that are under way.
  nb::list close();
  [[nodiscard]] nb::list calls() const;

 private:
  struct Hooks {
    explicit Hooks(nb::handle hooks) : given(nb::borrow(hooks)) {}

    nb::object given;
    RegionNames names{given.attr("announcements")};
    nb::object model = given.attr("model");
    nb::object caller = given.attr("caller");
    nb::object waits_for = caller.attr("waits_for");
    nb::object link = given.attr("link");
    nb::object form = given.attr("form");
    nb::object check = given.attr("check");
    nb::object failed = given.attr("failed");
    nb::object describe = given.attr("describe");
    nb::object long_text = given.attr("long_text");
    nb::object send_long = given.attr("send_long");
    nb::object signature = given.attr("signature");
    nb::object receive = given.attr("receive");
    nb::object refuse = given.attr("refuse");
    nb::object send = given.attr("send");
    nb::object call_soon = given.attr("call_soon");
  };
  using Key = std::pair<PyObject*, PyObject*>;
  struct KeyHash {
    std::size_t operator()(const Key& key) const {
      return std::hash<PyObject*>{}(key.first) * 31 + std::hash<PyObject*>{}(key.second);
    }
  };
  // The signature and the context of calls, and what they say.
  struct Kept {
    nb::object signature;
    nb::object context;
    std::shared_ptr<KnownCall> form;
  };

  void begin(const Hooks& hooks, nb::handle record);
  void submit(const Hooks& hooks, std::uint32_t number, nb::handle record);
  nb::object ranges(const Hooks& hooks, nb::handle record);
  std::shared_ptr<KnownCall> form(const Hooks& hooks, nb::handle record);

  void answer(const Hooks& hooks, std::uint32_t number, nb::object outcome, std::uint32_t flags);
  void write_response(const Hooks& hooks, RecordParts parts, nb::handle response);
  void append(const Hooks& hooks, RecordParts parts, nb::handle ranges, std::uint32_t lease,
              bool read_only);
  std::string_view signature(const Hooks& hooks, nb::handle signature);

  nb::object requests_object_;
  at_stub::RequestsAtStub& requests_;
  nb::object reader_object_;
  RecordReader& reader_;
  // Code that calls Python holds a reference: Python may close this.
  std::shared_ptr<const Hooks> hooks_;
  int descriptor_;
  bool mute_ = false;
  bool blocked_ = false;
  std::map<std::uint32_t, nb::object> calls_;
  std::unordered_map<Key, Kept, KeyHash> known_;
  // Encoded signatures of answers, which readers have one object of.
  std::unordered_map<PyObject*, std::pair<nb::object, nb::object>> signatures_;
  std::string answers_;
  std::uint32_t answered_ = 0;
};

}  // namespace gpubridge
