// Vectors of the machine's width, in GCC's vector extensions: one source for every processor.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(LANES)  // a test builds for a width other than the machine's
constexpr int W = LANES;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int COLUMNS = 2 * W;  // of a panel: two vectors

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef uint32_t Uint __attribute__((vector_size(4 * W)));
typedef uint16_t Half __attribute__((vector_size(2 * W)));

template <class T, class P>
inline T load(const P* from) {
    T v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class T, class P>
inline void store(P* to, T v) {
    std::memcpy(to, &v, sizeof v);
}

inline Vec splat(float x) { return x - Vec{}; }

inline float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    return load<float>(&wide);
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
    uint32_t bits = load<uint32_t>(&x);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load_as_float(const float* from) { return load<Vec>(from); }
inline Vec load_as_float(const uint16_t* from) {
    return (Vec)(__builtin_convertvector(load<Half>(from), Uint) << 16);
}
inline float one_as_float(const float* from) { return *from; }
inline float one_as_float(const uint16_t* from) { return bf16_to_float(*from); }
inline void from_float(float* to, float x) { *to = x; }
inline void from_float(uint16_t* to, float x) { *to = float_to_bf16(x); }

// e^x within 2 ulp for x <= 88; exactly 0 below -87.  Reduction to |r| <= ln 2 / 2 and the
// polynomial of Cephes' expf.
inline Vec exp(Vec x) {
    const Vec rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec n = (x * 1.44269504088896341f + rounder) - rounder;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Vec power = (Vec)((__builtin_convertvector(n, Int) + 127) << 23);
    return x < -87.0f ? Vec{} : p * power;
}

// Rows and columns of a W x W square change places: log2(W) rounds that swap the off-diagonal
// halves of ever smaller squares.
template <int D, int... I>
inline void swap_halves(Vec& upper, Vec& lower, std::integer_sequence<int, I...>) {
    Vec a = upper, b = lower;
    upper = __builtin_shufflevector(a, b, (I & D ? W + I - D : I)...);
    lower = __builtin_shufflevector(a, b, (I & D ? W + I : I + D)...);
}

template <int D = W / 2>
inline void transpose(Vec (&square)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (!(i & D))
            swap_halves<D>(square[i], square[i + D], std::make_integer_sequence<int, W>{});
    if constexpr (D > 1) transpose<D / 2>(square);
}

// Memory of a thread, aligned to cache lines, kept from call to call.  Each `Tag` has its own.
template <class Tag, class T = float>
inline T* scratch(int64_t count) {
    constexpr int64_t EACH = 64 / sizeof(T);
    struct alignas(64) Line {
        T values[EACH];
    };
    static thread_local std::vector<Line> lines;
    if (int64_t(lines.size()) * EACH <= count) lines.resize(count / EACH + 1);
    return lines.data()->values;
}
