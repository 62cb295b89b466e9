// Prints one line per instruction set of this machine: its name, and the CRC-32 of the kernels' results for the same
// pseudo-random runs. All lines, of all machines, must have the same CRC-32.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels.h"

namespace {

class Random {
  public:
    uint32_t next() {  // xorshift64*
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1dull) >> 32);
    }

    // A float: of moderate size, of any magnitude, or of any bits at all.
    float value(int kind) {
        uint32_t bits = next();
        if (kind == 0) bits = (bits & 0x83ffffffu) | 0x3c000000u;
        if (kind == 1 && (bits & 0x7f800000u) == 0x7f800000u) bits &= ~0x00800000u;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }

  private:
    uint64_t state_ = 0x9e3779b97f4a7c15ull;
};

// All kinds of NaN count as the same value.
uint32_t digest_floats(uint32_t crc, std::vector<float> values) {
    for (float &x : values)
        if (x != x) x = 0.0f;
    return p2pavg_crc32(crc, values.data(), 4 * values.size());
}

uint32_t digest() {
    Random random;
    uint32_t crc = 0;
    for (size_t n : {size_t{1}, size_t{7}, size_t{33}, size_t{1025}, size_t{4096}, size_t{9001}, size_t{70003}})
        for (int kind = 0; kind < 3; kind++)
            for (float scale : {1.0f, -0.3f, 0x1p-60f})
                for (size_t shift = 0; shift < 2; shift++) {
                    std::vector<float> room(n + shift), acc(n, 0.25f), y(n);
                    for (float &x : room) x = random.value(kind);
                    for (int codec = 0; codec < 11; codec++) {  // 5: stochastic int8; from 6 on: sparse
                        const int kind_of = codec > 5 ? P2PAVG_SPARSE + codec - 2 : codec == 5 ? P2PAVG_INT8 : codec;
                        std::vector<uint8_t> bytes(p2pavg_encoded_size(kind_of, n) + shift);
                        uint8_t *dst = bytes.data() + shift;
                        int finite = codec == 5 ? p2pavg_encode_int8_stochastic(room.data() + shift, n, scale, 3, 4,
                                                                                0xfffffff0u, dst)
                                                : p2pavg_encode(kind_of, room.data() + shift, n, scale, dst);
                        p2pavg_decode(kind_of, dst, n, scale, y.data());
                        finite += 2 * p2pavg_decode_add(kind_of, dst, n, scale, acc.data());
                        crc = p2pavg_crc32(crc, bytes.data(), bytes.size());
                        crc = digest_floats(digest_floats(crc, y), acc);
                        std::vector<float> around(n + shift);
                        p2pavg_decode(kind_of, dst, n, scale, around.data() + shift, true);
                        if (digest_floats(0, {around.begin() + static_cast<long>(shift), around.end()}) != digest_floats(0, y))
                            std::printf("decoded otherwise around the cache\n");
                        crc = p2pavg_crc32(crc, &finite, sizeof finite);
                        std::vector<float>(n, 0.25f).swap(acc);
                    }
                    const auto *plain = reinterpret_cast<const uint8_t *>(room.data() + shift);
                    const P2pavgTerm terms[] = {{P2PAVG_NONE, plain, scale}, {P2PAVG_NONE, plain, 0.5f}};
                    std::vector<float> sum(n);
                    int finite = p2pavg_sum_encode(terms, 2, n, 0.5f, P2PAVG_NONE, reinterpret_cast<uint8_t *>(sum.data()));
                    crc = digest_floats(crc, sum);
                    crc = p2pavg_crc32(crc, &finite, sizeof finite);
                }
    return crc;
}

}  // namespace

int main() {
    for (const char *isa : {"avx2", "neon", "portable"})
        if (p2pavg_select_isa(isa)) std::printf("%s %08x\n", isa, digest());
    return 0;
}
