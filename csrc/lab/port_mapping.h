// A gateway's answers to hosts that ask for a port by NAT-PMP (RFC 6886) or PCP (RFC 6887). No I/O.
#pragma once

#include <vector>

#include "gateway.h"

namespace lab {

constexpr uint16_t kPortMappingPort = 5351;

// The answer to a datagram that a host behind the gateway sent to port 5351; empty: none.
std::vector<uint8_t> answer_port_mapping(Gateway& gateway, Endpoint4 client, const uint8_t* data, size_t bytes,
                                         Nanoseconds now);

}  // namespace lab
