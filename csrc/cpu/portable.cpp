// The portable twin: plain loops over scalar.h, which compilers may vectorise.
#include "scalar.h"
#include "spans.h"

namespace p2pavg {
namespace {

inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

uint32_t max_abs(const float *x, size_t n) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) m = larger(m, abs_bits(get(x, i)));
    return m;
}

uint32_t scale_f32(const float *x, size_t n, float s, float *y) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float v = get(x, i) * s;
        put(y, i, v);
        m = larger(m, abs_bits(v));
    }
    return m;
}

uint32_t sum_f32(const float *x, float a, const float *y, float b, size_t n, float s, float *z) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float p = get(x, i) * a, q = get(y, i) * b, v = (p + q) * s;
        put(z, i, v);
        m = larger(m, abs_bits(v));
    }
    return m;
}

uint32_t add_f32(const float *x, size_t n, float s, float *acc) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = get(x, i) * s;
        put(acc, i, get(acc, i) + term);
        m = larger(m, abs_bits(term));
    }
    return m;
}

void encode_f16(const float *x, size_t n, float s, uint16_t *h) {
    for (size_t i = 0; i < n; i++) put(h, i, half_from_finite(get(x, i) * s));
}

void decode_f16(const uint16_t *h, size_t n, float s, float *y) {
    for (size_t i = 0; i < n; i++) put(y, i, half_to_float(get(h, i)) * s);
}

uint32_t add_f16(const uint16_t *h, size_t n, float s, float *acc) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = half_to_float(get(h, i)) * s;
        put(acc, i, get(acc, i) + term);
        m = larger(m, abs_bits(term));
    }
    return m;
}

uint32_t encode_bf16(const float *x, size_t n, float s, uint16_t *h) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float y = get(x, i) * s;
        put(h, i, bf16_round(y));
        m = larger(m, abs_bits(y));
    }
    return m;
}

void decode_bf16(const uint16_t *h, size_t n, float s, float *y) {
    for (size_t i = 0; i < n; i++) put(y, i, bf16_to_float(get(h, i)) * s);
}

uint32_t add_bf16(const uint16_t *h, size_t n, float s, float *acc) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = bf16_to_float(get(h, i)) * s;
        put(acc, i, get(acc, i) + term);
        m = larger(m, abs_bits(term));
    }
    return m;
}

void encode_i8(const float *x, size_t n, float s, int8_t *q) {
    // Adding 1.5 * 2^23 leaves the integer nearest to a small float, ties to even, in the low bits.
    for (size_t i = 0; i < n; i++) put(q, i, static_cast<int8_t>(to_bits(get(x, i) * s + 0x1.8p23f)));
}

void encode_i8_random(const float *x, size_t n, float s, uint32_t index, uint32_t key0, uint32_t key1,
                      int8_t *q) {
    for (size_t i = 0; i < n; i++) {
        const float u = uniform(index + static_cast<uint32_t>(i), key0, key1);
        const float v = std::floor(get(x, i) * s + u);
        put(q, i, static_cast<int8_t>(v < -127.0f ? -127.0f : v > 127.0f ? 127.0f : v));
    }
}

void decode_i8(const int8_t *q, size_t n, float s, float *y) {
    for (size_t i = 0; i < n; i++) put(y, i, static_cast<float>(get(q, i)) * s);
}

uint32_t add_i8(const int8_t *q, size_t n, float s, float *acc) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = static_cast<float>(get(q, i)) * s;
        put(acc, i, get(acc, i) + term);
        m = larger(m, abs_bits(term));
    }
    return m;
}

// Adding 1.5 * 2^23 as in encode_i8.
inline uint32_t level_i4(const float *x, size_t i, float s) { return to_bits(get(x, i) * s + 0x1.8p23f); }

void encode_i4(const float *x, size_t n, float s, uint8_t *q) {
    for (size_t i = 0; i + 2 <= n; i += 2) q[i / 2] = int4_pair(level_i4(x, i, s), level_i4(x, i + 1, s));
    if (n % 2) q[n / 2] = int4_pair(level_i4(x, n - 1, s), 0);
}

void decode_i4(const uint8_t *q, size_t n, float s, float *y) {
    for (size_t i = 0; i < n; i++) put(y, i, static_cast<float>(int4_level(q[i / 2], i)) * s);
}

uint32_t add_i4(const uint8_t *q, size_t n, float s, float *acc) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = static_cast<float>(int4_level(q[i / 2], i)) * s;
        put(acc, i, get(acc, i) + term);
        m = larger(m, abs_bits(term));
    }
    return m;
}

size_t at_least(const float *x, size_t n, uint32_t bits) {
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) count += abs_bits(get(x, i)) >= bits;
    return count;
}

}  // namespace

const Spans portable_spans = {
    "portable",  max_abs,     scale_f32, add_f32,   encode_f16,       decode_f16, add_f16,
    encode_bf16, decode_bf16, add_bf16,  encode_i8, encode_i8_random, decode_i8,  add_i8,
    encode_i4,   decode_i4,   add_i4,    sum_f32,   at_least,         nullptr,    nullptr,
};

}  // namespace p2pavg
