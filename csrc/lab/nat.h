// A firewall in front of a host: it lets in only packets of flows that the host has opened.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "packet.h"

namespace lab {

using Nanoseconds = int64_t;

// Flows by protocol, addresses and ports: address- and port-dependent filtering in the terms of RFC 4787. Addresses and
// ports are not translated (gateway.h does that). A packet of either direction keeps a flow open. No new flow
// opens when the table is full.
class Nat {
public:
    void sent(FlowKey flow, Nanoseconds now);        // the host sent a packet of this flow
    bool admits(FlowKey arriving, Nanoseconds now);  // whether the host has opened the reverse flow
    void clear() { seen_.clear(); }

private:
    std::unordered_map<FlowKey, Nanoseconds, FlowKeyHash> seen_;  // flow of the host's packets -> when it was last used
};

}  // namespace lab
