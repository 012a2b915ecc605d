// What lies between the matrix products: norms, rotary embeddings, gates.  Rows are shared out
// among threads only where there is enough to do.
#include "elementwise.h"

#include <cmath>

namespace {

constexpr int64_t ALONE = 16384;  // elements: fewer are done before another thread would start

// x * sigmoid(z); the tanh form of gelu is x * sigmoid(2 u), as (1 + tanh u) / 2 = sigmoid(2 u).
Vec activate(Vec x, int64_t activation) {
    Vec z = x;
    if (activation == GELU_TANH) z = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    Vec power = exp(-larger(z, splat(-88.0f)));
    return x / (1.0f + power);
}

void normalise(const float* x, const float* weight, int64_t n, float eps, float* out) {
    int64_t whole = n / W * W;
    Vec squares{};
    for (int64_t i = 0; i < whole; i += W) {
        Vec v = load<Vec>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
    float scale = 1.0f / std::sqrt(total / float(n) + eps);
    for (int64_t i = 0; i < whole; i += W)
        store(out + i, load<Vec>(x + i) * scale * load<Vec>(weight + i));
    for (int64_t i = whole; i < n; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace

void gate(const float* gate, const float* up, int64_t n, int64_t activation, float* out) {
    int64_t whole = n / W * W;
    for (int64_t i = 0; i < whole; i += W)
        store(out + i, activate(load<Vec>(gate + i), activation) * load<Vec>(up + i));
    for (int64_t i = whole; i < n; i++) out[i] = activate(splat(gate[i]), activation)[0] * up[i];
}

// x [rows, heads, n], rows and heads apart by their strides -> out [rows, heads, n] contiguous.
extern "C" void trireme_rms_norm(const float* x, int64_t rows, int64_t row_stride, int64_t heads,
                                 int64_t head_stride, int64_t n, const float* weight, float eps,
                                 float* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * n > ALONE)
    for (int64_t i = 0; i < rows * heads; i++)
        normalise(x + i / heads * row_stride + i % heads * head_stride, weight, n, eps,
                  out + i * n);
}

// x [rows, heads, n] in place; cos and sin [rows, n], the first half of sin with its sign flipped.
extern "C" void trireme_rotate(float* x, int64_t rows, int64_t row_stride, int64_t heads,
                               int64_t head_stride, int64_t n, const float* cos, const float* sin,
                               int64_t threads) {
    int64_t half = n / 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * n > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            float* at = x + row * row_stride + head * head_stride;
            const float *c = cos + row * n, *s = sin + row * n;
            for (int64_t i = 0; i < half; i++) {
                float a = at[i], b = at[i + half];
                at[i] = a * c[i] + b * s[i];
                at[i + half] = b * c[i + half] + a * s[i + half];
            }
        }
}

// gate_up [rows, 2 n] -> out [rows, n]
extern "C" void trireme_gated(const float* gate_up, int64_t rows, int64_t row_stride, int64_t n,
                              int64_t activation, float* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = gate_up + row * row_stride;
        gate(from, from + n, n, activation, out + row * n);
    }
}
