#include "control.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

#include "router.h"

namespace lab {
namespace {

constexpr size_t kLongestLine = 65536;
constexpr size_t kMostClients = 64;
constexpr size_t kMostGateways = 64;
constexpr int kAnswerBytes = 16 << 20;  // gateways may hold 65,000 mappings each, of 100 bytes in an answer

using Setters = std::map<std::string, std::function<void(double)>>;

// Parses a whole line before it applies any setting.
void assign(std::istringstream& words, const Setters& setters) {
    std::vector<std::pair<const std::function<void(double)>*, double>> changes;
    std::string word;
    while (words >> word) {
        const size_t equals = word.find('=');
        const auto setter = setters.find(word.substr(0, equals));
        if (equals == std::string::npos || setter == setters.end()) throw std::runtime_error("unknown setting " + word);
        size_t used = 0;
        const std::string text = word.substr(equals + 1);
        double value = -1;
        try {
            value = std::stod(text, &used);
        } catch (const std::exception&) {
        }
        if (used != text.size() || !(value >= 0)) throw std::runtime_error("not a number of at least 0: " + word);
        changes.emplace_back(&setter->second, value);
    }
    for (const auto& [setter, value] : changes) (*setter)(value);
}

std::pair<size_t, size_t> range(const std::string& word, size_t hosts) {
    if (word == "*") return {0, hosts};
    try {
        const size_t i = std::stoul(word);
        if (i < hosts) return {i, i + 1};
    } catch (const std::exception&) {
    }
    throw std::runtime_error("no such host " + word);
}

// "gateway NAME key=value ...": a new gateway, or changes to an existing one.
void apply_gateway(Network& network, std::istringstream& words, const std::string& name) {
    std::vector<Gateway>& gateways = network.gateways();
    size_t g = 0;
    while (g < gateways.size() && gateways[g].name != name) ++g;
    Gateway changed = g < gateways.size() ? gateways[g] : Gateway{};
    changed.name = name;
    auto dependence = [](double v) { return static_cast<Dependence>(static_cast<int>(v)); };
    assign(words, {{"inside", [&](double v) { changed.inside = static_cast<uint32_t>(v); }},
                   {"external", [&](double v) { changed.external = static_cast<uint32_t>(v); }},
                   {"parent", [&](double v) { changed.parent = static_cast<int>(v) - 1; }},  // 0: none
                   {"mapping", [&](double v) { changed.mapping = dependence(v); }},
                   {"filtering", [&](double v) { changed.filtering = dependence(v); }},
                   {"hairpin", [&](double v) { changed.hairpin = v != 0; }},
                   {"resets", [&](double v) { changed.resets = v != 0; }},
                   {"pmp", [&](double v) { changed.pmp = v != 0; }},
                   {"pcp", [&](double v) { changed.pcp = v != 0; }},
                   {"udp_idle_ns", [&](double v) { changed.udp_idle = static_cast<Nanoseconds>(v); }},
                   {"tcp_idle_ns", [&](double v) { changed.tcp_idle = static_cast<Nanoseconds>(v); }}});
    if (changed.parent >= static_cast<int>(gateways.size())) throw std::runtime_error("no such parent of gateway " + name);
    if (gateways.size() >= kMostGateways) throw std::runtime_error("too many gateways");
    if (g == gateways.size()) {
        changed.started = monotonic();
        gateways.push_back(changed);
        return;
    }
    if (changed.external != gateways[g].external) changed.clear();
    gateways[g] = changed;
}

std::string dotted(uint32_t address) {
    char text[16];
    std::snprintf(text, sizeof text, "%u.%u.%u.%u", address >> 24, address >> 16 & 255, address >> 8 & 255, address & 255);
    return text;
}

}  // namespace

void apply(Network& network, const std::string& line) {
    std::istringstream words(line);
    std::string verb, first, second;
    words >> verb >> first;
    if (verb == "gateway") return apply_gateway(network, words, first);
    const auto [from, from_end] = range(first, network.size());
    if (verb == "node") {
        double egress_bps = -1, ingress_bps = -1, queue_bytes = -1, behind_nat = -1, address = -1, v6 = -1, gateway = -1,
               drop_udp = -1;
        assign(words, {{"egress_bps", [&](double v) { egress_bps = v; }},
                       {"ingress_bps", [&](double v) { ingress_bps = v; }},
                       {"queue_bytes", [&](double v) { queue_bytes = v; }},
                       {"behind_nat", [&](double v) { behind_nat = v; }},
                       {"address", [&](double v) { address = v; }},
                       {"v6", [&](double v) { v6 = v; }},
                       {"gateway", [&](double v) { gateway = v; }},
                       {"drop_udp", [&](double v) { drop_udp = v; }}});
        if (gateway > double(network.gateways().size())) throw std::runtime_error("no such gateway: " + line);
        for (size_t i = from; i < from_end; ++i) {
            Host& host = network.host(i);
            if (egress_bps >= 0) host.egress_bps = egress_bps;
            if (ingress_bps >= 0) host.ingress_bps = ingress_bps;
            if (queue_bytes >= 0) host.queue_bytes = queue_bytes;
            if (behind_nat >= 0) host.behind_nat = behind_nat != 0;
            if (address >= 0) host.address = static_cast<uint32_t>(address);
            if (v6 >= 0) host.has_v6 = v6 != 0;
            if (gateway >= 0) host.gateway = static_cast<int>(gateway) - 1;  // 0: none
            if (drop_udp >= 0) host.drop_udp = drop_udp != 0;
        }
        network.configured();
        return;
    }
    words >> second;
    const auto [to, to_end] = range(second, network.size());
    if (verb == "path") {
        std::vector<std::pair<double Path::*, double>> changes;
        int down = -1;
        Setters setters;
        const std::pair<const char*, double Path::*> fields[] = {
            {"delay_ns", &Path::delay_ns}, {"jitter_ns", &Path::jitter_ns},     {"loss", &Path::loss},
            {"corrupt", &Path::corrupt},   {"shared", &Path::shared},
            {"rate_bps", &Path::rate_bps}, {"flow_bps", &Path::flow_bps}, {"queue_bytes", &Path::queue_bytes}};
        for (const auto& [name, field] : fields)
            setters[name] = [&changes, field = field](double v) { changes.emplace_back(field, v); };
        setters["down"] = [&](double v) { down = v != 0; };
        assign(words, setters);
        for (size_t i = from; i < from_end; ++i) {
            for (size_t j = to; j < to_end; ++j) {
                Path& path = network.path(i, j);
                for (const auto& [field, value] : changes) path.*field = value;
                if (down >= 0) path.down = down;
            }
        }
        network.configured();
    } else if (verb == "cut") {
        unsigned sport = 0, dport = 0;
        if (!(words >> sport >> dport) || sport > 65535 || dport > 65535) throw std::runtime_error("bad ports: " + line);
        for (size_t i = from; i < from_end; ++i)
            for (size_t j = to; j < to_end; ++j)
                network.cut_flow({static_cast<uint8_t>(i), static_cast<uint8_t>(j), static_cast<uint16_t>(sport),
                                  static_cast<uint16_t>(dport)});
    } else if (verb == "restore") {
        for (size_t i = from; i < from_end; ++i)
            for (size_t j = to; j < to_end; ++j) network.restore_flows(static_cast<uint8_t>(i), static_cast<uint8_t>(j));
    } else {
        throw std::runtime_error("unknown command " + verb);
    }
}

int ControlServer::accept(int listener) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return -1;
    if (clients_.size() >= kMostClients) {
        close(fd);
        return -1;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kAnswerBytes, sizeof kAnswerBytes) < 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kAnswerBytes, sizeof kAnswerBytes);
    clients_[fd];
    return fd;
}

bool ControlServer::serve(int fd) {
    const auto client = clients_.find(fd);
    if (client == clients_.end()) return true;
    std::string& input = client->second;
    bool quit = false;
    char buffer[4096];
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n > 0) input.append(buffer, static_cast<size_t>(n));
    bool open = n > 0 && input.size() <= kLongestLine;
    size_t end;
    while (open && (end = input.find('\n')) != std::string::npos) {
        const std::string reply = answer(input.substr(0, end), &quit) + "\n";
        input.erase(0, end + 1);
        // The socket's buffer has room for one answer, so the router does not wait for a client that does not read.
        open = send(fd, reply.data(), reply.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(reply.size());
    }
    if (!open) {
        close(fd);
        clients_.erase(client);
    }
    return !quit;
}

std::string ControlServer::answer(const std::string& line, bool* quit) {
    if (line == "stats") return statistics();
    if (line == "quit") {
        *quit = true;
        kill_inside(devices_);
        return "ok";
    }
    try {
        if (line.rfind("readdress ", 0) == 0) readdress(line);
        else apply(network_, line);
        return "ok";
    } catch (const std::exception& error) {
        return std::string("error: ") + error.what();
    }
}

// "readdress I A.B.C.D": the host's device gets another address, and packets to the old address are lost.
void ControlServer::readdress(const std::string& line) {
    std::istringstream words(line);
    std::string verb, host, address;
    unsigned a, b, c, d;
    words >> verb >> host >> address;
    if (std::sscanf(address.c_str(), "%u.%u.%u.%u", &a, &b, &c, &d) != 4 || (a | b | c | d) > 255)
        throw std::runtime_error("bad address " + address);
    const auto [i, end] = range(host, network_.size());
    if (end - i != 1) throw std::runtime_error("one host at a time: " + line);
    set_host_address(devices_[i], address);
    network_.host(i).address = a << 24 | b << 16 | c << 8 | d;
}

std::string ControlServer::statistics() const {
    std::string text = router_.statistics() + "\"hosts\":[";
    char buffer[768];
    for (size_t i = 0; i < network_.size(); ++i) {
        const Host& host = network_.host(i);
        std::snprintf(buffer, sizeof buffer, "%s{\"name\":\"%s\",\"address\":\"%s\",\"egress_bps\":%.17g,\"ingress_bps\":%.17g}",
                      i ? "," : "", devices_[i].name.c_str(), devices_[i].address.c_str(), host.egress_bps,
                      host.ingress_bps);
        text += buffer;
    }
    text += "],\"gateways\":[";
    for (size_t g = 0; g < network_.gateways().size(); ++g) {
        const Gateway& gateway = network_.gateways()[g];
        std::snprintf(buffer, sizeof buffer, "%s{\"name\":\"%s\",\"external\":\"%s\",\"mappings\":[", g ? "," : "",
                      gateway.name.c_str(), dotted(gateway.external).c_str());
        text += buffer;
        bool first = true;
        for (const auto& [where, mapping] : gateway.mappings()) {
            if (gateway.expired(mapping, monotonic())) continue;
            std::snprintf(buffer, sizeof buffer,
                          "%s{\"protocol\":%u,\"outside_port\":%u,\"inside\":\"%s:%u\",\"leased\":%s,\"lease_s\":%.3f}",
                          first ? "" : ",", unsigned{where.first}, unsigned{where.second},
                          dotted(mapping.inside.address).c_str(), unsigned{mapping.inside.port},
                          mapping.lease_ends != 0 ? "true" : "false",
                          mapping.lease_ends != 0 ? double(mapping.lease_ends - monotonic()) * 1e-9 : 0.0);
            text += buffer;
            first = false;
        }
        text += "]}";
    }
    text += "],\"paths\":[";
    bool first = true;
    for (size_t i = 0; i < network_.size(); ++i) {
        for (size_t j = 0; j < network_.size(); ++j) {
            if (i == j) continue;
            const Path& path = network_.path(i, j);
            const Counters& c = path.counters;
            std::snprintf(
                buffer, sizeof buffer,
                "%s{\"src\":\"%s\",\"dst\":\"%s\",\"delay_ns\":%.17g,\"jitter_ns\":%.17g,\"rate_bps\":%.17g,"
                "\"flow_bps\":%.17g,\"loss\":%.17g,\"corrupt\":%.17g,\"queue_bytes\":%.17g,\"down\":%s,\"sent_packets\":%llu,"
                "\"sent_bytes\":%llu,\"delivered_packets\":%llu,\"delivered_bytes\":%llu,\"lost_packets\":%llu,"
                "\"dropped_packets\":%llu,\"corrupted_packets\":%llu,\"cut_packets\":%llu}",
                first ? "" : ",", devices_[i].name.c_str(), devices_[j].name.c_str(), path.delay_ns, path.jitter_ns,
                path.rate_bps, path.flow_bps, path.loss, path.corrupt, path.queue_bytes, path.down ? "true" : "false",
                static_cast<unsigned long long>(c.sent_packets), static_cast<unsigned long long>(c.sent_bytes),
                static_cast<unsigned long long>(c.delivered_packets), static_cast<unsigned long long>(c.delivered_bytes),
                static_cast<unsigned long long>(c.lost_packets), static_cast<unsigned long long>(c.dropped_packets),
                static_cast<unsigned long long>(c.corrupted_packets),
                static_cast<unsigned long long>(c.cut_packets));
            text += buffer;
            first = false;
        }
    }
    return text + "]}";
}

}  // namespace lab
