#include "memory/sent_buffers.h"

#include "buffer_view.h"

namespace gpubridge {

SentBuffers::SentBuffers(nb::handle sequence) : spans_(LentBuffers::of(sequence)) {
  if (spans_ != nullptr) {
    for (const LentSpan& span : *spans_) sizes_.push_back(span.size);
  } else {
    for (nb::handle buffer : sequence) {
      objects_.push_back(nb::borrow(buffer));
      sizes_.push_back(BufferView(buffer, PyBUF_SIMPLE).size());
    }
  }
  for (const std::size_t size : sizes_) total_ += size;
}

void SentBuffers::append_to(std::string& text, std::size_t index) const {
  if (spans_ != nullptr) {
    const LentSpan& span = (*spans_)[index];
    text.append(span.data, span.size);
    return;
  }
  const BufferView view(objects_[index], PyBUF_SIMPLE);
  if (view.size() != sizes_[index]) throw nb::value_error("expected buffers that stay as they are");
  text.append(static_cast<const char*>(view.data()), view.size());
}

void MessagePieces::append(const std::string& text, const SentBuffers& buffers, std::size_t index) {
  pending_.append(text);
  if (buffers.size(index) <= copied_) {
    buffers.append_to(pending_, index);
    return;
  }
  flush();
  pieces_.push_back(buffers.object(index));
}

std::vector<nb::object> MessagePieces::finish(std::string_view ending) {
  pending_.append(ending);
  flush();
  return std::move(pieces_);
}

}  // namespace gpubridge
