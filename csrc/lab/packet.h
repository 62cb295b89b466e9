// One IPv4 or IPv6 packet as it crosses the router: a virtio header, then the packet, possibly a TSO super-packet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lab {

struct VirtioHeader {  // struct virtio_net_hdr of linux/virtio_net.h, little-endian on every machine that we support
    uint8_t flags;
    uint8_t gso_type;
    uint16_t hdr_len;
    uint16_t gso_size;
    uint16_t csum_start;
    uint16_t csum_offset;
};
static_assert(sizeof(VirtioHeader) == 10);

constexpr uint8_t kIcmp = 1, kTcp = 6, kUdp = 17;  // the protocol field of an IP header
constexpr size_t kMaxPacket = 65536 + sizeof(VirtioHeader);

struct Flow;

struct Packet {
    Packet* next;       // free list
    Flow* flow;
    uint32_t len;       // bytes in data: virtio header and packet
    uint32_t capacity;
    uint32_t segments;  // MTU-sized packets on the wire
    uint32_t wire;      // IP bytes on the wire, all segments' headers counted
    uint16_t header;    // bytes of IP + TCP/UDP header
    uint16_t payload;   // payload bytes of a full segment
    uint8_t size_class;
    uint8_t src, dst;   // host indices
    uint8_t protocol;   // TCP, UDP, ICMP
    uint8_t ip_header;  // bytes of the IP header
    uint8_t entering;   // 1 + the gateway that must still let the packet in; 0: none
    uint8_t stage;      // the stage of Network for which the packet waits
    uint8_t* data() { return reinterpret_cast<uint8_t*>(this + 1); }
    uint8_t* ip() { return data() + sizeof(VirtioHeader); }
    VirtioHeader* virtio() { return reinterpret_cast<VirtioHeader*>(data()); }
};

// Buffers of a few sizes, so that an ACK in flight does not occupy 64 KB.
class PacketPool {
public:
    Packet* get(size_t bytes);
    void put(Packet* packet);
    uint64_t held_bytes() const { return held_; }

private:
    static constexpr int kClasses = 4;
    Packet* free_[kClasses] = {};
    uint64_t held_ = 0;
};

struct FlowKey {
    uint64_t ports_and_hosts;  // src host, dst host, protocol, source port, destination port
    bool operator==(const FlowKey& other) const { return ports_and_hosts == other.ports_and_hosts; }
};

struct FlowKeyHash {
    size_t operator()(const FlowKey& key) const {
        uint64_t x = key.ports_and_hosts * 0x9E3779B97F4A7C15ULL;
        return static_cast<size_t>(x ^ (x >> 32));
    }
};

FlowKey make_flow_key(uint8_t src, uint8_t dst, uint8_t protocol, uint16_t sport, uint16_t dport);
FlowKey reversed(FlowKey key);  // the flow of the answers
uint8_t protocol_of(FlowKey key);

// Reads the headers of a packet that came out of a TUN device. False: neither IPv4 nor IPv6, or malformed.
// Fills protocol, ip_header, segments, wire, header and payload, and the ports; 0 where a packet has none.
bool parse(Packet* packet, uint16_t* sport, uint16_t* dport);

bool is_v6(Packet* packet);
uint32_t source(Packet* packet);       // of IPv4, host order
uint32_t destination(Packet* packet);  // of IPv4, host order
uint16_t last_of_destination6(Packet* packet);  // the last 16 bits of an IPv6 destination
bool is_unfragmented(Packet* packet);           // of IPv4

// The ports that a gateway translates: of TCP and UDP, and an ICMP echo's identifier as both. False: there are none.
bool translatable_ports(Packet* packet, uint16_t* sport, uint16_t* dport);
bool opens_tcp(Packet* packet);  // a SYN without ACK

// Writes another source or destination into an IPv4 packet, and updates the checksums.
void set_source(Packet* packet, uint32_t address, uint16_t port);
void set_destination(Packet* packet, uint32_t address, uint16_t port);

// New IPv4 packets; addresses are in host order.
Packet* make_udp(PacketPool& pool, uint32_t from, uint16_t sport, uint32_t to, uint16_t dport, const uint8_t* data,
                 size_t bytes);
Packet* make_reset(PacketPool& pool, Packet* refused);  // the answer to a SYN for a closed port

// Inverts one bit of the payload, counted from its first, and updates the checksum, so that the receiver's kernel does
// not detect the damage.
void flip(Packet* packet, uint32_t bit);

// A new packet with segments [first, first + count) of a TSO super-packet.
Packet* slice(PacketPool& pool, Packet* packet, uint32_t first, uint32_t count);

}  // namespace lab
