// What stands before a recurrence of few frames: z = x W^T + b, one launch that overlaps with those around it.
//
//   z[r][n] = b[n] + sum over k of x[r][k] W[n][k]        r = t B + utterance; 0 where t < begin[utterance]
//
// A block has 16 rows of W, or 32 where rows of x are many, which then come from L2 half as often. They are in registers before
// the kernel before it has ended: 8 warps share K, each takes every eighth group of 16 words. Then its share of the columns goes
// by, 16 rows of x at a time; a number of x is asked for as soon as the one in its registers is used, and partial sums meet in
// shared memory. No row of x meets another one, and the order of a sum depends on nothing but K: the bits of z do not depend on
// how frames are cut or batched, nor on shares.
// Shape letters: R = T B rows of x, K its width, H rows of W.
#pragma once

#include "ptx/number.cuh"
#include "recurrent/pass.cuh"

namespace ds2 {

struct Projection {
    const void* x;      // (R, K)
    const void* matrix; // (H, K)
    const void* bias;   // (H)
    const int* begin;   // (B) or null (all 0)
    void* z;            // (R, H)
    int rows, batch, width, hidden;
    int shares;         // of the rows of x: as many blocks have the same rows of W
};

template <class Number_, int PAIRS_, int TILES_, int CLUSTER_>
struct ProjectionShape {
    using Number = Number_;
    static constexpr int CLUSTER = CLUSTER_, ALL_THREADS = THREADS;
    static constexpr int PAIRS = PAIRS_;  // of matrix instructions along a warp's share of K
    static constexpr int TILES = TILES_;  // of MMA_ROWS rows of W
    static constexpr int COLUMNS = 2 * MMA_SAMPLES;  // rows of x that go by together
    static constexpr int SUMS = COLUMNS * MMA_ROWS;
    static constexpr int SMEM_BYTES = TILES * WARPS * SUMS * 4;
    static_assert(SUMS == THREADS, "a thread adds up one sum of a tile");
    static_assert(MMA_ROWS == 16 && MMA_SAMPLES == 8, "place");

    // Where a tile's sum of a column and a row of W lies: neither what a warp stores nor what it loads shares a bank.
    static __device__ int place(int column, int row) {
        return column / 2 * 32 + (column % 2 * 16 + row + column / 2 * 8) % 32;
    }
    static_assert(Number::PER_WORD == 2, "16-bit types: what a thread stores is half a word");
};

template <class Shape>
__device__ void project(const Projection& given) {
    using Number = typename Shape::Number;
    using Element = typename Number::Storage;
    extern __shared__ __align__(128) char smem[];
    release_kernel_behind();  // it waits for this one as this one for the kernel before
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int across = gridDim.x / given.shares;
    const int first = blockIdx.x % across * (Shape::TILES * MMA_ROWS), own = blockIdx.x / across * Shape::COLUMNS;
    Pass weights_of{};
    weights_of.matrix = given.matrix, weights_of.hidden = given.width, weights_of.wide_rows = 1;
    const auto word = [=](int k, int q, int) { return 16 * (k / 2 * WARPS + warp) + 4 * q; };
    Weights<Number, Shape::TILES, 2 * Shape::PAIRS> weights;
    weights.load_permuted(weights_of, word, [=, width = given.width, hidden = given.hidden](int row, int word) -> Place {
        const int column = word * Number::PER_WORD;
        return {size_t(first + row) * width + column, column, first + row < hidden};
    });
    // The sum of each tile that this thread finishes.
    const int column = threadIdx.x / MMA_ROWS, unit = first + threadIdx.x % MMA_ROWS;
    const unsigned sum = smem_address(smem) + 4 * Shape::place(column, threadIdx.x % MMA_ROWS);
    unsigned bias_bits[Shape::TILES];
#pragma unroll
    for (int m = 0; m < Shape::TILES; m++) {
        const int own_unit = unit + m * MMA_ROWS;
        bias_bits[m] = own_unit < given.hidden ? unsigned(static_cast<const Element*>(given.bias)[own_unit]) : 0;
    }
    await_kernel_before();
    const auto* x = static_cast<const Element*>(given.x);
    const auto load = [=](int row, int half, int k) {
        const int from = row + MMA_SAMPLES * half + g, at = Number::PER_WORD * word(2 * k, q, 4);
        const bool inside = from < given.rows && at < given.width;
        return inside ? *reinterpret_cast<const uint4*>(x + size_t(from) * given.width + at) : make_uint4(0, 0, 0, 0);
    };
    uint4 b[2][Shape::PAIRS];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < Shape::PAIRS; k++) b[half][k] = load(own, half, k);
    const int next = given.shares * Shape::COLUMNS;
    for (int row = own; row < given.rows; row += next) {
        float c[Shape::TILES][2][4] = {};
#pragma unroll
        for (int k = 0; k < Shape::PAIRS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = b[half][k];
#pragma unroll
                for (int m = 0; m < Shape::TILES; m++) {
                    Number::multiply_add(c[m][half], weights.a[m][2 * k], v.x, v.y);
                    Number::multiply_add(c[m][half], weights.a[m][2 * k + 1], v.z, v.w);
                }
                b[half][k] = load(row + next, half, k);
            }
        // Sums of a warp.
#pragma unroll
        for (int m = 0; m < Shape::TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    store_shared_4(smem_address(smem) + 4 * ((m * WARPS + warp) * Shape::SUMS +
                                       Shape::place(MMA_SAMPLES * half + 2 * q + e % 2, g + e / 2 * 8)),
                                   __float_as_uint(c[m][half][e]));
        __syncthreads();
        const int to = row + column;
        const bool begun =
            to < given.rows && (!given.begin || to / given.batch >= given.begin[to % given.batch]);
#pragma unroll
        for (int m = 0; m < Shape::TILES; m++) {
            float part[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                part[w] = __uint_as_float(load_shared_4(sum + 4 * ((m * WARPS + w) * Shape::SUMS)));
            float pair[2] = {}, bias[2];
            Number::unpack(bias_bits[m], bias);
            pair[0] = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7])) + bias[0];
            const int own_unit = unit + m * MMA_ROWS;
            if (own_unit < given.hidden && to < given.rows)
                static_cast<Element*>(given.z)[size_t(to) * given.hidden + own_unit] =
                    begun ? static_cast<Element>(Number::pack(pair)) : Element(0);
        }
        __syncthreads();
    }
}

}  // namespace ds2
