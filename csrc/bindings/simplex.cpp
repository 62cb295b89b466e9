// Binds simplex.h, as kernels.cpp binds kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "simplex.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Rows = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Solution = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void add(P2PAvgSimplex &self, Rows rows) {
    if (rows.shape(1) != self.columns()) throw nb::value_error("a row has as many elements as there are columns");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows.shape(0); i++) self.add(rows.data() + i * self.columns());
}

void solve(P2PAvgSimplex &self, Solution y, size_t most) {
    if (y.size() != self.columns()) throw nb::value_error("a solution has as many elements as there are columns");
    nb::gil_scoped_release release;
    self.solve(most);
    self.solution(y.data());
}

}  // namespace

void bind_simplex(nb::module_ &m) {
    nb::class_<P2PAvgSimplex>(m, "Simplex")
        .def(nb::init<size_t>(), "columns"_a)
        .def("add", &add, "rows"_a.noconvert())
        .def("solve", &solve, "y"_a.noconvert(), "most"_a);
}
