// Images of modules: whether a device runs them.
#pragma once

#include "driver_types.h"

// What loading an image fails with, or success.
CUresult refused_image(const void* image);
