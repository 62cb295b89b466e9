// Several pumps in one process, connected over loopback, and an all-reduce among them whose result is known.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pump.h"

namespace stress {

using namespace p2pavg::pump;
using Random = std::mt19937_64;

inline std::string &now_running() {
    static std::string scenario;
    return scenario;
}

[[noreturn]] inline void fail(const std::string &what) {
    std::fprintf(stderr, "FAILED in %s: %s\n", now_running().c_str(), what.c_str());
    std::abort();
}

inline void check(bool good, const char *what) {
    if (!good) fail(what);
}

inline size_t below(Random &random, size_t n) { return static_cast<size_t>(random() % n); }

inline std::pair<int, int> tcp_pair() {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    check(bind(listener, reinterpret_cast<sockaddr *>(&address), size) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, reinterpret_cast<sockaddr *>(&address), &size);
    const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(connect(one, reinterpret_cast<sockaddr *>(&address), size) == 0, "connect");
    const int other = accept(listener, nullptr, nullptr);
    ::close(listener);
    return {one, other};
}

struct Peer {
    explicit Peer(size_t threads) : pump(threads) {}
    Pump pump;
    std::set<uint64_t> done, released;
    std::multiset<std::pair<uint64_t, uint32_t>> blob_chunks;
    size_t refused = 0, blobs_sent = 0, closed = 0;

    void drain() {
        for (const Event &event : pump.drain()) {
            switch (event.type) {
            case Event::Type::job_done: done.insert(event.transfer); break;
            case Event::Type::released: released.insert(event.transfer); break;
            case Event::Type::job_refused: ++refused; break;
            case Event::Type::blob_chunk: blob_chunks.insert({event.transfer, event.index}); break;
            case Event::Type::blob_sent: ++blobs_sent; break;
            case Event::Type::stream_closed: ++closed; break;
            }
        }
    }
};

class Swarm {
  public:
    Swarm(size_t peers, size_t streams, size_t threads, bool encrypted = false)
        : encrypted_(encrypted && Cipher::available()) {
        for (size_t i = 0; i < peers; ++i) this->peers.push_back(std::make_unique<Peer>(threads));
        for (size_t i = 0; i < peers; ++i)
            for (size_t j = 0; j < i; ++j)
                for (size_t k = 0; k < streams; ++k) connect(i, j);
    }

    std::vector<std::unique_ptr<Peer>> peers;

    Pump &pump(size_t i) { return peers[i]->pump; }
    size_t size() const { return peers.size(); }
    static int64_t link(size_t other) { return static_cast<int64_t>(other); }

    void connect(size_t i, size_t j) {
        auto [one, other] = tcp_pair();
        StreamKeys there, back;
        if (encrypted_) {
            there = {std::string(32, 'a'), std::string(32, 'b')};
            back = {there.receiving, there.sending};
        }
        pump(i).attach(link(j), next_, one, there);
        pump(j).attach(link(i), next_, other, back);
        ++next_;
    }
    // A stream of peer i from peer j whose other end the test holds.
    int wire(size_t i, size_t j) {
        auto [one, other] = tcp_pair();
        pump(i).attach(link(j), next_++, one);
        return other;
    }
    // Closes a random stream at one of its ends.
    void cut(Random &random) {
        const size_t i = below(random, size()), j = (i + 1 + below(random, size() - 1)) % size();
        const auto streams = pump(i).streams(link(j));
        if (!streams.empty()) pump(i).detach(link(j), streams[below(random, streams.size())]);
    }

    // Drains events until `happened`; `meanwhile` runs every few milliseconds.
    template <typename Happened, typename Meanwhile>
    void until(const char *what, Happened happened, Meanwhile meanwhile) {
        const auto start = std::chrono::steady_clock::now();
        for (;;) {
            for (auto &peer : peers) peer->drain();
            if (happened()) return;
            if (std::chrono::steady_clock::now() - start > std::chrono::seconds(60)) fail(std::string("waited in vain: ") + what);
            std::vector<pollfd> fds;
            for (auto &peer : peers) fds.push_back({peer->pump.event_fd(), POLLIN, 0});
            poll(fds.data(), fds.size(), 3);
            meanwhile();
        }
    }
    template <typename Happened>
    void until(const char *what, Happened happened) {
        until(what, happened, [] {});
    }

  private:
    const bool encrypted_;
    int64_t next_ = 0;
};

// Every buffer is its own allocation, so that a sanitizer detects every access after it is freed.
struct Reduction {
    uint64_t transfer;
    int codec, result_codec;
    uint32_t chunk_elements;
    std::vector<Part> parts;
    std::vector<int64_t> groups;
    std::vector<double> weights;
    std::vector<uint8_t> voters;
    std::vector<std::vector<float>> sources;
    std::vector<std::vector<uint8_t>> results;
    size_t numel = 0;

    Reduction(Random &random, uint64_t transfer, size_t peers, size_t most, size_t joiners = 0)
        : transfer(transfer), codec(static_cast<int>(below(random, 4))), result_codec(static_cast<int>(below(random, 4))),
          chunk_elements(static_cast<uint32_t>(100 + below(random, most / 4 + 1))) {
        const size_t members = peers - joiners;
        for (size_t i = 0; i < members; ++i) {
            const size_t count = below(random, 5) == 0 ? 0 : below(random, most);
            parts.push_back({static_cast<uint32_t>(i), numel, count});
            numel += count;
        }
        // Half of the jobs have two levels: some of the other groups have a deputy.
        for (size_t i = 0; i < peers; ++i) groups.push_back(static_cast<int64_t>(below(random, 3)));
        const bool deputized = below(random, 2) != 0;
        for (Part &part : parts)
            for (int64_t group = 0; deputized && group < 3; ++group) {
                const auto deputy = static_cast<uint32_t>(below(random, members));
                if (group != groups[part.owner] && groups[deputy] == group) part.deputies.push_back(deputy);
            }
        for (Part &part : parts) part.swaps = part.deputies.size() == 1 && below(random, 2) != 0;
        for (size_t i = 0; i < peers; ++i) {
            voters.push_back(i < members);
            weights.push_back(i < members && below(random, 4) ? 1.0 + static_cast<double>(below(random, 9)) : 0.0);
            std::vector<float> source(numel);
            bool touched = true;  // false: the contribution has runs of zeros, which are sent packed
            for (float &value : source) {
                if (below(random, 500) == 0) touched = below(random, 2) == 0;
                value = touched ? static_cast<float>(below(random, 2000)) / 1000 - 1 : 0;
            }
            sources.push_back(std::move(source));
            results.emplace_back(result_bytes());
        }
        weights[0] = 1;
    }

    size_t result_bytes() const {
        size_t bytes = 0;
        each_chunk([&](size_t, size_t count) { bytes += p2pavg_encoded_size(result_codec, count); });
        return bytes;
    }
    template <typename Action>
    void each_chunk(Action action) const {
        for (const Part &part : parts)
            for (size_t at = 0; at < part.count; at += chunk_elements)
                action(part.start + at, std::min<size_t>(chunk_elements, part.count - at));
    }
    void open(Swarm &swarm, size_t rank) {
        ReduceJob spec;
        spec.transfer = transfer;
        spec.rank = static_cast<uint32_t>(rank);
        spec.voters = voters;
        spec.parts = parts;
        spec.groups = groups;
        spec.chunk_elements = chunk_elements;
        spec.contribution_codec = codec;
        spec.result_codec = result_codec;
        spec.result = results[rank].data();
        spec.result_bytes = results[rank].size();
        std::vector<int64_t> links;
        for (size_t i = 0; i < swarm.size(); ++i) links.push_back(i == rank ? kSelf : Swarm::link(i));
        swarm.pump(rank).open_reduce(std::move(spec), links);
    }
    void begin(Swarm &swarm, size_t rank) {
        Start start;
        start.weights = weights;
        start.source = sources[rank].data();
        start.source_elements = numel;
        swarm.pump(rank).begin(transfer, std::move(start));
    }
    // Every peer asks every other peer for the chunks that it lacks.
    void repair(Swarm &swarm) {
        for (size_t i = 0; i < swarm.size(); ++i)
            for (size_t j = 0; j < swarm.size(); ++j) {
                auto asker = swarm.pump(i).job(transfer), sender = swarm.pump(j).job(transfer);
                if (i == j || !asker || !sender) continue;
                ChunkNames contributions, results;
                asker->missing(static_cast<uint32_t>(j), contributions, results);
                sender->resend(static_cast<uint32_t>(i), contributions, results);
            }
    }
    bool done(const Swarm &swarm) const {
        for (auto &peer : swarm.peers)
            if (!peer->done.count(transfer)) return false;
        return true;
    }
    void verify() const {
        for (auto &result : results) check(result == results[0], "peers hold different bits");
        double total = 0;
        for (double weight : weights) total += weight;
        const double tolerance = codec == P2PAVG_INT4 || result_codec == P2PAVG_INT4 ? 0.3
                             : codec == P2PAVG_INT8 || result_codec == P2PAVG_INT8 ? 0.03
                                                                                   : 0.012;
        size_t at = 0;
        std::vector<float> decoded(chunk_elements);
        each_chunk([&](size_t first, size_t count) {
            p2pavg_decode(result_codec, results[0].data() + at, count, 1.0f, decoded.data());
            at += p2pavg_encoded_size(result_codec, count);
            for (size_t i = 0; i < count; ++i) {
                double mean = 0;
                for (size_t peer = 0; peer < sources.size(); ++peer)
                    mean += weights[peer] * static_cast<double>(sources[peer][first + i]);
                check(std::abs(mean / total - static_cast<double>(decoded[i])) < tolerance, "the mean is wrong");
            }
        });
    }
};

}  // namespace stress
