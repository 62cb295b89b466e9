// Error feedback: the encoding error of a contribution, added to the next one.
#pragma once

#include <cstddef>
#include <cstdint>

// With the mean m[i] = src[i] * scale, and owed a bfloat16 residual in shares of the average:
// dst[encoded_size(codec, n)] <- encode(m[i] + owed[i] / share), or encode(0) where m[i] is 0;
// kept[n], bfloat16, <- owed[i] + share * (m[i] - what dst decodes to). scratch: 2 * n floats.
// Returns 1 when every encoded value is finite. Every step rounds to float32.
int p2pavg_encode_feedback(int codec, const float *src, size_t n, float scale, const uint8_t *owed, float share,
                           uint8_t *dst, uint8_t *kept, float *scratch);
