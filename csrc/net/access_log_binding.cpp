// The access log, for Python: gpubridge/_native.pyi has the contract.

#include "net/access_log_binding.h"

#include "ipc/infer_request_binding.h"

namespace gpubridge {

namespace {

std::string text_attribute(nb::handle object, const char* name) {
  return std::string(view_of_text(nb::str(nb::object(object.attr(name)))));
}

}  // namespace

void note_model(AccessRecord& record, nb::handle statistics) {
  record.model = text_attribute(statistics, "model");
  record.version = text_attribute(statistics, "version");
}

void note_identifier(AccessRecord& record, nb::handle request) {
  record.identifier = view_of_text(infer_request(request).get(InferRequest::kIdentifier));
}

void RequestRecord::note(nb::handle statistics, std::string identifier) {
  if (record_ == nullptr) return;
  note_model(*record_, statistics);
  record_->identifier = std::move(identifier);
}

void RequestRecord::answer(std::uint64_t sent, std::optional<int> status) {
  if (record_ == nullptr) return;
  record_->sent += sent;
  if (!status) return;
  record_->status = *status;
  log_->add(std::move(*std::exchange(record_, nullptr)));
}

namespace {

AccessLog::Format format_of(std::string_view name) {
  if (name == "json") return AccessLog::Format::kJson;
  return name == "ISO8601" ? AccessLog::Format::kIso : AccessLog::Format::kDefault;
}

}  // namespace

void bind_access_log(nb::module_& module) {
  nb::class_<AccessLog>(module, "AccessLog")
      .def("__init__",
           [](AccessLog* self, int descriptor, std::string_view format,
              std::vector<std::string> http, std::vector<std::string> grpc) {
             new (self)
                 AccessLog(descriptor, format_of(format), {std::move(http), std::move(grpc)});
           })
      .def("set_format",
           [](AccessLog& self, std::string_view name) { self.set_format(format_of(name)); })
      .def_prop_ro("dropped", &AccessLog::dropped)
      .def("close", &AccessLog::close, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<RequestRecord>(module, "RequestRecord")
      .def_prop_ro("number", &RequestRecord::number)
      .def("note", &RequestRecord::note)
      .def("answer", &RequestRecord::answer, nb::arg("sent"), nb::arg("status") = nb::none());
}

}  // namespace gpubridge
