// The emulated network, which decides when, and whether, a packet arrives. No I/O: time and packets are arguments.
#pragma once

#include <cstdint>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "gateway.h"
#include "nat.h"
#include "packet.h"

namespace lab {

// A FIFO queue with a rate and a tail-drop limit. Its state is the time at which its last byte will have left.
struct Shaper {
    double ns_per_byte = 0;  // 0: unlimited
    double limit = 0;        // bytes that may wait
    double free_at = 0;      // ns

    uint32_t fit(double now, uint32_t segments, double segment_bytes) const;
    double pass(double now, double bytes);  // the time at which these bytes have left
};

struct Flow {
    FlowKey key;
    Shaper shaper;
    Nanoseconds last_due = 0;
    Nanoseconds seen = 0;
    uint32_t in_flight = 0;
    bool cut = false;
};

struct Counters {
    uint64_t sent_packets = 0, sent_bytes = 0;            // offered by the sender, in packets and bytes of the wire
    uint64_t delivered_packets = 0, delivered_bytes = 0;
    uint64_t lost_packets = 0;     // dropped by the loss rate
    uint64_t dropped_packets = 0;  // dropped because a queue was full
    uint64_t corrupted_packets = 0;  // delivered with a flipped bit
    uint64_t cut_packets = 0;        // dropped because the path or the flow was down, or by a firewall or NAT
};

struct Path {  // one ordered pair of hosts
    double delay_ns = 0, jitter_ns = 0, loss = 0, corrupt = 0, rate_bps = 0, flow_bps = 0;
    double queue_bytes = 0;  // 0: one bandwidth-delay product
    double shared = 0;       // the number of the queue that all paths with this number share; 0: the path has its own
    bool down = false;
    bool from_nat = false, to_nat = false;  // derived: whether the sender, or the receiver, is behind a NAT
    double flow_limit = 0;
    Shaper shaper;
    double to_next_loss = -1;  // segments until the next loss; < 0: not drawn yet
    Counters counters;
};

struct Host {
    double egress_bps = 0, ingress_bps = 0, queue_bytes = 0;
    Shaper egress, ingress;
    bool behind_nat = false;
    Nat nat;
    uint32_t address = 0;  // IPv4, host order; 0: none
    bool has_v6 = false;
    int gateway = -1;      // number of the gateway in front of the host; -1: none
    bool drop_udp = false;
};

struct FlowRule {
    uint8_t src, dst;
    uint16_t sport, dport;  // 0: any
};

class Network {
public:
    explicit Network(size_t hosts, uint64_t seed);

    size_t size() const { return hosts_.size(); }
    Host& host(size_t i) { return hosts_[i]; }
    Path& path(size_t i, size_t j) { return paths_[i * hosts_.size() + j]; }
    std::vector<Gateway>& gateways() { return gateways_; }
    const std::vector<Gateway>& gateways() const { return gateways_; }
    void cut_flow(FlowRule rule);
    void restore_flows(uint8_t src, uint8_t dst);
    void configured();  // derives shapers and queue limits; to be called after any change

    // Takes a packet of host src, and owns it from then on.
    void admit(PacketPool& pool, Packet* packet, uint8_t src, Nanoseconds now);
    // The time at which the next packet is due; INT64_MAX: none is in flight.
    Nanoseconds next_due() const { return heap_.empty() ? INT64_MAX : heap_.top().due; }
    // The next packet to hand over at or before `now`, with the time it was due, or null.
    Packet* pop(PacketPool& pool, Nanoseconds now, Nanoseconds* due);
    void delivered(PacketPool& pool, Packet* packet);
    size_t in_flight() const { return heap_.size(); }
    double shortest_delay_ns() const { return shortest_delay_; }

private:
    struct Event {
        Nanoseconds due;
        uint64_t order;
        Packet* packet;
        bool operator>(const Event& other) const {
            return due != other.due ? due > other.due : order > other.order;
        }
    };

    enum Stage : uint8_t { kLeavesFlow, kLeavesPath, kArrives };
    enum class Way : uint8_t { kNowhere, kHost, kEntering, kAnswered };

    // In routing.cpp.

    // Routes a packet from the network behind gateway `net` (-1: the public one): translates its source at each gateway
    // on the way out, and sets dst, and entering where a gateway has to let it in.
    Way route(PacketPool& pool, Packet* packet, int net, Nanoseconds now);
    bool translate_out(Packet* packet, Gateway& gateway, Nanoseconds now);
    // Called on arrival: translates the destination at each gateway on the way to a host. False: a gateway drops it.
    bool translate_in(Packet* packet, Nanoseconds now);
    int host_in(int net, uint32_t address) const;     // -1: none
    int gateway_in(int net, uint32_t address) const;  // -1: none
    int likely_host(int gateway, uint8_t protocol, uint16_t port, Nanoseconds now);
    void answer(PacketPool& pool, Packet* packet, Gateway& gateway, Nanoseconds now);
    void reset(PacketPool& pool, Packet* refused, Nanoseconds now);

    // In network.cpp.

    void push(Packet* packet, Nanoseconds due);
    void drop(PacketPool& pool, Packet* packet);
    void enter_flow(PacketPool& pool, Packet* piece, Path& path, Nanoseconds now);
    void enter_path(PacketPool& pool, Packet* piece, Path& path, double now);
    void enter_ingress(PacketPool& pool, Packet* piece, Path& path, double now);
    Packet* keep(PacketPool& pool, Packet* piece, Path& path, uint32_t segments);
    uint32_t piece_segments(const Path& path, const Packet* packet) const;
    Flow* find_flow(const FlowKey& key, Nanoseconds now);
    bool is_cut(const FlowKey& key) const;
    double draw();
    void corrupt(Packet* packet, Path& path);
    double draw_loss_gap(double loss);
    Shaper& rate_of(Path& path) { return path.shared > 0 ? shared_[static_cast<uint32_t>(path.shared)] : path.shaper; }

    std::vector<Host> hosts_;
    std::vector<Gateway> gateways_;
    std::vector<Path> paths_;
    std::unordered_map<uint32_t, Shaper> shared_;  // by number: rates that several paths share
    std::vector<FlowRule> cut_;
    std::unordered_map<FlowKey, Flow, FlowKeyHash> flows_;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> heap_;
    uint64_t order_ = 0;
    uint64_t random_;
    double shortest_delay_ = 0;
};

}  // namespace lab
