// The loop that moves packets between the hosts' TUN devices and the emulated network.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "host.h"
#include "network.h"

namespace lab {

Nanoseconds monotonic();

// How late things were, in buckets. The bounds are those of p2pavg/lab/stats.py.
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

    // Runs until `control` (a listening socket) was told to quit, `lifeline` is closed, or a signal came.
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
    Lateness deliveries_;  // of a packet after it was due
    Lateness turns_;       // length of one turn of the loop: an upper bound for a packet's wait before it is read
    uint64_t write_errors_ = 0;
    Nanoseconds started_ = monotonic();
};

}  // namespace lab
