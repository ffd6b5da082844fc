// What stands before a recurrence of few frames: z = x W^T + b, one launch that overlaps with those around it.
//
//   z[r][n] = b[n] + sum over k of x[r][k] W[n][k]        r = t B + utterance; 0 where t < begin[utterance]
//
// A block has TILES x 16 rows of W in registers: 8 warps share K, each takes every eighth group of 16 words. Its share of the
// rows of x goes by, 16 at a time, and partial sums meet in shared memory. Of few rows of x W is there before the kernel before
// has ended, and a number of x is asked for as soon as the one in its registers is used. Of many rows x comes through shared
// memory, several turns ahead, for more rows of W, so that it comes from L2 less often; W then comes while the first of x do, as
// there is no place for it beside the kernel before. No row of x meets another one, and the order of a sum depends on nothing
// but K: the bits of z do not depend on how frames are cut or batched, nor on shares.
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

template <class Number_, int PAIRS_, int TILES_, int STAGES_, int PITCH_, int CLUSTER_>
struct ProjectionShape {
    using Number = Number_;
    static constexpr int CLUSTER = CLUSTER_, ALL_THREADS = THREADS;
    static constexpr int PAIRS = PAIRS_;  // of matrix instructions along a warp's share of K
    static constexpr int TILES = TILES_;  // of MMA_ROWS rows of W
    static constexpr int STAGES = STAGES_;  // turns of x in shared memory; 0: in registers
    static constexpr int PITCH = PITCH_;  // bytes of a row of x there
    static_assert(PITCH % 128 == 64 || !STAGES, "two rows lie in all banks");
    static constexpr int COLUMNS = 2 * MMA_SAMPLES;  // rows of x that go by together
    static constexpr int SUMS = COLUMNS * MMA_ROWS;
    static constexpr int SUMS_BYTES = TILES * WARPS * SUMS * 4;
    static constexpr int SMEM_BYTES = SUMS_BYTES + STAGES * COLUMNS * PITCH;
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
    const int next = given.shares * Shape::COLUMNS;
    const auto* x = static_cast<const Element*>(given.x);
    const unsigned staged = smem_address(smem) + Shape::SUMS_BYTES;
    const auto stage = [=](int row, int turn) {  // asks for the rows of a turn
        const unsigned to = staged + turn % Shape::STAGES * (Shape::COLUMNS * Shape::PITCH);
        const int chunks = (given.width + 31) / 32 * 4;  // zeros behind the width
        for (int i = threadIdx.x; i < Shape::COLUMNS * chunks; i += THREADS) {
            const int from = row + i / chunks, at = i % chunks;
            const bool inside = from < given.rows && 8 * at < given.width;
            copy_async_16(to + i / chunks * Shape::PITCH + 16 * at, x + (inside ? size_t(from) * given.width + 8 * at : 0), inside);
        }
        copies_commit();
    };
    if constexpr (Shape::STAGES > 0) {
        await_kernel_before();
        for (int turn = 0; turn < Shape::STAGES - 1; turn++) stage(own + turn * next, turn);
    }
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
    if constexpr (Shape::STAGES == 0) await_kernel_before();
    const auto load = [=](int row, int half, int k) {
        const int from = row + MMA_SAMPLES * half + g, at = Number::PER_WORD * word(2 * k, q, 4);
        const bool inside = from < given.rows && at < given.width;
        return inside ? *reinterpret_cast<const uint4*>(x + size_t(from) * given.width + at) : make_uint4(0, 0, 0, 0);
    };
    uint4 b[2][Shape::STAGES ? 1 : Shape::PAIRS];
    if constexpr (Shape::STAGES == 0)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int k = 0; k < Shape::PAIRS; k++) b[half][k] = load(own, half, k);
    for (int row = own, turn = 0; row < given.rows; row += next, turn++) {
        const unsigned here = staged + (Shape::STAGES ? turn % max(Shape::STAGES, 1) : 0) * (Shape::COLUMNS * Shape::PITCH);
        if constexpr (Shape::STAGES > 0) {
            copies_wait<Shape::STAGES - 2>();
            __syncthreads();  // the turn's rows are there, and all have used those of the turn before
            stage(row + (Shape::STAGES - 1) * next, turn + Shape::STAGES - 1);
        }
        float c[Shape::TILES][2][4] = {};
#pragma unroll
        for (int k = 0; k < Shape::PAIRS; k++) {
            if (Shape::STAGES > 0 && Number::PER_WORD * word(2 * k, 0, 4) >= given.width) break;  // zeros from here on
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 v;
                if constexpr (Shape::STAGES > 0)
                    v = load_shared_16(here + (MMA_SAMPLES * half + g) * Shape::PITCH + 4 * word(2 * k, q, 4));
                else
                    v = b[half][k];
#pragma unroll
                for (int m = 0; m < Shape::TILES; m++) {
                    Number::multiply_add(c[m][half], weights.a[m][2 * k], v.x, v.y);
                    Number::multiply_add(c[m][half], weights.a[m][2 * k + 1], v.z, v.w);
                }
                if constexpr (Shape::STAGES == 0) b[half][k] = load(row + next, half, k);
            }
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
