// Clocks in seconds; monotonic() is the clock of Python's time.monotonic().
#pragma once

#include <ctime>

namespace p2pavg::pump {

inline double seconds(const timespec &time) {
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline double monotonic() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return seconds(now);
}

}  // namespace p2pavg::pump
