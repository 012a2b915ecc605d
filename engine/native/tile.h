// The innermost loop of every matrix product here: a few rows times one panel.
#pragma once
#include "simd.h"

constexpr int TILE_ROWS = 6;  // 12 vectors of sums, 2 of weights, 1 of x: what 16 registers hold

// A panel is COLUMNS outputs of a matrix, depth first.  STEP depths of it are WORDS vectors of
// words; value(words, j, v) is column vector v of depth j.  enter(k) comes before the depths of a
// group that begins at k; end_of_group(k, end) says where it ends.

struct Float32Panel {
    static constexpr int STEP = 1, WORDS = 2;
    const float* at;
    int64_t stride;
    const float* words(int64_t k) const { return at + k * stride; }
    int64_t end_of_group(int64_t, int64_t end) const { return end; }
    void enter(int64_t) {}
    Vec value(const Uint* words, int, int v) const { return (Vec)words[v]; }
};

// A word holds one depth of two columns, W apart: the first in its low half.
struct Bfloat16Panel {
    static constexpr int STEP = 1, WORDS = 1;
    const uint32_t* at;
    const uint32_t* words(int64_t k) const { return at + k * W; }
    int64_t end_of_group(int64_t, int64_t end) const { return end; }
    void enter(int64_t) {}
    Vec value(const Uint* words, int, int v) const {
        return (Vec)(v ? words[0] & 0xffff0000u : words[0] << 16);
    }
};

// A word holds STEP consecutive depths of one column, the first in its low bits.
template <int BITS>
struct CodePanel {
    static constexpr int STEP = 32 / BITS, WORDS = 2;
    const uint32_t* at;
    const float *scales, *mins;  // [groups, COLUMNS]; mins may be null
    int64_t group;
    Vec scale[2], min[2];

    const uint32_t* words(int64_t k) const { return at + k / STEP * COLUMNS; }
    int64_t end_of_group(int64_t k, int64_t end) const {
        int64_t next = (k / group + 1) * group;
        return next < end ? next : end;
    }
    void enter(int64_t k) {
        int64_t first = k / group * COLUMNS;
        for (int v = 0; v < 2; v++) {
            scale[v] = load<Vec>(scales + first + v * W);
            min[v] = mins ? load<Vec>(mins + first + v * W) : Vec{};
        }
    }
    Vec value(const Uint* words, int j, int v) const {
        Int code;
        if constexpr (BITS == 8)
            code = (Int)(words[v] << (24 - 8 * j)) >> 24;
        else
            code = (Int)((words[v] >> (4 * j)) & 15u);
        return __builtin_convertvector(code, Vec) * scale[v] + min[v];
    }
};

template <class T>
struct Rows {
    T* at;
    int64_t stride;
    Rows from(int64_t row) const { return {at + row * stride, stride}; }
};

// Memory to bring into the cache meanwhile: `step` bytes further at each step of the depth.
struct Ahead {
    const char* at;
    int64_t step;
};

// sums += x[.., first..end) . panel, M rows.  Every sum is one chain of fused multiply-adds in
// order of depth, so that a row's result does not depend on how many rows there are.
template <int M, class Panel>
inline void tile(Panel panel, Rows<const float> x, int64_t first, int64_t end, Rows<float> sums,
                 Ahead ahead) {
    Vec acc[M][2];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++) acc[m][v] = load<Vec>(sums.from(m).at + v * W);
    for (int64_t k = first; k < end;) {
        int64_t stop = panel.end_of_group(k, end);
        panel.enter(k);
        const float* row = x.at + k;
        for (; k < stop; k += Panel::STEP, row += Panel::STEP) {
            Uint words[Panel::WORDS];
            for (int i = 0; i < Panel::WORDS; i++) words[i] = load<Uint>(panel.words(k) + i * W);
            __builtin_prefetch(ahead.at);
            ahead.at += ahead.step;
#pragma GCC unroll 8
            for (int j = 0; j < Panel::STEP; j++) {
                Vec a = panel.value(words, j, 0), b = panel.value(words, j, 1);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    Vec xs = splat(row[m * x.stride + j]);
                    acc[m][0] += a * xs;
                    acc[m][1] += b * xs;
                }
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < 2; v++) store(sums.from(m).at + v * W, acc[m][v]);
}

// The same for any number of rows: as few tiles as do, of nearly equal height.  The `bytes` bytes
// at `next`, which will be needed soon, are fetched evenly over all of them.
template <class Panel>
inline void tiles(const Panel& panel, Rows<const float> x, int64_t rows, int64_t first, int64_t end,
                  Rows<float> sums, const void* next, int64_t bytes) {
    int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t steps = (end - first) / Panel::STEP, step = bytes / (steps * count);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = rows * i / count;
        auto from = x.from(row);
        auto to = sums.from(row);
        Ahead ahead{(const char*)next + i * steps * step, step};
        switch (rows * (i + 1) / count - row) {
            case 1: tile<1>(panel, from, first, end, to, ahead); break;
            case 2: tile<2>(panel, from, first, end, to, ahead); break;
            case 3: tile<3>(panel, from, first, end, to, ahead); break;
            case 4: tile<4>(panel, from, first, end, to, ahead); break;
            case 5: tile<5>(panel, from, first, end, to, ahead); break;
            default: tile<6>(panel, from, first, end, to, ahead); break;
        }
    }
}
