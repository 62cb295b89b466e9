// Blocks in the LZ4 block format (github.com/lz4/lz4, doc/lz4_Block_format.md), readable by other implementations.
#pragma once

#include <cstddef>
#include <cstdint>

// Writes a block to dst. Returns its bytes, or 0 when it needs more than `room`. n is at most 1 GiB.
size_t p2pavg_lz4_pack(const uint8_t *src, size_t n, uint8_t *dst, size_t room);

// dst[exactly n] <- the block's bytes. Returns 0 for a malformed block or another size; stays within both buffers.
int p2pavg_lz4_unpack(const uint8_t *src, size_t bytes, uint8_t *dst, size_t n);

// Returns 1 when all bytes are zero.
int p2pavg_all_zero(const uint8_t *src, size_t n);

// The packed size of n bytes as a share of n, estimated from a sample: 0 when all are zero, about 1 for noise.
double p2pavg_lz4_sample(const uint8_t *src, size_t n);

// Bytes/s that this processor packs when half of them are zeros; measured once, in about a millisecond.
double p2pavg_lz4_speed();

// Makes p2pavg_lz4_speed return that instead; 0: nothing is packed; below 0: as measured, again. For measurements.
void p2pavg_lz4_assume_speed(double speed);
