// What an x86-64 processor and its kernel offer, asked of the processor itself: not every compiler's runtime library
// fills in what __builtin_cpu_supports looks at.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace p2pavg {

struct X86 {
    bool sse41 = false, pclmul = false, f16c = false, avx2 = false, avx512f = false, vpclmulqdq = false;

    X86() {
        unsigned int a, b, c, d, b7 = 0, c7 = 0, d7;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) b7 = c7 = 0;
        sse41 = c >> 19 & 1;
        pclmul = c >> 1 & 1;
        const uint32_t saved = c >> 27 & 1 ? saved_registers() : 0;
        const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
        f16c = ymm && (c >> 29 & 1);
        avx2 = ymm && (b7 >> 5 & 1);
        avx512f = zmm && (b7 >> 16 & 1);
        vpclmulqdq = ymm && (c7 >> 10 & 1);
    }

  private:
    // The registers that the kernel saves for each thread: 1 xmm, 2 ymm, 5 to 7 zmm and masks.
    static uint32_t saved_registers() {
        uint32_t low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
    }
};

}  // namespace p2pavg
#endif
