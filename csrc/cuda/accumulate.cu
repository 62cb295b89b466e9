// Many tensors in few launches: dst += src * scale, from float32, float16 or bfloat16 into float32.
#include <cuda_bf16.h>

#include "device.cuh"
#include "launch.h"

namespace p2pavg {
namespace {

constexpr int kTerms = 96;  // as many as fit into the 4 KB of kernel arguments of every architecture

struct Batch {
    const void *src[kTerms];
    float *dst[kTerms];
    uint64_t n[kTerms];
    uint32_t first_block[kTerms + 1];  // the first block of each term; then the number of blocks
    int count;
};
static_assert(sizeof(Batch) + 16 <= 4096, "kernel arguments are limited to 4 KB");

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

template <typename T>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const Batch batch, float scale, int *flag) {
    int low = 0, high = batch.count;  // the term t with first_block[t] <= blockIdx.x < first_block[t + 1]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (batch.first_block[middle] <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    const size_t at = static_cast<size_t>(blockIdx.x - batch.first_block[low]) * kBlock;
    const T *src = static_cast<const T *>(batch.src[low]) + at;
    float *dst = batch.dst[low] + at;
    const int count = static_cast<int>(min(static_cast<uint64_t>(kBlock), batch.n[low] - at));
    bool bad = false;
    if (count == kBlock && reinterpret_cast<uintptr_t>(src) % sizeof(Four<T>) == 0 &&
        reinterpret_cast<uintptr_t>(dst) % sizeof(float4) == 0) {
        Four<T> x[4];
        float y[kPerThread];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = reinterpret_cast<const Four<T> *>(src)[threadIdx.x + kThreads * k];
        load_floats<true>(dst, count, y);
#pragma unroll
        for (int k = 0; k < kPerThread; k++) {
            const float term = __fmul_rn(widen(x[k / 4].v[k % 4]), scale);
            bad |= magnitude(term) >= kInf;
            y[k] = __fadd_rn(y[k], term);
        }
        store_floats<true>(dst, count, y);
    } else {
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
            const float term = __fmul_rn(widen(src[i]), scale);
            bad |= magnitude(term) >= kInf;
            dst[i] = __fadd_rn(dst[i], term);
        }
    }
    if (bad) *flag = 1;
}

cudaError_t launch(const Batch &batch, FloatType type, float scale, int *flag, cudaStream_t stream) {
    const uint32_t grid = batch.first_block[batch.count];
    if (grid == 0) return cudaSuccess;
    switch (type) {
        case FLOAT32: accumulate_kernel<float><<<grid, kThreads, 0, stream>>>(batch, scale, flag); break;
        case FLOAT16: accumulate_kernel<__half><<<grid, kThreads, 0, stream>>>(batch, scale, flag); break;
        case BFLOAT16: accumulate_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(batch, scale, flag); break;
        default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

}  // namespace

cudaError_t accumulate(const Term *terms, size_t count, FloatType type, float scale, int *flag, cudaStream_t stream) {
    Batch batch{};
    for (size_t i = 0; i < count; i++) {
        const int t = batch.count++;
        batch.src[t] = terms[i].src;
        batch.dst[t] = terms[i].dst;
        batch.n[t] = terms[i].n;
        batch.first_block[t + 1] = batch.first_block[t] + static_cast<uint32_t>((terms[i].n + kBlock - 1) / kBlock);
        if (batch.count < kTerms && i + 1 < count) continue;
        const cudaError_t error = launch(batch, type, scale, flag, stream);
        if (error != cudaSuccess) return error;
        batch = Batch{};
    }
    return cudaSuccess;
}

}  // namespace p2pavg
