// libFuzzer: any bytes on a data stream into a pump with an open job and an open blob. Odd inputs arrive encrypted
// for a stream whose key the attacker has, so that they get past the tags.
#include <sys/socket.h>

#include <cstring>

#include "cipher.h"
#include "harness.h"

using namespace stress;

namespace {

constexpr uint64_t kJob = 1, kBlob = 2;
constexpr size_t kElements = 4000, kBlobBytes = 3000, kBlobChunk = 1000;

struct Bench {
    Pump pump{1};
    std::vector<float> source = std::vector<float>(kElements, 1.0f);
    std::vector<uint8_t> result = std::vector<uint8_t>(kElements * 4), blob = std::vector<uint8_t>(kBlobBytes);
    int64_t next = 0;

    void open() {
        ReduceJob spec;
        spec.transfer = kJob;
        spec.voters = {1, 1};
        spec.parts = {{0, 0, kElements / 2}, {1, kElements / 2, kElements / 2}};
        spec.chunk_elements = 500;
        spec.result = result.data();
        spec.result_bytes = result.size();
        pump.open_reduce(std::move(spec), {kSelf, 0});
        Start start;
        start.weights = {1, 1};
        start.source = source.data();
        start.source_elements = kElements;
        pump.begin(kJob, std::move(start));
        pump.open_blob(kBlob, blob.data(), kBlobBytes, kBlobChunk);
    }
    void close() {
        pump.cancel(kJob);
        pump.cancel(kBlob);
        pump.detach_all(0);
        pump.drain();
    }
};

// Headers get right checksums or tags, and lengths within the remaining input; else almost all inputs would be refused.
std::string repaired(const uint8_t *data, size_t size, Cipher *cipher) {
    std::string out;
    uint64_t frame = 0;
    while (size >= kHeaderBytes) {
        uint8_t head[kHeaderBytes];
        std::memcpy(head, data, kHeaderBytes);
        data += kHeaderBytes;
        size -= kHeaderBytes;
        uint32_t length;
        std::memcpy(&length, head + 4, sizeof length);
        if (head[1] & 0x80) length %= 2500;
        std::memcpy(head + 4, &length, sizeof length);
        const size_t body = std::min<size_t>(length, size);
        std::vector<uint8_t> sealed(body + kTagBytes);
        if (cipher) {
            cipher->sign(frame, head);
            cipher->encrypt(frame++, head, data, body, sealed.data());
        } else {
            const uint32_t body_crc = p2pavg_crc32(0, data, body);
            std::memcpy(head + 32, &body_crc, sizeof body_crc);
            const uint32_t header_crc = p2pavg_crc32(0, head, kHeaderBytes - 4);
            std::memcpy(head + 36, &header_crc, sizeof header_crc);
            std::memcpy(sealed.data(), data, body);
            sealed.resize(body);
        }
        out.append(reinterpret_cast<char *>(head), kHeaderBytes);
        out.append(reinterpret_cast<char *>(sealed.data()), sealed.size());
        data += body;
        size -= body;
    }
    return out.append(reinterpret_cast<const char *>(data), size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static Bench bench;
    if (size == 0) return 0;
    const bool encrypted = data[0] & 1, repair = data[0] & 2;
    const std::string key(32, 'k');
    std::unique_ptr<Cipher> cipher;
    if (encrypted) cipher = std::make_unique<Cipher>(key, Cipher::Direction::encrypt);
    const std::string bytes = repair ? repaired(data + 1, size - 1, cipher.get())
                                     : std::string(reinterpret_cast<const char *>(data + 1), size - 1);
    bench.open();
    auto [ours, theirs] = tcp_pair();
    bench.pump.attach(0, bench.next++, theirs, encrypted ? StreamKeys{std::string(32, 'o'), key} : StreamKeys{});
    for (size_t at = 0; at < bytes.size();) {
        const ssize_t put = send(ours, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
        if (put <= 0) break;
        at += static_cast<size_t>(put);
    }
    shutdown(ours, SHUT_WR);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!bench.pump.streams(0).empty()) {  // until the stream has read the whole input, or refused it
        check(std::chrono::steady_clock::now() < end, "the pump hangs on an input");
        pollfd wait{bench.pump.event_fd(), POLLIN, 0};
        poll(&wait, 1, 5);
        bench.pump.drain();
    }
    ::close(ours);
    bench.close();
    return 0;
}
