// The module p2pavg._native: CPU kernels, and the pump when it is part of the build.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_kernels(nb::module_ &m);
void bind_feedback(nb::module_ &m);
void bind_outer(nb::module_ &m);
void bind_simplex(nb::module_ &m);
void bind_sparse(nb::module_ &m);
#ifdef P2PAVG_HAVE_PUMP
void bind_pump(nb::module_ &m);
#endif

NB_MODULE(_native, m) {
    m.doc() = "Native kernels and byte pump of p2pavg; import p2pavg.native instead.";
    nb::set_leak_warnings(false);  // a script may end while a pump still runs, which needs no warning
    m.attr("SOURCES") = P2PAVG_SOURCES;
    bind_kernels(m);
    bind_feedback(m);
    bind_outer(m);
    bind_simplex(m);
    bind_sparse(m);
#ifdef P2PAVG_HAVE_PUMP
    bind_pump(m);
#endif
}
