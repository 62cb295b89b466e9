// The loop that transfers packets between the hosts' TUN devices and the emulated network.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "host.h"
#include "network.h"

namespace lab {

Nanoseconds monotonic();

// A histogram of delays. The bounds of its buckets are those of p2pavg/lab/stats.py.
class Lateness {
public:
    static constexpr std::array<int, 12> kBoundsUs = {50,   100,  200,   500,   1000,  2000,
                                                      5000, 10000, 20000, 50000, 100000, 1000000};
    void add(Nanoseconds late);
    std::string json() const;

private:
    std::array<uint64_t, kBoundsUs.size() + 1> counts_{};
};

class Router {
public:
    Router(std::vector<HostDevice>& devices, Network& network);

    // Runs until a client of `control` (a listening socket) says to quit, `lifeline` is closed, or a signal arrives.
    void run(int control, int lifeline, int signals);
    std::string statistics() const;

    const char* priority = "normal";

private:
    void read_host(size_t i);
    void deliver(Nanoseconds early);

    std::vector<HostDevice>& devices_;
    Network& network_;
    PacketPool pool_;
    Packet* spare_ = nullptr;
    int moved_ = 0;        // packets read and delivered in this turn of the loop
    Lateness deliveries_;  // time from a packet's due time to its delivery
    Lateness turns_;       // duration of one turn of the loop, which bounds a packet's wait to be read
    uint64_t write_errors_ = 0;
    Nanoseconds started_ = monotonic();
};

}  // namespace lab
