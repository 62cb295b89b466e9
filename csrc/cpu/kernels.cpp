// The layout of encoded runs, block by block, over the span functions of the instruction set in use.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "float_mode.h"
#include "scalar.h"
#include "spans.h"
#include "sparse.h"
#include "x86.h"

namespace p2pavg {
namespace {

constexpr size_t kBlock = 4096;       // elements walked at a time; one exponent each in fp16
constexpr size_t kStepBlock = 1024;   // elements per step in int8 and int4
constexpr size_t kHeaderAlign = 64;   // headers are padded so that an aligned run has an aligned body

size_t blocks(size_t n, size_t block) { return (n + block - 1) / block; }

size_t header_used(int codec, size_t n) {
    if (codec == P2PAVG_FP16) return blocks(n, kBlock);
    return codec == P2PAVG_INT8 || codec == P2PAVG_INT4 ? 4 * blocks(n, kStepBlock) : 0;
}

size_t header_size(int codec, size_t n) { return blocks(header_used(codec, n), kHeaderAlign) * kHeaderAlign; }

// Bytes of n elements after the header.
size_t body_size(int codec, size_t n) {
    if (codec == P2PAVG_INT4) return n / 2 + n % 2;
    return n * (codec == P2PAVG_NONE ? 4 : codec == P2PAVG_INT8 ? 1 : 2);
}

bool known(int codec) { return codec >= P2PAVG_NONE && codec <= P2PAVG_INT4; }

bool runs_here(const Spans &spans) {
#if defined(__x86_64__)
    if (&spans == &avx2_spans) {
        const X86 here;
        return here.avx2 && here.f16c;
    }
#endif
    (void)spans;
    return true;
}

const Spans *const kAll[] = {
#if defined(__x86_64__)
    &avx2_spans,
#elif defined(__aarch64__)
    &neon_spans,
#endif
    &portable_spans,
};

const Spans *best() {
    for (const Spans *spans : kAll)
        if (runs_here(*spans)) return spans;
    return &portable_spans;
}

std::atomic<const Spans *> &chosen() {
    static std::atomic<const Spans *> spans{best()};
    return spans;
}

// The rounding of int8: to nearest, or by draws of a counter RNG.
struct Draws {
    uint64_t key, first;
};

uint64_t draw_key(uint64_t seed, uint64_t epoch) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
    return mix64(mix64(seed + kGolden) + epoch * kGolden);
}

void round_i8(const Spans &k, const Draws *draws, size_t at, const float *x, size_t n, float factor,
              int8_t *q) {
    if (!draws) return k.encode_i8(x, n, factor, q);
    while (n) {  // the keys change with the high half of the index
        const uint64_t index = draws->first + at;
        const auto low = static_cast<uint32_t>(index);
        const auto m = static_cast<size_t>(std::min<uint64_t>(n, (uint64_t{1} << 32) - low));
        const uint64_t key = mix64(draws->key ^ ((index >> 32) * 0xd1342543de82ef95ull));
        k.encode_i8_random(x, m, factor, low, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), q);
        x += m, q += m, at += m, n -= m;
    }
}

// A view of one encoded run of n elements.
template <typename Byte>
struct Run {
    int codec;
    Byte *header, *body;
    Run(int c, Byte *bytes, size_t n) : codec(c), header(bytes), body(bytes + header_size(c, n)) {}
};

// Whether one multiplication by s * 2^e gives the same bits as two, (x * s) * 2^e: it does while nothing overflows, and
// while products that become denormal are far below the smallest float16.
bool one_factor(int e, float factor) {
    const uint32_t a = abs_bits(factor);
    return e >= -112 && e <= 100 && a >= 0x00800000u && a < kInfBits;
}

bool encode_fp16_block(const Spans &k, const float *x, size_t n, float scale, uint8_t *exponent, uint16_t *h) {
    uint32_t m = k.max_abs(x, n);
    if (m < kInfBits) m = abs_bits(from_bits(m) * scale);
    const bool finite = m < kInfBits;
    if (!finite) {
        m = 0;
        for (size_t i = 0; i < n; i++) {
            const uint32_t a = abs_bits(get(x, i) * scale);
            if (a < kInfBits) m = std::max(m, a);
        }
    }
    const int e = half_exponent(m);
    *exponent = static_cast<uint8_t>(static_cast<int8_t>(e));
    const float power = power_of_two(e);
    if (finite && one_factor(e, scale * power))
        k.encode_f16(x, n, scale * power, h);
    else
        for (size_t i = 0; i < n; i++) put(h, i, half_from_any((get(x, i) * scale) * power, half_top_bits(e)));
    return finite;
}

// The blocks of int8 and int4: a step, and levels of it. `at` is the block's first element.
bool encode_step_block(const Spans &k, const Draws *draws, size_t at, const float *x, size_t n, float scale,
                       const Run<uint8_t> &run) {
    uint8_t *const q = run.body + body_size(run.codec, at);
    const uint32_t raw = k.max_abs(x, n);
    const float largest = from_bits(raw) * scale;  // with the sign of scale
    const uint32_t m = std::max(raw, abs_bits(largest));
    float step = 0.0f;
    if (m >= kInfBits) {
        step = from_bits(0x7fc00000u);  // no level is NaN, so the whole block becomes NaN
        std::memset(q, 0, body_size(run.codec, n));
    } else if (std::min(raw, abs_bits(largest)) < kStepMinBits) {
        std::memset(q, 0, body_size(run.codec, n));
    } else if (run.codec == P2PAVG_INT4) {
        step = int4_step(largest);
        k.encode_i4(x, n, 7.0f / from_bits(raw), q);
    } else {
        step = int8_step(largest);
        round_i8(k, draws, at, x, n, 127.0f / from_bits(raw), reinterpret_cast<int8_t *>(q));
    }
    std::memcpy(run.header + 4 * (at / kStepBlock), &step, 4);
    return m < kInfBits;
}

// Encodes block b (kBlock elements, or the rest) of a run; x points at the block.
bool encode_block(const Spans &k, const Draws *draws, const Run<uint8_t> &run, size_t b, const float *x, size_t n,
                  float scale) {
    const size_t at = b * kBlock;
    switch (run.codec) {
        case P2PAVG_NONE: {
            auto *y = reinterpret_cast<float *>(run.body) + at;
            if (k.scale_f32(x, n, scale, y) < kInfBits) return true;
            for (size_t i = 0; i < n; i++) put(y, i, canonical(get(x, i) * scale));
            return false;
        }
        case P2PAVG_FP16:
            return encode_fp16_block(k, x, n, scale, run.header + b, reinterpret_cast<uint16_t *>(run.body) + at);
        case P2PAVG_BF16: {
            auto *h = reinterpret_cast<uint16_t *>(run.body) + at;
            const uint32_t m = k.encode_bf16(x, n, scale, h);
            if (m <= kBf16MaxBits) return true;
            for (size_t i = 0; i < n; i++) put(h, i, bf16_from_any(get(x, i) * scale));
            return m < kInfBits;
        }
        default: {
            bool finite = true;
            for (size_t i = 0; i < n; i += kStepBlock)
                finite &= encode_step_block(k, draws, at + i, x + i, std::min(kStepBlock, n - i), scale, run);
            return finite;
        }
    }
}

int encode_run(const Spans &k, const Draws *draws, int codec, const float *src, size_t n, float scale, uint8_t *dst) {
    const Run<uint8_t> run(codec, dst, n);
    const size_t used = header_used(codec, n);
    std::memset(dst + used, 0, header_size(codec, n) - used);
    bool finite = true;
    for (size_t b = 0; b * kBlock < n; b++)
        finite &= encode_block(k, draws, run, b, src + b * kBlock, std::min(kBlock, n - b * kBlock), scale);
    return finite;
}

// y = (h * 2^-e) * scale, in one multiplication when one gives the same bits.
void decode_fp16_block(const Spans &k, const uint16_t *h, size_t n, int e, float scale, float *y) {
    const float power = power_of_two(-e);
    if (one_factor(e, power * scale)) return k.decode_f16(h, n, power * scale, y);
    for (size_t i = 0; i < n; i++) put(y, i, (half_to_float(get(h, i)) * power) * scale);
}

uint32_t add_fp16_block(const Spans &k, const uint16_t *h, size_t n, int e, float weight, float *acc) {
    const float power = power_of_two(-e);
    if (one_factor(e, power * weight)) return k.add_f16(h, n, power * weight, acc);
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++) {
        const float term = (half_to_float(get(h, i)) * power) * weight;
        put(acc, i, get(acc, i) + term);
        m = std::max(m, abs_bits(term));
    }
    return m;
}

float block_step(const Run<const uint8_t> &run, size_t at) {
    float step;
    std::memcpy(&step, run.header + 4 * (at / kStepBlock), 4);
    return step;
}

// Elements from `at` on, all of one block of int8 or int4.
void decode_step_block(const Spans &k, const Run<const uint8_t> &run, size_t at, size_t n, float scale, float *y) {
    const uint8_t *q = run.body + body_size(run.codec, at);
    const float step = block_step(run, at) * scale;
    if (run.codec == P2PAVG_INT4) k.decode_i4(q, n, step, y);
    else k.decode_i8(reinterpret_cast<const int8_t *>(q), n, step, y);
}

uint32_t add_step_block(const Spans &k, const Run<const uint8_t> &run, size_t at, size_t n, float weight, float *acc) {
    const uint8_t *q = run.body + body_size(run.codec, at);
    const float step = block_step(run, at) * weight;
    if (run.codec == P2PAVG_INT4) return k.add_i4(q, n, step, acc);
    return k.add_i8(reinterpret_cast<const int8_t *>(q), n, step, acc);
}

void decode_block(const Spans &k, const Run<const uint8_t> &run, size_t b, size_t n, float scale, float *y) {
    const size_t at = b * kBlock;
    switch (run.codec) {
        case P2PAVG_NONE:
            k.scale_f32(reinterpret_cast<const float *>(run.body) + at, n, scale, y);
            break;
        case P2PAVG_FP16:
            decode_fp16_block(k, reinterpret_cast<const uint16_t *>(run.body) + at, n,
                              static_cast<int8_t>(run.header[b]), scale, y);
            break;
        case P2PAVG_BF16:
            k.decode_bf16(reinterpret_cast<const uint16_t *>(run.body) + at, n, scale, y);
            break;
        default:
            for (size_t i = 0; i < n; i += kStepBlock) decode_step_block(k, run, at + i, std::min(kStepBlock, n - i), scale, y + i);
    }
}

uint32_t add_block(const Spans &k, const Run<const uint8_t> &run, size_t b, size_t n, float weight, float *acc) {
    const size_t at = b * kBlock;
    switch (run.codec) {
        case P2PAVG_NONE:
            return k.add_f32(reinterpret_cast<const float *>(run.body) + at, n, weight, acc);
        case P2PAVG_FP16:
            return add_fp16_block(k, reinterpret_cast<const uint16_t *>(run.body) + at, n,
                                  static_cast<int8_t>(run.header[b]), weight, acc);
        case P2PAVG_BF16:
            return k.add_bf16(reinterpret_cast<const uint16_t *>(run.body) + at, n, weight, acc);
        default: {
            uint32_t m = 0;
            for (size_t i = 0; i < n; i += kStepBlock)
                m = std::max(m, add_step_block(k, run, at + i, std::min(kStepBlock, n - i), weight, acc + i));
            return m;
        }
    }
}

constexpr size_t kSpan = 1024;  // elements summed at a time, so that a term does not push the block's sum out of L1

// y <- term's elements [at, at + n) of `total`, or y += them; they lie within one block, at a multiple of kSpan.
void take_span(const Spans &k, const P2pavgTerm &term, size_t total, size_t at, size_t n, bool first, float *y) {
    const Run<const uint8_t> run(term.codec, term.data, total);
    switch (run.codec) {
        case P2PAVG_NONE: {
            const auto *x = reinterpret_cast<const float *>(run.body) + at;
            if (first) k.scale_f32(x, n, term.weight, y);
            else k.add_f32(x, n, term.weight, y);
            break;
        }
        case P2PAVG_FP16: {
            const auto *h = reinterpret_cast<const uint16_t *>(run.body) + at;
            const int e = static_cast<int8_t>(run.header[at / kBlock]);
            if (first) decode_fp16_block(k, h, n, e, term.weight, y);
            else add_fp16_block(k, h, n, e, term.weight, y);
            break;
        }
        case P2PAVG_BF16: {
            const auto *h = reinterpret_cast<const uint16_t *>(run.body) + at;
            if (first) k.decode_bf16(h, n, term.weight, y);
            else k.add_bf16(h, n, term.weight, y);
            break;
        }
        default: {
            static_assert(kSpan == kStepBlock, "a span of int8 or int4 has one step");
            if (first) decode_step_block(k, run, at, n, term.weight, y);
            else add_step_block(k, run, at, n, term.weight, y);
        }
    }
}

// dst <- scale * (a + b), of two terms that are plain floats, as plain floats, in one pass.
bool sum_plain(const Spans &k, const P2pavgTerm &a, const P2pavgTerm &b, size_t n, float scale, float *dst) {
    const auto *x = reinterpret_cast<const float *>(a.data), *y = reinterpret_cast<const float *>(b.data);
    if (k.sum_f32(x, a.weight, y, b.weight, n, scale, dst) < kInfBits) return true;
    for (size_t i = 0; i < n; i++) put(dst, i, canonical(get(dst, i)));
    return false;
}

}  // namespace
const Spans &spans_in_use() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace p2pavg

using namespace p2pavg;

size_t p2pavg_encoded_size(int codec, size_t n) {
    return known(codec) ? header_size(codec, n) + body_size(codec, n) : p2pavg_sparse_size(codec, n);
}

int p2pavg_encode(int codec, const float *src, size_t n, float scale, uint8_t *dst) {
    if (!known(codec)) return p2pavg_sparse_encode(codec, src, n, scale, dst);
    const DefaultFloatMode mode;
    return encode_run(spans_in_use(), nullptr, codec, src, n, scale, dst);
}

int p2pavg_encode_int8_stochastic(const float *src, size_t n, float scale, uint64_t seed, uint64_t epoch,
                                  uint64_t first, uint8_t *dst) {
    const DefaultFloatMode mode;
    const Draws draws{draw_key(seed, epoch), first};
    return encode_run(spans_in_use(), &draws, P2PAVG_INT8, src, n, scale, dst);
}

void p2pavg_decode(int codec, const uint8_t *src, size_t n, float scale, float *dst, bool streaming) {
    if (!known(codec)) return p2pavg_sparse_decode(codec, src, n, scale, dst);
    const DefaultFloatMode mode;
    const Spans &all = spans_in_use(), &k = streaming && all.streaming ? *all.streaming : all;
    const Run<const uint8_t> run(codec, src, n);
    for (size_t at = 0; at < n; at += kBlock)
        decode_block(k, run, at / kBlock, std::min(kBlock, n - at), scale, dst + at);
#if defined(__x86_64__)
    if (streaming) _mm_sfence();  // stores around the cache are not ordered
#endif
}

int p2pavg_finite_crc32(const float *src, size_t n, uint32_t *crc) {
    const Spans &k = spans_in_use();
    uint32_t m = 0;
    *crc = 0;
    for (size_t at = 0; at < n; at += kSpan) {
        const size_t length = std::min(kSpan, n - at);
        m = std::max(m, k.max_abs(src + at, length));
        *crc = p2pavg_crc32(*crc, src + at, length * sizeof(float));
    }
    return m < kInfBits;
}

int p2pavg_decode_add(int codec, const uint8_t *src, size_t n, float weight, float *acc) {
    if (!known(codec)) return p2pavg_sparse_decode_add(codec, src, n, weight, acc);
    const DefaultFloatMode mode;
    const Spans &k = spans_in_use();
    const Run<const uint8_t> run(codec, src, n);
    uint32_t m = 0;
    for (size_t at = 0; at < n; at += kBlock)
        m = std::max(m, add_block(k, run, at / kBlock, std::min(kBlock, n - at), weight, acc + at));
    return m < kInfBits;
}

int p2pavg_sum_encode(const P2pavgTerm *terms, size_t count, size_t n, float scale, int codec_out, uint8_t *dst) {
    for (size_t i = 0; i < count; i++)
        if (!known(terms[i].codec)) return 0;
    if (!known(codec_out) || count == 0) return 0;
    const DefaultFloatMode mode;
    const Spans &k = spans_in_use();
    if (count == 2 && terms[0].codec == P2PAVG_NONE && terms[1].codec == P2PAVG_NONE && codec_out == P2PAVG_NONE)
        return sum_plain(k, terms[0], terms[1], n, scale, reinterpret_cast<float *>(dst));
    const Spans &near = k.in_cache ? *k.in_cache : k;
    const Run<uint8_t> out(codec_out, dst, n);
    std::memset(dst, 0, header_size(codec_out, n));
    alignas(64) float sum[kBlock];
    bool finite = true;
    for (size_t at = 0; at < n; at += kBlock) {
        const size_t m = std::min(kBlock, n - at);
        for (size_t span = 0; span < m; span += kSpan) {
            const size_t length = std::min(kSpan, m - span);
            for (size_t i = 0; i < count; i++)
                take_span(k, terms[i], n, at + span, length, i == 0, sum + span);
        }
        finite &= encode_block(near, nullptr, out, at / kBlock, sum, m, scale);
    }
    return finite;
}

const char *p2pavg_isa() { return chosen().load()->name; }

int p2pavg_select_isa(const char *name) {
    for (const Spans *spans : kAll) {
        if (std::strcmp(spans->name, name) != 0 || !runs_here(*spans)) continue;
        chosen().store(spans);
        return 1;
    }
    return 0;
}
