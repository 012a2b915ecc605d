// The MLPs of a mixture-of-experts layer: rows are sorted by expert, every active expert runs once
// over its rows, and each token adds up its shares in the order in which its experts were chosen.
#include <algorithm>

#include "elementwise.h"
#include "matrix.h"

namespace {

struct Gathered;
struct Hidden;
struct Gated;
struct Results;

// Row `place[i]` of the sorted rows belongs to choice i; expert e has rows first[e] to first[e+1].
struct Sorted {
    std::vector<int64_t> place, first;

    Sorted(const int64_t* chosen, int64_t choices, int64_t experts)
        : place(choices), first(experts + 1) {
        for (int64_t i = 0; i < choices; i++) first[chosen[i] + 1]++;
        for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
        std::vector<int64_t> next(first);
        for (int64_t i = 0; i < choices; i++) place[i] = next[chosen[i]]++;
    }

    // What every active expert has to multiply: its rows of x into its rows of out.
    std::vector<Product> products(const Matrix* matrices, Rows<const float> x,
                                  Rows<float> out) const {
        std::vector<Product> all;
        for (size_t e = 0; e + 1 < first.size(); e++)
            if (int64_t rows = first[e + 1] - first[e])
                all.push_back({matrices + e, x.from(first[e]), rows, out.from(first[e]), nullptr});
        return all;
    }
};

}  // namespace

// x [rows, hidden], chosen and share [rows, k] -> out [rows, hidden], all contiguous but x, whose
// rows are x_stride apart.  Inner rows are padded with zeros to the depth of their matrix.
extern "C" void trireme_experts(const Matrix* gate_up, const Matrix* down, int64_t experts,
                                const float* x, int64_t x_stride, int64_t rows,
                                const int64_t* chosen, const float* share, int64_t k,
                                int64_t activation, float* out, int64_t threads) {
    int64_t hidden = down->outputs, width = gate_up->outputs / 2, choices = rows * k;
    Sorted sorted(chosen, choices, experts);
    Rows<float> gathered{scratch<Gathered>(choices * gate_up->depth), gate_up->depth};
    Rows<float> both{scratch<Hidden>(choices * 2 * width), 2 * width};
    Rows<float> gated{scratch<Gated>(choices * down->depth), down->depth};
    Rows<float> results{scratch<Results>(choices * hidden), hidden};
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < choices; i++) {
        float* to = gathered.from(sorted.place[i]).at;
        std::fill(std::copy_n(x + i / k * x_stride, hidden, to), to + gathered.stride, 0.0f);
    }
    multiply(sorted.products(gate_up, {gathered.at, gathered.stride}, both), threads);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < choices; i++) {
        const float* from = both.from(i).at;
        float* to = gated.from(i).at;
        gate(from, from + width, width, activation, to);
        std::fill(to + width, to + gated.stride, 0.0f);
    }
    multiply(sorted.products(down, {gated.at, gated.stride}, results), threads);
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < hidden; i++) {
            float total = 0;
            for (int64_t j = row * k; j < (row + 1) * k; j++)
                total += share[j] * results.from(sorted.place[j]).at[i];
            out[row * hidden + i] = total;
        }
}
