// How a process waits for the driver, counted where tests can read it.
#pragma once

#include "world.h"

// The counters of this process.
Activity& activity();
