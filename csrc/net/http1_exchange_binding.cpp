#include <cstring>
#include <utility>

#include "buffer_view.h"
#include "net/http1_connection.h"

namespace nb = nanobind;

namespace gpubridge::http1 {
namespace {

// Buffers of so many bytes together are joined with what comes before them: one write of one piece
// costs less than naming each of them to the kernel.
constexpr std::size_t kJoined = 2048;

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// A bytes object of known size that is filled piece by piece.
class Filling {
 public:
  explicit Filling(std::size_t size)
      : bytes_(nb::steal<nb::bytes>(
            PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)))),
        size_(size) {
    if (!bytes_.is_valid()) throw nb::python_error();
    at_ = PyBytes_AsString(bytes_.ptr());
  }

  void append(std::string_view text) {
    if (text.size() > size_) throw nb::value_error("expected buffers that stay as they are");
    if (text.empty()) return;
    std::memcpy(at_, text.data(), text.size());
    at_ += text.size();
    size_ -= text.size();
  }

  nb::bytes take() { return std::move(bytes_); }

 private:
  nb::bytes bytes_;
  std::size_t size_;
  char* at_ = nullptr;
};

std::size_t total_size(nb::handle buffers) {
  std::size_t total = 0;
  for (nb::handle buffer : buffers) total += BufferView(buffer, PyBUF_SIMPLE).size();
  return total;
}

}  // namespace

Exchange::Exchange(Connection& connection, std::unique_ptr<const Head> head, bool close)
    : connection_(&connection), head_(std::move(head)), close_(close) {}

nb::bytes Exchange::method() const { return bytes_of(head_ ? head_->method() : ""); }

nb::bytes Exchange::target() const { return bytes_of(head_ ? head_->target() : ""); }

nb::object Exchange::field(nb::bytes name) const {
  if (head_ == nullptr) return nb::none();
  const auto value = head_->field(view_of(name));
  return value ? nb::object(bytes_of(*value)) : nb::none();
}

std::optional<std::uint64_t> Exchange::length() const {
  if (head_ == nullptr) return 0;
  if (head_->chunked || head_->coded) return std::nullopt;
  return head_->length;
}

bool Exchange::whole() const {
  return connection_ != nullptr && connection_->current_.exchange == this &&
         connection_->delivered_;
}

const char* Exchange::coding() const {
  if (head_ == nullptr || head_->accepts == Coding::kNone) return nullptr;
  return head_->accepts == Coding::kGzip ? "gzip" : "deflate";
}

void Exchange::receive_into(nb::handle memory, std::uint64_t granted) {
  if (connection_ == nullptr || connection_->current_.exchange != this) {
    throw nb::value_error("expected a request whose body is to come");
  }
  connection_->receive_into(memory, granted);
}

void Exchange::weigh(std::size_t nbytes) {
  if (connection_ == nullptr) return;
  held_ += nbytes;
  connection_->held_ += nbytes;
  connection_->settle();
}

Persistence Exchange::persistence() const {
  if (close_) return Persistence::kClose;
  return modern() ? Persistence::kDefault : Persistence::kKeepAlive;
}

void Exchange::put(int status, Framing framing, std::string_view fields, std::string_view body,
                   nb::object buffers) {
  const ResponseHead head(status, framing, persistence());
  if (head.begin().empty()) throw nb::value_error("expected a status that has a reason");
  const std::size_t following = framing.length ? *framing.length - body.size() : 0;
  const bool joined = following <= kJoined;
  if (bodiless()) body = {};
  const std::size_t size = head.begin().size() + fields.size() + head.end().size() + body.size();
  Filling whole(size + (joined && !bodiless() ? following : 0));
  whole.append(head.begin());
  whole.append(fields);
  whole.append(head.end());
  whole.append(body);
  if (following != 0 && !bodiless()) {
    for (nb::handle buffer : buffers) {
      if (joined) {
        const BufferView view(buffer, PyBUF_SIMPLE);
        whole.append({static_cast<const char*>(view.data()), view.size()});
      } else {
        parts_.push_back(nb::borrow(buffer));
      }
    }
  }
  parts_.insert(parts_.begin(), whole.take());
  ready();
}

void Exchange::respond(int status, nb::bytes fields, nb::bytes body, nb::object buffers,
                       bool plain) {
  if (connection_ == nullptr || answered_) return;
  handler = nb::none();
  const std::size_t length = body.size() + total_size(buffers);
  if (!plain && length != 0 && head_ != nullptr && head_->accepts != Coding::kNone) {
    const nb::object pack = connection_->pack_;
    pack(nb::find(*this), status, fields, body, buffers);
    return;
  }
  put(status, {length, false}, view_of(fields), view_of(body), std::move(buffers));
}

void Exchange::fail(nb::object error, nb::object status) {
  if (connection_ == nullptr || answered_) return;
  handler = nb::none();
  connection_->drop_body(*this);
  const nb::object failure = connection_->failure_;
  const nb::object told = failure(error, status);
  const auto body = nb::cast<nb::bytes>(told[1]);
  put(nb::cast<int>(told[0]), {body.size(), false}, "Content-Type: application/json\r\n",
      view_of(body), nb::tuple());
}

void Exchange::begin(int status, nb::bytes fields, nb::object on_sent, nb::bytes filler) {
  if (connection_ == nullptr || answered_) return;
  chunked_ = modern();
  if (!chunked_) close_ = true;
  unfinished_ = true;
  on_sent_ = std::move(on_sent);
  filler_ = std::move(filler);
  put(status, {std::nullopt, chunked_}, view_of(fields), {}, nb::tuple());
}

nb::bytes Exchange::chunk(std::string_view data) const {
  if (!chunked_) return bytes_of(data);
  const std::string line = chunk_line(data.size());
  Filling whole(line.size() + data.size() + 2);
  whole.append(line);
  whole.append(data);
  whole.append("\r\n");
  return whole.take();
}

void Exchange::send(nb::bytes data) {
  if (connection_ != nullptr && !bodiless() && data.size() != 0) add(chunk(view_of(data)));
}

void Exchange::end() {
  if (connection_ == nullptr) return;
  handler = nb::none();
  unfinished_ = false;
  add(bytes_of(chunked_ && !bodiless() ? kLastChunk : std::string_view{}));
}

void Exchange::add(nb::bytes data) {
  probed_ = false;
  if (data.size() != 0) parts_.push_back(std::move(data));
  ready();
}

void Exchange::ready() {
  answered_ = true;
  ready_ = true;
  connection_->flush();
}

}  // namespace gpubridge::http1
