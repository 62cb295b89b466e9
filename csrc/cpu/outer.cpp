#include "outer.h"

#include "float_mode.h"

namespace {

float without_dust(float x) { return x > -0x1p-100f && x < 0x1p-100f ? 0.0f : x; }

}  // namespace

void p2pavg_outer_step(float *theta, float *velocity, const float *delta, size_t n, float lr, float momentum,
                       int nesterov) {
    const p2pavg::DefaultFloatMode mode;
    if (velocity == nullptr) {
        for (size_t i = 0; i < n; i++) theta[i] -= without_dust(lr * without_dust(delta[i]));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const float g = without_dust(delta[i]);
        const float v = without_dust(momentum * velocity[i] + g);
        velocity[i] = v;
        const float d = nesterov ? g + momentum * v : v;
        theta[i] -= without_dust(lr * d);
    }
}
