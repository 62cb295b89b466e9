// Binds kernels.h. Arrays come in as contiguous buffers, which are checked here; the GIL is released while computing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <string>

#include "kernels.h"
#include "lz4.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_encoded(int codec, size_t n, size_t bytes) {
    if (p2pavg_encoded_size(codec, 1) == 0)
        throw nb::value_error(("unknown codec " + std::to_string(codec) + "; known are 0 to 4, and 20 to 24").c_str());
    const size_t need = p2pavg_encoded_size(codec, n);
    if (bytes < need)
        throw nb::value_error((std::to_string(n) + " elements take " + std::to_string(need) +
                               " encoded bytes, but the buffer has " + std::to_string(bytes))
                                  .c_str());
}

bool encode(int codec, Floats src, BytesOut dst, double scale) {
    check_encoded(codec, src.size(), dst.size());
    nb::gil_scoped_release release;
    return p2pavg_encode(codec, src.data(), src.size(), static_cast<float>(scale), dst.data());
}

bool encode_int8_stochastic(Floats src, BytesOut dst, double scale, uint64_t seed, uint64_t epoch, uint64_t first) {
    check_encoded(P2PAVG_INT8, src.size(), dst.size());
    nb::gil_scoped_release release;
    return p2pavg_encode_int8_stochastic(src.data(), src.size(), static_cast<float>(scale), seed, epoch, first, dst.data());
}

void decode(int codec, Bytes src, FloatsOut dst, double scale) {
    check_encoded(codec, dst.size(), src.size());
    nb::gil_scoped_release release;
    p2pavg_decode(codec, src.data(), dst.size(), static_cast<float>(scale), dst.data());
}

bool decode_add(int codec, Bytes src, FloatsOut acc, double weight) {
    check_encoded(codec, acc.size(), src.size());
    nb::gil_scoped_release release;
    return p2pavg_decode_add(codec, src.data(), acc.size(), static_cast<float>(weight), acc.data());
}

// The runs of one large buffer, decoded in one call: run i lies at byte src_offsets[i], has counts[i] elements and
// goes to element dst_offsets[i].
void decode_runs(int codec, Bytes src, Indices src_offsets, FloatsOut dst, Indices dst_offsets, Indices counts,
                 double scale) {
    const size_t runs = counts.size();
    if (src_offsets.size() != runs || dst_offsets.size() != runs)
        throw nb::value_error("src_offsets, dst_offsets and counts must have one entry per run");
    for (size_t i = 0; i < runs; i++) {
        const int64_t from = src_offsets.data()[i], to = dst_offsets.data()[i], n = counts.data()[i];
        if (from < 0 || to < 0 || n < 0 || static_cast<uint64_t>(from) > src.size() ||
            static_cast<uint64_t>(to) > dst.size() || static_cast<uint64_t>(n) > dst.size() - static_cast<size_t>(to))
            throw nb::value_error(("run " + std::to_string(i) + " lies outside its buffers").c_str());
        check_encoded(codec, static_cast<size_t>(n), src.size() - static_cast<size_t>(from));
    }
    nb::gil_scoped_release release;
    for (size_t i = 0; i < runs; i++)
        p2pavg_decode(codec, src.data() + src_offsets.data()[i], static_cast<size_t>(counts.data()[i]), scale,
                      dst.data() + dst_offsets.data()[i], true);
}

uint32_t crc32(Bytes data, uint32_t crc) {
    nb::gil_scoped_release release;
    return p2pavg_crc32(crc, data.data(), data.size());
}

// Returns None when the block needs more than `room` bytes.
nb::object lz4_pack(Bytes data, size_t room) {
    const size_t most = std::min(room, data.size() + data.size() / 255 + 16);
    const std::unique_ptr<uint8_t[]> packed(new uint8_t[most]);
    size_t size;
    {
        nb::gil_scoped_release release;
        size = p2pavg_lz4_pack(data.data(), data.size(), packed.get(), most);
    }
    return size ? nb::object(nb::bytes(reinterpret_cast<const char *>(packed.get()), size)) : nb::none();
}

bool lz4_unpack(Bytes data, BytesOut dst) {
    nb::gil_scoped_release release;
    return p2pavg_lz4_unpack(data.data(), data.size(), dst.data(), dst.size());
}

double lz4_sample(Bytes data) { return p2pavg_lz4_sample(data.data(), data.size()); }

}  // namespace

void bind_kernels(nb::module_ &m) {
    m.attr("CODECS") = nb::make_tuple("none", "fp16", "bf16", "int8", "int4");  // in the order of P2pavgCodec
    m.def("encoded_size", &p2pavg_encoded_size, "codec"_a, "n"_a);
    m.def("encode", &encode, "codec"_a, "src"_a.noconvert(), "dst"_a.noconvert(), "scale"_a);
    m.def("encode_int8_stochastic", &encode_int8_stochastic, "src"_a.noconvert(), "dst"_a.noconvert(), "scale"_a,
          "seed"_a, "epoch"_a, "first"_a);
    m.def("decode", &decode, "codec"_a, "src"_a.noconvert(), "dst"_a.noconvert(), "scale"_a);
    m.def("decode_add", &decode_add, "codec"_a, "src"_a.noconvert(), "acc"_a.noconvert(), "weight"_a);
    m.def("decode_runs", &decode_runs, "codec"_a, "src"_a.noconvert(), "src_offsets"_a.noconvert(),
          "dst"_a.noconvert(), "dst_offsets"_a.noconvert(), "counts"_a.noconvert(), "scale"_a);
    m.def("crc32", &crc32, "data"_a.noconvert(), "crc"_a = 0u);
    m.def("lz4_pack", &lz4_pack, "data"_a.noconvert(), "room"_a);
    m.def("lz4_unpack", &lz4_unpack, "data"_a.noconvert(), "dst"_a.noconvert());
    m.def("lz4_sample", &lz4_sample, "data"_a.noconvert());
    m.def("lz4_speed", &p2pavg_lz4_speed);
    m.def("lz4_assume_speed", &p2pavg_lz4_assume_speed, "speed"_a);
    m.def("isa", &p2pavg_isa);
    m.def("select_isa", &p2pavg_select_isa, "name"_a);
}
