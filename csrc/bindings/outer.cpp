// Binds outer.h, as kernels.cpp binds kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "outer.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void outer_step(FloatsOut theta, std::optional<FloatsOut> velocity, Floats delta, double lr, double momentum,
                bool nesterov) {
    const size_t n = theta.size();
    if (delta.size() != n || (velocity && velocity->size() != n))
        throw nb::value_error("theta, velocity and delta have as many elements");
    nb::gil_scoped_release release;
    p2pavg_outer_step(theta.data(), velocity ? velocity->data() : nullptr, delta.data(), n, static_cast<float>(lr),
                      static_cast<float>(momentum), nesterov);
}

}  // namespace

void bind_outer(nb::module_ &m) {
    m.def("outer_step", &outer_step, "theta"_a.noconvert(), "velocity"_a.none().noconvert(), "delta"_a.noconvert(),
          "lr"_a, "momentum"_a, "nesterov"_a);
}
