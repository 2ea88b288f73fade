// Clients' memory in a stub: pages that its owner takes away, or that the system has no memory for,
// become zeros and are reported; no SIGBUS ends the process.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>

#include "buffer_view.h"
#include "heap_type.h"

namespace gpubridge::stub {
namespace {

// Addresses that are watched; none while `end` is 0. The signal's handler reads it at any time, so
// it is never freed, but watches other addresses later.
struct Watch {
  std::atomic<std::uintptr_t> begin = 0;
  std::atomic<std::uintptr_t> end = 0;
  std::atomic<int> fd = -1;
  std::atomic<bool> lost = false;
  // The number of the last touch of a page that there was no memory for; 0: there was none.
  std::atomic<std::uint64_t> starved = 0;
  Watch* next = nullptr;
};

std::atomic<Watch*> first_watch = nullptr;
// Counts the pages of all watches that there was no memory for.
std::atomic<std::uint64_t> starvations = 0;
// Handles what is not for this one.
struct sigaction handler_before;
std::uintptr_t page_size = 0;
// Pages of a forked child are not watched: it ends as it would without this.
pid_t watching_process = -1;

// Puts zeros in the place of a page that is not there, and of those behind the end of the object.
bool replace(std::uintptr_t address) {
  for (Watch* watch = first_watch.load(); watch != nullptr; watch = watch->next) {
    std::uintptr_t end = watch->end.load();
    if (address < watch->begin.load() || address >= end) continue;
    const std::uintptr_t begin = address & ~(page_size - 1);
    struct stat object{};
    if (::fstat(watch->fd.load(), &object) != 0) return false;
    // Either is known before the zeros can be seen.
    if (begin - watch->begin.load() < static_cast<std::uintptr_t>(object.st_size)) {
      watch->starved.store(++starvations);
      end = begin + page_size;
    } else {
      watch->lost.store(true);
    }
    return ::mmap(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  const int before = errno;
  const bool ours = info->si_code == BUS_ADRERR && ::getpid() == watching_process &&
                    replace(reinterpret_cast<std::uintptr_t>(info->si_addr));
  if (!ours) {
    // What was touched is touched again, and then handled as if this did not exist.
    ::sigaction(signal, &handler_before, nullptr);
    if (info->si_code <= 0) ::raise(signal);
  }
  errno = before;
}

void install() {
  if (watching_process != -1) return;
  page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  watching_process = ::getpid();
  struct sigaction handler{};
  handler.sa_sigaction = on_bus_error;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigaction(SIGBUS, &handler, &handler_before);
}

// A watch that watches nothing yet. Called with the interpreter's lock.
Watch& free_watch() {
  for (Watch* watch = first_watch.load(); watch != nullptr; watch = watch->next) {
    if (watch->end.load() == 0) return *watch;
  }
  auto made = std::make_unique<Watch>();
  made->next = first_watch.load();
  first_watch.store(made.get());
  return *made.release();
}

// A writable mapping of an object from its begin, watched while this object, an exporter of its
// bytes, lives.
class WatchedPages {
 public:
  WatchedPages(nb::handle mapping, int fd) : bytes_(mapping, PyBUF_WRITABLE), watch_(free_watch()) {
    const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) throw nb::value_error("the descriptor of watched pages cannot be duplicated");
    install();
    watch_.fd.store(own);
    watch_.starved.store(0);
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes_.data());
    watch_.lost.store(false);
    watch_.begin.store(begin);
    watch_.end.store((begin + bytes_.size() + page_size - 1) & ~(page_size - 1));
  }
  WatchedPages(const WatchedPages&) = delete;
  WatchedPages& operator=(const WatchedPages&) = delete;
  ~WatchedPages() {
    watch_.end.store(0);
    ::close(watch_.fd.exchange(-1));
  }

  // True if some of it are zeros now, and no longer its owner's.
  [[nodiscard]] bool lost() const { return watch_.lost.load(); }
  // Changes, and grows, whenever a page was touched that there was no memory for: it holds zeros
  // since then, which its owner does not see.
  [[nodiscard]] std::uint64_t starved() const { return watch_.starved.load(); }
  // Maps the object anew where zeros are instead of it.
  void renew() {
    const std::uintptr_t begin = watch_.begin.load();
    if (::mmap(reinterpret_cast<void*>(begin), watch_.end.load() - begin, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, watch_.fd.load(), 0) == MAP_FAILED) {
      watch_.lost.store(true);
    }
  }
  [[nodiscard]] const BufferView& bytes() const { return bytes_; }

 private:
  BufferView bytes_;
  Watch& watch_;
};

int export_pages(PyObject* self, Py_buffer* view, int flags) {
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_BufferError, "there are no pages");
    return -1;
  }
  const BufferView& bytes = nb::inst_ptr<WatchedPages>(self)->bytes();
  return PyBuffer_FillInfo(view, self, bytes.data(), static_cast<Py_ssize_t>(bytes.size()), 0,
                           flags);
}

}  // namespace
}  // namespace gpubridge::stub

namespace gpubridge {

void bind_watched_pages(nb::module_& module) {
  using stub::WatchedPages;
  static PyType_Slot slots[] = {// NOLINT: the C API's own form
                                {Py_bf_getbuffer, slot(stub::export_pages)},
                                {0, nullptr}};
  nb::class_<WatchedPages>(module, "WatchedPages", nb::type_slots(slots))
      .def(nb::init<nb::handle, int>())
      .def_prop_ro("lost", &WatchedPages::lost)
      .def_prop_ro("starved", &WatchedPages::starved)
      .def("renew", &WatchedPages::renew);
}

}  // namespace gpubridge
