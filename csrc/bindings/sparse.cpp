// Binds sparse.h, as kernels.cpp binds kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "sparse.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool sparse_check(int codec, Bytes src, size_t n) {
    if (src.size() != p2pavg_sparse_size(codec, n)) return false;
    nb::gil_scoped_release release;
    return p2pavg_sparse_check(codec, src.data(), n);
}

}  // namespace

void bind_sparse(nb::module_ &m) {
    m.def("sparse_check", &sparse_check, "codec"_a, "src"_a.noconvert(), "n"_a);
}
