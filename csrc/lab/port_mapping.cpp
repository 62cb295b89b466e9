#include "port_mapping.h"

#include <algorithm>
#include <cstring>

namespace lab {
namespace {

constexpr uint8_t kPmp = 0, kPcp = 2, kResponse = 0x80;
constexpr uint32_t kLongestLease = 7200;
constexpr size_t kPcpHeader = 24, kPcpMap = 36, kNonce = 12;

enum PmpResult : uint16_t { kPmpSuccess = 0, kPmpVersion = 1, kPmpResources = 4, kPmpOpcode = 5 };
enum PcpResult : uint8_t { kPcpSuccess = 0, kPcpVersion = 1, kPcpNotAuthorized = 2, kPcpMalformed = 3, kPcpOpcode = 4,
                           kPcpResources = 8, kPcpMismatch = 12 };

uint16_t load16(const uint8_t* p) { return static_cast<uint16_t>(p[0] << 8 | p[1]); }
uint32_t load32(const uint8_t* p) { return uint32_t{load16(p)} << 16 | load16(p + 2); }

void put16(std::vector<uint8_t>& out, uint32_t value) {
    out.push_back(static_cast<uint8_t>(value >> 8));
    out.push_back(static_cast<uint8_t>(value));
}

void put32(std::vector<uint8_t>& out, uint32_t value) {
    put16(out, value >> 16);
    put16(out, value & 0xffff);
}

void put_mapped(std::vector<uint8_t>& out, uint32_t address) {  // ::ffff:a.b.c.d
    out.insert(out.end(), 10, 0);
    put16(out, 0xffff);
    put32(out, address);
}

uint32_t epoch_s(const Gateway& gateway, Nanoseconds now) {
    return static_cast<uint32_t>((now - gateway.started) / 1'000'000'000);
}

std::vector<uint8_t> pmp_head(const Gateway& gateway, uint8_t opcode, uint16_t result, Nanoseconds now) {
    std::vector<uint8_t> out{kPmp, static_cast<uint8_t>(kResponse | opcode)};
    put16(out, result);
    put32(out, epoch_s(gateway, now));
    return out;
}

std::vector<uint8_t> answer_pmp(Gateway& gateway, Endpoint4 client, const uint8_t* data, size_t bytes, Nanoseconds now) {
    const uint8_t opcode = data[1];
    if (opcode == 0 && bytes == 2) {
        std::vector<uint8_t> out = pmp_head(gateway, opcode, kPmpSuccess, now);
        put32(out, gateway.external);
        return out;
    }
    if ((opcode != 1 && opcode != 2) || bytes != 12) return pmp_head(gateway, opcode, kPmpOpcode, now);
    const uint8_t protocol = opcode == 1 ? kUdp : kTcp;
    const Endpoint4 inside{client.address, load16(data + 4)};
    const uint32_t seconds = std::min(load32(data + 8), kLongestLease);
    uint16_t outside_port = 0;
    uint16_t result = kPmpSuccess;
    if (seconds == 0 && inside.port == 0) {
        gateway.release_all(protocol, client.address);
    } else if (seconds == 0) {
        gateway.release(protocol, inside, {});
    } else {
        const Mapping* mapped =
            gateway.lease(protocol, inside, load16(data + 6), now + seconds * 1'000'000'000LL, {}, now);
        if (mapped == nullptr) result = kPmpResources;
        else outside_port = mapped->outside_port;
    }
    std::vector<uint8_t> out = pmp_head(gateway, opcode, result, now);
    put16(out, inside.port);
    put16(out, outside_port);
    put32(out, result == kPmpSuccess ? seconds : 0);
    return out;
}

std::vector<uint8_t> pcp_head(const Gateway& gateway, uint8_t opcode, uint8_t result, uint32_t seconds, Nanoseconds now) {
    std::vector<uint8_t> out{kPcp, static_cast<uint8_t>(kResponse | opcode), 0, result};
    put32(out, seconds);
    put32(out, epoch_s(gateway, now));
    out.insert(out.end(), 12, 0);
    return out;
}

std::vector<uint8_t> answer_pcp(Gateway& gateway, Endpoint4 client, const uint8_t* data, size_t bytes, Nanoseconds now) {
    const uint8_t opcode = data[1];
    if (bytes < kPcpHeader || bytes % 4 != 0) return pcp_head(gateway, opcode, kPcpMalformed, 0, now);
    std::vector<uint8_t> expected;
    put_mapped(expected, client.address);
    if (std::memcmp(data + 8, expected.data(), 16) != 0) return pcp_head(gateway, opcode, kPcpMismatch, 0, now);
    if (opcode == 0) return pcp_head(gateway, opcode, kPcpSuccess, 0, now);
    if (opcode != 1) return pcp_head(gateway, opcode, kPcpOpcode, 0, now);
    if (bytes < kPcpHeader + kPcpMap) return pcp_head(gateway, opcode, kPcpMalformed, 0, now);
    const uint8_t* map = data + kPcpHeader;
    const std::vector<uint8_t> nonce(map, map + kNonce);
    const uint8_t protocol = map[kNonce];
    const Endpoint4 inside{client.address, load16(map + 16)};
    const uint32_t seconds = std::min(load32(data + 4), kLongestLease);
    uint16_t outside_port = load16(map + 18);
    uint8_t result = kPcpSuccess;
    if ((protocol != kUdp && protocol != kTcp) || inside.port == 0) {
        result = kPcpMalformed;
    } else if (seconds == 0) {
        if (!gateway.release(protocol, inside, nonce)) result = kPcpNotAuthorized;
    } else {
        const Mapping* mapped =
            gateway.lease(protocol, inside, outside_port, now + seconds * 1'000'000'000LL, nonce, now);
        if (mapped == nullptr) result = kPcpResources;
        else outside_port = mapped->outside_port;
    }
    std::vector<uint8_t> out = pcp_head(gateway, opcode, result, result == kPcpSuccess ? seconds : 0, now);
    out.insert(out.end(), map, map + 16);
    put16(out, inside.port);
    put16(out, outside_port);
    put_mapped(out, gateway.external);
    return out;
}

}  // namespace

std::vector<uint8_t> answer_port_mapping(Gateway& gateway, Endpoint4 client, const uint8_t* data, size_t bytes,
                                         Nanoseconds now) {
    if (bytes < 2 || (data[1] & kResponse) != 0) return {};
    if (data[0] == kPmp && gateway.pmp) return answer_pmp(gateway, client, data, bytes, now);
    if (data[0] == kPcp && gateway.pcp) return answer_pcp(gateway, client, data, bytes, now);
    if (gateway.pcp) return pcp_head(gateway, data[1], kPcpVersion, 0, now);
    if (gateway.pmp) return pmp_head(gateway, data[1], kPmpVersion, now);
    return {};
}

}  // namespace lab
