// The lock of the driver that pinning holds: no call of any process of the machine goes on
// meanwhile.
#pragma once

#include <cstdint>

// Holds the lock for so long; others that hold it come first.
void hold_driver(std::uint64_t microseconds);
// Waits until nobody holds it, and counts how long that was.
void wait_for_driver();
// Lets the caller pay for a call, which is nobody else's matter.
void spend(int microseconds);
