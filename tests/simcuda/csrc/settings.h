// The settings of the simulated driver: environment variables, read when a process first asks.
// This is the one place that says what each means. Beside them there are SIMCUDA_DIR, the machine's
// directory, and SIMCUDA_KERNEL, the library that runs whatever is launched (modules.cpp). A name
// or a value that is none of these is noted as a broken rule.
#pragma once

enum class Destroyed { kReused, kRefused, kCrash };

struct Settings {
  // -- what calls cost, in microseconds ----------------------------------------------------------
  // SIMCUDA_PIN_US_PER_MIB: pinning of memory whose pages are there. No call of any process goes on
  // meanwhile (driver_lock.h).
  int pin_us_per_mib = 4;
  // SIMCUDA_PIN_US_PER_MIB_UNTOUCHED: the same for pages that nobody has touched yet.
  int pin_us_per_mib_untouched = 40;
  // SIMCUDA_ALLOCATE_US: cuMemAlloc, cuMemCreate.
  int allocate_us = 100;
  // SIMCUDA_OPEN_US: cuIpcOpenMemHandle, cuMemMap.
  int open_us = 200;
  // SIMCUDA_CLOSE_US: cuIpcCloseMemHandle, after it has waited for all work of the process;
  // cuMemUnmap, which waits for nothing.
  int close_us = 200;

  // -- what is undefined, or differs from driver to driver ---------------------------------------
  // SIMCUDA_DESTROYED: what the handle of a destroyed stream or event means.
  //   reused   that of the next one that is created; until then error 400
  //   refused  error 400 for ever
  //   crash    the end of the process
  Destroyed destroyed = Destroyed::kReused;
};

const Settings& settings();
// Notes what is set and is no setting.
void check_settings();
