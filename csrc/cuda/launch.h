// The CUDA kernels as plain functions. Pointers are device memory (or host memory that the device can read);
// all calls only enqueue on `stream` and return the launch's error.
//
// A run of n elements is laid out in chunks of `chunk` elements (the last may be shorter), each encoded as
// csrc/cpu/kernels.h says, one after the other without gaps. Results equal the CPU's to the bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace p2pavg {

// int8 rounds by the draws of (seed, epoch, first + element) when `random`.
struct Draws {
    bool random;
    uint64_t seed, epoch, first;
};

// Residuals of error feedback (csrc/cpu/feedback.h): bfloat16[n] of what averages lack so far, and of what they will
// lack after this contribution. Page-locked memory of the host, or of the device. owed: nullptr for none.
struct Feedback {
    const uint16_t *owed;
    uint16_t *kept;
    float share;
};

enum FloatType : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// One tensor of a fused accumulation: dst[n] += src[n] * scale.
struct Term {
    const void *src;
    float *dst;
    size_t n;
};

size_t encoded_size(int codec, size_t n);

// *flag is set to 1 when a value is not finite, else unchanged. Only int8 and int4 take feedback.
cudaError_t encode(int codec, const float *src, size_t n, size_t chunk, float scale, const Draws &draws,
                   const Feedback &feedback, uint8_t *dst, int *flag, cudaStream_t stream);

// dst = decode(src) * scale, or dst += when `add`; flag as above.
cudaError_t decode(int codec, const uint8_t *src, size_t n, size_t chunk, float scale, bool add, float *dst, int *flag,
                   cudaStream_t stream);

cudaError_t accumulate(const Term *terms, size_t count, FloatType type, float scale, int *flag, cudaStream_t stream);

// data *= *wanted / *current where they differ; then *current = *wanted.
cudaError_t rescale(float *data, size_t n, const float *wanted, float *current, cudaStream_t stream);

// data = 0 unless *flag is 0. *told = *flag, in page-locked host memory; may be null.
cudaError_t clear_if(float *data, size_t n, const float *flag, float *told, cudaStream_t stream);

// Whether the kernels run on the current device: cudaSuccess, or the error.
cudaError_t usable();

}  // namespace p2pavg
