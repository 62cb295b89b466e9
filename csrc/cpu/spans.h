// The inner loops over at most one block of elements; one table per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p2pavg {

// Every function that returns uint32_t returns the largest absolute bits of the float32 values it produced
// (before encoding), by which the caller knows whether all were finite. Encoders of float16, int8 and int4 need
// finite input within their range; that of bfloat16 is right when the largest absolute bits are at most kBf16MaxBits.
struct Spans {
    const char *name;
    uint32_t (*max_abs)(const float *x, size_t n);
    uint32_t (*scale_f32)(const float *x, size_t n, float s, float *y);            // y = x*s
    uint32_t (*add_f32)(const float *x, size_t n, float s, float *acc);            // acc += x*s
    void (*encode_f16)(const float *x, size_t n, float s, uint16_t *h);            // h = x*s
    void (*decode_f16)(const uint16_t *h, size_t n, float s, float *y);            // y = h*s
    uint32_t (*add_f16)(const uint16_t *h, size_t n, float s, float *acc);         // acc += h*s
    uint32_t (*encode_bf16)(const float *x, size_t n, float s, uint16_t *h);       // h = x*s
    void (*decode_bf16)(const uint16_t *h, size_t n, float s, float *y);           // y = h*s
    uint32_t (*add_bf16)(const uint16_t *h, size_t n, float s, float *acc);        // acc += h*s
    void (*encode_i8)(const float *x, size_t n, float s, int8_t *q);               // q = rint(x*s)
    void (*encode_i8_random)(const float *x, size_t n, float s, uint32_t index, uint32_t key0, uint32_t key1,
                             int8_t *q);                                           // q = floor(x*s + uniform)
    void (*decode_i8)(const int8_t *q, size_t n, float s, float *y);               // y = q*s
    uint32_t (*add_i8)(const int8_t *q, size_t n, float s, float *acc);            // acc += q*s
    void (*encode_i4)(const float *x, size_t n, float s, uint8_t *q);              // q = rint(x*s), two to a byte
    void (*decode_i4)(const uint8_t *q, size_t n, float s, float *y);              // y = q*s
    uint32_t (*add_i4)(const uint8_t *q, size_t n, float s, float *acc);           // acc += q*s
    uint32_t (*sum_f32)(const float *x, float a, const float *y, float b, size_t n, float s,
                        float *z);                                                 // z = (x*a + y*b)*s
    size_t (*at_least)(const float *x, size_t n, uint32_t bits);  // how many have at least these absolute bits, not 0
    const Spans *in_cache;  // variants for x that is in L1 already, without prefetches; nullptr: this table
    const Spans *streaming;  // variants that write decoded y around the cache; nullptr: this table
};

const Spans &spans_in_use();  // of the instruction set in use

extern const Spans portable_spans;
#if defined(__x86_64__)
extern const Spans avx2_spans;
#endif
#if defined(__aarch64__)
extern const Spans neon_spans;
#endif

}  // namespace p2pavg
