// The settings of the simulated driver: lines NAME=text of the machine's file "settings", read
// again when that was written, or a process's own environment variables SIMCUDA_NAME, which win.
// This is the one place that says what each means. Beside them there are SIMCUDA_DIR, the machine's
// directory, and SIMCUDA_KERNEL, the library that runs whatever is launched (modules.cpp). A name
// or a value that is none of these is noted as a broken rule.
#pragma once

#include <string>

#include "driver_types.h"

enum class Destroyed { kReused, kRefused, kCrash };
enum class SameBlock { kCounted, kRefused, kClosedOnce };
enum class KilledRecorder { kRerecord, kReleased, kNever };
enum class ExitedRecorder { kPasses, kNever, kLost };
enum class DeadExporter { kFault, kStale, kHeld };

struct Settings {
  // -- what calls cost, in microseconds ----------------------------------------------------------
  // PIN_US_PER_MIB: pinning of memory whose pages are there. No call of any process goes on
  // meanwhile (driver_lock.h).
  int pin_us_per_mib = 4;
  // PIN_US_PER_MIB_UNTOUCHED: the same for pages that nobody has touched yet.
  int pin_us_per_mib_untouched = 40;
  // ALLOCATE_US: cuMemAlloc, cuMemCreate.
  int allocate_us = 100;
  // OPEN_US: cuIpcOpenMemHandle, cuMemMap.
  int open_us = 200;
  // CLOSE_US: cuIpcCloseMemHandle, after it has waited for all work of the process;
  // cuMemUnmap, which waits for nothing.
  int close_us = 200;
  // CONTEXT_US: making a context. CONTEXT_MIB: what it takes of its device's memory.
  int context_us = 0;
  int context_mib = 0;

  // -- what there is -----------------------------------------------------------------------------
  // DRIVER_VERSION: the newest CUDA release that the driver knows, as 12020 or 13000.
  int driver_version = 12090;
  // NVRTC_VERSION: the release of the compiler beside it (nvrtc/nvrtc.cpp), which reads the
  // environment alone.
  int nvrtc_version = 12090;
  // ARCHITECTURE: of the devices; 75 for a T4.
  int architecture = 90;

  // -- what is undefined, or differs from driver to driver ---------------------------------------
  // DESTROYED: what the handle of a destroyed stream or event means.
  //   reused   that of the next one that is created; until then error 400
  //   refused  error 400 for ever
  //   crash    the end of the process
  Destroyed destroyed = Destroyed::kReused;
  // SAME_BLOCK: memory of a block that this process has open is opened once more. (Small
  // allocations of a process share blocks; a handle means one of them, and opens all the block.)
  //   counted      each opening counts, and the last closing unmaps: what the manual says
  //   refused      error 208 (already mapped): what has been seen of several releases
  //   closed-once  the first closing unmaps all of the block, whoever has it open
  SameBlock same_block = SameBlock::kCounted;
  // DEAD_EXPORTER: memory that is open, and whose process is dead.
  //   fault  an illegal address
  //   stale  what it was, of memory that is somebody else's next
  //   held   what it was, and it stays used until it is closed
  DeadExporter dead_exporter = DeadExporter::kFault;
  // KILLED_RECORDER: what a wait for an event becomes whose recorder was killed before the
  // work was done.
  //   rerecord  it ends when any process records the event anew, and that has come
  //   released  it ends with the recorder, though nothing was done
  //   never     it never ends, whoever records the event anew
  KilledRecorder killed_recorder = KilledRecorder::kRerecord;
  // EXITED_RECORDER: what a wait for an event becomes whose work was done, and whose recorder has
  // ended since, or has destroyed its handle of the event.
  //   passes  it ends
  //   never   it ends only when a process that lives records the event anew, and that has come
  //   lost    it never ends, whoever records the event anew
  ExitedRecorder exited_recorder = ExitedRecorder::kPasses;
  // UNKNOWN: the error 999 that a test lets a call fail with.
  //   passes  is that call's alone
  //   sticks  is what all that follows in that context fails with
  bool unknown_sticks = false;
  // LOST_DEVICE: the device that fell off the bus; -1 for none. Nothing of it works, nor is
  // anything done that was under way: error 999, in whatever process. It is still counted and
  // named.
  int lost_device = -1;
  // OPENS: what of other processes this process may open. In the environment of some processes
  // alone it makes a sandbox: others may still open what those have exported.
  //   all  everything, in each way
  //   no-handles, no-descriptors  no memory in that way
  //   no-events  no events
  //   nothing  neither
  std::string opens = "all";
  // OPEN_ERROR: what refused opening fails with: 304, 999 or 801.
  int open_error = 304;
  // SHM: the name of the process's /dev/shm. Events cross only to processes with the same.
  std::string shm = "common";
  // EVENT_LIMIT: how many events of a process can be opened by others at once.
  int event_limit = 100'000;
  // PAGEABLE: a copy from pageable memory to the device.
  //   staged  returns when the memory is copied away
  //   waits   returns when the stream has come to it, as above some size on a real device
  bool pageable_waits = false;
};

// The settings as they are now; what it returned before stays as it was.
const Settings& settings();
// The error that opening something of another process fails with, "handles", "descriptors" or
// "events", or success.
CUresult refused_opening(const std::string& kind);
// Notes what is set in the environment and is no setting.
void check_settings();
