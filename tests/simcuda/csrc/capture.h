// Stream capture: work that is noted instead of done, and the calls that must not be made
// meanwhile.
#pragma once

#include <cstdint>
#include <memory>

#include "driver_types.h"
#include "streams.h"

struct Capture;

// What an event says of a capture: it was last recorded there, on that stream.
struct CaptureMark {
  std::shared_ptr<Capture> capture;
  Stream* stream = nullptr;
};

// What a call has to fail with because of a capture that is under way, or success.
CUresult refused_by_capture(const char* call);
// Adds work to a stream, or to the graph that is made of it; `number` is that of `enqueue`, if it
// is to be done.
CUresult submit(Stream* stream, Work work, std::uint64_t* number = nullptr);
// What a call fails with that looks at a stream, or waits for it.
CUresult refused_look(Stream* stream);
// What a call fails with that looks at all streams of a context, or waits for them.
CUresult refused_look(CUcontext context);
// What a copy of pageable memory fails with, which no graph can do.
CUresult refused_pageable(Stream* stream);
// A stream goes, and what is captured of it with it.
void abandon_capture(Stream* stream);

// An event is recorded on a stream; sets the mark, which is empty when nothing is captured.
CUresult mark_capture(Stream* stream, CaptureMark* mark);
// A stream is to wait for an event; sets whether that is all, as the stream is captured.
CUresult wait_in_capture(Stream* stream, const CaptureMark& mark, bool recorded, bool* done);
// What a call fails with that looks at an event, or waits for it.
CUresult refused_look(const CaptureMark& mark);
