// Encodes float32 to chunks: one thread block reads the elements of one exponent once, keeps them in registers while it
// finds their largest magnitude, and writes them encoded. With feedback the block also reads and writes the residuals of
// its elements, which are in the host's memory.
#include "device.cuh"
#include "launch.h"

namespace p2pavg {
namespace {

constexpr int kWarps = kThreads / 32;

// The largest of each of COUNT values over the thread block.
template <int COUNT>
__device__ inline void reduce_max(uint32_t (&m)[COUNT]) {
    __shared__ uint32_t shared[COUNT][kWarps];
    const unsigned warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
#pragma unroll
        for (int step = 16; step; step /= 2) m[c] = max(m[c], __shfl_xor_sync(0xffffffffu, m[c], step));
        if (threadIdx.x % 32 == 0) shared[c][warp] = m[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
        for (int w = 0; w < kWarps; w++) m[c] = max(m[c], shared[c][w]);
}

template <bool VECTOR>
__device__ inline void store_halves(uint16_t *h, int count, const uint16_t (&v)[kPerThread]) {
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            reinterpret_cast<uint2 *>(h)[threadIdx.x + kThreads * k] =
                make_uint2(v[4 * k] | static_cast<uint32_t>(v[4 * k + 1]) << 16,
                           v[4 * k + 2] | static_cast<uint32_t>(v[4 * k + 3]) << 16);
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            if (at < count) h[at] = v[k];
        }
    }
}

template <bool VECTOR>
__device__ inline void store_bytes(int8_t *q, int count, const int (&v)[kPerThread]) {
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            reinterpret_cast<char4 *>(q)[threadIdx.x + kThreads * k] =
                make_char4(static_cast<signed char>(v[4 * k]), static_cast<signed char>(v[4 * k + 1]),
                           static_cast<signed char>(v[4 * k + 2]), static_cast<signed char>(v[4 * k + 3]));
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            if (at < count) q[at] = static_cast<int8_t>(v[k]);
        }
    }
}

// Levels of int4, two to a byte. The second level of a lone element's byte is in the next thread.
template <bool VECTOR>
__device__ inline void store_pairs(uint8_t *q, int count, const int (&v)[kPerThread]) {
    if (VECTOR) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            reinterpret_cast<uint16_t *>(q)[threadIdx.x + kThreads * k] =
                static_cast<uint16_t>((v[4 * k] & 0xf) | (v[4 * k + 1] & 0xf) << 4 | (v[4 * k + 2] & 0xf) << 8 |
                                      (v[4 * k + 3] & 0xf) << 12);
    } else {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            const int next = __shfl_down_sync(0xffffffffu, v[k], 1);  // 0 beyond the end, as the elements loaded there
            if (at % 2 == 0 && at < count) q[at / 2] = static_cast<uint8_t>((v[k] & 0xf) | (next & 0xf) << 4);
        }
    }
}

enum class Rounding { nearest, random, feedback };

// The key of the draws and the index of the run's first element.
struct Key {
    uint64_t key, first;
};

template <bool VECTOR>
__device__ inline bool encode_fp16(float (&v)[kPerThread], float scale, const Place &p, uint8_t *header, uint16_t *h) {
    uint32_t m[1] = {0};
    bool bad = false;
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
        v[k] = __fmul_rn(v[k], scale);
        const uint32_t a = magnitude(v[k]);
        bad |= a >= kInf;
        m[0] = max(m[0], a < kInf ? a : 0u);
    }
    reduce_max(m);
    const int e = half_exponent(m[0]);
    const float power = power_of_two(e);
    const uint32_t top = e == -113 ? 0x46ffe000u : 0x47000000u;
    if (threadIdx.x == 0) header[p.in_chunk / kBlock] = static_cast<uint8_t>(e);
    uint16_t out[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) out[k] = half_of(__fmul_rn(v[k], power), top);
    store_halves<VECTOR>(h, p.count, out);
    return bad;
}

// sent: what the encoded elements decode to.
template <int CODEC, bool VECTOR, bool RANDOM>
__device__ inline bool encode_steps(const float (&v)[kPerThread], float scale, const Place &p, const Key &key,
                                    uint8_t *header, uint8_t *q, float (&sent)[kPerThread]) {
    constexpr float kTop = CODEC == P2PAVG_INT4 ? 7.0f : 127.0f;
    constexpr uint32_t kLeast = 15u << 23;  // 2^-112
    uint32_t raw[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        raw[k] = max(max(magnitude(v[4 * k]), magnitude(v[4 * k + 1])), max(magnitude(v[4 * k + 2]), magnitude(v[4 * k + 3])));
    reduce_max(raw);
    bool bad = false;
    int out[kPerThread];
    float steps[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float largest = __fmul_rn(__uint_as_float(raw[k]), scale);
        const uint32_t scaled = magnitude(largest);
        const bool finite = max(raw[k], scaled) < kInf, usable = finite && min(raw[k], scaled) >= kLeast;
        const float factor = usable ? __fdiv_rn(kTop, __uint_as_float(raw[k])) : 0.0f;
        const float step = CODEC == P2PAVG_INT4 ? int4_step(largest) : int8_step(largest);
        steps[k] = usable ? step : finite ? 0.0f : __uint_as_float(0x7fc00000u);
        // Blocks beyond the chunk's end hold zeros, which do not belong to the chunk.
        bad |= !finite && kStepBlock * k < p.count;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!usable) {
                out[4 * k + i] = 0;
            } else if (RANDOM) {
                const uint64_t index = key.first + p.element + static_cast<size_t>(offset_of<VECTOR>(k, i));
                const uint64_t draw = mix64(key.key ^ ((index >> 32) * 0xd1342543de82ef95ull));
                const float u = uniform(static_cast<uint32_t>(index), draw);
                const float level = floorf(__fadd_rn(__fmul_rn(v[4 * k + i], factor), u));
                out[4 * k + i] = static_cast<int>(fminf(fmaxf(level, -127.0f), 127.0f));
            } else {
                out[4 * k + i] = __float2int_rn(__fmul_rn(v[4 * k + i], factor));
            }
            sent[4 * k + i] = __fmul_rn(__int2float_rn(out[4 * k + i]), steps[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (threadIdx.x == static_cast<unsigned>(k) && kStepBlock * k < p.count)
            store_step<VECTOR>(header, p.in_chunk / kStepBlock + k, steps[k]);
    if (CODEC == P2PAVG_INT4)
        store_pairs<VECTOR>(q, p.count, out);
    else
        store_bytes<VECTOR>(reinterpret_cast<int8_t *>(q), p.count, out);
    return bad;
}

// As csrc/cpu/feedback.h.
template <int CODEC, bool VECTOR>
__device__ inline bool encode_owed(float (&v)[kPerThread], float scale, const Feedback &feedback, const Place &p,
                                   uint8_t *header, uint8_t *q) {
    uint32_t bits[kPerThread];
    load_words<VECTOR, uint16_t, uint2>(reinterpret_cast<const uint8_t *>(feedback.owed + p.element), p.count, bits);
    float wanted[kPerThread], sent[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
        v[k] = __fmul_rn(v[k], scale);
        const float owed = __uint_as_float(bits[k] << 16);
        wanted[k] = __fadd_rn(v[k] == 0.0f ? 0.0f : __fdiv_rn(owed, feedback.share), v[k]);
    }
    const bool bad = encode_steps<CODEC, VECTOR, false>(wanted, 1.0f, p, Key{}, header, q, sent);
    uint16_t kept[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++)
        kept[k] = bf16_of(__fadd_rn(__fmul_rn(__fsub_rn(v[k], sent[k]), feedback.share), __uint_as_float(bits[k] << 16)));
    store_halves<VECTOR>(feedback.kept + p.element, p.count, kept);
    return bad;
}

template <int CODEC, bool VECTOR, Rounding ROUNDING>
__device__ inline bool encode_block(const float *src, const Place &p, float scale, const Key &key,
                                    const Feedback &feedback, uint8_t *chunk) {
    float v[kPerThread];
    load_floats<VECTOR>(src + p.element, p.count, v);
    uint8_t *body = chunk + header_size(CODEC, p.chunk_len);
    if (CODEC == P2PAVG_FP16)
        return encode_fp16<VECTOR>(v, scale, p, chunk, reinterpret_cast<uint16_t *>(body) + p.in_chunk);
    if (has_steps(CODEC)) {
        uint8_t *q = body + body_size(CODEC, p.in_chunk);
        if (ROUNDING == Rounding::feedback) return encode_owed<CODEC, VECTOR>(v, scale, feedback, p, chunk, q);
        float sent[kPerThread];
        return encode_steps<CODEC, VECTOR, ROUNDING == Rounding::random>(v, scale, p, key, chunk, q, sent);
    }
    bool bad = false;
    uint16_t halves[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
        v[k] = __fmul_rn(v[k], scale);
        bad |= magnitude(v[k]) >= kInf && offset_of<VECTOR>(k / 4, k % 4) < p.count;
        if (CODEC == P2PAVG_BF16)
            halves[k] = bf16_of(v[k]);
        else
            v[k] = canonical(v[k]);
    }
    if (CODEC == P2PAVG_BF16)
        store_halves<VECTOR>(reinterpret_cast<uint16_t *>(body) + p.in_chunk, p.count, halves);
    else
        store_floats<VECTOR>(reinterpret_cast<float *>(body) + p.in_chunk, p.count, v);
    return bad;
}

template <int CODEC, bool VECTOR, Rounding ROUNDING>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const float *__restrict__ src, const Layout layout, float scale, Key key, Feedback feedback,
                  uint8_t *__restrict__ dst, int *flag) {
    const Place p = layout.place(blockIdx.x);
    uint8_t *chunk = dst + p.chunk_at;
    if (p.in_chunk == 0) {  // the header's padding
        const size_t used = header_used(CODEC, p.chunk_len);
        if (used + threadIdx.x < header_size(CODEC, p.chunk_len)) chunk[used + threadIdx.x] = 0;
    }
    const bool bad = VECTOR && p.count == kBlock
                         ? encode_block<CODEC, true, ROUNDING>(src, p, scale, key, feedback, chunk)
                         : encode_block<CODEC, false, ROUNDING>(src, p, scale, key, feedback, chunk);
    if (bad) *flag = 1;
}

template <int CODEC, Rounding ROUNDING>
cudaError_t launch(const float *src, const Layout &layout, float scale, const Key &key, const Feedback &feedback,
                   uint8_t *dst, int *flag, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(layout.blocks());
    const auto residuals = reinterpret_cast<uintptr_t>(feedback.owed) | reinterpret_cast<uintptr_t>(feedback.kept);
    if (layout.vectors(src, dst) && residuals % 8 == 0)
        encode_kernel<CODEC, true, ROUNDING><<<grid, kThreads, 0, stream>>>(src, layout, scale, key, feedback, dst, flag);
    else
        encode_kernel<CODEC, false, ROUNDING><<<grid, kThreads, 0, stream>>>(src, layout, scale, key, feedback, dst, flag);
    return cudaGetLastError();
}

}  // namespace

size_t encoded_size(int codec, size_t n) { return header_size(codec, n) + body_size(codec, n); }

cudaError_t encode(int codec, const float *src, size_t n, size_t chunk, float scale, const Draws &draws,
                   const Feedback &feedback, uint8_t *dst, int *flag, cudaStream_t stream) {
    if (n == 0) return cudaSuccess;
    const Layout layout(codec, n, chunk);
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
    const Key key{mix64(mix64(draws.seed + kGolden) + draws.epoch * kGolden), draws.first};
    if (feedback.owed) {
        switch (codec) {
            case P2PAVG_INT8:
                return launch<P2PAVG_INT8, Rounding::feedback>(src, layout, scale, key, feedback, dst, flag, stream);
            case P2PAVG_INT4:
                return launch<P2PAVG_INT4, Rounding::feedback>(src, layout, scale, key, feedback, dst, flag, stream);
            default: return cudaErrorInvalidValue;
        }
    }
    switch (codec) {
        case P2PAVG_NONE:
            return launch<P2PAVG_NONE, Rounding::nearest>(src, layout, scale, key, feedback, dst, flag, stream);
        case P2PAVG_FP16:
            return launch<P2PAVG_FP16, Rounding::nearest>(src, layout, scale, key, feedback, dst, flag, stream);
        case P2PAVG_BF16:
            return launch<P2PAVG_BF16, Rounding::nearest>(src, layout, scale, key, feedback, dst, flag, stream);
        case P2PAVG_INT8:
            return draws.random
                       ? launch<P2PAVG_INT8, Rounding::random>(src, layout, scale, key, feedback, dst, flag, stream)
                       : launch<P2PAVG_INT8, Rounding::nearest>(src, layout, scale, key, feedback, dst, flag, stream);
        case P2PAVG_INT4:
            return launch<P2PAVG_INT4, Rounding::nearest>(src, layout, scale, key, feedback, dst, flag, stream);
        default: return cudaErrorInvalidValue;
    }
}

cudaError_t usable() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, encode_kernel<P2PAVG_FP16, true, Rounding::nearest>);
}

}  // namespace p2pavg
