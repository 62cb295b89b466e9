// CRC-32 of zlib's polynomial: the portable table method, and the folding methods of processors that have one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p2pavg {

// All methods take and return the raw register: the caller inverts before and after.
uint32_t crc32_table(uint32_t state, const uint8_t *data, size_t length);
#if defined(__x86_64__)
uint32_t crc32_pclmul(uint32_t state, const uint8_t *data, size_t length);
uint32_t crc32_vpclmul(uint32_t state, const uint8_t *data, size_t length);
#elif defined(__aarch64__)
uint32_t crc32_arm(uint32_t state, const uint8_t *data, size_t length);
#endif

}  // namespace p2pavg
