// The transpose of a matrix, by tiles in shared memory: both sides are read and written in whole rows of a tile.
#pragma once

#include "ptx/sync.cuh"

namespace ds2 {

constexpr int TRANSPOSE_THREADS = 256;
constexpr int TRANSPOSE_TILE = 64;
constexpr int TRANSPOSE_PITCH = TRANSPOSE_TILE + 2; // of 16-bit numbers, an odd count of words: no two lanes share a bank

// to (columns, rows) = from (rows, columns); a block takes a tile, those of a row of tiles following one another.
template <class Number>
__device__ void transpose(const void* from, void* to, int rows, int columns, void* memory) {
    constexpr int STEP = TRANSPOSE_THREADS / TRANSPOSE_TILE;
    const Number* const source = static_cast<const Number*>(from);
    Number* const target = static_cast<Number*>(to);
    Number* const tile = static_cast<Number*>(memory);
    const int across = (columns + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    const int row = blockIdx.x / across * TRANSPOSE_TILE, column = blockIdx.x % across * TRANSPOSE_TILE;
    const int along = threadIdx.x % TRANSPOSE_TILE, first = threadIdx.x / TRANSPOSE_TILE;
#pragma unroll
    for (int i = first; i < TRANSPOSE_TILE; i += STEP)
        if (row + i < rows && column + along < columns)
            tile[i * TRANSPOSE_PITCH + along] = source[(long long)(row + i) * columns + column + along];
    __syncthreads();
#pragma unroll
    for (int i = first; i < TRANSPOSE_TILE; i += STEP)
        if (column + i < columns && row + along < rows)
            target[(long long)(column + i) * rows + row + along] = tile[along * TRANSPOSE_PITCH + i];
}

}  // namespace ds2
