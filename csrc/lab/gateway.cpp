#include "gateway.h"

namespace lab {
namespace {

constexpr size_t kMostMappings = 8192;
constexpr uint16_t kFirstDrawn = 16384;  // ports of mappings that depend on the destination are drawn from here on

}  // namespace

Gateway::InsideKey Gateway::key(uint8_t protocol, Endpoint4 source, Endpoint4 destination) const {
    uint64_t remote = 0;
    if (mapping == Dependence::kAddress) remote = uint64_t{destination.address} << 16;
    if (mapping == Dependence::kAddressAndPort) remote = destination.key();
    return {protocol, source.key(), remote};
}

bool Gateway::expired(const Mapping& mapping, Nanoseconds now) const {
    if (mapping.lease_ends != 0) return now > mapping.lease_ends;
    return now - mapping.used > (mapping.protocol == kTcp ? tcp_idle : udp_idle);
}

void Gateway::erase(uint8_t protocol, uint16_t outside_port) {
    by_outside_.erase({protocol, outside_port});
    std::erase_if(by_inside_, [&](const auto& item) {
        return std::get<0>(item.first) == protocol && item.second == outside_port;
    });
}

Mapping* Gateway::known(uint8_t protocol, uint16_t outside_port, Nanoseconds now) {
    const auto found = by_outside_.find({protocol, outside_port});
    if (found == by_outside_.end()) return nullptr;
    if (!expired(found->second, now)) return &found->second;
    erase(protocol, outside_port);
    return nullptr;
}

uint16_t Gateway::free_port(uint8_t protocol, uint16_t wanted, Nanoseconds now) {
    if (by_outside_.size() >= kMostMappings) {
        std::vector<std::pair<uint8_t, uint16_t>> old;
        for (const auto& [where, mapping] : by_outside_)
            if (expired(mapping, now)) old.push_back(where);
        for (const auto& [old_protocol, port] : old) erase(old_protocol, port);
        if (by_outside_.size() >= kMostMappings) return 0;
    }
    while (wanted == 0 || known(protocol, wanted, now) != nullptr) {
        random_ = random_ * 1664525u + 1013904223u;
        wanted = static_cast<uint16_t>(kFirstDrawn + (random_ >> 16) % (65536u - kFirstDrawn));
    }
    return wanted;
}

uint16_t Gateway::leaves(uint8_t protocol, Endpoint4 source, Endpoint4 destination, Nanoseconds now) {
    Mapping* mapped = nullptr;
    const InsideKey leased{protocol, source.key(), UINT64_MAX};
    for (const InsideKey& inside : {leased, key(protocol, source, destination)}) {
        const auto found = by_inside_.find(inside);
        if (found != by_inside_.end() && (mapped = known(protocol, found->second, now)) != nullptr) break;
    }
    if (mapped == nullptr) {
        // A mapping for all destinations preserves the port where possible, as most home routers do.
        const uint16_t wanted = mapping == Dependence::kIndependent ? source.port : 0;
        const uint16_t port = free_port(protocol, wanted, now);
        if (port == 0) return 0;
        mapped = &by_outside_[{protocol, port}];
        mapped->protocol = protocol;
        mapped->inside = source;
        mapped->outside_port = port;
        by_inside_[key(protocol, source, destination)] = port;
    }
    mapped->used = now;
    mapped->spoken_to[destination.key()] = now;
    return mapped->outside_port;
}

const Mapping* Gateway::find(uint8_t protocol, uint16_t outside_port, Nanoseconds now) {
    return known(protocol, outside_port, now);
}

const Mapping* Gateway::enters(uint8_t protocol, uint16_t outside_port, Endpoint4 remote, Nanoseconds now) {
    Mapping* mapped = known(protocol, outside_port, now);
    if (mapped == nullptr) return nullptr;
    bool open = mapped->lease_ends != 0 || filtering == Dependence::kIndependent;
    for (const auto& [spoken, when] : mapped->spoken_to) {
        if (open) break;
        if (now - when > (protocol == kTcp ? tcp_idle : udp_idle)) continue;
        open = filtering == Dependence::kAddress ? spoken >> 16 == remote.address : spoken == remote.key();
    }
    if (!open) return nullptr;
    mapped->used = now;
    return mapped;
}

const Mapping* Gateway::lease(uint8_t protocol, Endpoint4 source, uint16_t suggested, Nanoseconds ends,
                              const std::vector<uint8_t>& nonce, Nanoseconds now) {
    const InsideKey inside{protocol, source.key(), UINT64_MAX};
    const auto found = by_inside_.find(inside);
    Mapping* mapped = found == by_inside_.end() ? nullptr : known(protocol, found->second, now);
    if (mapped != nullptr && mapped->nonce != nonce) return nullptr;
    if (mapped == nullptr) {
        const uint16_t port = free_port(protocol, suggested != 0 ? suggested : source.port, now);
        if (port == 0) return nullptr;
        mapped = &by_outside_[{protocol, port}];
        mapped->protocol = protocol;
        mapped->inside = source;
        mapped->outside_port = port;
        mapped->nonce = nonce;
        by_inside_[inside] = port;
    }
    mapped->used = now;
    mapped->lease_ends = ends;
    return mapped;
}

bool Gateway::release(uint8_t protocol, Endpoint4 source, const std::vector<uint8_t>& nonce) {
    const auto found = by_inside_.find({protocol, source.key(), UINT64_MAX});
    if (found == by_inside_.end()) return true;
    if (by_outside_[{protocol, found->second}].nonce != nonce) return false;
    erase(protocol, found->second);
    return true;
}

void Gateway::release_all(uint8_t protocol, uint32_t address) {
    std::vector<uint16_t> ports;
    for (const auto& [where, mapping] : by_outside_) {
        if (where.first == protocol && mapping.lease_ends != 0 && mapping.inside.address == address)
            ports.push_back(where.second);
    }
    for (uint16_t port : ports) erase(protocol, port);
}

void Gateway::clear() {
    by_outside_.clear();
    by_inside_.clear();
}

}  // namespace lab
