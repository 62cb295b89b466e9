// The way back into a host behind a firewall: open to what the host spoke to first, and to nothing else.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "packet.h"

namespace lab {

using Nanoseconds = int64_t;

// Flows by protocol, addresses and ports: address- and port-dependent filtering in the words of RFC 4787. Addresses and
// ports are not rewritten (gateway.h does that). A packet either way keeps a flow open; when the table is full, new flows stay closed.
class Nat {
public:
    void sent(FlowKey flow, Nanoseconds now);        // the host sent a packet of this flow
    bool admits(FlowKey arriving, Nanoseconds now);  // a packet of this flow may go in: the host opened its reverse
    void clear() { seen_.clear(); }

private:
    std::unordered_map<FlowKey, Nanoseconds, FlowKeyHash> seen_;  // as the host sends it -> when it was last used
};

}  // namespace lab
