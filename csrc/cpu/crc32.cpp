#include "crc32.h"

#include <array>
#include <cstring>

#include "kernels.h"
#include "x86.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace p2pavg {
namespace {

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
    Table table{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (0xedb88320u & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (size_t slice = 1; slice < 8; slice++)
        for (size_t i = 0; i < 256; i++)
            table[slice][i] = (table[slice - 1][i] >> 8) ^ table[0][table[slice - 1][i] & 0xff];
    return table;
}

constexpr Table kTable = make_table();

using Crc = uint32_t (*)(uint32_t, const uint8_t *, size_t);

Crc best() {
#if defined(__x86_64__)
    const X86 here;
    const bool folds = here.pclmul && here.sse41;
    if (folds && here.vpclmulqdq && here.avx512f) return crc32_vpclmul;
    if (folds) return crc32_pclmul;
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long kHasCrc32 = 1ul << 7;
    if (getauxval(AT_HWCAP) & kHasCrc32) return crc32_arm;
#elif defined(__aarch64__)
    return crc32_arm;  // every 64-bit Apple processor has it
#endif
    return crc32_table;
}

}  // namespace

uint32_t crc32_table(uint32_t state, const uint8_t *p, size_t length) {
    while (length >= 8) {  // slicing by eight, on little-endian machines only
        uint64_t word;
        std::memcpy(&word, p, 8);
        word ^= state;
        state = 0;
        for (size_t i = 0; i < 8; i++) state ^= kTable[7 - i][(word >> (8 * i)) & 0xff];
        p += 8;
        length -= 8;
    }
    while (length--) state = (state >> 8) ^ kTable[0][(state ^ *p++) & 0xff];
    return state;
}

}  // namespace p2pavg

uint32_t p2pavg_crc32(uint32_t crc, const void *data, size_t length) {
    static const p2pavg::Crc function = p2pavg::best();
    return ~function(~crc, static_cast<const uint8_t *>(data), length);
}
