// Binds sparse.h, as kernels.cpp binds kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "sparse.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool sparse_feedback(int codec, Floats src, double scale, Bytes owed, double share, double decay, BytesOut dst,
                     BytesOut kept) {
    const size_t n = src.size(), need = p2pavg_sparse_size(codec, n);
    if ((n && !need) || dst.size() < need)
        throw nb::value_error("the encoded chunk does not fit its buffer, or its codec is not sparse");
    if (owed.size() < 2 * n || kept.size() < 2 * n)
        throw nb::value_error("the residual does not have an element for each of the chunk");
    nb::gil_scoped_release release;
    return p2pavg_sparse_feedback(codec, src.data(), n, static_cast<float>(scale), owed.data(),
                                  static_cast<float>(share), static_cast<float>(decay), dst.data(), kept.data());
}

bool sparse_check(int codec, Bytes src, size_t n) {
    if (src.size() != p2pavg_sparse_size(codec, n)) return false;
    nb::gil_scoped_release release;
    return p2pavg_sparse_check(codec, src.data(), n);
}

}  // namespace

void bind_sparse(nb::module_ &m) {
    m.def("sparse_feedback", &sparse_feedback, "codec"_a, "src"_a.noconvert(), "scale"_a, "owed"_a.noconvert(),
          "share"_a, "decay"_a, "dst"_a.noconvert(), "kept"_a.noconvert());
    m.def("sparse_check", &sparse_check, "codec"_a, "src"_a.noconvert(), "n"_a);
}
