// The definition of every codec for one element; the results of all instruction sets equal it to the bit.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace p2pavg {

constexpr uint32_t kInfBits = 0x7f800000u;  // values whose absolute bits are at least these are not finite
constexpr uint32_t kBf16MaxBits = 0x7f7f7fffu;  // the largest absolute bits that round to a finite bfloat16

static inline uint32_t to_bits(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}

static inline float from_bits(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

// Element i of an array of any alignment.
template <typename T>
static inline T get(const T *p, size_t i) {
    T v;
    std::memcpy(&v, reinterpret_cast<const char *>(p) + i * sizeof(T), sizeof(T));
    return v;
}

template <typename T>
static inline void put(T *p, size_t i, T v) {
    std::memcpy(reinterpret_cast<char *>(p) + i * sizeof(T), &v, sizeof(T));
}

static inline uint32_t abs_bits(float x) { return to_bits(x) & 0x7fffffffu; }

// Round to nearest even, for finite |x| < 65520. Branch-free, so that compilers vectorise it.
static inline uint16_t half_from_finite(float x) {
    const uint32_t b = to_bits(x), a = b & 0x7fffffffu;
    const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const uint32_t tiny = to_bits(from_bits(a) + 0.5f) - 0x3f000000u;  // the addition rounds
    const uint32_t is_tiny = 0u - static_cast<uint32_t>(a < (113u << 23));
    return static_cast<uint16_t>((normal & ~is_tiny) | (tiny & is_tiny) | ((b >> 16) & 0x8000u));
}

static inline float half_to_float(uint16_t h) {
    const uint32_t shifted = (h & 0x7fffu) << 13;
    const uint32_t finite = to_bits(from_bits(shifted) * 0x1p112f);
    const uint32_t special = 0u - static_cast<uint32_t>(shifted >= (31u << 23));
    return from_bits((finite & ~special) | ((shifted | kInfBits) & special) | ((h & 0x8000u) << 16));
}

// Round to nearest even, for |x| of at most kBf16MaxBits.
static inline uint16_t bf16_round(float x) {
    const uint32_t b = to_bits(x);
    return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

static inline float bf16_to_float(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

// Encoders of any float, for the rare blocks that need them: an infinity stays, a NaN becomes the quiet one.
static inline float canonical(float x) { return abs_bits(x) > kInfBits ? from_bits(0x7fc00000u) : x; }

static inline uint16_t half_from_any(float x, uint32_t top_bits) {  // saturating at the float with these bits
    const uint32_t a = abs_bits(x), sign = to_bits(x) & 0x80000000u;
    if (a > kInfBits) return 0x7e00u;
    if (a == kInfBits) return static_cast<uint16_t>((sign >> 16) | 0x7c00u);
    return half_from_finite(a > top_bits ? from_bits(sign | top_bits) : x);
}

static inline uint16_t bf16_from_any(float x) {  // saturating: a finite x never becomes infinite
    const uint32_t a = abs_bits(x);
    if (a > kInfBits) return 0x7fc0u;
    const auto sign = static_cast<uint16_t>((to_bits(x) >> 16) & 0x8000u);
    if (a > kBf16MaxBits) return static_cast<uint16_t>(sign | (a == kInfBits ? 0x7f80u : 0x7f7fu));
    return bf16_round(x);
}

// The exponent e of a block of float16 whose largest finite magnitude has these bits: x * 2^e lies in [2^14, 2^15).
static inline int half_exponent(uint32_t max_bits) {
    if (max_bits == 0) return 0;
    const int biased = static_cast<int>(max_bits >> 23);
    return biased < 14 ? 127 : 141 - biased;
}

// The limit of values of a block with exponent e. In the topmost binade of float32 a float16 rounded up to 2^15 would
// decode to infinity, so the limit there is 32752, the largest float16 below.
static inline uint32_t half_top_bits(int e) { return e == -113 ? 0x46ffe000u : 0x47000000u; }

// 2^e for any e of one byte; 2^128 is infinity.
static inline float power_of_two(int e) { return std::ldexp(1.0f, e); }

// A block of int8 or int4 whose largest bits are below these is all zeros: its step would be an imprecise denormal.
constexpr uint32_t kStepMinBits = 15u << 23;  // 2^-112

// The step of a block of int8 whose largest magnitude is |largest|; 127 steps never round to infinity.
static inline float int8_step(float largest) {
    constexpr float kMost = 0x1.020406p+121f;
    const float step = largest / 127.0f;
    return step > kMost ? kMost : step < -kMost ? -kMost : step;
}

// The step of a block of int4: 7 steps of the largest float32 are that float32 again, so none rounds to infinity.
static inline float int4_step(float largest) { return largest / 7.0f; }

// Two levels of int4, from -7 to 7, in one byte: the first in the low half.
static inline uint8_t int4_pair(uint32_t first, uint32_t second) {
    return static_cast<uint8_t>((first & 0xfu) | (second & 0xfu) << 4);
}

// Half `i` of a byte, with its sign: -8 to 7.
static inline int int4_level(uint8_t pair, size_t i) {
    return static_cast<int>((i % 2 ? pair >> 4 : pair) & 0xf) - 2 * static_cast<int>((i % 2 ? pair >> 4 : pair) & 0x8);
}

// The finaliser of splitmix64.
static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Uniform in [0, 1), 24 bits: the draw of the element whose index has these low 32 bits. The rounds are those of
// lowbias32 (Chris Wellons' hash-prospector), keyed before the first and between the two.
static inline float uniform(uint32_t index, uint32_t key0, uint32_t key1) {
    uint32_t x = index * 0x9e3779b1u + key0;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= (x >> 15) ^ key1;
    x *= 0x846ca68bu;
    return static_cast<float>(static_cast<int32_t>(x >> 8) ^ static_cast<int32_t>(x >> 24)) * 0x1p-24f;
}

}  // namespace p2pavg
