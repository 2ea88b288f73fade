// The settings of the simulated driver: environment variables, read when a process first asks.
// This is the one place that says what each means. Beside them there are SIMCUDA_DIR, the machine's
// directory, and SIMCUDA_KERNEL, the library that runs whatever is launched (modules.cpp). A name
// or a value that is none of these is noted as a broken rule.
#pragma once

struct Settings {
  // -- what calls cost, in microseconds ----------------------------------------------------------
  // SIMCUDA_PIN_US_PER_MIB: pinning of memory whose pages are there. No call of any process goes on
  // meanwhile (driver_lock.h).
  int pin_us_per_mib = 4;
  // SIMCUDA_PIN_US_PER_MIB_UNTOUCHED: the same for pages that nobody has touched yet.
  int pin_us_per_mib_untouched = 40;
};

const Settings& settings();
// Notes what is set and is no setting.
void check_settings();
