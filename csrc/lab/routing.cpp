// The routing of packets through gateways: their translation on the way out and in, and the gateways' own answers.
#include "network.h"
#include "port_mapping.h"

namespace lab {
namespace {

constexpr double kInside = 2e5;  // ns: to the gateway and back

}  // namespace

int Network::host_in(int net, uint32_t address) const {
    for (size_t i = 0; i < size(); ++i)
        if (hosts_[i].gateway == net && hosts_[i].address == address && address != 0) return static_cast<int>(i);
    return -1;
}

int Network::gateway_in(int net, uint32_t address) const {
    for (size_t g = 0; g < gateways_.size(); ++g)
        if (gateways_[g].parent == net && gateways_[g].external == address) return static_cast<int>(g);
    return -1;
}

// The host to which a port of a gateway is mapped, or, without a mapping, one whose path to the gateway is as long.
int Network::likely_host(int gateway, uint8_t protocol, uint16_t port, Nanoseconds now) {
    if (const Mapping* mapped = gateways_[gateway].find(protocol, port, now)) {
        const int host = host_in(gateway, mapped->inside.address);
        if (host >= 0) return host;
        const int inner = gateway_in(gateway, mapped->inside.address);
        if (inner >= 0) return likely_host(inner, protocol, mapped->inside.port, now);
    }
    for (size_t i = 0; i < size(); ++i)
        for (int g = hosts_[i].gateway; g != -1; g = gateways_[g].parent)
            if (g == gateway) return static_cast<int>(i);
    return -1;
}

bool Network::translate_out(Packet* packet, Gateway& gateway, Nanoseconds now) {
    uint16_t sport, dport;
    if (!translatable_ports(packet, &sport, &dport)) return false;
    const uint16_t remote = packet->protocol == kIcmp ? 0 : dport;
    const uint16_t port =
        gateway.leaves(packet->protocol, {source(packet), sport}, {destination(packet), remote}, now);
    if (port == 0) return false;
    set_source(packet, gateway.external, port);
    return true;
}

bool Network::translate_in(Packet* packet, Nanoseconds now) {
    int at = packet->entering - 1;
    const uint32_t asked = destination(packet);
    uint16_t asked_port, sport, dport;
    if (!translatable_ports(packet, &sport, &asked_port)) return false;
    auto keep_out = [&] {
        set_destination(packet, asked, asked_port);
        return false;
    };
    while (true) {
        translatable_ports(packet, &sport, &dport);
        const uint16_t remote = packet->protocol == kIcmp ? 0 : sport;
        const Mapping* mapped = gateways_[at].enters(packet->protocol, dport, {source(packet), remote}, now);
        if (mapped == nullptr) return keep_out();
        set_destination(packet, mapped->inside.address, mapped->inside.port);
        const int host = host_in(at, mapped->inside.address);
        const int inner = gateway_in(at, mapped->inside.address);
        if (host < 0 && inner < 0) return keep_out();
        if (host >= 0) {
            packet->dst = static_cast<uint8_t>(host);
            packet->entering = 0;
            return true;
        }
        at = inner;
    }
}

Network::Way Network::route(PacketPool& pool, Packet* packet, int net, Nanoseconds now) {
    while (true) {
        const uint32_t to = destination(packet);
        const int host = host_in(net, to);
        if (host >= 0) {
            packet->dst = static_cast<uint8_t>(host);
            return host == packet->src ? Way::kNowhere : Way::kHost;
        }
        int entering = gateway_in(net, to);
        if (net >= 0) {
            Gateway& own = gateways_[net];
            if (to == own.inside) {
                answer(pool, packet, own, now);
                return Way::kAnswered;
            }
            if (to == own.external && own.hairpin) entering = net;
            if (to == own.external && !own.hairpin) return Way::kNowhere;
            if (entering < 0 || entering == net) {
                if (!translate_out(packet, own, now)) return Way::kNowhere;
            }
        }
        if (entering >= 0) {
            uint16_t sport, dport;
            if (!translatable_ports(packet, &sport, &dport)) return Way::kNowhere;
            const int likely = likely_host(entering, packet->protocol, dport, now);
            if (likely < 0) return Way::kNowhere;
            packet->dst = static_cast<uint8_t>(likely);
            packet->entering = static_cast<uint8_t>(entering + 1);
            return Way::kEntering;
        }
        if (net < 0) return Way::kNowhere;
        net = gateways_[net].parent;
    }
}

void Network::answer(PacketPool& pool, Packet* packet, Gateway& gateway, Nanoseconds now) {
    uint16_t sport, dport;
    if (packet->protocol != kUdp || !translatable_ports(packet, &sport, &dport) || dport != kPortMappingPort) return;
    const Endpoint4 client{source(packet), sport};
    const std::vector<uint8_t> text = answer_port_mapping(
        gateway, client, packet->ip() + packet->header, packet->len - sizeof(VirtioHeader) - packet->header, now);
    if (text.empty()) return;
    Packet* reply =
        make_udp(pool, gateway.inside, kPortMappingPort, client.address, client.port, text.data(), text.size());
    reply->src = reply->dst = packet->src;
    reply->flow = find_flow(make_flow_key(packet->src, packet->src, kUdp, kPortMappingPort, client.port), now);
    reply->flow->in_flight += 1;
    reply->stage = kArrives;
    push(reply, now + static_cast<Nanoseconds>(kInside));
}

// Lets a gateway refuse a connection by an RST that comes from the address of the packet's destination.
void Network::reset(PacketPool& pool, Packet* refused, Nanoseconds now) {
    Packet* reply = make_reset(pool, refused);
    reply->src = refused->dst;
    const Way way = route(pool, reply, gateways_[refused->entering - 1].parent, now);
    if (way != Way::kHost && way != Way::kEntering) return drop(pool, reply);
    uint16_t sport, dport;
    translatable_ports(reply, &sport, &dport);
    reply->flow = find_flow(make_flow_key(reply->src, reply->dst, reply->protocol, sport, dport), now);
    enter_flow(pool, reply, path(reply->src, reply->dst), now);
}

}  // namespace lab
