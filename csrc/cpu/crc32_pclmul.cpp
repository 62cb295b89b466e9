// CRC-32 by carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009; the constants are x^k mod P(x), bit-reflected, for the distances of its section on
// reflected input.
#include <immintrin.h>

#include "crc32.h"

namespace p2pavg {
namespace {

inline __m128i load(const uint8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }

// a, shifted by the distance of k, plus b.
inline __m128i fold(__m128i a, __m128i k, __m128i b) {
    const __m128i low = _mm_clmulepi64_si128(a, k, 0x00), high = _mm_clmulepi64_si128(a, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), b);
}

}  // namespace

uint32_t crc32_pclmul(uint32_t state, const uint8_t *p, size_t length) {
    if (length < 64) return crc32_table(state, p, length);
    const __m128i by512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i b = load(p + 16), c = load(p + 32), d = load(p + 48);
    for (p += 64, length -= 64; length >= 64; p += 64, length -= 64) {
        a = fold(a, by512, load(p));
        b = fold(b, by512, load(p + 16));
        c = fold(c, by512, load(p + 32));
        d = fold(d, by512, load(p + 48));
    }
    a = fold(fold(fold(a, by128, b), by128, c), by128, d);
    for (; length >= 16; p += 16, length -= 16) a = fold(a, by128, load(p));

    // Folds 128 bits to 64, and reduces them to 32 (Barrett).
    const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by128, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low32), _mm_set_epi64x(0, 0x163cd6124), 0x00));
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    __m128i t = _mm_clmulepi64_si128(_mm_and_si128(a, low32), barrett, 0x10);
    t = _mm_clmulepi64_si128(_mm_and_si128(t, low32), barrett, 0x00);
    state = static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(t, a), 1));
    return crc32_table(state, p, length);
}

}  // namespace p2pavg
