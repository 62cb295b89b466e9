// NEON (AArch64), four or eight elements a step; the rest of a run goes through the portable twin.
#include <arm_neon.h>

#include "scalar.h"
#include "spans.h"

namespace p2pavg {
namespace {

inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline uint32x4_t max_of(uint32x4_t m, float32x4_t x) {
    return vmaxq_u32(m, vreinterpretq_u32_f32(vabsq_f32(x)));
}

// Loads and stores of any alignment: NEON's typed ones may assume the alignment of the element.
inline float32x4_t load(const float *x) { return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t *>(x))); }

inline void store(float *y, float32x4_t v) { vst1q_u8(reinterpret_cast<uint8_t *>(y), vreinterpretq_u8_f32(v)); }

inline uint16x8_t load(const uint16_t *h) { return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const uint8_t *>(h))); }

inline void store(uint16_t *h, uint16x8_t v) { vst1q_u8(reinterpret_cast<uint8_t *>(h), vreinterpretq_u8_u16(v)); }

uint32_t max_abs(const float *x, size_t n) {
    uint32x4_t a = vdupq_n_u32(0), b = a;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        a = max_of(a, load(x + i));
        b = max_of(b, load(x + i + 4));
    }
    return larger(vmaxvq_u32(vmaxq_u32(a, b)), portable_spans.max_abs(x + i, n - i));
}

uint32_t scale_f32(const float *x, size_t n, float s, float *y) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t v = vmulq_n_f32(load(x + i), s);
        store(y + i, v);
        m = max_of(m, v);
    }
    return larger(vmaxvq_u32(m), portable_spans.scale_f32(x + i, n - i, s, y + i));
}

uint32_t sum_f32(const float *x, float a, const float *y, float b, size_t n, float s, float *z) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t p = vmulq_n_f32(load(x + i), a), q = vmulq_n_f32(load(y + i), b);
        const float32x4_t v = vmulq_n_f32(vaddq_f32(p, q), s);
        store(z + i, v);
        m = max_of(m, v);
    }
    return larger(vmaxvq_u32(m), portable_spans.sum_f32(x + i, a, y + i, b, n - i, s, z + i));
}

inline uint32x4_t add_term(uint32x4_t m, float *acc, float32x4_t term) {
    store(acc, vaddq_f32(load(acc), term));
    return max_of(m, term);
}

uint32_t add_f32(const float *x, size_t n, float s, float *acc) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) m = add_term(m, acc + i, vmulq_n_f32(load(x + i), s));
    return larger(vmaxvq_u32(m), portable_spans.add_f32(x + i, n - i, s, acc + i));
}

void encode_f16(const float *x, size_t n, float s, uint16_t *h) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float16x4_t low = vcvt_f16_f32(vmulq_n_f32(load(x + i), s));
        store(h + i, vreinterpretq_u16_f16(vcvt_high_f16_f32(low, vmulq_n_f32(load(x + i + 4), s))));
    }
    portable_spans.encode_f16(x + i, n - i, s, h + i);
}

void decode_f16(const uint16_t *h, size_t n, float s, float *y) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float16x8_t v = vreinterpretq_f16_u16(load(h + i));
        store(y + i, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(v)), s));
        store(y + i + 4, vmulq_n_f32(vcvt_high_f32_f16(v), s));
    }
    portable_spans.decode_f16(h + i, n - i, s, y + i);
}

uint32_t add_f16(const uint16_t *h, size_t n, float s, float *acc) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float16x8_t v = vreinterpretq_f16_u16(load(h + i));
        m = add_term(m, acc + i, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(v)), s));
        m = add_term(m, acc + i + 4, vmulq_n_f32(vcvt_high_f32_f16(v), s));
    }
    return larger(vmaxvq_u32(m), portable_spans.add_f16(h + i, n - i, s, acc + i));
}

inline uint32x4_t round_bf16(float32x4_t x) {  // the bfloat16 in the high half of each lane
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)));
}

uint32_t encode_bf16(const float *x, size_t n, float s, uint16_t *h) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float32x4_t a = vmulq_n_f32(load(x + i), s), b = vmulq_n_f32(load(x + i + 4), s);
        m = max_of(max_of(m, a), b);
        store(h + i, vshrn_high_n_u32(vshrn_n_u32(round_bf16(a), 16), round_bf16(b), 16));
    }
    return larger(vmaxvq_u32(m), portable_spans.encode_bf16(x + i, n - i, s, h + i));
}

inline float32x4_t low_bf16(uint16x8_t h) { return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)); }

inline float32x4_t high_bf16(uint16x8_t h) { return vreinterpretq_f32_u32(vshll_high_n_u16(h, 16)); }

void decode_bf16(const uint16_t *h, size_t n, float s, float *y) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const uint16x8_t v = load(h + i);
        store(y + i, vmulq_n_f32(low_bf16(v), s));
        store(y + i + 4, vmulq_n_f32(high_bf16(v), s));
    }
    portable_spans.decode_bf16(h + i, n - i, s, y + i);
}

uint32_t add_bf16(const uint16_t *h, size_t n, float s, float *acc) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const uint16x8_t v = load(h + i);
        m = add_term(m, acc + i, vmulq_n_f32(low_bf16(v), s));
        m = add_term(m, acc + i + 4, vmulq_n_f32(high_bf16(v), s));
    }
    return larger(vmaxvq_u32(m), portable_spans.add_bf16(h + i, n - i, s, acc + i));
}

inline int8x8_t pack_i8(int32x4_t a, int32x4_t b) { return vmovn_s16(vmovn_high_s32(vmovn_s32(a), b)); }

void encode_i8(const float *x, size_t n, float s, int8_t *q) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1_s8(q + i, pack_i8(vcvtnq_s32_f32(vmulq_n_f32(load(x + i), s)),
                               vcvtnq_s32_f32(vmulq_n_f32(load(x + i + 4), s))));
    portable_spans.encode_i8(x + i, n - i, s, q + i);
}

inline float32x4_t uniform_of(uint32x4_t index, uint32x4_t key0, uint32x4_t key1) {
    uint32x4_t x = vmlaq_u32(key0, index, vdupq_n_u32(0x9e3779b1u));
    x = veorq_u32(x, vshrq_n_u32(x, 16));
    x = vmulq_u32(x, vdupq_n_u32(0x7feb352du));
    x = veorq_u32(x, veorq_u32(vshrq_n_u32(x, 15), key1));
    x = vmulq_u32(x, vdupq_n_u32(0x846ca68bu));
    x = veorq_u32(vshrq_n_u32(x, 8), vshrq_n_u32(x, 24));
    return vmulq_n_f32(vcvtq_f32_u32(x), 0x1p-24f);
}

void encode_i8_random(const float *x, size_t n, float s, uint32_t index, uint32_t key0, uint32_t key1, int8_t *q) {
    const uint32x4_t k0 = vdupq_n_u32(key0), k1 = vdupq_n_u32(key1);
    const uint32_t first[4] = {0, 1, 2, 3};
    const int32x4_t low = vdupq_n_s32(-127), high = vdupq_n_s32(127);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        int32x4_t v[2];
        for (size_t k = 0; k < 2; k++) {
            const auto start = index + static_cast<uint32_t>(i + 4 * k);
            const float32x4_t u = uniform_of(vaddq_u32(vdupq_n_u32(start), vld1q_u32(first)), k0, k1);
            const float32x4_t t = vaddq_f32(vmulq_n_f32(load(x + i + 4 * k), s), u);
            v[k] = vmaxq_s32(low, vminq_s32(high, vcvtmq_s32_f32(t)));
        }
        vst1_s8(q + i, pack_i8(v[0], v[1]));
    }
    portable_spans.encode_i8_random(x + i, n - i, s, index + static_cast<uint32_t>(i), key0, key1, q + i);
}

inline float32x4_t low_i8(int16x8_t q) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(q))); }

inline float32x4_t high_i8(int16x8_t q) { return vcvtq_f32_s32(vmovl_high_s16(q)); }

void decode_i8(const int8_t *q, size_t n, float s, float *y) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const int16x8_t v = vmovl_s8(vld1_s8(q + i));
        store(y + i, vmulq_n_f32(low_i8(v), s));
        store(y + i + 4, vmulq_n_f32(high_i8(v), s));
    }
    portable_spans.decode_i8(q + i, n - i, s, y + i);
}

uint32_t add_i8(const int8_t *q, size_t n, float s, float *acc) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const int16x8_t v = vmovl_s8(vld1_s8(q + i));
        m = add_term(m, acc + i, vmulq_n_f32(low_i8(v), s));
        m = add_term(m, acc + i + 4, vmulq_n_f32(high_i8(v), s));
    }
    return larger(vmaxvq_u32(m), portable_spans.add_i8(q + i, n - i, s, acc + i));
}

void encode_i4(const float *x, size_t n, float s, uint8_t *q) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int8x8_t v[2];
        for (size_t k = 0; k < 2; k++)
            v[k] = pack_i8(vcvtnq_s32_f32(vmulq_n_f32(load(x + i + 8 * k), s)),
                           vcvtnq_s32_f32(vmulq_n_f32(load(x + i + 8 * k + 4), s)));
        const uint8x8_t first = vreinterpret_u8_s8(vuzp1_s8(v[0], v[1])), second = vreinterpret_u8_s8(vuzp2_s8(v[0], v[1]));
        vst1_u8(q + i / 2, vorr_u8(vand_u8(first, vdup_n_u8(0x0f)), vshl_n_u8(second, 4)));
    }
    portable_spans.encode_i4(x + i, n - i, s, q + i / 2);
}

// 8 bytes of pairs to 16 levels.
inline void load_i4(const uint8_t *q, int16x8_t (&levels)[2]) {
    const int8x8_t bytes = vreinterpret_s8_u8(vld1_u8(q));
    const int8x8_t first = vshr_n_s8(vshl_n_s8(bytes, 4), 4), second = vshr_n_s8(bytes, 4);
    levels[0] = vmovl_s8(vzip1_s8(first, second));
    levels[1] = vmovl_s8(vzip2_s8(first, second));
}

void decode_i4(const uint8_t *q, size_t n, float s, float *y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int16x8_t levels[2];
        load_i4(q + i / 2, levels);
        for (size_t k = 0; k < 2; k++) {
            store(y + i + 8 * k, vmulq_n_f32(low_i8(levels[k]), s));
            store(y + i + 8 * k + 4, vmulq_n_f32(high_i8(levels[k]), s));
        }
    }
    portable_spans.decode_i4(q + i / 2, n - i, s, y + i);
}

uint32_t add_i4(const uint8_t *q, size_t n, float s, float *acc) {
    uint32x4_t m = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int16x8_t levels[2];
        load_i4(q + i / 2, levels);
        for (size_t k = 0; k < 2; k++) {
            m = add_term(m, acc + i + 8 * k, vmulq_n_f32(low_i8(levels[k]), s));
            m = add_term(m, acc + i + 8 * k + 4, vmulq_n_f32(high_i8(levels[k]), s));
        }
    }
    return larger(vmaxvq_u32(m), portable_spans.add_i4(q + i / 2, n - i, s, acc + i));
}

size_t at_least(const float *x, size_t n, uint32_t bits) {
    const uint32x4_t least = vdupq_n_u32(bits);
    uint32x4_t a = vdupq_n_u32(0), b = vdupq_n_u32(0);  // each match adds 2^32 - 1
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        a = vaddq_u32(a, vcgeq_u32(vreinterpretq_u32_f32(vabsq_f32(load(x + i))), least));
        b = vaddq_u32(b, vcgeq_u32(vreinterpretq_u32_f32(vabsq_f32(load(x + i + 4))), least));
    }
    return (0u - vaddvq_u32(vaddq_u32(a, b))) + portable_spans.at_least(x + i, n - i, bits);
}

}  // namespace

const Spans neon_spans = {
    "neon",      max_abs,     scale_f32, add_f32,   encode_f16,       decode_f16, add_f16,
    encode_bf16, decode_bf16, add_bf16,  encode_i8, encode_i8_random, decode_i8,  add_i8,
    encode_i4,   decode_i4,   add_i4,    sum_f32,   at_least,         nullptr,    nullptr,
};

}  // namespace p2pavg
