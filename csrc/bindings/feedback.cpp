// Binds feedback.h, as kernels.cpp binds kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "feedback.h"
#include "kernels.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool encode_feedback(int codec, Floats src, double scale, Bytes owed, double share, BytesOut dst, BytesOut kept) {
    const size_t n = src.size(), stored = p2pavg_encoded_size(P2PAVG_BF16, n);
    if (codec < P2PAVG_NONE || codec > P2PAVG_INT4 || dst.size() < p2pavg_encoded_size(codec, n))
        throw nb::value_error("the encoded chunk does not fit its buffer, or its codec is unknown");
    if (owed.size() < stored || kept.size() < stored)
        throw nb::value_error("the residual does not have an element for each of the chunk");
    nb::gil_scoped_release release;
    const std::unique_ptr<float[]> scratch(new float[2 * n]);
    return p2pavg_encode_feedback(codec, src.data(), n, static_cast<float>(scale), owed.data(),
                                  static_cast<float>(share), dst.data(), kept.data(), scratch.get());
}

}  // namespace

void bind_feedback(nb::module_ &m) {
    m.def("encode_feedback", &encode_feedback, "codec"_a, "src"_a.noconvert(), "scale"_a, "owed"_a.noconvert(),
          "share"_a, "dst"_a.noconvert(), "kept"_a.noconvert());
}
