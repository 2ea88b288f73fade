// What of a request's record is known to Python.
#pragma once

#include "net/access_log.h"
#include "python_object.h"

namespace gpubridge {

// Notes the model of a request by its statistics (ModelStatistics).
void note_model(AccessRecord& record, nb::handle statistics);
// Notes the id of an InferRequest.
void note_identifier(AccessRecord& record, nb::handle request);

}  // namespace gpubridge
