// AVX2 + F16C, eight elements a step; the rest of a run goes through the portable twin.
#include <immintrin.h>

#include <algorithm>

#include "scalar.h"
#include "spans.h"

namespace p2pavg {
namespace {

constexpr size_t kAhead = 4096;  // elements ahead: the next block is prefetched while this one is encoded

inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline __m256i abs_of(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }

inline __m256i max_of(__m256i m, __m256 x) { return _mm256_max_epi32(m, abs_of(x)); }

inline uint32_t reduce(__m256i m) {
    __m128i r = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
    r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
}

inline void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

uint32_t max_abs(const float *x, size_t n) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 4; k++) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i + 8 * k));
            m[k] = _mm256_max_epi32(m[k], _mm256_and_si256(v, mask));
        }
    const __m256i all = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
    return larger(reduce(all), portable_spans.max_abs(x + i, n - i));
}

size_t at_least(const float *x, size_t n, uint32_t bits) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff), below = _mm256_set1_epi32(static_cast<int>(bits - 1));
    __m256i count[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int k = 0; k < 2; k++) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i + 8 * k));
            count[k] = _mm256_sub_epi32(count[k], _mm256_cmpgt_epi32(_mm256_and_si256(v, mask), below));
        }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), _mm256_add_epi32(count[0], count[1]));
    size_t found = portable_spans.at_least(x + i, n - i, bits);
    for (uint32_t lane : lanes) found += lane;
    return found;
}

// With kStream, which writes around the cache, y must be at a multiple of 32 bytes.
template <bool kStream>
inline void store(float *y, __m256 v) {
    if (kStream) _mm256_stream_ps(y, v);
    else _mm256_storeu_ps(y, v);
}

// The number of elements until y is at a multiple of 32 bytes; n when y never is.
size_t before_lines(const float *y, size_t n) {
    const size_t beyond = reinterpret_cast<uintptr_t>(y) % 32;
    return beyond % 4 ? n : std::min(n, (32 - beyond) % 32 / 4);
}

template <bool kStream>
uint32_t scale_f32(const float *x, size_t n, float s, float *y) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = kStream ? before_lines(y, n) : 0;
    const uint32_t head = kStream ? portable_spans.scale_f32(x, i, s, y) : 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), vs);
        store<kStream>(y + i, v);
        m = max_of(m, v);
    }
    return larger(larger(head, reduce(m)), portable_spans.scale_f32(x + i, n - i, s, y + i));
}

uint32_t sum_f32(const float *x, float a, const float *y, float b, size_t n, float s, float *z) {
    const __m256 va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b), vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 p = _mm256_mul_ps(_mm256_loadu_ps(x + i), va), q = _mm256_mul_ps(_mm256_loadu_ps(y + i), vb);
        const __m256 v = _mm256_mul_ps(_mm256_add_ps(p, q), vs);
        _mm256_storeu_ps(z + i, v);
        m = max_of(m, v);
    }
    return larger(reduce(m), portable_spans.sum_f32(x + i, a, y + i, b, n - i, s, z + i));
}

uint32_t add_f32(const float *x, size_t n, float s, float *acc) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), vs);
        _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
        m = max_of(m, v);
    }
    return larger(reduce(m), portable_spans.add_f32(x + i, n - i, s, acc + i));
}

template <bool kPrefetch>
void encode_f16(const float *x, size_t n, float s, uint16_t *h) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        if (kPrefetch) prefetch(x + i + kAhead);
        const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + i), vs);
        const __m256 b = _mm256_mul_ps(_mm256_loadu_ps(x + i + 8), vs);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(h + i), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(h + i + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
    }
    portable_spans.encode_f16(x + i, n - i, s, h + i);
}

inline __m256 load_f16(const uint16_t *h) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(h)));
}

template <bool kStream>
void decode_f16(const uint16_t *h, size_t n, float s, float *y) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = kStream ? before_lines(y, n) : 0;
    if (kStream) portable_spans.decode_f16(h, i, s, y);
    for (; i + 8 <= n; i += 8) store<kStream>(y + i, _mm256_mul_ps(load_f16(h + i), vs));
    portable_spans.decode_f16(h + i, n - i, s, y + i);
}

uint32_t add_f16(const uint16_t *h, size_t n, float s, float *acc) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(load_f16(h + i), vs);
        _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
        m = max_of(m, v);
    }
    return larger(reduce(m), portable_spans.add_f16(h + i, n - i, s, acc + i));
}

inline __m256i round_bf16(__m256i bits) {  // the bfloat16 in the low half of each lane
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}

uint32_t encode_bf16(const float *x, size_t n, float s, uint16_t *h) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + i), vs), b = _mm256_mul_ps(_mm256_loadu_ps(x + i + 8), vs);
        m = max_of(max_of(m, a), b);
        const __m256i packed =
            _mm256_packus_epi32(round_bf16(_mm256_castps_si256(a)), round_bf16(_mm256_castps_si256(b)));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(h + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    return larger(reduce(m), portable_spans.encode_bf16(x + i, n - i, s, h + i));
}

inline __m256 load_bf16(const uint16_t *h) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(h)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

template <bool kStream>
void decode_bf16(const uint16_t *h, size_t n, float s, float *y) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = kStream ? before_lines(y, n) : 0;
    if (kStream) portable_spans.decode_bf16(h, i, s, y);
    for (; i + 8 <= n; i += 8) store<kStream>(y + i, _mm256_mul_ps(load_bf16(h + i), vs));
    portable_spans.decode_bf16(h + i, n - i, s, y + i);
}

uint32_t add_bf16(const uint16_t *h, size_t n, float s, float *acc) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(load_bf16(h + i), vs);
        _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
        m = max_of(m, v);
    }
    return larger(reduce(m), portable_spans.add_bf16(h + i, n - i, s, acc + i));
}

inline __m256i pack_i8(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// 32 elements, scaled and rounded, as signed bytes.
template <bool kPrefetch>
inline __m256i levels_of(const float *x, __m256 vs) {
    if (kPrefetch) {
        prefetch(x + kAhead);
        prefetch(x + kAhead + 16);
    }
    __m256i v[4];
    for (int k = 0; k < 4; k++) v[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * k), vs));
    return pack_i8(v[0], v[1], v[2], v[3]);
}

template <bool kPrefetch>
void encode_i8(const float *x, size_t n, float s, int8_t *q) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + i), levels_of<kPrefetch>(x + i, vs));
    }
    portable_spans.encode_i8(x + i, n - i, s, q + i);
}

inline __m256 uniform_of(__m256i index, __m256i key0, __m256i key1) {
    __m256i x = _mm256_add_epi32(_mm256_mullo_epi32(index, _mm256_set1_epi32(static_cast<int>(0x9e3779b1u))), key0);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7feb352d));
    x = _mm256_xor_si256(x, _mm256_xor_si256(_mm256_srli_epi32(x, 15), key1));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x846ca68bu)));
    x = _mm256_xor_si256(_mm256_srli_epi32(x, 8), _mm256_srli_epi32(x, 24));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(0x1p-24f));
}

void encode_i8_random(const float *x, size_t n, float s, uint32_t index, uint32_t key0, uint32_t key1,
                      int8_t *q) {
    const __m256 vs = _mm256_set1_ps(s);
    const __m256i k0 = _mm256_set1_epi32(static_cast<int>(key0)), k1 = _mm256_set1_epi32(static_cast<int>(key1));
    const __m256i low = _mm256_set1_epi32(-127), high = _mm256_set1_epi32(127);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i v[4];
        for (int k = 0; k < 4; k++) {
            const auto start = static_cast<int>(index + static_cast<uint32_t>(i) + 8u * static_cast<uint32_t>(k));
            const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(start), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            const __m256 u = uniform_of(lane, k0, k1);
            const __m256 t = _mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * k), vs);
            const __m256i f = _mm256_cvtps_epi32(_mm256_floor_ps(_mm256_add_ps(t, u)));
            v[k] = _mm256_max_epi32(low, _mm256_min_epi32(high, f));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + i), pack_i8(v[0], v[1], v[2], v[3]));
    }
    portable_spans.encode_i8_random(x + i, n - i, s, index + static_cast<uint32_t>(i), key0, key1, q + i);
}

inline __m256 load_i8(const int8_t *q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(q))));
}

template <bool kStream>
void decode_i8(const int8_t *q, size_t n, float s, float *y) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = kStream ? before_lines(y, n) : 0;
    if (kStream) portable_spans.decode_i8(q, i, s, y);
    for (; i + 8 <= n; i += 8) store<kStream>(y + i, _mm256_mul_ps(load_i8(q + i), vs));
    portable_spans.decode_i8(q + i, n - i, s, y + i);
}

uint32_t add_i8(const int8_t *q, size_t n, float s, float *acc) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(load_i8(q + i), vs);
        _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
        m = max_of(m, v);
    }
    return larger(reduce(m), portable_spans.add_i8(q + i, n - i, s, acc + i));
}

// 32 levels as signed bytes to 16 bytes of pairs.
inline __m128i pair_i4(__m256i bytes) {
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
    const __m256i pairs = _mm256_and_si256(_mm256_or_si256(low, _mm256_srli_epi16(low, 4)), _mm256_set1_epi16(0x00ff));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0xd8));
}

template <bool kPrefetch>
void encode_i4(const float *x, size_t n, float s, uint8_t *q) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(q + i / 2), pair_i4(levels_of<kPrefetch>(x + i, vs)));
    }
    portable_spans.encode_i4(x + i, n - i, s, q + i / 2);
}

// 16 bytes of pairs to 32 levels as signed bytes.
inline void load_i4(const uint8_t *q, __m128i (&levels)[2]) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q)), half = _mm_set1_epi8(0x0f);
    const __m128i low = _mm_and_si128(bytes, half), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), half);
    const __m128i sign = _mm_set1_epi8(8);
    levels[0] = _mm_sub_epi8(_mm_xor_si128(_mm_unpacklo_epi8(low, high), sign), sign);
    levels[1] = _mm_sub_epi8(_mm_xor_si128(_mm_unpackhi_epi8(low, high), sign), sign);
}

// Eight of the levels, from level 8k on.
inline __m256 float_i4(const __m128i (&levels)[2], int k) {
    const __m128i bytes = k % 2 ? _mm_srli_si128(levels[k / 2], 8) : levels[k / 2];
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

template <bool kStream>
void decode_i4(const uint8_t *q, size_t n, float s, float *y) {
    const __m256 vs = _mm256_set1_ps(s);
    size_t i = kStream ? before_lines(y, n) : 0;
    if (kStream && i % 2) return decode_i4<false>(q, n, s, y);  // pairs begin at even elements
    if (kStream) portable_spans.decode_i4(q, i, s, y);
    for (; i + 32 <= n; i += 32) {
        __m128i levels[2];
        load_i4(q + i / 2, levels);
        for (int k = 0; k < 4; k++) store<kStream>(y + i + 8 * k, _mm256_mul_ps(float_i4(levels, k), vs));
    }
    portable_spans.decode_i4(q + i / 2, n - i, s, y + i);
}

uint32_t add_i4(const uint8_t *q, size_t n, float s, float *acc) {
    const __m256 vs = _mm256_set1_ps(s);
    __m256i m = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m128i levels[2];
        load_i4(q + i / 2, levels);
        for (int k = 0; k < 4; k++) {
            const __m256 v = _mm256_mul_ps(float_i4(levels, k), vs);
            float *to = acc + i + 8 * k;
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), v));
            m = max_of(m, v);
        }
    }
    return larger(reduce(m), portable_spans.add_i4(q + i / 2, n - i, s, acc + i));
}

const Spans in_cache = {
    "avx2",      max_abs,            scale_f32<false>, add_f32,          encode_f16<false>, decode_f16<false>, add_f16,
    encode_bf16, decode_bf16<false>, add_bf16,         encode_i8<false>, encode_i8_random,  decode_i8<false>,  add_i8,
    encode_i4<false>, decode_i4<false>, add_i4,        sum_f32,          at_least,          nullptr,          nullptr,
};

const Spans streaming = {
    "avx2",      max_abs,           scale_f32<true>, add_f32,         encode_f16<true>, decode_f16<true>, add_f16,
    encode_bf16, decode_bf16<true>, add_bf16,        encode_i8<true>, encode_i8_random, decode_i8<true>,  add_i8,
    encode_i4<true>, decode_i4<true>, add_i4,         sum_f32,         at_least,         nullptr,          nullptr,
};

}  // namespace

const Spans avx2_spans = {
    "avx2",      max_abs,            scale_f32<false>, add_f32,         encode_f16<true>, decode_f16<false>, add_f16,
    encode_bf16, decode_bf16<false>, add_bf16,         encode_i8<true>, encode_i8_random, decode_i8<false>,  add_i8,
    encode_i4<true>, decode_i4<false>, add_i4,        sum_f32,         at_least,          &in_cache,        &streaming,
};

}  // namespace p2pavg
