#include "packet.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace lab {
namespace {

constexpr size_t kSizes[] = {256, 2048, 16384, kMaxPacket};
constexpr uint8_t kGsoTcp4 = 1, kGsoTcp6 = 4, kGsoEcn = 0x80, kNeedsChecksum = 1;
constexpr uint8_t kFin = 0x01, kSyn = 0x02, kReset = 0x04, kPush = 0x08, kAck = 0x10, kCwr = 0x80;
constexpr uint8_t kEchoReply = 0, kEcho = 8;
constexpr uint32_t kIp4Header = 20, kIp6Header = 40, kUdpHeader = 8, kTcpHeader = 20;

uint16_t load16(const uint8_t* p) { return static_cast<uint16_t>(p[0] << 8 | p[1]); }
uint32_t load32(const uint8_t* p) {
    return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}
void store16(uint8_t* p, uint32_t v) {
    p[0] = static_cast<uint8_t>(v >> 8);
    p[1] = static_cast<uint8_t>(v);
}
void store32(uint8_t* p, uint32_t v) {
    store16(p, v >> 16);
    store16(p + 2, v & 0xffff);
}

uint32_t sum16(const uint8_t* p, size_t bytes) {
    uint32_t sum = 0;
    for (size_t i = 0; i + 1 < bytes; i += 2) sum += load16(p + i);
    return sum;
}
uint16_t fold(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return static_cast<uint16_t>(sum);
}

// The checksum after one 16-bit word has changed (RFC 1624).
uint16_t changed(uint16_t sum, uint16_t before, uint16_t after) {
    return fold(uint32_t{sum} + static_cast<uint16_t>(~before) + after);
}

uint16_t changed(uint16_t sum, uint32_t before, uint32_t after) {
    sum = changed(sum, static_cast<uint16_t>(before >> 16), static_cast<uint16_t>(after >> 16));
    return changed(sum, static_cast<uint16_t>(before), static_cast<uint16_t>(after));
}

void update(uint8_t* checksum, uint32_t before, uint32_t after) {
    store16(checksum, static_cast<uint16_t>(~changed(static_cast<uint16_t>(~load16(checksum)), before, after)));
}

void update16(uint8_t* checksum, uint16_t before, uint16_t after) {
    store16(checksum, static_cast<uint16_t>(~changed(static_cast<uint16_t>(~load16(checksum)), before, after)));
}

void count(Packet* packet) {
    const uint32_t bytes = packet->len - sizeof(VirtioHeader);
    const VirtioHeader* virtio = packet->virtio();
    const int gso = virtio->gso_type & ~kGsoEcn;
    if ((gso == kGsoTcp4 || gso == kGsoTcp6) && virtio->gso_size != 0 && bytes > packet->header) {
        const uint32_t payload = bytes - packet->header;
        packet->payload = virtio->gso_size;
        packet->segments = (payload + virtio->gso_size - 1) / virtio->gso_size;
        packet->wire = payload + packet->segments * packet->header;
    } else {
        packet->payload = static_cast<uint16_t>(bytes > packet->header ? bytes - packet->header : 0);
        packet->segments = 1;
        packet->wire = bytes;
    }
}

}  // namespace

Packet* PacketPool::get(size_t bytes) {
    int cls = 0;
    while (kSizes[cls] < bytes) ++cls;
    Packet* packet = free_[cls];
    if (packet != nullptr) {
        free_[cls] = packet->next;
        return packet;
    }
    void* memory = std::malloc(sizeof(Packet) + kSizes[cls]);
    if (memory == nullptr) throw std::bad_alloc();
    held_ += kSizes[cls];
    packet = new (memory) Packet{};
    packet->capacity = static_cast<uint32_t>(kSizes[cls]);
    packet->size_class = static_cast<uint8_t>(cls);
    return packet;
}

void PacketPool::put(Packet* packet) {
    packet->next = free_[packet->size_class];
    free_[packet->size_class] = packet;
}

FlowKey make_flow_key(uint8_t src, uint8_t dst, uint8_t protocol, uint16_t sport, uint16_t dport) {
    return {uint64_t{src} << 48 | uint64_t{dst} << 40 | uint64_t{protocol} << 32 | uint64_t{sport} << 16 | dport};
}

FlowKey reversed(FlowKey key) {
    const uint64_t k = key.ports_and_hosts;
    return make_flow_key(k >> 40 & 255, k >> 48 & 255, protocol_of(key), k & 0xffff, k >> 16 & 0xffff);
}

uint8_t protocol_of(FlowKey key) { return static_cast<uint8_t>(key.ports_and_hosts >> 32); }

bool is_v6(Packet* packet) { return packet->ip()[0] >> 4 == 6; }

bool is_unfragmented(Packet* packet) { return (load16(packet->ip() + 6) & 0x3fff) == 0; }

bool parse(Packet* packet, uint16_t* sport, uint16_t* dport) {
    if (packet->len < sizeof(VirtioHeader) + kIp4Header) return false;
    const uint8_t* ip = packet->ip();
    const uint32_t bytes = packet->len - sizeof(VirtioHeader);
    const bool v6 = is_v6(packet);
    if (!v6 && ip[0] >> 4 != 4) return false;
    const uint32_t ip_header = v6 ? kIp6Header : (ip[0] & 15u) * 4;
    if (ip_header < kIp4Header || ip_header > bytes) return false;
    packet->protocol = v6 ? ip[6] : ip[9];
    packet->ip_header = static_cast<uint8_t>(ip_header);
    packet->entering = 0;
    *sport = *dport = 0;
    packet->header = static_cast<uint16_t>(ip_header);
    const bool whole = v6 || is_unfragmented(packet);
    if (whole && packet->protocol == kTcp && bytes >= ip_header + kTcpHeader) {
        const uint32_t tcp_header = (ip[ip_header + 12] >> 4) * 4u;
        if (tcp_header < kTcpHeader || ip_header + tcp_header > bytes) return false;
        packet->header = static_cast<uint16_t>(ip_header + tcp_header);
    } else if (whole && packet->protocol == kUdp && bytes >= ip_header + kUdpHeader) {
        packet->header = static_cast<uint16_t>(ip_header + kUdpHeader);
    }
    if (packet->header > ip_header) {
        *sport = load16(ip + ip_header);
        *dport = load16(ip + ip_header + 2);
    }
    count(packet);
    return true;
}

uint32_t source(Packet* packet) { return load32(packet->ip() + 12); }
uint32_t destination(Packet* packet) { return load32(packet->ip() + 16); }
uint16_t last_of_destination6(Packet* packet) { return load16(packet->ip() + 38); }

bool translatable_ports(Packet* packet, uint16_t* sport, uint16_t* dport) {
    const uint8_t* transport = packet->ip() + packet->ip_header;
    if (is_v6(packet) || !is_unfragmented(packet)) return false;
    if (packet->header > packet->ip_header) {
        *sport = load16(transport);
        *dport = load16(transport + 2);
        return true;
    }
    const bool echo = packet->protocol == kIcmp && packet->len >= sizeof(VirtioHeader) + packet->ip_header + 8u &&
                      (transport[0] == kEcho || transport[0] == kEchoReply);
    if (echo) *sport = *dport = load16(transport + 4);
    return echo;
}

bool opens_tcp(Packet* packet) {
    if (packet->protocol != kTcp || packet->header == packet->ip_header) return false;
    return (packet->ip()[packet->ip_header + 13] & (kSyn | kAck)) == kSyn;
}

namespace {

// at: offset of the address in the IP header; port_at: offset of the port in the transport header.
void set_end(Packet* packet, uint32_t at, uint32_t port_at, uint32_t address, uint16_t port) {
    uint8_t* ip = packet->ip();
    uint8_t* transport = ip + packet->ip_header;
    const uint32_t before = load32(ip + at);
    store32(ip + at, address);
    update(ip + 10, before, address);
    if (packet->protocol == kIcmp) {
        update16(transport + 2, load16(transport + 4), port);
        store16(transport + 4, port);
        return;
    }
    const uint16_t port_before = load16(transport + port_at);
    store16(transport + port_at, port);
    uint8_t* checksum = transport + (packet->protocol == kTcp ? 16 : 6);
    if (packet->virtio()->flags & kNeedsChecksum) {  // the field holds the sum of the pseudo-header only
        store16(checksum, changed(load16(checksum), before, address));
    } else if (packet->protocol == kTcp || load16(checksum) != 0) {
        update(checksum, before, address);
        update16(checksum, port_before, port);
    }
}

Packet* make_packet(PacketPool& pool, uint8_t protocol, uint32_t from, uint32_t to, uint32_t bytes) {
    Packet* packet = pool.get(sizeof(VirtioHeader) + kIp4Header + bytes);
    packet->len = static_cast<uint32_t>(sizeof(VirtioHeader)) + kIp4Header + bytes;
    packet->protocol = protocol;
    packet->ip_header = kIp4Header;
    packet->entering = 0;
    std::memset(packet->data(), 0, packet->len);
    uint8_t* ip = packet->ip();
    ip[0] = 0x45;
    store16(ip + 2, kIp4Header + bytes);
    ip[8] = 64;
    ip[9] = protocol;
    store32(ip + 12, from);
    store32(ip + 16, to);
    store16(ip + 10, static_cast<uint16_t>(~fold(sum16(ip, kIp4Header))));
    return packet;
}

}  // namespace

void set_source(Packet* packet, uint32_t address, uint16_t port) { set_end(packet, 12, 0, address, port); }
void set_destination(Packet* packet, uint32_t address, uint16_t port) { set_end(packet, 16, 2, address, port); }

Packet* make_udp(PacketPool& pool, uint32_t from, uint16_t sport, uint32_t to, uint16_t dport, const uint8_t* data,
                 size_t bytes) {
    const uint32_t length = kUdpHeader + static_cast<uint32_t>(bytes);
    Packet* packet = make_packet(pool, kUdp, from, to, length);
    uint8_t* udp = packet->ip() + kIp4Header;
    store16(udp, sport);
    store16(udp + 2, dport);
    store16(udp + 4, length);  // no checksum: IPv4 allows that
    if (bytes > 0) std::memcpy(udp + kUdpHeader, data, bytes);
    packet->header = kIp4Header + kUdpHeader;
    count(packet);
    return packet;
}

Packet* make_reset(PacketPool& pool, Packet* refused) {
    const uint8_t* asked = refused->ip() + refused->ip_header;
    Packet* packet = make_packet(pool, kTcp, destination(refused), source(refused), kTcpHeader);
    uint8_t* tcp = packet->ip() + kIp4Header;
    std::memcpy(tcp, asked + 2, 2);
    std::memcpy(tcp + 2, asked, 2);
    store32(tcp + 8, load32(asked + 4) + 1);
    tcp[12] = kTcpHeader / 4 << 4;
    tcp[13] = kReset | kAck;
    const uint32_t sum = sum16(packet->ip() + 12, 8) + kTcp + kTcpHeader + sum16(tcp, kTcpHeader);
    store16(tcp + 16, static_cast<uint16_t>(~fold(sum)));
    packet->header = kIp4Header + kTcpHeader;
    count(packet);
    return packet;
}

void flip(Packet* packet, uint32_t bit) {
    uint8_t* ip = packet->ip();
    const uint32_t at = packet->header + bit / 8;
    const uint8_t mask = static_cast<uint8_t>(1 << bit % 8);
    ip[at] ^= mask;
    if (packet->virtio()->flags & kNeedsChecksum) return;  // the receiver computes the checksum, or needs none
    const uint32_t ip_header = packet->ip_header;
    uint8_t* field = ip + ip_header + (packet->protocol == kTcp ? 16 : 6);
    if (packet->protocol != kTcp && load16(field) == 0) return;  // a datagram without a checksum
    const uint32_t word = (at - ip_header) % 2 == 0 ? uint32_t{mask} << 8 : mask;
    const bool set = ip[at] & mask;  // RFC 1624: the sum of the words changed by +word or -word
    store16(field, static_cast<uint16_t>(~fold((load16(field) ^ 0xffffu) + (set ? word : 0xffffu - word))));
}

Packet* slice(PacketPool& pool, Packet* packet, uint32_t first, uint32_t n) {
    const uint32_t total = packet->len - sizeof(VirtioHeader) - packet->header;
    const uint32_t begin = first * packet->payload;
    uint32_t bytes = n * packet->payload;
    const bool last = begin + bytes >= total;
    if (last) bytes = total - begin;

    const uint32_t prefix = sizeof(VirtioHeader) + packet->header;
    Packet* part = pool.get(prefix + bytes);
    part->flow = packet->flow;
    part->len = prefix + bytes;
    part->header = packet->header;
    part->src = packet->src;
    part->dst = packet->dst;
    part->stage = packet->stage;
    part->protocol = packet->protocol;
    part->ip_header = packet->ip_header;
    part->entering = packet->entering;
    std::memcpy(part->data(), packet->data(), prefix);
    std::memcpy(part->data() + prefix, packet->data() + prefix + begin, bytes);

    VirtioHeader* virtio = part->virtio();
    if (bytes <= virtio->gso_size) {
        virtio->gso_type = 0;
        virtio->gso_size = 0;
    }
    uint8_t* ip = part->ip();
    const uint32_t ip_header = packet->ip_header;
    const bool v6 = is_v6(packet);
    uint8_t* tcp = ip + ip_header;
    if (v6) {
        store16(ip + 4, packet->header - ip_header + bytes);
    } else {
        store16(ip + 2, packet->header + bytes);
        store16(ip + 4, load16(ip + 4) + first);
        store16(ip + 10, 0);
        store16(ip + 10, static_cast<uint16_t>(~fold(sum16(ip, ip_header))));
    }
    store32(tcp + 4, load32(tcp + 4) + begin);
    if (!last) tcp[13] &= static_cast<uint8_t>(~(kFin | kPush));
    if (first != 0) tcp[13] &= static_cast<uint8_t>(~kCwr);
    if (virtio->flags & kNeedsChecksum) {  // the field holds the pseudo-header's sum, which counts the length
        const uint32_t tcp_bytes = packet->header - ip_header + bytes;
        const uint32_t addresses = v6 ? sum16(ip + 8, 32) : sum16(ip + 12, 8);
        store16(tcp + 16, fold(addresses + kTcp + tcp_bytes));
    }
    count(part);
    return part;
}

}  // namespace lab
