// Work on accumulated sums that depends on numbers in device memory, so that no call waits for a stream.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "device.cuh"
#include "launch.h"

namespace p2pavg {
namespace {

constexpr int kMostBlocks = 2048;

// Returns at once in the ordinary case that the scale has not changed.
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(float *data, size_t n, const float *wanted, const float *current) {
    const float to = *wanted, from = *current;
    if (to == from) return;
    const float factor = __fdiv_rn(to, from);
    const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step)
        data[i] = __fmul_rn(data[i], factor);
}

__global__ void assign_kernel(float *to, const float *from) { *to = *from; }

// The first thread tells the host, in page-locked memory: no copy and no event beside the launch.
__global__ void __launch_bounds__(kThreads) clear_kernel(float *data, size_t n, const float *flag, float *told) {
    const float found = *flag;
    if (told && blockIdx.x == 0 && threadIdx.x == 0) *told = found;
    if (found == 0.0f) return;
    const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) data[i] = 0.0f;
}

unsigned blocks_for(size_t n) {
    return static_cast<unsigned>(std::min<size_t>(kMostBlocks, (n + kThreads - 1) / kThreads));
}

}  // namespace

cudaError_t rescale(float *data, size_t n, const float *wanted, float *current, cudaStream_t stream) {
    if (n) rescale_kernel<<<blocks_for(n), kThreads, 0, stream>>>(data, n, wanted, current);
    assign_kernel<<<1, 1, 0, stream>>>(current, wanted);
    return cudaGetLastError();
}

cudaError_t clear_if(float *data, size_t n, const float *flag, float *told, cudaStream_t stream) {
    if (n || told) clear_kernel<<<std::max(1u, blocks_for(n)), kThreads, 0, stream>>>(data, n, flag, told);
    return cudaGetLastError();
}

}  // namespace p2pavg
