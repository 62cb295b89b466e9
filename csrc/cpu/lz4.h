// Blocks in the format of LZ4 (github.com/lz4/lz4, doc/lz4_Block_format.md), which other implementations can read.
#pragma once

#include <cstddef>
#include <cstdint>

// Bytes of the block written to dst, or 0 when it would take more than `room`. n of at most 1 GiB.
size_t p2pavg_lz4_pack(const uint8_t *src, size_t n, uint8_t *dst, size_t room);

// dst[exactly n] <- the block. Returns 0 when it is malformed or of another size; never reads or writes beyond.
int p2pavg_lz4_unpack(const uint8_t *src, size_t bytes, uint8_t *dst, size_t n);

// How much of n bytes is left when they are packed, as a sample of them tells: 0 when all are zero, about 1 for noise.
double p2pavg_lz4_sample(const uint8_t *src, size_t n);

// Bytes/s that this processor packs, half of them zeros; measured once, in about a millisecond.
double p2pavg_lz4_speed();
