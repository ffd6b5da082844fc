// Convolution over two axes with any numbers of channels, taps, strides, padding and groups, as products whose second matrix
// is never in memory: each block gathers its tiles of it as it goes (Chetlur et al. 2014, section 3.1). No auxiliary memory in
// the forward pass and the gradient of the data; that of the weights adds up parts, in their order. The same bits on every run.
//
// Everything but the number of images is a constant of `Geometry`, so that indices cost multiplications, not divisions:
// CHANNELS, OUTPUTS (of a group), GROUPS, HEIGHT, WIDTH, TAPS_H, TAPS_W, OUT_H, OUT_W, STEP_H, STEP_W, TOP, LEFT, FLIP, and the
// strides of x, w and y in numbers. Shape letters: N images, C channels, K outputs, H x W data, R x S taps, P x Q results.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

struct Fp64 {};

// Numbers of a type one at a time, and the type of their sums.
template <class Number>
struct One {
    using Sum = float;
    using Storage = typename Number::Storage;
    static __device__ float load(const void* from, size_t i) {
        float v[Number::PER_WORD];
        Number::unpack(unsigned(static_cast<const Storage*>(from)[i]), v);
        return v[0];
    }
    static __device__ void store(void* to, size_t i, float value) {
        const float v[2] = {value, 0.0f};
        if constexpr (Number::PER_WORD == 2)
            static_cast<Storage*>(to)[i] = Storage(Number::pack(v));
        else
            static_cast<float*>(to)[i] = value;
    }
};
template <>
struct One<Fp64> {
    using Sum = double;
    static __device__ double load(const void* from, size_t i) { return static_cast<const double*>(from)[i]; }
    static __device__ void store(void* to, size_t i, double value) { static_cast<double*>(to)[i] = value; }
};

struct Convolution {
    const void* x;   // (N, C, H, W)
    const void* w;   // (K, C / groups, R, S)
    const void* y;   // (N, K, P, Q)
    void* result;    // one of them
    void* parts;     // sums of (splits, result), or null
    int images, splits;
    double beta;
};

// Where a column of the second matrix begins in an image, and what its rows add to that.
struct Window {
    int at, h, w;
};

// y = w * x: rows are outputs, columns positions (n, p, q), and the sum is over (c, r, s).
template <class Number, class G>
struct Outputs {
    using Sum = typename One<Number>::Sum;
    static constexpr int ROWS = G::OUTPUTS, TAPS = G::TAPS_H * G::TAPS_W;
    static __device__ int columns(const Convolution& p) { return p.images * G::OUT_H * G::OUT_W; }
    static __device__ int depth(const Convolution&) { return G::CHANNELS * TAPS; }
    static __device__ int weight_at(int k, int c, int r, int s) {
        return k * G::W_K + c * G::W_C + (G::FLIP ? G::TAPS_H - 1 - r : r) * G::W_R + (G::FLIP ? G::TAPS_W - 1 - s : s) * G::W_S;
    }
    static __device__ Sum first(const Convolution& p, int group, int row, int d) {
        const int c = d / TAPS, tap = d % TAPS;
        return One<Number>::load(p.w, weight_at(group * G::OUTPUTS + row, c, tap / G::TAPS_W, tap % G::TAPS_W));
    }
    static __device__ Window column(const Convolution&, int group, int n) {
        const int q = n % G::OUT_W, p = n / G::OUT_W % G::OUT_H, image = n / (G::OUT_W * G::OUT_H);
        return {image * G::X_N + group * G::CHANNELS * G::X_C, p * G::STEP_H - G::TOP, q * G::STEP_W - G::LEFT};
    }
    static __device__ Sum second(const Convolution& p, const Window& at, int d) {
        const int c = d / TAPS, tap = d % TAPS, h = at.h + tap / G::TAPS_W, w = at.w + tap % G::TAPS_W;
        const bool inside = unsigned(h) < unsigned(G::HEIGHT) && unsigned(w) < unsigned(G::WIDTH);
        return inside ? One<Number>::load(p.x, size_t(at.at + c * G::X_C + h * G::X_H + w * G::X_W)) : Sum(0);
    }
    static __device__ int target(const Convolution&, int group, int row, int n) {
        const int q = n % G::OUT_W, p = n / G::OUT_W % G::OUT_H, image = n / (G::OUT_W * G::OUT_H);
        return image * G::Y_N + (group * G::OUTPUTS + row) * G::Y_C + p * G::Y_H + q * G::Y_W;
    }
};

// The gradient of x: rows are channels, columns positions (n, h, w), and the sum is over (k, r, s).
template <class Number, class G>
struct DataGradient {
    using Sum = typename One<Number>::Sum;
    static constexpr int ROWS = G::CHANNELS, TAPS = G::TAPS_H * G::TAPS_W;
    static __device__ int columns(const Convolution& p) { return p.images * G::HEIGHT * G::WIDTH; }
    static __device__ int depth(const Convolution&) { return G::OUTPUTS * TAPS; }
    static __device__ Sum first(const Convolution& p, int group, int row, int d) {
        const int k = d / TAPS, tap = d % TAPS;
        const int at = Outputs<Number, G>::weight_at(group * G::OUTPUTS + k, row, tap / G::TAPS_W, tap % G::TAPS_W);
        return One<Number>::load(p.w, at);
    }
    static __device__ Window column(const Convolution&, int group, int n) {
        const int w = n % G::WIDTH, h = n / G::WIDTH % G::HEIGHT, image = n / (G::WIDTH * G::HEIGHT);
        return {image * G::Y_N + group * G::OUTPUTS * G::Y_C, h + G::TOP, w + G::LEFT};
    }
    static __device__ Sum second(const Convolution& p, const Window& at, int d) {
        const int k = d / TAPS, tap = d % TAPS, h = at.h - tap / G::TAPS_W, w = at.w - tap % G::TAPS_W;
        const bool met = h >= 0 && w >= 0 && h % G::STEP_H == 0 && w % G::STEP_W == 0;
        const int row = h / G::STEP_H, column = w / G::STEP_W;
        const bool inside = met && row < G::OUT_H && column < G::OUT_W;
        return inside ? One<Number>::load(p.y, size_t(at.at + k * G::Y_C + row * G::Y_H + column * G::Y_W)) : Sum(0);
    }
    static __device__ int target(const Convolution&, int group, int row, int n) {
        const int w = n % G::WIDTH, h = n / G::WIDTH % G::HEIGHT, image = n / (G::WIDTH * G::HEIGHT);
        return image * G::X_N + (group * G::CHANNELS + row) * G::X_C + h * G::X_H + w * G::X_W;
    }
};

// The gradient of w: rows are outputs, columns taps (c, r, s), and the sum is over positions (n, p, q).
template <class Number, class G>
struct WeightGradient {
    using Sum = typename One<Number>::Sum;
    static constexpr int ROWS = G::OUTPUTS, TAPS = G::TAPS_H * G::TAPS_W, PLACES = G::OUT_H * G::OUT_W;
    static __device__ int columns(const Convolution&) { return G::CHANNELS * TAPS; }
    static __device__ int depth(const Convolution& p) { return p.images * PLACES; }
    static __device__ Sum first(const Convolution& p, int group, int row, int d) {
        const int image = d / PLACES, place = d % PLACES;
        return One<Number>::load(p.y, size_t(image * G::Y_N + (group * G::OUTPUTS + row) * G::Y_C +
                                             place / G::OUT_W * G::Y_H + place % G::OUT_W * G::Y_W));
    }
    static __device__ Window column(const Convolution&, int group, int n) {
        const int c = n / TAPS, tap = n % TAPS;
        return {(group * G::CHANNELS + c) * G::X_C, tap / G::TAPS_W - G::TOP, tap % G::TAPS_W - G::LEFT};
    }
    static __device__ Sum second(const Convolution& p, const Window& at, int d) {
        const int image = d / PLACES, place = d % PLACES;
        const int h = at.h + place / G::OUT_W * G::STEP_H, w = at.w + place % G::OUT_W * G::STEP_W;
        const bool inside = unsigned(h) < unsigned(G::HEIGHT) && unsigned(w) < unsigned(G::WIDTH);
        return inside ? One<Number>::load(p.x, size_t(at.at + image * G::X_N + h * G::X_H + w * G::X_W)) : Sum(0);
    }
    static __device__ int target(const Convolution&, int group, int row, int n) {
        const int c = n / TAPS, tap = n % TAPS;
        return Outputs<Number, G>::weight_at(group * G::OUTPUTS + row, c, tap / G::TAPS_W, tap % G::TAPS_W);
    }
};

constexpr int CONVOLUTION_THREADS = 256, TILE_COLUMNS = 128, TILE_DEPTH = 8;

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pack {
    T v[COUNT];
};

// Leaves a sum in the result, or in the part of a split.
template <class Number, class G, class Product>
__device__ void leave(const Convolution& p, int split, int group, int row, int n, typename Product::Sum sum) {
    using Sum = typename Product::Sum;
    if (p.splits > 1) {
        const size_t row_of = (size_t(split) * G::GROUPS + group) * Product::ROWS + row;
        static_cast<Sum*>(p.parts)[row_of * Product::columns(p) + n] = sum;
        return;
    }
    const size_t at = Product::target(p, group, row, n);
    if (p.beta != 0) sum += Sum(p.beta) * One<Number>::load(p.result, at);
    One<Number>::store(p.result, at, sum);
}

// A block makes TILE_ROWS x TILE_COLUMNS sums, a thread TILE_ROWS / 16 x 8 of them; the next tiles are on their way while it
// multiplies. `memory` is shared: two buffers of (TILE_DEPTH, TILE_ROWS + 4), then two of (TILE_DEPTH, TILE_COLUMNS).
template <class Number, class G, class Product, int TILE_ROWS>
__device__ void multiply_tiles(const Convolution& p, void* memory) {
    using Sum = typename Product::Sum;
    constexpr int ROW_TILES = (Product::ROWS + TILE_ROWS - 1) / TILE_ROWS, A_STEP = TILE_ROWS + 4, MINE = TILE_ROWS / 16;
    constexpr int A_TURN = CONVOLUTION_THREADS / TILE_DEPTH, B_TURN = CONVOLUTION_THREADS / TILE_COLUMNS;
    constexpr int A_LOADS = TILE_ROWS / A_TURN, B_LOADS = TILE_DEPTH / B_TURN;
    Sum* const a_tiles = static_cast<Sum*>(memory);
    Sum* const b_tiles = a_tiles + 2 * TILE_DEPTH * A_STEP;
    const int columns = Product::columns(p), depth = Product::depth(p);
    const int column_tiles = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int block = blockIdx.x;
    const int first_row = block % ROW_TILES * TILE_ROWS;
    block /= ROW_TILES;
    const int first_column = block % column_tiles * TILE_COLUMNS;
    block /= column_tiles;
    const int group = block % G::GROUPS, split = block / G::GROUPS;
    const int share = ((depth + p.splits - 1) / p.splits + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
    const int begin = split * share, end = begin + share < depth ? begin + share : depth;
    const int thread = threadIdx.x, a_depth = thread % TILE_DEPTH, a_row = thread / TILE_DEPTH;
    const int b_column = thread % TILE_COLUMNS, b_depth = thread / TILE_COLUMNS;
    const bool exists = first_column + b_column < columns;
    const Window window = exists ? Product::column(p, group, first_column + b_column) : Window{0, 0, 0};
    Sum a_next[A_LOADS], b_next[B_LOADS];
    const auto fetch = [&](int from) {
#pragma unroll
        for (int i = 0; i < A_LOADS; i++) {
            const int row = first_row + a_row + i * A_TURN, d = from + a_depth;
            a_next[i] = row < Product::ROWS && d < end ? Product::first(p, group, row, d) : Sum(0);
        }
#pragma unroll
        for (int i = 0; i < B_LOADS; i++) {
            const int d = from + b_depth + i * B_TURN;
            b_next[i] = exists && d < end ? Product::second(p, window, d) : Sum(0);
        }
    };
    const auto put = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < A_LOADS; i++)
            a_tiles[(buffer * TILE_DEPTH + a_depth) * A_STEP + a_row + i * A_TURN] = a_next[i];
#pragma unroll
        for (int i = 0; i < B_LOADS; i++)
            b_tiles[(buffer * TILE_DEPTH + b_depth + i * B_TURN) * TILE_COLUMNS + b_column] = b_next[i];
    };
    const int down = thread / 16 * 2, across = thread % 16 * 4;
    Sum sums[MINE][8];
#pragma unroll
    for (int i = 0; i < MINE; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[i][j] = 0;
    fetch(begin);
    put(0);
    __syncthreads();
    for (int from = begin, buffer = 0; from < end; from += TILE_DEPTH, buffer ^= 1) {
        const bool more = from + TILE_DEPTH < end;
        if (more) fetch(from + TILE_DEPTH);
#pragma unroll
        for (int d = 0; d < TILE_DEPTH; d++) {
            const Sum* a_row_of = a_tiles + (buffer * TILE_DEPTH + d) * A_STEP + down;
            const Sum* b_row_of = b_tiles + (buffer * TILE_DEPTH + d) * TILE_COLUMNS + across;
            Pack<Sum, 2> a[MINE / 2];
            Pack<Sum, 4> b[2];
#pragma unroll
            for (int i = 0; i < MINE / 2; i++) a[i] = *reinterpret_cast<const Pack<Sum, 2>*>(a_row_of + 32 * i);
#pragma unroll
            for (int j = 0; j < 2; j++) b[j] = *reinterpret_cast<const Pack<Sum, 4>*>(b_row_of + 64 * j);
#pragma unroll
            for (int i = 0; i < MINE; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sums[i][j] += a[i / 2].v[i % 2] * b[j / 4].v[j % 4];
        }
        if (more) {
            put(buffer ^ 1);
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int row = first_row + down + i / 2 * 32 + i % 2, n = first_column + across + j / 4 * 64 + j % 4;
            if (row < Product::ROWS && n < columns) leave<Number, G, Product>(p, split, group, row, n, sums[i][j]);
        }
}

// The same for groups of few rows: a thread makes one sum.
template <class Number, class G, class Product>
__device__ void multiply_each(const Convolution& p) {
    using Sum = typename Product::Sum;
    const int columns = Product::columns(p), depth = Product::depth(p);
    const size_t i = size_t(blockIdx.x) * CONVOLUTION_THREADS + threadIdx.x;
    if (i >= size_t(G::GROUPS) * Product::ROWS * columns) return;
    const int n = int(i % columns), row = int(i / columns % Product::ROWS), group = int(i / columns / Product::ROWS);
    const Window window = Product::column(p, group, n);
    Sum sum = 0;
    for (int d = 0; d < depth; d++) sum += Product::first(p, group, row, d) * Product::second(p, window, d);
    leave<Number, G, Product>(p, 0, group, row, n, sum);
}

// Adds up the parts of all splits, in their order.
template <class Number, class G, class Product>
__device__ void add_parts(const Convolution& p) {
    using Sum = typename Product::Sum;
    const int columns = Product::columns(p);
    const size_t i = size_t(blockIdx.x) * CONVOLUTION_THREADS + threadIdx.x, all = size_t(G::GROUPS) * Product::ROWS * columns;
    if (i >= all) return;
    Sum sum = 0;
    for (int split = 0; split < p.splits; split++) sum += static_cast<const Sum*>(p.parts)[split * all + i];
    const int n = int(i % columns), row = int(i / columns % Product::ROWS), group = int(i / columns / Product::ROWS);
    Convolution whole = p;
    whole.splits = 1;
    leave<Number, G, Product>(whole, 0, group, row, n, sum);
}

}  // namespace ds2
