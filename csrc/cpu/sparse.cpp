#include "sparse.h"

#include <algorithm>
#include <cstring>

#include "float_mode.h"
#include "kernels.h"
#include "scalar.h"
#include "spans.h"

namespace p2pavg {
namespace {

constexpr size_t kBlock = 4096;
constexpr int kFewestLowBits = 4, kMostLowBits = 8;
constexpr size_t kMostKept = kBlock >> kFewestLowBits;
constexpr uint32_t kLeastBits = 27u << 23, kMostBits = 227u << 23;  // 2^-100 and 2^100
constexpr uint32_t kSignificand = 23;
constexpr size_t kScales = 4;  // bytes

// 0: not a sparse codec.
unsigned low_bits(int codec) {
    const int bits = codec - P2PAVG_SPARSE;
    return bits >= kFewestLowBits && bits <= kMostLowBits ? static_cast<unsigned>(bits) : 0;
}

size_t bytes_of(size_t bits) { return (bits + 7) / 8; }

// The record of a block of m elements.
struct Record {
    size_t m, kept, upper_at, codes_at, size;
    unsigned low;

    Record(unsigned l, size_t elements)
        : m(elements), kept((elements + (size_t{1} << l) - 1) >> l), upper_at(kScales + bytes_of(kept * l)),
          codes_at(upper_at + bytes_of(2 * kept)), size(codes_at + bytes_of(2 * kept)), low(l) {}
};

// Calls visit(record, bytes, first element) for each block of a run, until it returns false.
template <typename Byte, typename Visit>
bool each_block(int codec, Byte *bytes, size_t n, Visit visit) {
    const unsigned l = low_bits(codec);
    if (!l) return false;
    for (size_t at = 0; at < n; at += kBlock) {
        const Record record(l, std::min(kBlock, n - at));
        if (!visit(record, bytes, at)) return false;
        bytes += record.size;
    }
    return true;
}

void set_bits(uint8_t *bytes, size_t at, uint32_t value) {
    value <<= at % 8;
    bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] | value);
    if (value >> 8) bytes[at / 8 + 1] = static_cast<uint8_t>(bytes[at / 8 + 1] | (value >> 8));
}

uint32_t get_bits(const uint8_t *bytes, size_t at, unsigned count) {
    uint32_t value = bytes[at / 8];
    if (at % 8 + count > 8) value |= static_cast<uint32_t>(bytes[at / 8 + 1]) << 8;
    return (value >> (at % 8)) & ((1u << count) - 1);
}

// The bits behind the first `bits` of a run of whole bytes.
bool rest_is_zero(const uint8_t *bytes, size_t bits) { return bits % 8 == 0 || bytes[bits / 8] >> (bits % 8) == 0; }

// Writes the indices of the `record.kept` largest magnitudes of y, in ascending order. largest: of all.
void choose(const Spans &k, const float *y, const Record &record, uint32_t largest, uint32_t *indices) {
    uint32_t low = 0, high = largest + 1;  // at_least(low) >= kept > at_least(high)
    size_t above = 0;                      // at_least(high)
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const size_t found = k.at_least(y, record.m, middle);
        if (found >= record.kept) low = middle;
        else high = middle, above = found;
        if (found == record.kept) break;
    }
    size_t ties = record.kept - above, count = 0;
    if (high - low > 1) ties = record.kept;  // exactly as many as are kept have at least `low`
    const uint32_t sure = high - low > 1 ? low : high;
    for (size_t i = 0; i < record.m && count < record.kept; i++) {
        const uint32_t a = abs_bits(y[i]);
        if (a >= sure) indices[count++] = static_cast<uint32_t>(i);
        else if (a == low && ties) indices[count++] = static_cast<uint32_t>(i), ties--;
    }
}

// A magnitude in units of 2^-23 of the block's binade, rounded down.
uint32_t fixed(uint32_t bits, uint32_t exponent) {
    const uint32_t shift = exponent - (bits >> kSignificand);
    return shift > kSignificand ? 0 : ((bits & 0x7fffffu) | 0x800000u) >> shift;
}

uint16_t scale_of(uint64_t sum, uint64_t count, uint32_t exponent) {
    if (count == 0 || sum < count) return 0;
    const float unit = from_bits((exponent - kSignificand) << kSignificand);
    return static_cast<uint16_t>(to_bits(static_cast<float>(sum / count) * unit) >> 16);
}

// What the record of block y holds: kept indices, and the values that they decode to. encode_block returns false when y is not finite.
struct Encoded {
    size_t count = 0;  // 0: zeros
    uint32_t indices[kMostKept];
    float values[kMostKept];
};

bool encode_block(const Spans &k, const float *y, const Record &record, uint8_t *out, Encoded &found) {
    std::memset(out, 0, record.size);
    found.count = 0;
    const uint32_t largest = k.max_abs(y, record.m);
    if (largest >= kMostBits) {
        put(reinterpret_cast<uint16_t *>(out), 0, uint16_t{0x7fc0});
        return false;
    }
    if (largest < kLeastBits) return true;
    choose(k, y, record, largest, found.indices);
    const uint32_t exponent = largest >> kSignificand;
    uint32_t q[kMostKept], least = ~0u;
    uint64_t sum = 0;
    for (size_t i = 0; i < record.kept; i++) {
        q[i] = fixed(abs_bits(y[found.indices[i]]), exponent);
        sum += q[i];
        least = std::min(least, q[i]);
    }
    const auto from = least ? static_cast<uint32_t>(sum / record.kept) : 1u;
    uint64_t sums[2] = {0, 0}, counts[2] = {0, 0};
    for (size_t i = 0; i < record.kept; i++) {
        sums[q[i] >= from] += q[i];
        counts[q[i] >= from]++;
    }
    const uint16_t small = scale_of(sums[0], counts[0], exponent), big = scale_of(sums[1], counts[1], exponent);
    put(reinterpret_cast<uint16_t *>(out), 0, big);
    put(reinterpret_cast<uint16_t *>(out), 1, small);
    const float magnitudes[2] = {bf16_to_float(small), bf16_to_float(big)};
    for (size_t i = 0; i < record.kept; i++) {
        const uint32_t index = found.indices[i], is_big = q[i] >= from;
        const uint32_t negative = to_bits(y[index]) >> 31 & (is_big | (small != 0));
        set_bits(out + kScales, i * record.low, index & ((1u << record.low) - 1));
        set_bits(out + record.upper_at, i + (index >> record.low), 1);
        set_bits(out + record.codes_at, 2 * i, negative | is_big << 1);
        found.values[i] = negative ? -magnitudes[is_big] : magnitudes[is_big];
    }
    found.count = record.kept;
    return true;
}

bool all_zero(const uint8_t *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i]) return false;
    return true;
}

// Calls visit(index, value) for what a record holds, in ascending order. Returns false at the first malformed thing.
template <typename Visit>
bool walk(const Record &record, const uint8_t *bytes, Visit visit) {
    const auto *scales = reinterpret_cast<const uint16_t *>(bytes);
    const uint16_t big = get(scales, 0), small = get(scales, 1);
    if (big == 0) return all_zero(bytes, record.size);
    if (big >= kMostBits >> 16 || small > big) return false;
    const float magnitudes[2] = {bf16_to_float(small), bf16_to_float(big)};
    const uint8_t *const upper = bytes + record.upper_at, *const codes = bytes + record.codes_at;
    if (!rest_is_zero(bytes + kScales, record.kept * record.low) || !rest_is_zero(codes, 2 * record.kept)) return false;
    size_t count = 0, next = 0;
    for (size_t byte = 0; byte < bytes_of(2 * record.kept); byte++)
        for (unsigned set = upper[byte]; set; set &= set - 1) {
            const size_t bit = 8 * byte + static_cast<size_t>(__builtin_ctz(set));
            if (count == record.kept) return false;
            const size_t index = (bit - count) << record.low | get_bits(bytes + kScales, count * record.low, record.low);
            if (index < next || index >= record.m) return false;
            const uint32_t code = get_bits(codes, 2 * count, 2);
            visit(index, code & 1 ? -magnitudes[code >> 1] : magnitudes[code >> 1]);
            next = index + 1;
            count++;
        }
    return count == record.kept;
}

}  // namespace
}  // namespace p2pavg

using namespace p2pavg;

size_t p2pavg_sparse_size(int codec, size_t n) {
    const unsigned l = low_bits(codec);
    if (!l) return 0;
    const size_t rest = n % kBlock;
    return n / kBlock * Record(l, kBlock).size + (rest ? Record(l, rest).size : 0);
}

int p2pavg_sparse_encode(int codec, const float *src, size_t n, float scale, uint8_t *dst) {
    const DefaultFloatMode mode;
    const Spans &k = spans_in_use();
    alignas(64) float y[kBlock];
    Encoded found;
    bool finite = true;
    each_block(codec, dst, n, [&](const Record &record, uint8_t *out, size_t at) {
        k.scale_f32(src + at, record.m, scale, y);
        finite &= encode_block(k, y, record, out, found);
        return true;
    });
    return finite;
}

int p2pavg_sparse_check(int codec, const uint8_t *src, size_t n) {
    return each_block(codec, src, n, [](const Record &record, const uint8_t *bytes, size_t) {
        return walk(record, bytes, [](size_t, float) {});
    });
}

void p2pavg_sparse_decode(int codec, const uint8_t *src, size_t n, float scale, float *dst) {
    const DefaultFloatMode mode;
    each_block(codec, src, n, [&](const Record &record, const uint8_t *bytes, size_t at) {
        std::memset(dst + at, 0, record.m * sizeof(float));
        walk(record, bytes, [&](size_t index, float value) { put(dst, at + index, value * scale); });
        return true;
    });
}

int p2pavg_sparse_decode_add(int codec, const uint8_t *src, size_t n, float weight, float *acc) {
    const DefaultFloatMode mode;
    uint32_t m = 0;
    const bool sound = each_block(codec, src, n, [&](const Record &record, const uint8_t *bytes, size_t at) {
        return walk(record, bytes, [&](size_t index, float value) {
            const float term = value * weight;
            put(acc, at + index, get(acc, at + index) + term);
            m = std::max(m, abs_bits(term));
        });
    });
    return sound && m < kInfBits;
}
