// Stress for the sanitizers: stress [SECONDS [SEED]] runs every scenario again and again on random swarms.
#include <cstring>

#include "harness.h"

using namespace stress;

namespace {

uint64_t next_transfer = 1;

size_t some(Random &random, size_t least, size_t most) { return least + below(random, most - least + 1); }

Swarm random_swarm(Random &random) {
    return Swarm(some(random, 2, 4), some(random, 1, 4), some(random, 1, 3), below(random, 3) == 0);
}

// Jobs one after the other, with heartbeats and an upload limit now and then; all end with the right bits.
void plain(Random &random) {
    Swarm swarm = random_swarm(random);
    for (size_t i = 0; i < swarm.size(); ++i) {
        swarm.pump(i).set_heartbeat(0.002);
        if (below(random, 3) == 0) swarm.pump(i).set_upload_limit(30e6);
    }
    for (int round = 0; round < 4; ++round) {
        Reduction reduction(random, next_transfer++, swarm.size(), 40000);
        for (size_t i = 0; i < swarm.size(); ++i) reduction.open(swarm, i);
        for (size_t i = 0; i < swarm.size(); ++i) reduction.begin(swarm, i);
        swarm.until("a plain job", [&] { return reduction.done(swarm); }, [&] {
            for (size_t i = 0; i < swarm.size(); ++i) {
                swarm.pump(i).note_loop();
                swarm.pump(i).note_trainer();
                swarm.pump(i).stats(0);
                swarm.pump(i).health(0);
                swarm.pump(i).traffic(1);
                if (auto job = swarm.pump(i).job(reduction.transfer)) job->progress();
            }
        });
        reduction.verify();
        for (size_t i = 0; i < swarm.size(); ++i) check(swarm.pump(i).finish(reduction.transfer), "finish");
    }
}

// Streams die and are opened again in the middle of a job.
void lossy(Random &random) {
    Swarm swarm = random_swarm(random);
    Reduction reduction(random, next_transfer++, swarm.size(), 60000);
    for (size_t i = 0; i < swarm.size(); ++i) reduction.open(swarm, i);
    for (size_t i = 0; i < swarm.size(); ++i) reduction.begin(swarm, i);
    int cuts = 8;
    swarm.until("a job over dying streams", [&] { return reduction.done(swarm); }, [&] {
        if (cuts-- > 0) swarm.cut(random);
        for (size_t i = 0; i < swarm.size(); ++i)
            for (size_t j = 0; j < i; ++j) swarm.connect(i, j);
        reduction.repair(swarm);
    });
    reduction.verify();
    for (size_t i = 0; i < swarm.size(); ++i) swarm.pump(i).cancel(reduction.transfer);
}

// Jobs are cancelled at any moment, and their memory is freed at once.
void cancelled(Random &random) {
    Swarm swarm = random_swarm(random);
    for (int round = 0; round < 6; ++round) {
        auto reduction = std::make_unique<Reduction>(random, next_transfer++, swarm.size(), 80000);
        for (size_t i = 0; i < swarm.size(); ++i) reduction->open(swarm, i);
        for (size_t i = 0; i < swarm.size(); ++i)
            if (below(random, 8)) reduction->begin(swarm, i);
        const auto wait = std::chrono::microseconds(below(random, 1500));
        const auto start = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - start < wait) swarm.peers[0]->drain();
        for (size_t i = 0; i < swarm.size(); ++i) {
            swarm.pump(i).cancel(reduction->transfer);
            reduction->results[i] = {};
            reduction->sources[i] = {};
        }
    }
    Reduction last(random, next_transfer++, swarm.size(), 20000);
    for (size_t i = 0; i < swarm.size(); ++i) last.open(swarm, i);
    for (size_t i = 0; i < swarm.size(); ++i) last.begin(swarm, i);
    swarm.until("the job after cancelled ones", [&] { return last.done(swarm); });
    last.verify();
    for (size_t i = 0; i < swarm.size(); ++i) swarm.pump(i).cancel(last.transfer);
}

// A joiner gets its results after the job is over for the other peers, or its link closes.
void joined(Random &random) {
    const size_t peers = some(random, 3, 4), joiner = peers - 1;
    Swarm swarm(peers, 2, 2);
    const bool leaves = below(random, 2);
    Reduction reduction(random, next_transfer++, peers, 40000, 1);
    for (size_t i = 0; i < peers; ++i) reduction.open(swarm, i);
    for (size_t i = 0; i < peers; ++i) reduction.begin(swarm, i);
    swarm.until("the voters", [&] {
        for (size_t i = 0; i < joiner; ++i)
            if (!swarm.peers[i]->done.count(reduction.transfer)) return false;
        return true;
    });
    std::vector<size_t> waiting;
    for (size_t i = 0; i < joiner; ++i)
        if (!swarm.pump(i).finish(reduction.transfer)) waiting.push_back(i);
    if (leaves) {
        for (size_t i = 0; i < joiner; ++i) swarm.pump(i).detach_all(Swarm::link(joiner));
    } else {
        swarm.until("the joiner", [&] { return reduction.done(swarm); });
        reduction.verify();
    }
    swarm.until("the release", [&] {
        for (size_t i : waiting)
            if (!swarm.peers[i]->released.count(reduction.transfer)) return false;
        return true;
    });
    for (size_t i = 0; i < peers; ++i) swarm.pump(i).cancel(reduction.transfer);
}

// State chunks are sent while some transfers are cancelled and a receiver closes.
void blobs(Random &random) {
    Swarm swarm(2, some(random, 1, 3), 2);
    const size_t chunk = some(random, 1, 100000), bytes = chunk * some(random, 1, 20) + below(random, chunk) + 1;
    const size_t chunks = (bytes + chunk - 1) / chunk;
    std::vector<uint8_t> data(bytes), buffer(bytes);
    for (auto &byte : data) byte = static_cast<uint8_t>(random());
    const uint64_t transfer = next_transfer++;
    swarm.pump(1).open_blob(transfer, buffer.data(), bytes, chunk);
    for (int again = 0; again < 2; ++again)
        for (size_t i = 0; i < chunks; ++i)
            swarm.pump(0).send_blob(1, transfer, static_cast<uint32_t>(i), data.data() + i * chunk,
                                    std::min(chunk, bytes - i * chunk));
    swarm.until("a blob", [&] { return swarm.peers[1]->blob_chunks.size() == chunks && swarm.peers[0]->blobs_sent == 2 * chunks; });
    check(data == buffer, "the blob differs");
    swarm.pump(1).cancel(transfer);

    auto gone = std::make_unique<std::vector<uint8_t>>(data), target = std::make_unique<std::vector<uint8_t>>(bytes);
    swarm.pump(1).open_blob(transfer, target->data(), bytes, chunk);
    for (size_t i = 0; i < chunks; ++i)
        swarm.pump(0).send_blob(1, transfer, static_cast<uint32_t>(i), gone->data() + i * chunk,
                                std::min(chunk, bytes - i * chunk));
    if (below(random, 2)) swarm.pump(0).detach_all(1);
    else swarm.pump(0).cancel(transfer);
    gone.reset();
    swarm.pump(1).cancel(transfer);
    target.reset();
}

// A peer sends invalid bytes: random ones, and correct frames with one bit flipped.
void hostile(Random &random) {
    Swarm swarm(2, 1, 2);
    Reduction reduction(random, next_transfer++, 2, 20000);
    for (size_t i = 0; i < 2; ++i) reduction.open(swarm, i);
    std::vector<uint8_t> buffer(5000);
    const uint64_t blob = next_transfer++;
    swarm.pump(0).open_blob(blob, buffer.data(), buffer.size(), 1000);
    std::vector<int> wires;
    for (int i = 0; i < 12; ++i) {
        const int wire = swarm.wire(0, 1);
        wires.push_back(wire);
        Header header;
        header.kind = static_cast<Kind>(some(random, 1, 5));
        header.codec = static_cast<uint8_t>(below(random, 6));
        header.flags = below(random, 3) ? 0 : kFlagPacked;
        header.transfer = below(random, 2) ? reduction.transfer : blob;
        header.part = static_cast<uint32_t>(below(random, 3));
        header.chunk = static_cast<uint32_t>(below(random, 8));
        header.count = static_cast<uint32_t>(below(random, 30000));
        header.sender = static_cast<uint32_t>(below(random, 3));
        header.length = header.kind >= Kind::ping ? kHeartbeatBytes
                                                  : static_cast<uint32_t>(below(random, below(random, 2) ? 1001 : 300000));
        std::vector<uint8_t> frame(kHeaderBytes + header.length);
        for (auto &byte : frame) byte = static_cast<uint8_t>(random());
        header.body_crc = p2pavg_crc32(0, frame.data() + kHeaderBytes, header.length);
        if (below(random, 4)) write_header(header, frame.data());
        if (below(random, 2)) frame[below(random, frame.size())] ^= static_cast<uint8_t>(1u << below(random, 8));
        size_t length = below(random, 2) ? frame.size() : below(random, frame.size());
        for (size_t at = 0; at < length;) {
            const ssize_t put = send(wire, frame.data() + at, std::min<size_t>(length - at, 10000), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (put <= 0) break;
            at += static_cast<size_t>(put);
        }
        if (i == 6)
            for (size_t rank = 0; rank < 2; ++rank) reduction.begin(swarm, rank);
    }
    for (int wire : wires) ::close(wire);
    swarm.until("the wires' end", [&] { return swarm.peers[0]->closed >= wires.size(); });
    swarm.pump(0).cancel(reduction.transfer);
    swarm.pump(1).cancel(reduction.transfer);
    swarm.pump(0).cancel(blob);
}

// Pumps are closed during jobs and transfers.
void closed(Random &random) {
    Swarm swarm = random_swarm(random);
    Reduction reduction(random, next_transfer++, swarm.size(), 80000);
    for (size_t i = 0; i < swarm.size(); ++i) reduction.open(swarm, i);
    for (size_t i = 0; i < swarm.size(); ++i) reduction.begin(swarm, i);
    for (size_t i = 0; i < swarm.size(); ++i) {
        swarm.peers[i]->drain();
        swarm.pump(i).close();
        reduction.sources[i] = {};
        reduction.results[i] = {};
    }
}

}  // namespace

int main(int argc, char **argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
    const std::pair<const char *, void (*)(Random &)> scenarios[] = {
        {"plain", plain}, {"lossy", lossy},     {"cancelled", cancelled}, {"joined", joined},
        {"blobs", blobs}, {"hostile", hostile}, {"closed", closed},
    };
    std::printf("first seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    std::map<std::string, int> runs;
    const auto start = std::chrono::steady_clock::now();
    do {
        for (auto &[name, scenario] : scenarios) {
            now_running() = std::string(name) + ", seed " + std::to_string(seed);
            Random random(seed);
            scenario(random);
            ++runs[name];
        }
        ++seed;
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
    for (auto &[name, count] : runs) std::printf("%s %d  ", name.c_str(), count);
    std::printf("all right\n");
}
