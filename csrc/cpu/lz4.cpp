#include "lz4.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace {

constexpr size_t kLeastMatch = 4;
constexpr size_t kFarthest = 65535;
constexpr size_t kLastLiterals = 5;     // no match may cover these last bytes of a block
constexpr size_t kLastMatchStart = 12;  // no match may begin nearer to the block's end
constexpr size_t kHashBits = 12;
constexpr size_t kSampled = 256, kSamples = 16;

std::atomic<double> assumed_speed{-1.0};

uint32_t word(const uint8_t *p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

size_t slot_of(uint32_t v) { return (v * 2654435761u) >> (32 - kHashBits); }

// The number of equal bytes from `a` and from `b` on; `a` ends at `end`.
size_t equal_bytes(const uint8_t *a, const uint8_t *b, const uint8_t *end) {
    const uint8_t *const start = a;
    uint64_t x, y;
    for (; end - a >= 8; a += 8, b += 8) {
        std::memcpy(&x, a, 8);
        std::memcpy(&y, b, 8);
        if (x != y) break;
    }
    while (a < end && *a == *b) a++, b++;
    return static_cast<size_t>(a - start);
}

class Writer {
  public:
    Writer(uint8_t *dst, size_t room) : start_(dst), at_(dst), end_(dst + room) {}

    // Writes literals, and then a match unless `match` is 0. Returns false when there is no room.
    bool sequence(const uint8_t *literals, size_t count, size_t offset, size_t match) {
        const size_t extra = match ? match - kLeastMatch : 0;
        if (static_cast<size_t>(end_ - at_) < 1 + count / 255 + 1 + count + (match ? 2 + extra / 255 + 1 : 0)) return false;
        uint8_t *const token = at_++;
        *token = static_cast<uint8_t>(nibble(count) << 4 | nibble(extra));
        length(count);
        if (count) std::memcpy(at_, literals, count);
        at_ += count;
        if (!match) return true;
        *at_++ = static_cast<uint8_t>(offset);
        *at_++ = static_cast<uint8_t>(offset >> 8);
        length(extra);
        return true;
    }

    size_t written() const { return static_cast<size_t>(at_ - start_); }

  private:
    static unsigned nibble(size_t length) { return static_cast<unsigned>(std::min<size_t>(length, 15)); }

    void length(size_t length) {
        if (length < 15) return;
        for (length -= 15; length >= 255; length -= 255) *at_++ = 255;
        *at_++ = static_cast<uint8_t>(length);
    }

    uint8_t *const start_, *at_, *const end_;
};

}  // namespace

int p2pavg_all_zero(const uint8_t *src, size_t n) { return n == 0 || (src[0] == 0 && std::memcmp(src, src + 1, n - 1) == 0); }

size_t p2pavg_lz4_pack(const uint8_t *src, size_t n, uint8_t *dst, size_t room) {
    uint32_t places[size_t{1} << kHashBits] = {};  // hash of a word -> its last position + 1
    Writer out(dst, room);
    size_t anchor = 0, at = 0, misses = 0;
    while (n >= kLastMatchStart && at <= n - kLastMatchStart) {
        const uint32_t seen = word(src + at);
        uint32_t &place = places[slot_of(seen)];
        const size_t before = place;
        place = static_cast<uint32_t>(at + 1);
        if (before == 0 || at + 1 - before > kFarthest || word(src + before - 1) != seen) {
            at += 1 + (misses++ >> 6);  // the steps grow through bytes that do not repeat
            continue;
        }
        size_t from = before - 1;
        const size_t offset = at - from;
        while (at > anchor && from > 0 && src[at - 1] == src[from - 1]) at--, from--;
        const size_t match = equal_bytes(src + at, src + from, src + n - kLastLiterals);
        if (!out.sequence(src + anchor, at - anchor, offset, match)) return 0;
        at += match;
        anchor = at;
        misses = 0;
    }
    return out.sequence(src + anchor, n - anchor, 0, 0) ? out.written() : 0;
}

int p2pavg_lz4_unpack(const uint8_t *src, size_t bytes, uint8_t *dst, size_t n) {
    const uint8_t *const end = src + bytes;
    size_t done = 0;
    // Reads the rest of a length; returns false when the block ends before, or when no such length can fit.
    const auto extend = [&](size_t &length) {
        uint8_t more = 255;
        while (more == 255) {
            if (src == end || length > n) return false;
            more = *src++;
            length += more;
        }
        return true;
    };
    while (src != end) {
        const uint8_t token = *src++;
        size_t literals = token >> 4;
        if (literals == 15 && !extend(literals)) return 0;
        if (literals > static_cast<size_t>(end - src) || literals > n - done) return 0;
        if (literals) std::memcpy(dst + done, src, literals);
        src += literals;
        done += literals;
        if (src == end) return done == n;
        if (end - src < 2) return 0;
        const size_t offset = src[0] | static_cast<size_t>(src[1]) << 8;
        src += 2;
        size_t match = token & 15;
        if (match == 15 && !extend(match)) return 0;
        match += kLeastMatch;
        if (offset == 0 || offset > done || match > n - done) return 0;
        uint8_t *to = dst + done;
        done += match;
        for (size_t period = offset; match;) {  // copied bytes repeat: each copy may double in length
            const size_t piece = std::min(period, match);
            std::memcpy(to, to - period, piece);
            to += piece;
            match -= piece;
            period += piece;
        }
    }
    return 0;  // a block ends with literals
}

double p2pavg_lz4_sample(const uint8_t *src, size_t n) {
    if (p2pavg_all_zero(src, n)) return 0.0;
    uint8_t sample[kSampled * kSamples], packed[kSampled * kSamples];
    const size_t taken = std::min(n, sizeof sample);
    if (n <= sizeof sample)
        std::memcpy(sample, src, n);
    else
        for (size_t i = 0; i < kSamples; i++)
            std::memcpy(sample + i * kSampled, src + (n - kSampled) * (2 * i + 1) / (2 * kSamples), kSampled);
    const size_t left = p2pavg_lz4_pack(sample, taken, packed, taken);
    return left ? static_cast<double>(left) / static_cast<double>(taken) : 1.0;
}

void p2pavg_lz4_assume_speed(double speed) { assumed_speed.store(speed, std::memory_order_relaxed); }

double p2pavg_lz4_speed() {
    const double assumed = assumed_speed.load(std::memory_order_relaxed);
    if (assumed >= 0.0) return assumed;
    static const double speed = [] {
        constexpr size_t n = 64 << 10;
        static uint8_t data[n], packed[n];
        uint32_t random = 1;
        for (size_t i = 0; i < n; i++) {
            random = random * 1664525u + 1013904223u;
            data[i] = i / 512 % 2 ? static_cast<uint8_t>(random >> 24) : 0;
        }
        double best = 1.0;
        for (int i = 0; i < 5; i++) {
            const auto begun = std::chrono::steady_clock::now();
            p2pavg_lz4_pack(data, n, packed, n);
            best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
        }
        return n / std::max(best, 1e-9);
    }();
    return speed;
}
