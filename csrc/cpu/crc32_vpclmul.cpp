// The method of crc32_pclmul.cpp on registers four times as wide.
#include <immintrin.h>

#include "crc32.h"

namespace p2pavg {
namespace {

inline __m512i load(const uint8_t *p) { return _mm512_loadu_si512(p); }

// Each lane of a, shifted by the distance of k, plus b.
inline __m512i fold(__m512i a, __m512i k, __m512i b) {
    constexpr int kXor3 = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11), b, kXor3);
}

inline __m512i distance(int64_t high, int64_t low) { return _mm512_set4_epi64(high, low, high, low); }

}  // namespace

uint32_t crc32_vpclmul(uint32_t state, const uint8_t *p, size_t length) {
    if (length < 512) return crc32_pclmul(state, p, length);
    const __m512i by2048 = distance(0x1322d1430, 0x11542778a), by512 = distance(0x1c6e41596, 0x154442bd4);
    __m512i a = _mm512_xor_si512(load(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    __m512i b = load(p + 64), c = load(p + 128), d = load(p + 192);
    for (p += 256, length -= 256; length >= 256; p += 256, length -= 256) {
        a = fold(a, by2048, load(p));
        b = fold(b, by2048, load(p + 64));
        c = fold(c, by2048, load(p + 128));
        d = fold(d, by2048, load(p + 192));
    }
    a = fold(fold(fold(a, by512, b), by512, c), by512, d);
    // The remaining message is these 64 bytes, from an empty register, and the bytes after them.
    alignas(64) uint8_t folded[64];
    _mm512_store_si512(folded, a);
    return crc32_pclmul(crc32_pclmul(0, folded, sizeof folded), p, length);
}

}  // namespace p2pavg
