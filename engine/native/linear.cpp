// Products with packed matrices, of one row or of thousands.  A task is one panel times one block
// of rows; it owns its part of the output, so nothing is shared and nothing is reduced.
#include <algorithm>

#include "matrix.h"
#include "tile.h"

namespace {

constexpr int64_t BLOCK_ROWS = 96;     // whose x stays in the L2 cache from panel to panel
constexpr int64_t BLOCK_DEPTH = 1024;  // of which a panel stays there from tile to tile
constexpr int64_t UNPACK_ABOVE = 4;    // rows: more would unpack codes several times
constexpr int64_t AHEAD = 2048;        // bytes between reading a panel once and fetching it

struct Unpacked;

// Depths first..end of a panel of codes as float32, in memory of this thread.
template <int BITS>
Float32Panel unpack(CodePanel<BITS> panel, int64_t first, int64_t end) {
    constexpr int STEP = CodePanel<BITS>::STEP;
    float* values = scratch<Unpacked>(BLOCK_DEPTH * COLUMNS);
    float* to = values;
    for (int64_t k = first; k < end;) {
        int64_t stop = panel.end_of_group(k, end);
        panel.enter(k);
        for (; k < stop; k += STEP, to += STEP * COLUMNS) {
            Uint words[2] = {load<Uint>(panel.words(k)), load<Uint>(panel.words(k) + W)};
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j++)
                for (int v = 0; v < 2; v++)
                    store(to + j * COLUMNS + v * W, panel.value(words, j, v));
        }
    }
    return {values, COLUMNS};
}

template <class Panel>
void block(const Panel& panel, Rows<const float> x, int64_t rows, int64_t first, int64_t end,
           Rows<float> sums, const void* next, int64_t bytes) {
    tiles(panel, x, rows, first, end, sums, next, bytes);
}

template <int BITS>
void block(const CodePanel<BITS>& panel, Rows<const float> x, int64_t rows, int64_t first,
           int64_t end, Rows<float> sums, const void* next, int64_t bytes) {
    if (rows <= UNPACK_ABOVE) return tiles(panel, x, rows, first, end, sums, next, bytes);
    Rows<const float> from{x.at + first, x.stride};
    tiles(unpack(panel, first, end), from, rows, 0, end - first, sums, next, bytes);
}

// Adds the bias; leaves out what a last panel has beyond the matrix.
void write(const Product& product, const float* sums, int64_t row, int64_t rows, int64_t column) {
    int64_t width = std::min<int64_t>(product.matrix->outputs - column, COLUMNS);
    for (int64_t m = 0; m < rows; m++, sums += COLUMNS) {
        float* to = product.out.from(row + m).at + column;
        for (int64_t i = 0; i < width; i++)
            to[i] = product.bias ? sums[i] + product.bias[column + i] : sums[i];
    }
}

template <class Panel>
void run(const Product& product, const Panel& panel, int64_t row, int64_t rows, int64_t column) {
    alignas(64) float sums[BLOCK_ROWS * COLUMNS];
    std::fill_n(sums, rows * COLUMNS, 0.0f);
    int64_t depth = product.matrix->depth;
    for (int64_t first = 0; first < depth; first += BLOCK_DEPTH) {
        int64_t end = std::min(first + BLOCK_DEPTH, depth);
        int64_t bytes = (const char*)panel.words(end) - (const char*)panel.words(first);
        const char* next = (const char*)panel.words(first) + AHEAD;
        if (rows > TILE_ROWS) next = (const char*)panel.words(depth + first);
        block(panel, product.x.from(row), rows, first, end, {sums, COLUMNS}, next, bytes);
    }
    write(product, sums, row, rows, column);
}

void run_task(const Product& product, int64_t task, int64_t panels, int64_t blocks) {
    const Matrix& matrix = *product.matrix;
    int64_t index = task % panels, row = product.rows * (task / panels) / blocks;
    int64_t rows = product.rows * (task / panels + 1) / blocks - row, column = index * COLUMNS;
    int64_t weights = column * matrix.depth;
    const float* scales = matrix.scales + weights / matrix.group;
    const float* mins = matrix.mins ? matrix.mins + weights / matrix.group : nullptr;
    switch (matrix.kind) {
        case FLOAT32: {
            Float32Panel panel{(const float*)matrix.words + weights, COLUMNS};
            return run(product, panel, row, rows, column);
        }
        case BFLOAT16: {
            Bfloat16Panel panel{matrix.words + weights / 2};
            return run(product, panel, row, rows, column);
        }
        case CODES8: {
            CodePanel<8> panel{matrix.words + weights / 4, scales, mins, matrix.group, {}, {}};
            return run(product, panel, row, rows, column);
        }
        case CODES4: {
            CodePanel<4> panel{matrix.words + weights / 8, scales, mins, matrix.group, {}, {}};
            return run(product, panel, row, rows, column);
        }
    }
}

}  // namespace

void multiply(const std::vector<Product>& products, int64_t threads) {
    struct Share {
        int64_t end, panels, blocks;
    };
    std::vector<Share> shares;
    int64_t tasks = 0;
    for (const Product& product : products) {
        int64_t panels = (product.matrix->outputs + COLUMNS - 1) / COLUMNS;
        int64_t blocks = (product.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        shares.push_back({tasks += panels * blocks, panels, blocks});
    }
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (int64_t task = 0; task < tasks; task++) {
        auto after = [](int64_t at, const Share& share) { return at < share.end; };
        auto share = std::upper_bound(shares.begin(), shares.end(), task, after);
        int64_t own = task - (share->end - share->panels * share->blocks);
        run_task(products[share - shares.begin()], own, share->panels, share->blocks);
    }
}

// out [rows, sum of outputs] = x [rows, depth] . (matrices one below the other)^T (+ bias)
extern "C" void trireme_linear(const Matrix* parts, int64_t count, const float* x,
                               int64_t x_stride, int64_t rows, float* out, int64_t out_stride,
                               const float* bias, int64_t threads) {
    std::vector<Product> products;
    int64_t column = 0;
    for (int64_t i = 0; i < count; i++) {
        const float* own_bias = bias ? bias + column : nullptr;
        products.push_back({parts + i, {x, x_stride}, rows, {out + column, out_stride}, own_bias});
        column += parts[i].outputs;
    }
    multiply(products, threads);
}

// Vector width in floats: what panels are made for.
extern "C" int64_t trireme_lanes() { return W; }
