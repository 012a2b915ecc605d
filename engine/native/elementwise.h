#pragma once
#include "simd.h"

enum Activation : int64_t { SILU, GELU_TANH };

// out[i] = activation(gate[i]) * up[i]
void gate(const float* gate, const float* up, int64_t n, int64_t activation, float* out);
