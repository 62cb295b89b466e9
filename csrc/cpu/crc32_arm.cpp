// CRC-32 by the instruction that ARMv8.1 requires and most ARMv8.0 processors have.
#include <arm_acle.h>

#include <cstring>

#include "crc32.h"

namespace p2pavg {

uint32_t crc32_arm(uint32_t state, const uint8_t *p, size_t length) {
    for (; length >= 8; p += 8, length -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        state = __crc32d(state, word);
    }
    for (; length; p++, length--) state = __crc32b(state, *p);
    return state;
}

}  // namespace p2pavg
