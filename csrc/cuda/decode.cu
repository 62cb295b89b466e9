// Decodes chunks to float32, which are written or added, and checks whether the terms of the sum are finite.
#include "device.cuh"
#include "launch.h"

namespace p2pavg {
namespace {

// Sixteen levels of int4, as bits.
template <bool VECTOR>
__device__ inline void load_pairs(const uint8_t *body, int count, uint32_t (&v)[kPerThread]) {
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
        if (VECTOR) {
            v[k] = reinterpret_cast<const uint16_t *>(body)[threadIdx.x + kThreads * (k / 4)] >> (4 * (k % 4)) & 0xf;
        } else {
            const int at = static_cast<int>(threadIdx.x) + kThreads * k;
            v[k] = at < count ? body[at / 2] >> (4 * (at % 2)) & 0xf : 0;
        }
    }
}

template <int CODEC>
__device__ inline float level_of(uint32_t bits) {
    return CODEC == P2PAVG_INT4 ? static_cast<float>(static_cast<int>(bits ^ 8u) - 8)
                                : static_cast<float>(static_cast<int8_t>(bits));
}

template <int CODEC, bool VECTOR>
__device__ inline void decode_block(const uint8_t *chunk, const Place &p, float scale, float (&y)[kPerThread]) {
    const uint8_t *body = chunk + header_size(CODEC, p.chunk_len) + body_size(CODEC, p.in_chunk);
    if (CODEC == P2PAVG_NONE) {
        load_floats<VECTOR>(reinterpret_cast<const float *>(body), p.count, y);
#pragma unroll
        for (int k = 0; k < kPerThread; k++) y[k] = __fmul_rn(y[k], scale);
        return;
    }
    uint32_t v[kPerThread];
    if (CODEC == P2PAVG_INT4)
        load_pairs<VECTOR>(body, p.count, v);
    else if (CODEC == P2PAVG_INT8)
        load_words<VECTOR, uint8_t, uint32_t>(body, p.count, v);
    else
        load_words<VECTOR, uint16_t, uint2>(body, p.count, v);
    if (CODEC == P2PAVG_FP16) {
        const float power = power_of_two(-static_cast<int>(static_cast<int8_t>(chunk[p.in_chunk / kBlock])));
#pragma unroll
        for (int k = 0; k < kPerThread; k++)
            y[k] = __fmul_rn(__fmul_rn(__half2float(__ushort_as_half(static_cast<uint16_t>(v[k]))), power), scale);
    } else if (CODEC == P2PAVG_BF16) {
#pragma unroll
        for (int k = 0; k < kPerThread; k++) y[k] = __fmul_rn(__uint_as_float(v[k] << 16), scale);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float factor = kStepBlock * k < p.count
                                     ? __fmul_rn(load_step<VECTOR>(chunk, p.in_chunk / kStepBlock + k), scale)
                                     : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[4 * k + i] = __fmul_rn(level_of<CODEC>(v[4 * k + i]), factor);
        }
    }
}

template <int CODEC, bool VECTOR, bool ADD>
__device__ inline bool finish_block(const uint8_t *chunk, const Place &p, float scale, float *dst) {
    float y[kPerThread];
    if (!ADD) {
        decode_block<CODEC, VECTOR>(chunk, p, scale, y);
        store_floats<VECTOR>(dst, p.count, y);
        return false;
    }
    float acc[kPerThread];
    load_floats<VECTOR>(dst, p.count, acc);
    decode_block<CODEC, VECTOR>(chunk, p, scale, y);
    bool bad = false;
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
        bad |= magnitude(y[k]) >= kInf && offset_of<VECTOR>(k / 4, k % 4) < p.count;
        acc[k] = __fadd_rn(acc[k], y[k]);
    }
    store_floats<VECTOR>(dst, p.count, acc);
    return bad;
}

template <int CODEC, bool VECTOR, bool ADD>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t *__restrict__ src, const Layout layout, float scale, float *dst, int *flag) {
    const Place p = layout.place(blockIdx.x);
    const uint8_t *chunk = src + p.chunk_at;
    const bool bad = VECTOR && p.count == kBlock ? finish_block<CODEC, true, ADD>(chunk, p, scale, dst + p.element)
                                                 : finish_block<CODEC, false, ADD>(chunk, p, scale, dst + p.element);
    if (ADD && bad) *flag = 1;
}

template <int CODEC, bool ADD>
cudaError_t launch(const uint8_t *src, const Layout &layout, float scale, float *dst, int *flag, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(layout.blocks());
    if (layout.vectors(dst, src))
        decode_kernel<CODEC, true, ADD><<<grid, kThreads, 0, stream>>>(src, layout, scale, dst, flag);
    else
        decode_kernel<CODEC, false, ADD><<<grid, kThreads, 0, stream>>>(src, layout, scale, dst, flag);
    return cudaGetLastError();
}

template <bool ADD>
cudaError_t dispatch(int codec, const uint8_t *src, const Layout &layout, float scale, float *dst, int *flag,
                     cudaStream_t stream) {
    switch (codec) {
        case P2PAVG_NONE: return launch<P2PAVG_NONE, ADD>(src, layout, scale, dst, flag, stream);
        case P2PAVG_FP16: return launch<P2PAVG_FP16, ADD>(src, layout, scale, dst, flag, stream);
        case P2PAVG_BF16: return launch<P2PAVG_BF16, ADD>(src, layout, scale, dst, flag, stream);
        case P2PAVG_INT8: return launch<P2PAVG_INT8, ADD>(src, layout, scale, dst, flag, stream);
        case P2PAVG_INT4: return launch<P2PAVG_INT4, ADD>(src, layout, scale, dst, flag, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

cudaError_t decode(int codec, const uint8_t *src, size_t n, size_t chunk, float scale, bool add, float *dst, int *flag,
                   cudaStream_t stream) {
    if (n == 0) return cudaSuccess;
    const Layout layout(codec, n, chunk);
    return add ? dispatch<true>(codec, src, layout, scale, dst, flag, stream)
               : dispatch<false>(codec, src, layout, scale, dst, flag, stream);
}

}  // namespace p2pavg
