// The outer step: SGD with momentum on the mean of the peers' parameter changes, the same bits on every processor.
#pragma once

#include <cstddef>

// With g = delta[i]: velocity[i] <- momentum * velocity[i] + g; theta[i] <- theta[i] - lr * d, where d is the new
// velocity, or g + momentum * velocity with nesterov. Every operation rounds to float32; the build forbids fusing them.
// Gradients, velocities and products under 2^-100 count as 0, so that no denormals occur, which some threads flush.
// velocity may be null: then momentum counts as 0.
void p2pavg_outer_step(float *theta, float *velocity, const float *delta, size_t n, float lr, float momentum,
                       int nesterov);
