// CPU kernels: the encodings of a run of float32 on the wire, and CRC-32.
//
// Plain C++ without Python, shared by the bindings and the pump. All functions are thread-safe, never allocate,
// and take pointers of any alignment; source and destination must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

enum P2pavgCodec : int { P2PAVG_NONE = 0, P2PAVG_FP16 = 1, P2PAVG_BF16 = 2, P2PAVG_INT8 = 3, P2PAVG_INT4 = 4,
                       P2PAVG_SPARSE = 16 };  // plus 4 to 8: see sparse.h; no sum_encode has these

// Bytes of n encoded elements, a function of n only; 0 for an unknown codec.
size_t p2pavg_encoded_size(int codec, size_t n);

// dst[encoded_size(n)] <- encode(src[n] * scale). Returns 1 when every src * scale is finite, else 0.
int p2pavg_encode(int codec, const float *src, size_t n, float scale, uint8_t *dst);

// dst[n] <- decode(src[encoded_size(n)]) * scale. streaming: write around the cache, for vectors far larger than it.
void p2pavg_decode(int codec, const uint8_t *src, size_t n, float scale, float *dst, bool streaming = false);

// acc[n] += decode(src[encoded_size(n)]) * weight. Returns 1 when every term is finite; else 0, and acc is undefined.
int p2pavg_decode_add(int codec, const uint8_t *src, size_t n, float weight, float *acc);

// The CRC-32 of zlib.crc32: crc is 0 for the first bytes, and the result for the bytes before after that.
uint32_t p2pavg_crc32(uint32_t crc, const void *data, size_t length);

// *crc <- the CRC-32 of n floats. Returns 1 when every one is finite. One pass over memory serves both.
int p2pavg_finite_crc32(const float *src, size_t n, uint32_t *crc);

// Encodes int8 with stochastic rounding: element i of src draws from a counter RNG keyed by (seed, epoch, first + i).
int p2pavg_encode_int8_stochastic(const float *src, size_t n, float scale, uint64_t seed, uint64_t epoch,
                                  uint64_t first, uint8_t *dst);

// One term of a sum: weight * decode(data). Plain float32 is the codec P2PAVG_NONE.
struct P2pavgTerm {
    int codec;
    const uint8_t *data;
    float weight;
};

// dst <- encode(scale * sum_i terms[i]) over `count` runs of n elements, summed in order, without an accumulator in
// memory. Returns 1 when every result is finite.
int p2pavg_sum_encode(const P2pavgTerm *terms, size_t count, size_t n, float scale, int codec_out, uint8_t *dst);

// The instruction set in use: "avx2", "neon" or "portable". select returns 0 when this machine lacks the named one.
const char *p2pavg_isa();
int p2pavg_select_isa(const char *name);
