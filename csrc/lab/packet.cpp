#include "packet.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace lab {
namespace {

constexpr size_t kSizes[] = {256, 2048, 16384, kMaxPacket};
constexpr uint8_t kGsoTcp4 = 1, kGsoEcn = 0x80, kNeedsChecksum = 1;
constexpr uint8_t kTcp = 6;
constexpr uint8_t kFin = 0x01, kPush = 0x08, kCwr = 0x80;

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

void count(Packet* packet) {
    const uint32_t bytes = packet->len - sizeof(VirtioHeader);
    const VirtioHeader* virtio = packet->virtio();
    if ((virtio->gso_type & ~kGsoEcn) == kGsoTcp4 && virtio->gso_size != 0 && bytes > packet->header) {
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

bool parse(Packet* packet, uint8_t* protocol, uint16_t* sport, uint16_t* dport) {
    if (packet->len < sizeof(VirtioHeader) + 20) return false;
    const uint8_t* ip = packet->ip();
    const uint32_t bytes = packet->len - sizeof(VirtioHeader);
    if (ip[0] >> 4 != 4) return false;
    const uint32_t ip_header = (ip[0] & 15u) * 4;
    if (ip_header < 20 || ip_header > bytes) return false;
    *protocol = ip[9];
    *sport = *dport = 0;
    packet->header = static_cast<uint16_t>(ip_header);
    const bool fragment = (load16(ip + 6) & 0x3fff) != 0;
    if (!fragment && *protocol == kTcp && bytes >= ip_header + 20) {
        const uint32_t tcp_header = (ip[ip_header + 12] >> 4) * 4u;
        if (tcp_header < 20 || ip_header + tcp_header > bytes) return false;
        packet->header = static_cast<uint16_t>(ip_header + tcp_header);
    } else if (!fragment && *protocol == 17 && bytes >= ip_header + 8) {
        packet->header = static_cast<uint16_t>(ip_header + 8);
    }
    if (packet->header > ip_header) {
        *sport = load16(ip + ip_header);
        *dport = load16(ip + ip_header + 2);
    }
    count(packet);
    return true;
}

uint32_t destination(Packet* packet) { return load32(packet->ip() + 16); }

void flip(Packet* packet, uint32_t bit) {
    uint8_t* ip = packet->ip();
    const uint32_t at = packet->header + bit / 8;
    const uint8_t mask = static_cast<uint8_t>(1 << bit % 8);
    ip[at] ^= mask;
    if (packet->virtio()->flags & kNeedsChecksum) return;  // it is computed by the receiver, or not at all
    const uint32_t ip_header = (ip[0] & 15u) * 4;
    uint8_t* field = ip + ip_header + (ip[9] == kTcp ? 16 : 6);
    if (ip[9] != kTcp && load16(field) == 0) return;  // a datagram without one
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
    std::memcpy(part->data(), packet->data(), prefix);
    std::memcpy(part->data() + prefix, packet->data() + prefix + begin, bytes);

    VirtioHeader* virtio = part->virtio();
    if (bytes <= virtio->gso_size) {
        virtio->gso_type = 0;
        virtio->gso_size = 0;
    }
    uint8_t* ip = part->ip();
    const uint32_t ip_header = (ip[0] & 15u) * 4;
    uint8_t* tcp = ip + ip_header;
    store16(ip + 2, packet->header + bytes);
    store16(ip + 4, load16(ip + 4) + first);
    store16(ip + 10, 0);
    store16(ip + 10, static_cast<uint16_t>(~fold(sum16(ip, ip_header))));
    store32(tcp + 4, load32(tcp + 4) + begin);
    if (!last) tcp[13] &= static_cast<uint8_t>(~(kFin | kPush));
    if (first != 0) tcp[13] &= static_cast<uint8_t>(~kCwr);
    if (virtio->flags & kNeedsChecksum) {  // the field holds the pseudo-header's sum, which counts the length
        const uint32_t tcp_bytes = packet->header - ip_header + bytes;
        store16(tcp + 16, fold(sum16(ip + 12, 8) + 6 + tcp_bytes));
    }
    count(part);
    return part;
}

}  // namespace lab
