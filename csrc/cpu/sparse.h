// The sparse encoding of a run of float32: the largest values of each block, in two bits each, and where they stand.
//
// A run is a sequence of records, one for each block of 4096 elements; the last block may be shorter. With the codec
// P2PAVG_SPARSE + l, a block of m elements keeps the k = ceil(m / 2^l) of the largest magnitude, of equal ones the
// first. A record, in bytes whose first bit is the lowest:
//
//   u16 big, u16 small   bfloat16: the magnitudes that kept values stand for; both 0: all bytes of the record are 0
//   k x l bits           the low l bits of the indices, in ascending order of the indices
//   2k bits              bit (i + (index_i >> l)) is set for the i-th index (Elias 1974)
//   k x 2 bits           the sign, then whether the magnitude is `big`
//
// Kept magnitudes from their mean on count as big; where some are 0, all others do, and small is 0. Both are means,
// in 24 bits below the block's largest, rounded down. A block whose largest magnitude is under 2^-100 is one of zeros.
// Magnitudes from 2^100 on count as infinite, so that no sum of a few contributions overflows.
#pragma once

#include <cstddef>
#include <cstdint>

// Bytes of n encoded elements; 0: not a sparse codec.
size_t p2pavg_sparse_size(int codec, size_t n);

// dst <- encode(src[n] * scale). Returns 1 when every value is finite; the record of a block that has another is NaN.
int p2pavg_sparse_encode(int codec, const float *src, size_t n, float scale, uint8_t *dst);

// Whether these are the bytes of n finite elements: indices ascend inside their block, and nothing else is set.
int p2pavg_sparse_check(int codec, const uint8_t *src, size_t n);

// dst[n] <- decode(src) * scale; what does not pass the check decodes to any values.
void p2pavg_sparse_decode(int codec, const uint8_t *src, size_t n, float scale, float *dst);

// acc[n] += decode(src) * weight. Returns 1 when src passes the check and every term is finite.
int p2pavg_sparse_decode_add(int codec, const uint8_t *src, size_t n, float weight, float *acc);
