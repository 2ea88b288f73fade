// Reads the channel of a model's calls for those who wait: gpubridge/stub/bls/reader.py decides who
// reads.

#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "clock.h"
#include "ipc/datagrams.h"
#include "ipc/messages.h"
#include "ipc/wait_predictor.h"
#include "python_object.h"
#include "stub/bls_records.h"

namespace gpubridge {
namespace stub {
namespace {

// As gpubridge/transport/calls.py has it.
constexpr char kCallResponses = 16;

bool is_empty(nb::handle sized) {
  const Py_ssize_t size = PyObject_Size(sized.ptr());
  if (size < 0) throw nb::python_error();
  return size == 0;
}

}  // namespace

// Python objects that a CallReader needs.
struct CallReaderParts {
  nb::object responses;  // a CallResponseReader
  nb::object call;       // the class Call (gpubridge/stub/bls/calls.py)
  nb::object deliver;  // gives a call a response that is not the only one, or that others wait for
  nb::object take;     // takes a message of another kind, or the end of the channel
  nb::object pass_on;  // has another thread read, where some wait
  nb::object outbox;   // of the calls that are not sent yet
  nb::object calls;    // the dict of the calls under way, by their numbers
  nb::object acquire;  // of the RLock of who reads
  nb::object release;
  nb::object waiting;   // the dict of the threads that leave reading to another one
  nb::object requests;  // the WaitPredictor of requests
  nb::object answers;   // the compiled one of answers
};

// Delivers the responses to calls, and leaves all other messages to Python. One thread at a time
// uses it; a signal's handler may within that.
class CallReader {
 public:
  CallReader(CallReaderParts parts, int descriptor, std::int64_t awake_ns)
      : parts_(std::move(parts)), descriptor_(descriptor), awake_ns_(awake_ns) {}
  CallReader(const CallReader&) = delete;
  CallReader& operator=(const CallReader&) = delete;

  // Waits until an outcome is ready. False where Python has to: another thread reads, there are
  // calls to be sent before, this is another process, or the call is for several responses.
  bool wait(nb::handle outcome) {
    if (getpid() != process_ || !is_empty(attribute<"unsent">(parts_.outbox))) return false;
    if (outcome.type().is(parts_.call) && !attribute<"credit">(outcome).is_none()) return false;
    if (!nb::cast<bool>(parts_.acquire(false))) return false;
    const Reading reading(parts_);
    read_until(outcome);
    return true;
  }

  // Handles messages until an outcome is ready.
  void read_until(nb::handle outcome) {
    if (is_ready(outcome)) return;
    answers_.alone = nb::cast<bool>(attribute<"alone">(parts_.requests));
    bool awake = answers_.begin(monotonic_ns());
    do {
      if (awake) awake = answers_.poll(descriptor_, awake_ns_);
      if (!awake) sleep();
      receive();
    } while (!is_ready(outcome));
    answers_.end(monotonic_ns());
  }

  // Handles one message, if there is one.
  void receive() {
    const Datagram datagram = receive_now(descriptor_, memory_);
    if (datagram.count < 0 && errno == EAGAIN) return;
    const auto size = static_cast<std::size_t>(std::max<std::ptrdiff_t>(datagram.count, 0));
    // A copy: the handler of a signal may receive while this is decoded.
    const nb::bytes message(memory_.data(), size);
    if (datagram.cut || !datagram.descriptors.empty() || size == 0 ||
        memory_[0] != kCallResponses) {
      parts_.take(message, descriptors_of(datagram), datagram.cut);
      return;
    }
    deliver(nb::cast<CallResponseReader&>(parts_.responses).responses(message));
  }

  // Receives no more: the descriptor is another's from now on.
  void close() { descriptor_ = -1; }

 private:
  // The time in which this thread reads; then another one does, where some wait.
  class Reading {
   public:
    explicit Reading(const CallReaderParts& parts) : parts_(parts) {}
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    ~Reading() {
      const nb::error_scope kept;
      try {
        parts_.release();
        if (!is_empty(parts_.waiting)) parts_.pass_on();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("letting another thread read");
      }
    }

   private:
    const CallReaderParts& parts_;
  };

  // Waits for a message, or until a signal comes, whose handler is run.
  void sleep() const {
    // One may have come while this stayed awake.
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (descriptor_ < 0) return;
    pollfd looked{descriptor_, POLLIN, 0};
    const nb::gil_scoped_release unlocked;
    poll(&looked, 1, -1);
  }

  [[nodiscard]] bool is_ready(nb::handle outcome) const {
    if (attribute<"ended">(outcome).is(nb::bool_(true))) return true;
    if (outcome.type().is(parts_.call)) return !is_empty(attribute<"_responses">(outcome));
    return nb::cast<bool>(attribute<"ready">(outcome));
  }

  // Delivers all of them, whatever one raises: signals' handlers may, where Python code runs.
  void deliver(const std::vector<CallResponse>& responses) {
    std::optional<nb::python_error> raised;
    for (const CallResponse& each : responses) {
      try {
        deliver(each);
      } catch (nb::python_error& error) {
        if (!raised) raised.emplace(error);
      }
    }
    if (raised) throw nb::python_error(*raised);
  }

  void deliver(const CallResponse& given) {
    const nb::int_ number(given.number);
    const nb::object call = nb::borrow(PyDict_GetItemWithError(parts_.calls.ptr(), number.ptr()));
    if (!call.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return;
    }
    if ((given.flags & kResponseOpen) != 0 || given.response.is_none() ||
        !attribute<"credit">(call).is_none() || !is_empty(attribute<"_waiters">(call))) {
      parts_.deliver(nb::make_tuple(number, given.flags, given.response));
      return;
    }
    // As Call.deliver does, where nobody is to be told.
    if (PyDict_DelItem(parts_.calls.ptr(), number.ptr()) != 0) throw nb::python_error();
    const nb::object kept = nb::make_tuple(given.response, nb::bool_(false));
    checked(PyObject_CallMethodObjArgs(attribute<"_responses">(call).ptr(), name_object<"append">(),
                                       kept.ptr(), nullptr));
    set_attribute<"inputs">(call, nb::none());
    set_attribute<"ended">(call, nb::bool_(true));
  }

  CallReaderParts parts_;
  WaitPredictor& answers_ = nb::cast<WaitPredictor&>(parts_.answers);
  int descriptor_;
  std::int64_t awake_ns_;
  pid_t process_ = getpid();
  std::vector<char> memory_ = std::vector<char>(kDatagramLimit);
};

}  // namespace stub

void bind_bls_reader(nb::module_& module) {
  using namespace stub;
  nb::class_<CallReader>(module, "CallReader")
      .def("__init__",
           [](CallReader* place, nb::object responses, nb::object call, const nb::tuple& handlers,
              const nb::tuple& state, int descriptor, std::int64_t awake_ns) {
             new (place)
                 CallReader({std::move(responses), std::move(call), handlers[0], handlers[1],
                             handlers[2], state[0], state[1], state[2].attr("acquire"),
                             state[2].attr("release"), state[3], state[4], state[5]},
                            descriptor, awake_ns);
           })
      .def("wait", &CallReader::wait)
      .def("read_until", &CallReader::read_until)
      .def("receive", &CallReader::receive)
      .def("close", &CallReader::close);
}

}  // namespace gpubridge
