// A gateway, which translates the addresses of the hosts behind it (NAT), in the terms of RFC 4787 and RFC 5382.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "packet.h"

namespace lab {

using Nanoseconds = int64_t;

enum class Dependence : uint8_t { kIndependent, kAddress, kAddressAndPort };  // on the remote side

struct Endpoint4 {
    uint32_t address = 0;  // host order
    uint16_t port = 0;     // for ICMP, the echo's identifier
    uint64_t key() const { return uint64_t{address} << 16 | port; }
};

// One port of the outside address that leads to a host.
struct Mapping {
    uint8_t protocol = 0;
    Endpoint4 inside;
    uint16_t outside_port = 0;
    Nanoseconds used = 0;                             // time of the last packet
    Nanoseconds lease_ends = 0;                       // a lease by NAT-PMP or PCP, open to all until then; 0: no lease
    std::vector<uint8_t> nonce;                       // of the PCP client that holds the lease; empty: NAT-PMP
    std::unordered_map<uint64_t, Nanoseconds> spoken_to;  // remote Endpoint4::key -> when the host last sent to it
};

class Gateway {
public:
    std::string name;
    uint32_t inside = 0, external = 0;  // its own addresses, host order
    int parent = -1;                    // the gateway that this one stands behind; -1: none
    Dependence mapping = Dependence::kIndependent, filtering = Dependence::kAddressAndPort;
    bool hairpin = true;
    bool resets = false;  // whether it answers an uninvited SYN by RST instead of dropping it
    bool pmp = false, pcp = false;
    Nanoseconds udp_idle = 30'000'000'000, tcp_idle = 300'000'000'000;

    // The outside port for a packet that a host sends; 0: the table is full.
    uint16_t leaves(uint8_t protocol, Endpoint4 source, Endpoint4 destination, Nanoseconds now);
    // The mapping of an outside port, for any remote address; null: there is none.
    const Mapping* find(uint8_t protocol, uint16_t outside_port, Nanoseconds now);
    // The mapping for a packet from `remote` that the filter lets in; null: the packet is kept out.
    const Mapping* enters(uint8_t protocol, uint16_t outside_port, Endpoint4 remote, Nanoseconds now);

    // A lease for a host, of port `suggested` where free. Null: the table is full, or the port is another host's.
    const Mapping* lease(uint8_t protocol, Endpoint4 source, uint16_t suggested, Nanoseconds ends,
                         const std::vector<uint8_t>& nonce, Nanoseconds now);
    bool release(uint8_t protocol, Endpoint4 source, const std::vector<uint8_t>& nonce);
    void release_all(uint8_t protocol, uint32_t address);

    const std::map<std::pair<uint8_t, uint16_t>, Mapping>& mappings() const { return by_outside_; }
    bool expired(const Mapping& mapping, Nanoseconds now) const;
    void clear();  // drops all mappings, as a restart or a new outside address does
    Nanoseconds started = 0;

private:
    using InsideKey = std::tuple<uint8_t, uint64_t, uint64_t>;  // protocol, inside, part of remote

    InsideKey key(uint8_t protocol, Endpoint4 source, Endpoint4 destination) const;
    Mapping* known(uint8_t protocol, uint16_t outside_port, Nanoseconds now);
    uint16_t free_port(uint8_t protocol, uint16_t wanted, Nanoseconds now);
    void erase(uint8_t protocol, uint16_t outside_port);

    std::map<std::pair<uint8_t, uint16_t>, Mapping> by_outside_;
    std::map<InsideKey, uint16_t> by_inside_;
    uint32_t random_ = 0x9E3779B9u;
};

}  // namespace lab
