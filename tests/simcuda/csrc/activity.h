// How a process waits for the driver, counted where tests can read it.
#pragma once

#include <functional>

#include "contexts.h"
#include "world.h"

// The counters of this process.
Activity& activity();
// Whether who waits for work of a context burns a processor: unless blocking waits were asked for.
bool spins(CUcontext context);
// Lets the caller wait until something is done, and counts for how long. No processor is burned.
void wait_until(const std::function<bool()>& done, bool spinning);
