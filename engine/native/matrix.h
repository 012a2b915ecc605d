// A packed weight matrix, and one product with it.
#pragma once
#include "tile.h"

enum Kind : int64_t { FLOAT32, BFLOAT16, CODES8, CODES4 };

// As `engine.native.pack` lays it out; depth is a multiple of a panel's STEP.
struct Matrix {
    int64_t kind, outputs, depth, group;
    const uint32_t* words;  // [panels, depth / STEP, words of a step]
    const float* scales;    // [panels, depth / group, COLUMNS]; null when dense
    const float* mins;      // like scales; null: zero
};

// out [rows, matrix.outputs] = x [rows, matrix.depth] . matrix^T (+ bias)
struct Product {
    const Matrix* matrix;
    Rows<const float> x;
    int64_t rows;
    Rows<float> out;
    const float* bias;  // may be null
};

void multiply(const std::vector<Product>& products, int64_t threads);
