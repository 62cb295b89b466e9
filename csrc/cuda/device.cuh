// The definition of the codecs for one element on the device, equal to csrc/cpu/scalar.h.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "../cpu/kernels.h"

namespace p2pavg {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kBlock = kThreads * kPerThread;  // elements per thread block: one exponent of fp16, four steps of int8 or int4
constexpr int kStepBlock = 1024;
static_assert(kBlock == 4096, "the layout has one exponent per 4096 elements");

constexpr uint32_t kInf = 0x7f800000u;

__host__ __device__ inline bool has_steps(int codec) { return codec == P2PAVG_INT8 || codec == P2PAVG_INT4; }

// Bytes of the header before it is padded.
__host__ __device__ inline size_t header_used(int codec, size_t n) {
    return codec == P2PAVG_FP16 ? (n + kBlock - 1) / kBlock
           : has_steps(codec)   ? 4 * ((n + kStepBlock - 1) / kStepBlock)
                                : 0;
}

__host__ __device__ inline size_t header_size(int codec, size_t n) { return (header_used(codec, n) + 63) / 64 * 64; }

// Bytes of n elements after the header.
__host__ __device__ inline size_t body_size(int codec, size_t n) {
    if (codec == P2PAVG_INT4) return n / 2 + n % 2;
    return n * (codec == P2PAVG_NONE ? 4 : codec == P2PAVG_INT8 ? 1 : 2);
}

__host__ __device__ inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline uint32_t sign_of(float x) { return __float_as_uint(x) & 0x80000000u; }

__device__ inline float power_of_two(int e) {  // -127 <= e <= 128
    return __uint_as_float(e == -127 ? 0x00400000u : static_cast<uint32_t>(e + 127) << 23);
}

__device__ inline int half_exponent(uint32_t largest) {
    if (largest == 0) return 0;
    const int biased = static_cast<int>(largest >> 23);
    return biased < 14 ? 127 : 141 - biased;
}

__device__ inline uint16_t half_of(float x, uint32_t top) {
    const uint32_t a = magnitude(x);
    if (a > kInf) return 0x7e00u;
    if (a != kInf && a > top) x = __uint_as_float(sign_of(x) | top);
    return __half_as_ushort(__float2half_rn(x));
}

__device__ inline uint16_t bf16_of(float x) {
    const uint32_t b = __float_as_uint(x), a = magnitude(x);
    if (a > kInf) return 0x7fc0u;
    if (a > 0x7f7f7fffu) return static_cast<uint16_t>((sign_of(x) >> 16) | (a == kInf ? 0x7f80u : 0x7f7fu));
    return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

__device__ inline float canonical(float x) { return magnitude(x) > kInf ? __uint_as_float(0x7fc00000u) : x; }

__device__ inline float int8_step(float largest) {
    const float most = __uint_as_float(0x7c010203u);  // 127 times this step is still finite
    const float step = __fdiv_rn(largest, 127.0f);
    return step > most ? most : step < -most ? -most : step;
}

__device__ inline float int4_step(float largest) { return __fdiv_rn(largest, 7.0f); }

__device__ inline float uniform(uint32_t index, uint64_t key) {
    uint32_t x = index * 0x9e3779b1u + static_cast<uint32_t>(key);
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= (x >> 15) ^ static_cast<uint32_t>(key >> 32);
    x *= 0x846ca68bu;
    return __uint2float_rn((x >> 8) ^ (x >> 24)) * 0x1p-24f;
}

// The elements of a thread block: kBlock elements (or the rest) of one chunk.
struct Place {
    size_t element;    // number in the run of the block's first element
    size_t chunk_at;   // byte at which the encoded chunk starts
    size_t in_chunk;   // number in the chunk of the block's first element
    size_t chunk_len;  // elements of the chunk
    int count;         // elements of the block
};

struct Layout {
    size_t n, chunk, chunk_bytes;
    uint32_t blocks_per_chunk;

    Layout(int codec, size_t n_, size_t chunk_)
        : n(n_), chunk(chunk_ < n_ ? chunk_ : n_), chunk_bytes(header_size(codec, chunk) + body_size(codec, chunk)),
          blocks_per_chunk(static_cast<uint32_t>((chunk + kBlock - 1) / kBlock)) {}

    size_t blocks() const {
        const size_t whole = n / chunk, rest = n % chunk;
        return whole * blocks_per_chunk + (rest + kBlock - 1) / kBlock;
    }

    // Whether every full block can be read and written in vectors of four elements.
    bool vectors(const void *floats, const void *bytes) const {
        return (reinterpret_cast<uintptr_t>(floats) | reinterpret_cast<uintptr_t>(bytes)) % 16 == 0 &&
               (chunk == n || chunk % 16 == 0);
    }

    __device__ Place place(uint32_t block) const {
        const uint32_t c = block / blocks_per_chunk, j = block - c * blocks_per_chunk;
        Place p;
        p.chunk_at = c * chunk_bytes;
        p.in_chunk = static_cast<size_t>(j) * kBlock;
        p.element = c * chunk + p.in_chunk;
        p.chunk_len = min(chunk, n - c * chunk);
        p.count = static_cast<int>(min(static_cast<size_t>(kBlock), p.chunk_len - p.in_chunk));
        return p;
    }
};

// The index in its block of a thread's element 4k + i. Elements of the same k are in one block of int8 or int4.
template <bool VECTOR>
__device__ inline int offset_of(int k, int i) {
    return VECTOR ? (static_cast<int>(threadIdx.x) + kThreads * k) * 4 + i
                  : static_cast<int>(threadIdx.x) + kThreads * (4 * k + i);
}

// The sixteen floats of this thread; elements beyond `count` are zero.
template <bool VECTOR>
__device__ inline void load_floats(const float *x, int count, float (&v)[kPerThread]) {
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 f = reinterpret_cast<const float4 *>(x)[threadIdx.x + kThreads * k];
            v[4 * k] = f.x, v[4 * k + 1] = f.y, v[4 * k + 2] = f.z, v[4 * k + 3] = f.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            v[k] = at < count ? x[at] : 0.0f;
        }
    }
}

// Sixteen elements of W bytes each, as bits.
template <bool VECTOR, typename Word, typename Vector>
__device__ inline void load_words(const uint8_t *body, int count, uint32_t (&v)[kPerThread]) {
    static_assert(sizeof(Vector) == 4 * sizeof(Word), "a vector is four words");
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            union {
                Vector vector;
                Word words[4];
            } four;
            four.vector = reinterpret_cast<const Vector *>(body)[threadIdx.x + kThreads * k];
#pragma unroll
            for (int i = 0; i < 4; i++) v[4 * k + i] = four.words[i];
        }
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            v[k] = at < count ? reinterpret_cast<const Word *>(body)[at] : 0;
        }
    }
}

template <bool VECTOR>
__device__ inline void store_floats(float *y, int count, const float (&v)[kPerThread]) {
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            reinterpret_cast<float4 *>(y)[threadIdx.x + kThreads * k] =
                make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            if (at < count) y[at] = v[k];
        }
    }
}

// Step i of a chunk of int8 or int4. A chunk may be at an odd address, where only single bytes can be accessed.
template <bool VECTOR>
__device__ inline void store_step(uint8_t *header, size_t i, float step) {
    if (VECTOR) {
        reinterpret_cast<float *>(header)[i] = step;
    } else {
#pragma unroll
        for (int b = 0; b < 4; b++) header[4 * i + b] = static_cast<uint8_t>(__float_as_uint(step) >> (8 * b));
    }
}

template <bool VECTOR>
__device__ inline float load_step(const uint8_t *header, size_t i) {
    if (VECTOR) return reinterpret_cast<const float *>(header)[i];
    uint32_t bits = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) bits |= static_cast<uint32_t>(header[4 * i + b]) << (8 * b);
    return __uint_as_float(bits);
}

}  // namespace p2pavg
