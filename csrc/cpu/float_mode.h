// Kernels compute with denormals and round to nearest, whatever the mode of the calling thread (which
// torch.set_flush_denormal changes), because the results of twins and peers must be equal to the bit.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace p2pavg {

class DefaultFloatMode {
  public:
#if defined(__x86_64__)
    DefaultFloatMode() : saved_(_mm_getcsr()) {
        if (saved_ & kMask) _mm_setcsr(saved_ & ~kMask);
    }
    ~DefaultFloatMode() {
        if (saved_ & kMask) _mm_setcsr(saved_);
    }

  private:
    static constexpr unsigned kMask = 0xe040u;  // flush to zero, rounding mode, denormals are zero
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        if (saved_ & kMask) __asm__ volatile("msr fpcr, %0" : : "r"(saved_ & ~kMask));
    }
    ~DefaultFloatMode() {
        if (saved_ & kMask) __asm__ volatile("msr fpcr, %0" : : "r"(saved_));
    }

  private:
    static constexpr uint64_t kMask = 0x07c00000u;  // half precision mode, default NaN, flush to zero, rounding mode
    uint64_t saved_;
#else
    DefaultFloatMode() {}
    ~DefaultFloatMode() {}

  private:
#endif
    DefaultFloatMode(const DefaultFloatMode &) = delete;
    DefaultFloatMode &operator=(const DefaultFloatMode &) = delete;
};

}  // namespace p2pavg
