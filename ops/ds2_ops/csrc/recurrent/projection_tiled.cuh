// The projection of many rows: what projection.cuh computes, bit for bit, in tiles of 64 rows of W and COLUMNS rows of x.
//
// Both come through shared memory, STAGES - 1 stages of K ahead, 32 words of K a stage. 8 warps share the tile, two along W and four
// along x; each goes through all of K. Order of a sum: as in projection.cuh, K is cut in WARPS parts of PAIRS groups of 16
// words; a part is a chain of matrix instructions that begins at 0, and parts are added in their order.
// Shape letters: R = T B rows of x, K its width, H rows of W.
#pragma once

#include "recurrent/projection.cuh"

namespace ds2 {

template <class Number_, int PAIRS_, int COLUMNS_>
struct TiledShape {
    using Number = Number_;
    static constexpr int ALL_THREADS = THREADS, CLUSTER = 1;
    static constexpr int PAIRS = PAIRS_;      // groups of a part of K
    static constexpr int UNITS = 64;          // rows of W of a tile
    static constexpr int COLUMNS = COLUMNS_;  // rows of x of a tile
    static constexpr int STAGES = 4, GROUPS = 2;  // of K in shared memory, and groups of 16 words of a stage
    static constexpr int ROW_BYTES = 64;          // of a group
    static constexpr int GROUP_BYTES = (UNITS + COLUMNS) * ROW_BYTES + 64;  // so that both groups of a row lie on other banks
    static constexpr int STAGE_BYTES = GROUPS * GROUP_BYTES;
    static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES;
    static constexpr int OUT_BYTES = 2 * UNITS + 16;  // of a row of z on its way out: neighbours lie on other banks
    static constexpr int M_TILES = UNITS / 2 / MMA_ROWS, N_TILES = COLUMNS / 4 / MMA_SAMPLES;  // of a warp
    static_assert(COLUMNS * OUT_BYTES <= SMEM_BYTES, "z on its way out");
    static_assert(Number::PER_WORD == 2, "16-bit types");
};

// The chunk of 16 bytes `piece` of 8 of row `row` of stage `stage`: rows of W, then rows of x.
template <class Shape>
__device__ inline unsigned chunk_at(unsigned smem, int stage, int row, int piece) {
    return smem + stage % Shape::STAGES * Shape::STAGE_BYTES + piece / 4 * Shape::GROUP_BYTES + row * Shape::ROW_BYTES +
           piece % 4 * 16;
}

// Rows `first` to `first + ROWS` - 1 of a matrix (end, width), as far as they are, for a stage.
template <class Shape, int ROWS>
__device__ inline void copy_rows(unsigned smem, int stage, int to, const unsigned short* matrix, int first, int end, int width) {
    const int chunk = threadIdx.x % 8, column = stage * 64 + chunk * 8;
    static_assert(ROWS % (THREADS / 8) == 0, "as many for every thread, so that the loop is unrolled");
#pragma unroll
    for (int i = 0; i < ROWS; i += THREADS / 8) {
        const int own = threadIdx.x / 8 + i, row = first + own;
        const bool wanted = row < end && column < width;
        copy_async_16(chunk_at<Shape>(smem, stage, to + own, chunk), matrix + (wanted ? size_t(row) * width + column : 0), wanted);
    }
}

template <class Shape>
__device__ void project_tiled(const Projection& given) {
    using Number = typename Shape::Number;
    extern __shared__ __align__(128) char memory[];
    release_kernel_behind();  // it waits for this one as this one for the kernel before
    const unsigned smem = smem_address(memory);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int across = gridDim.x / given.shares;
    const int first_unit = blockIdx.x % across * Shape::UNITS, first_row = blockIdx.x / across * Shape::COLUMNS;
    const int stages = (given.width + 63) / 64;
    const auto* x = static_cast<const unsigned short*>(given.x);
    const auto* matrix = static_cast<const unsigned short*>(given.matrix);
    const auto weights_of = [=](int stage) {
        copy_rows<Shape, Shape::UNITS>(smem, stage, 0, matrix, first_unit, given.hidden, given.width);
    };
    const auto rows_of = [=](int stage) {
        copy_rows<Shape, Shape::COLUMNS>(smem, stage, Shape::UNITS, x, first_row, given.rows, given.width);
    };
    for (int stage = 0; stage < Shape::STAGES - 1; stage++)
        if (stage < stages) weights_of(stage);
    await_kernel_before();
    for (int stage = 0; stage < Shape::STAGES - 1; stage++) {
        if (stage < stages) rows_of(stage);
        copies_commit();
    }
    const int own_unit = warp / 4 * (Shape::UNITS / 2), own_row = warp % 4 * (Shape::COLUMNS / 4);  // of the tile
    float sum[Shape::M_TILES][Shape::N_TILES][4] = {}, part[Shape::M_TILES][Shape::N_TILES][4] = {};
    const auto add_part = [&] {
#pragma unroll
        for (int m = 0; m < Shape::M_TILES; m++)
#pragma unroll
            for (int n = 0; n < Shape::N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[m][n][e] += part[m][n][e], part[m][n][e] = 0;
    };
    int in_part = 0;
    for (int stage = 0; stage < stages; stage++) {
        copies_wait<Shape::STAGES - 2>();
        __syncthreads();  // what all have copied is there, and the stage before has been read by all
        const int ahead = stage + Shape::STAGES - 1;
        if (ahead < stages) weights_of(ahead), rows_of(ahead);
        copies_commit();
#pragma unroll
        for (int group = 0; group < Shape::GROUPS; group++) {
            uint4 a[Shape::M_TILES][2], b[Shape::N_TILES];
#pragma unroll
            for (int m = 0; m < Shape::M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    a[m][half] = load_shared_16(
                        chunk_at<Shape>(smem, stage, own_unit + MMA_ROWS * m + 8 * half + g, 4 * group + q));
#pragma unroll
            for (int n = 0; n < Shape::N_TILES; n++)
                b[n] = load_shared_16(
                    chunk_at<Shape>(smem, stage, Shape::UNITS + own_row + MMA_SAMPLES * n + g, 4 * group + q));
#pragma unroll
            for (int m = 0; m < Shape::M_TILES; m++) {
                const unsigned early[4] = {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y};
                const unsigned late[4] = {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w};
#pragma unroll
                for (int n = 0; n < Shape::N_TILES; n++) {
                    Number::multiply_add(part[m][n], early, b[n].x, b[n].y);
                    Number::multiply_add(part[m][n], late, b[n].z, b[n].w);
                }
            }
            if (++in_part == Shape::PAIRS) add_part(), in_part = 0;
        }
    }
    add_part();
    __syncthreads();  // shared memory has been read by all: z goes through it
#pragma unroll
    for (int m = 0; m < Shape::M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int unit = own_unit + MMA_ROWS * m + 8 * half + g;
            const bool exists = first_unit + unit < given.hidden;
            float bias[2];
            Number::unpack(exists ? static_cast<const unsigned short*>(given.bias)[first_unit + unit] : 0, bias);
#pragma unroll
            for (int n = 0; n < Shape::N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float pair[2] = {sum[m][n][2 * half + e] + bias[0], 0};
                    store_shared_2(smem + (own_row + MMA_SAMPLES * n + 2 * q + e) * Shape::OUT_BYTES + 2 * unit, Number::pack(pair));
                }
        }
    __syncthreads();
    auto* z = static_cast<unsigned short*>(given.z);
    for (int i = threadIdx.x; i < Shape::COLUMNS * 8; i += THREADS) {
        const int row = first_row + i / 8, unit = first_unit + i % 8 * 8;
        if (row >= given.rows || unit >= given.hidden) continue;
        const bool begun = !given.begin || row / given.batch >= given.begin[row % given.batch];
        const uint4 v = begun ? load_shared_16(smem + i / 8 * Shape::OUT_BYTES + i % 8 * 16) : make_uint4(0, 0, 0, 0);
        unsigned short* const to = z + size_t(row) * given.hidden + unit;
        if (given.hidden % 8 == 0) {
            *reinterpret_cast<uint4*>(to) = v;
            continue;
        }
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (unit + e < given.hidden) to[e] = static_cast<unsigned short>(words[e / 2] >> 16 * (e % 2));
    }
}

}  // namespace ds2
