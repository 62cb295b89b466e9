#include "network.h"

#include <algorithm>
#include <cmath>

namespace lab {
namespace {

constexpr double kShortestQueue = 5e6;         // ns: the queue of a short path holds the bytes of this time at its rate
constexpr double kSmallestQueue = 128 * 1024;  // bytes: two super-packets
constexpr double kPieceTime = 1e6;             // ns: the longest time of a slice of a super-packet
constexpr Nanoseconds kFlowIdle = 120'000'000'000;
constexpr size_t kManyFlows = 4096;

double segment_bytes(const Packet* packet) {
    return packet->segments == 1 ? packet->wire : packet->payload + packet->header;
}

double ns_per_byte(double bps) { return bps > 0 ? 8e9 / bps : 0; }

double limit_of(double queue_bytes, double bps, double rtt_ns) {
    if (queue_bytes > 0) return queue_bytes;
    return std::max(kSmallestQueue, bps / 8e9 * std::max(rtt_ns, kShortestQueue));
}

}  // namespace

uint32_t Shaper::fit(double now, uint32_t segments, double segment_bytes) const {
    if (ns_per_byte == 0) return segments;
    const double waiting = free_at > now ? (free_at - now) / ns_per_byte : 0;
    const double room = (limit - waiting) / segment_bytes;
    const uint32_t fitting = room > 0 ? static_cast<uint32_t>(std::min(room, 1e6)) : 0;
    return std::min(segments, waiting == 0 ? std::max(fitting, 1u) : fitting);
}

double Shaper::pass(double now, double bytes) {
    if (ns_per_byte == 0) return std::max(free_at, now);  // the cap was lifted, but waiting packets still leave first
    free_at = std::max(free_at, now) + bytes * ns_per_byte;
    return free_at;
}

Network::Network(size_t hosts, uint64_t seed) : hosts_(hosts), paths_(hosts * hosts), random_(seed) {}

double Network::draw() {  // splitmix64
    uint64_t z = (random_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

double Network::draw_loss_gap(double loss) {  // geometric: segments that pass before one is lost
    if (loss >= 1) return 0;
    return std::floor(std::log1p(-draw()) / std::log1p(-loss));
}

void Network::corrupt(Packet* packet, Path& path) {
    const uint32_t payload = packet->len - sizeof(VirtioHeader) - packet->header;
    if (payload == 0 || draw() >= 1 - std::pow(1 - path.corrupt, packet->segments)) return;
    flip(packet, static_cast<uint32_t>(draw() * payload * 8));
    path.counters.corrupted_packets += 1;
}

void Network::configured() {
    shortest_delay_ = 1e18;
    for (size_t i = 0; i < size(); ++i) {
        double longest = 0;
        for (size_t j = 0; j < size(); ++j) {
            Path& path = this->path(i, j);
            if (i != j) shortest_delay_ = std::min(shortest_delay_, path.delay_ns);
            path.from_nat = hosts_[i].behind_nat;
            path.to_nat = hosts_[j].behind_nat;
            const double rtt = path.delay_ns + this->path(j, i).delay_ns;
            longest = std::max(longest, rtt);
            path.shaper.ns_per_byte = ns_per_byte(path.rate_bps);
            path.shaper.limit = limit_of(path.queue_bytes, path.rate_bps, rtt);
            rate_of(path).ns_per_byte = path.shaper.ns_per_byte;
            rate_of(path).limit = path.shaper.limit;
            path.flow_limit = limit_of(path.queue_bytes, path.flow_bps, rtt);
            if (path.loss <= 0) path.to_next_loss = -1;
        }
        Host& host = hosts_[i];
        if (!host.behind_nat) host.nat.clear();
        host.egress.ns_per_byte = ns_per_byte(host.egress_bps);
        host.egress.limit = limit_of(host.queue_bytes, host.egress_bps, longest);
        host.ingress.ns_per_byte = ns_per_byte(host.ingress_bps);
        host.ingress.limit = limit_of(host.queue_bytes, host.ingress_bps, longest);
    }
    for (auto& [key, flow] : flows_) {
        const Path& path = this->path(key.ports_and_hosts >> 48 & 255, key.ports_and_hosts >> 40 & 255);
        flow.shaper.ns_per_byte = ns_per_byte(path.flow_bps);
        flow.shaper.limit = path.flow_limit;
        flow.cut = is_cut(key);
    }
}

void Network::cut_flow(FlowRule rule) {
    cut_.push_back(rule);
    configured();
}

void Network::restore_flows(uint8_t src, uint8_t dst) {
    std::erase_if(cut_, [&](const FlowRule& rule) { return rule.src == src && rule.dst == dst; });
    configured();
}

bool Network::is_cut(const FlowKey& key) const {
    const uint64_t k = key.ports_and_hosts;
    for (const FlowRule& rule : cut_) {
        if (rule.src == (k >> 48 & 255) && rule.dst == (k >> 40 & 255) &&
            (rule.sport == 0 || rule.sport == (k >> 16 & 0xffff)) && (rule.dport == 0 || rule.dport == (k & 0xffff)))
            return true;
    }
    return false;
}

Flow* Network::find_flow(const FlowKey& key, Nanoseconds now) {
    auto [where, created] = flows_.try_emplace(key);
    Flow& flow = where->second;
    flow.seen = now;
    if (created) {
        flow.key = key;
        const Path& path = this->path(key.ports_and_hosts >> 48 & 255, key.ports_and_hosts >> 40 & 255);
        flow.shaper.ns_per_byte = ns_per_byte(path.flow_bps);
        flow.shaper.limit = path.flow_limit;
        flow.cut = is_cut(key);
        if (flows_.size() % kManyFlows == 0) {
            std::erase_if(flows_, [&](const auto& item) {
                return item.second.in_flight == 0 && now - item.second.seen > kFlowIdle;
            });
        }
    }
    return &flow;
}

void Network::push(Packet* packet, Nanoseconds due) { heap_.push({due, order_++, packet}); }

void Network::drop(PacketPool& pool, Packet* packet) { pool.put(packet); }

uint32_t Network::piece_segments(const Path& path, const Packet* packet) const {
    double slowest = std::max({path.shaper.ns_per_byte, hosts_[packet->src].egress.ns_per_byte,
                               hosts_[packet->dst].ingress.ns_per_byte, packet->flow->shaper.ns_per_byte});
    if (slowest == 0) return packet->segments;
    const double segment_ns = (packet->payload + packet->header) * slowest;
    return std::clamp<uint32_t>(static_cast<uint32_t>(kPieceTime / segment_ns), 1, packet->segments);
}

void Network::admit(PacketPool& pool, Packet* packet, uint8_t src, Nanoseconds now) {
    uint16_t sport, dport;
    if (!parse(packet, &sport, &dport)) return drop(pool, packet);
    packet->src = src;
    if (is_v6(packet)) {
        const uint16_t last = last_of_destination6(packet);
        if (last == 0 || last > size() || last - 1 == src || !hosts_[last - 1].has_v6) return drop(pool, packet);
        packet->dst = static_cast<uint8_t>(last - 1);
    } else {
        const Way way = route(pool, packet, hosts_[src].gateway, now);
        if (way == Way::kNowhere || way == Way::kAnswered) return drop(pool, packet);
        if (packet->header > packet->ip_header) translatable_ports(packet, &sport, &dport);
    }
    Path& path = this->path(src, packet->dst);
    path.counters.sent_packets += packet->segments;
    path.counters.sent_bytes += packet->wire;
    packet->flow = find_flow(make_flow_key(src, packet->dst, packet->protocol, sport, dport), now);
    const bool filtered = packet->protocol == kUdp && (hosts_[src].drop_udp || hosts_[packet->dst].drop_udp);
    if (path.down || packet->flow->cut || filtered) {
        path.counters.cut_packets += packet->segments;
        return drop(pool, packet);
    }
    if (path.corrupt > 0) corrupt(packet, path);
    if (path.from_nat) hosts_[src].nat.sent(packet->flow->key, now);

    const uint32_t most = piece_segments(path, packet);
    const uint32_t total = packet->segments;
    for (uint32_t first = 0; first < total;) {
        uint32_t n = std::min(most, total - first);
        bool lose = false;
        if (path.loss > 0) {
            if (path.to_next_loss < 0) path.to_next_loss = draw_loss_gap(path.loss);
            if (path.to_next_loss < 1) {
                n = 1;
                lose = true;
                path.to_next_loss = draw_loss_gap(path.loss);
            } else {
                n = static_cast<uint32_t>(std::min<double>(n, path.to_next_loss));
                path.to_next_loss -= n;
            }
        }
        // Only super-packets are sliced, as the header of a single segment must not be rewritten.
        Packet* piece = n == total ? packet : slice(pool, packet, first, n);
        first += n;
        if (lose) {
            path.counters.lost_packets += 1;
            if (piece != packet) drop(pool, piece);
            else return drop(pool, packet);
            continue;
        }
        enter_flow(pool, piece, path, now);
        if (piece == packet) return;
    }
    drop(pool, packet);
}

// The order of stages: the flow's cap, the sender's egress cap, the pair's rate, the delay, the receiver's ingress cap.
// Each stage handles packets in order of time. Packets of several flows leave the flows' caps, and arrive at the ends
// of paths, out of order, so they wait in the heap for their time there. The egress cap and the pair's rate keep the
// order, and are computed at once.
void Network::enter_flow(PacketPool& pool, Packet* piece, Path& path, Nanoseconds now) {
    Shaper& shaper = piece->flow->shaper;
    piece->flow->in_flight += 1;
    if (shaper.ns_per_byte == 0 && shaper.free_at <= double(now)) return enter_path(pool, piece, path, double(now));
    piece = keep(pool, piece, path, shaper.fit(double(now), piece->segments, segment_bytes(piece)));
    if (piece == nullptr) return;
    piece->stage = kLeavesFlow;
    push(piece, static_cast<Nanoseconds>(shaper.pass(double(now), piece->wire)));
}

void Network::enter_path(PacketPool& pool, Packet* piece, Path& path, double now) {
    Host& sender = hosts_[piece->src];
    piece = keep(pool, piece, path, sender.egress.fit(now, piece->segments, segment_bytes(piece)));
    if (piece == nullptr) return;
    double t = sender.egress.pass(now, piece->wire);
    Shaper& rate = rate_of(path);
    piece = keep(pool, piece, path, rate.fit(t, piece->segments, segment_bytes(piece)));
    if (piece == nullptr) return;
    t = rate.pass(t, piece->wire);

    double delay = path.delay_ns;
    if (path.jitter_ns > 0) delay = std::max(0.0, delay + (2 * draw() - 1) * path.jitter_ns);
    Flow& flow = *piece->flow;
    flow.last_due = std::max(static_cast<Nanoseconds>(t + delay), flow.last_due);
    const Shaper& ingress = hosts_[piece->dst].ingress;
    piece->stage = ingress.ns_per_byte != 0 || ingress.free_at > double(now) ? kLeavesPath : kArrives;
    push(piece, flow.last_due);
}

void Network::enter_ingress(PacketPool& pool, Packet* piece, Path& path, double now) {
    Shaper& ingress = hosts_[piece->dst].ingress;
    piece = keep(pool, piece, path, ingress.fit(now, piece->segments, segment_bytes(piece)));
    if (piece == nullptr) return;
    piece->stage = kArrives;
    push(piece, static_cast<Nanoseconds>(ingress.pass(now, piece->wire)));
}

// The first segments of a packet, as many as a queue has room for; the others are dropped. Null: all are dropped.
Packet* Network::keep(PacketPool& pool, Packet* piece, Path& path, uint32_t segments) {
    if (segments == piece->segments) return piece;
    path.counters.dropped_packets += piece->segments - segments;
    Packet* kept = segments == 0 ? nullptr : slice(pool, piece, 0, segments);
    if (kept == nullptr) piece->flow->in_flight -= 1;
    drop(pool, piece);
    return kept;
}

Packet* Network::pop(PacketPool& pool, Nanoseconds now, Nanoseconds* due) {
    while (!heap_.empty() && heap_.top().due <= now) {
        *due = heap_.top().due;
        Packet* packet = heap_.top().packet;
        heap_.pop();
        Path& path = this->path(packet->src, packet->dst);
        bool kept_out = path.to_nat && packet->stage != kLeavesFlow &&
                        !hosts_[packet->dst].nat.admits(packet->flow->key, *due);
        if (packet->entering != 0 && packet->stage != kLeavesFlow && !path.down && !kept_out) {
            const Gateway& first = gateways_[packet->entering - 1];
            kept_out = !translate_in(packet, *due);
            if (kept_out && first.resets && opens_tcp(packet)) reset(pool, packet, *due);
        }
        if (path.down || packet->flow->cut || kept_out) {
            path.counters.cut_packets += packet->segments;
            packet->flow->in_flight -= 1;
            drop(pool, packet);
        } else if (packet->stage == kLeavesFlow) {
            enter_path(pool, packet, path, double(*due));
        } else if (packet->stage == kLeavesPath) {
            enter_ingress(pool, packet, path, double(*due));
        } else {
            return packet;
        }
    }
    return nullptr;
}

void Network::delivered(PacketPool& pool, Packet* packet) {
    Counters& counters = path(packet->src, packet->dst).counters;
    counters.delivered_packets += packet->segments;
    counters.delivered_bytes += packet->wire;
    packet->flow->in_flight -= 1;
    pool.put(packet);
}

}  // namespace lab
