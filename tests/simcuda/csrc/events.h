// Events: what was recorded of streams, and whether it has come to pass.
#pragma once

#include "driver_types.h"

// A context goes, and its events with it.
void forget_events(CUcontext context);
