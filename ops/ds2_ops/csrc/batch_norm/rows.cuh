// Batch norm over rows of channels, two launches each way: sums over rows, then the transform. A block owns some columns and
// a chunk of rows; what it adds up goes out as float64, and each block of the second launch adds up the chunks of its own
// columns, in their order. No atomics, no waits between blocks: the same bits on every run.
//
// Shape letters: N rows, C channels. With lengths, rows are (B, F, T), utterances, bins and frames, and count where
// t < length; without, rows that do not count hold 0, and so do their gradients.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

constexpr int NORM_THREADS = 256;
// Rows of a thread whose loads are on their way together, and which float32 adds up.
constexpr int SUM_TURN = 8, NORM_TURN = 4;

struct Rows {
    const int* lengths;    // (B), or null
    int rows, channels, chunk_rows, chunks, column_blocks;
    int bins, frames;      // F, T
};

// What a channel is normalised by, (C) each.
struct Channel {
    const float* weight;
    const float* bias;
    const float* mean;
    const float* inverse;  // of the root of variance + eps
};

// Where this thread is: NUMBERS neighbouring channels, in every ROWS-th row of its block's chunk.
template <class Number, int LANES>
struct Place {
    static constexpr int NUMBERS = 4 * Number::PER_WORD;  // in 16 bytes
    static constexpr int ROWS = NORM_THREADS / LANES, COLUMNS = LANES * NUMBERS;
    int first_column, column, row, chunk, begin, end;
    bool inside;

    __device__ explicit Place(const Rows& p) {
        chunk = blockIdx.x / p.column_blocks;
        first_column = blockIdx.x % p.column_blocks * COLUMNS;
        column = first_column + threadIdx.x % LANES * NUMBERS;
        row = threadIdx.x / LANES;
        begin = chunk * p.chunk_rows;
        end = begin + p.chunk_rows < p.rows ? begin + p.chunk_rows : p.rows;
        inside = column < p.channels;
    }
};

template <class Number, int N = 4 * Number::PER_WORD>
__device__ void unpack_16(const uint4& words, float (&v)[N]) {
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float part[Number::PER_WORD];
        Number::unpack(word[i], part);
#pragma unroll
        for (int j = 0; j < Number::PER_WORD; j++) v[i * Number::PER_WORD + j] = part[j];
    }
}

template <class Number, int N = 4 * Number::PER_WORD>
__device__ uint4 pack_16(const float (&v)[N]) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float part[Number::PER_WORD];
#pragma unroll
        for (int j = 0; j < Number::PER_WORD; j++) part[j] = v[i * Number::PER_WORD + j];
        word[i] = Number::pack(part);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Whether row r counts.
template <bool RAGGED>
__device__ bool counts(const Rows& p, int r) {
    if constexpr (RAGGED) {
        const int bin = r / p.frames;
        return r - bin * p.frames < p.lengths[bin / p.bins];
    }
    return true;
}

// The rows of a turn from `row` on; zeros where they are none or do not count.
template <int TURN, class At>
__device__ void load_turn(const Rows& p, const At& at, const void* from, int row, const bool (&wanted)[TURN],
                          uint4 (&words)[TURN]) {
#pragma unroll
    for (int u = 0; u < TURN; u++) {
        const size_t offset = size_t(row + u * At::ROWS) * p.channels + at.column;
        words[u] = wanted[u] ? reinterpret_cast<const uint4*>(from)[offset / At::NUMBERS] : make_uint4(0, 0, 0, 0);
    }
}

template <bool RAGGED, int TURN, class At>
__device__ void want_turn(const Rows& p, const At& at, int row, bool (&wanted)[TURN]) {
#pragma unroll
    for (int u = 0; u < TURN; u++) {
        const int r = row + u * At::ROWS;
        wanted[u] = at.inside && r < at.end && counts<RAGGED>(p, r);
    }
}

// Adds up both sums of all threads of the block, thread row after thread row, into `partial` (chunks, 2, C).
// `memory` is shared: (ROWS, 2, COLUMNS).
template <class At>
__device__ void write_partial(const Rows& p, const At& at, const double (&first)[At::NUMBERS],
                              const double (&second)[At::NUMBERS], double* partial, double* memory) {
    const int mine = at.row * 2 * At::COLUMNS + at.column - at.first_column;
#pragma unroll
    for (int i = 0; i < At::NUMBERS; i++) {
        memory[mine + i] = first[i];
        memory[mine + At::COLUMNS + i] = second[i];
    }
    __syncthreads();
    for (int sum = threadIdx.x; sum < 2 * At::COLUMNS; sum += NORM_THREADS) {
        const int column = at.first_column + sum % At::COLUMNS;
        double total = 0.0;
#pragma unroll 8
        for (int row = 0; row < At::ROWS; row++) total += memory[row * 2 * At::COLUMNS + sum];
        if (column < p.channels) partial[(size_t(at.chunk) * 2 + sum / At::COLUMNS) * p.channels + column] = total;
    }
}

// Both sums of this block's columns over all chunks, into shared memory (2, COLUMNS). Half of the threads add up the first
// half of the chunks, the others the rest.
template <class At>
__device__ void merge_partial(const Rows& p, const At& at, const double* partial, double* memory) {
    constexpr int SUMS = 2 * At::COLUMNS, PARTS = NORM_THREADS / SUMS;
    static_assert(PARTS >= 1 && NORM_THREADS % SUMS == 0, "each thread adds up chunks of one sum");
    const int sum = threadIdx.x % SUMS, part = threadIdx.x / SUMS, column = at.first_column + sum % At::COLUMNS;
    const int share = (p.chunks + PARTS - 1) / PARTS, last = part * share + share;
    double total = 0.0;
    if (column < p.channels) {
        const double* from = partial + size_t(sum / At::COLUMNS) * p.channels + column;
#pragma unroll 16
        for (int chunk = part * share; chunk < (last < p.chunks ? last : p.chunks); chunk++)
            total += from[size_t(chunk) * 2 * p.channels];
    }
    memory[threadIdx.x] = total;
    __syncthreads();
    if (part == 0) {
#pragma unroll
        for (int other = 1; other < PARTS; other++) total += memory[other * SUMS + sum];
        memory[sum] = total;
    }
    __syncthreads();
}

// partial: sums of x and of x * x.
template <class Number, int LANES, bool RAGGED>
__device__ void sum_rows(const Rows& p, const void* x, double* partial, double* memory) {
    using At = Place<Number, LANES>;
    const At at(p);
    double sums[At::NUMBERS] = {}, squares[At::NUMBERS] = {};
    for (int row = at.begin + at.row; row < at.end; row += SUM_TURN * At::ROWS) {
        bool wanted[SUM_TURN];
        uint4 words[SUM_TURN];
        float sum[At::NUMBERS] = {}, square[At::NUMBERS] = {};
        want_turn<RAGGED>(p, at, row, wanted);
        load_turn(p, at, x, row, wanted, words);
#pragma unroll
        for (int u = 0; u < SUM_TURN; u++) {
            float v[At::NUMBERS];
            unpack_16<Number>(words[u], v);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) {
                sum[i] += v[i];
                square[i] = fmaf(v[i], v[i], square[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < At::NUMBERS; i++) {
            sums[i] += sum[i];
            squares[i] += square[i];
        }
    }
    write_partial(p, at, sums, squares, partial, memory);
}

struct Averages {
    float* mean;            // (C) of this batch
    float* inverse;
    float* running_mean;    // (C), or null; they take a share of the batch's
    float* running_var;
    float share;
};

// y = (x - mean) / sqrt(var + eps) * weight + bias, from 0 to `clip` if CLIPPED; 0 where a row does not count.
template <class Number, int LANES, bool RAGGED, bool CLIPPED>
__device__ void normalise(const Rows& p, const void* x, void* y, const double* partial, const int* count, const float* weight,
                          const float* bias, const Averages& averages, float eps, float clip, double* memory) {
    using At = Place<Number, LANES>;
    const At at(p);
    merge_partial(p, at, partial, memory);
    float* means = reinterpret_cast<float*>(memory + 2 * At::COLUMNS);
    float* scales = means + At::COLUMNS;
    if (threadIdx.x < At::COLUMNS && at.first_column + threadIdx.x < p.channels) {
        const int column = at.first_column + threadIdx.x;
        const double mean = memory[threadIdx.x] / *count;
        const double var = fmax(memory[At::COLUMNS + threadIdx.x] / *count - mean * mean, 0.0);
        const float inverse = float(1.0 / sqrt(var + double(eps)));
        means[threadIdx.x] = float(mean);
        scales[threadIdx.x] = weight[column] * inverse;
        if (at.chunk == 0) {
            averages.mean[column] = float(mean);
            averages.inverse[column] = inverse;
            if (averages.running_mean != nullptr) {
                averages.running_mean[column] += averages.share * (float(mean) - averages.running_mean[column]);
                averages.running_var[column] += averages.share * (float(var) - averages.running_var[column]);
            }
        }
    }
    __syncthreads();
    if (!at.inside) return;
    float mean[At::NUMBERS], scale[At::NUMBERS], shift[At::NUMBERS];
#pragma unroll
    for (int i = 0; i < At::NUMBERS; i++) {
        mean[i] = means[at.column - at.first_column + i];
        scale[i] = scales[at.column - at.first_column + i];
        shift[i] = bias[at.column + i];
    }
    // From the last row to the first: those that were read last may still be in the L2 cache.
    const int turns = (at.end - at.begin + NORM_TURN * At::ROWS - 1) / (NORM_TURN * At::ROWS);
    for (int turn = turns - 1; turn >= 0; turn--) {
        const int row = at.begin + turn * NORM_TURN * At::ROWS + at.row;
        bool wanted[NORM_TURN];
        uint4 words[NORM_TURN];
        want_turn<RAGGED>(p, at, row, wanted);
        load_turn(p, at, x, row, wanted, words);
#pragma unroll
        for (int u = 0; u < NORM_TURN; u++) {
            const int r = row + u * At::ROWS;
            float v[At::NUMBERS];
            unpack_16<Number>(words[u], v);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) {
                v[i] = fmaf(v[i] - mean[i], scale[i], shift[i]);
                if constexpr (CLIPPED) v[i] = v[i] != v[i] ? v[i] : fminf(fmaxf(v[i], 0.0f), clip);
                if (RAGGED && !wanted[u]) v[i] = 0.0f;
            }
            if (r < at.end)
                reinterpret_cast<uint4*>(y)[(size_t(r) * p.channels + at.column) / At::NUMBERS] = pack_16<Number>(v);
        }
    }
}

// The gradient behind the clip: where the output, rounded as it was stored, lies inside.
template <class Number, bool CLIPPED, int N>
__device__ void behind_clip(float (&grad)[N], const float (&centred)[N], const float (&scale)[N], const float (&shift)[N],
                            float clip) {
    if constexpr (CLIPPED) {
        float y[N];
#pragma unroll
        for (int i = 0; i < N; i++) y[i] = fmaf(centred[i], scale[i], shift[i]);
        float stored[N];
        unpack_16<Number>(pack_16<Number>(y), stored);
#pragma unroll
        for (int i = 0; i < N; i++) grad[i] = stored[i] <= 0.0f || stored[i] >= clip ? 0.0f : grad[i];
    }
}

// partial: sums of the gradient and of its product with x - mean.
template <class Number, int LANES, bool RAGGED, bool CLIPPED>
__device__ void sum_gradients(const Rows& p, const void* grad_y, const void* x, const Channel& channel, double* partial,
                              float clip, double* memory) {
    using At = Place<Number, LANES>;
    const At at(p);
    float mean[At::NUMBERS], scale[At::NUMBERS], shift[At::NUMBERS];
#pragma unroll
    for (int i = 0; i < At::NUMBERS; i++) {
        mean[i] = at.inside ? channel.mean[at.column + i] : 0.0f;
        scale[i] = CLIPPED && at.inside ? channel.weight[at.column + i] * channel.inverse[at.column + i] : 0.0f;
        shift[i] = CLIPPED && at.inside ? channel.bias[at.column + i] : 0.0f;
    }
    double sums[At::NUMBERS] = {}, products[At::NUMBERS] = {};
    for (int row = at.begin + at.row; row < at.end; row += NORM_TURN * At::ROWS) {
        bool wanted[NORM_TURN];
        uint4 words[NORM_TURN], gradients[NORM_TURN];
        float sum[At::NUMBERS] = {}, product[At::NUMBERS] = {};
        want_turn<RAGGED>(p, at, row, wanted);
        load_turn(p, at, x, row, wanted, words);
        load_turn(p, at, grad_y, row, wanted, gradients);
#pragma unroll
        for (int u = 0; u < NORM_TURN; u++) {
            float v[At::NUMBERS], grad[At::NUMBERS];
            unpack_16<Number>(words[u], v);
            unpack_16<Number>(gradients[u], grad);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) v[i] -= mean[i];
            behind_clip<Number, CLIPPED>(grad, v, scale, shift, clip);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) {
                sum[i] += grad[i];
                product[i] = fmaf(grad[i], v[i], product[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < At::NUMBERS; i++) {
            sums[i] += sum[i];
            products[i] += product[i];
        }
    }
    write_partial(p, at, sums, products, partial, memory);
}

// grad_x = weight * inverse * (grad_y - mean(grad_y) - x_hat * mean(grad_y * x_hat)), means over rows that count; 0 at the
// others. The gradients of weight and bias are the sums themselves, if they are wanted.
template <class Number, int LANES, bool RAGGED, bool CLIPPED>
__device__ void backward_rows(const Rows& p, const void* grad_y, const void* x, void* grad_x, const double* partial,
                              const int* count, const Channel& channel, float* grad_weight, float* grad_bias, float clip,
                              double* memory) {
    using At = Place<Number, LANES>;
    const At at(p);
    merge_partial(p, at, partial, memory);
    float* offsets = reinterpret_cast<float*>(memory + 2 * At::COLUMNS);
    float* slopes = offsets + At::COLUMNS;
    if (threadIdx.x < At::COLUMNS && at.first_column + threadIdx.x < p.channels) {
        const int column = at.first_column + threadIdx.x;
        const double total = memory[threadIdx.x], product = memory[At::COLUMNS + threadIdx.x];
        const double inverse = channel.inverse[column];
        offsets[threadIdx.x] = float(total / *count);
        slopes[threadIdx.x] = float(inverse * inverse * product / *count);
        if (at.chunk == 0 && grad_weight != nullptr) {
            grad_weight[column] = float(product * inverse);
            grad_bias[column] = float(total);
        }
    }
    __syncthreads();
    if (!at.inside) return;
    float mean[At::NUMBERS], scale[At::NUMBERS], shift[At::NUMBERS], offset[At::NUMBERS], slope[At::NUMBERS];
#pragma unroll
    for (int i = 0; i < At::NUMBERS; i++) {
        mean[i] = channel.mean[at.column + i];
        scale[i] = channel.weight[at.column + i] * channel.inverse[at.column + i];
        shift[i] = channel.bias[at.column + i];
        offset[i] = offsets[at.column - at.first_column + i];
        slope[i] = slopes[at.column - at.first_column + i];
    }
    const int turns = (at.end - at.begin + NORM_TURN * At::ROWS - 1) / (NORM_TURN * At::ROWS);
    for (int turn = turns - 1; turn >= 0; turn--) {
        const int row = at.begin + turn * NORM_TURN * At::ROWS + at.row;
        bool wanted[NORM_TURN];
        uint4 words[NORM_TURN], gradients[NORM_TURN];
        want_turn<RAGGED>(p, at, row, wanted);
        load_turn(p, at, x, row, wanted, words);
        load_turn(p, at, grad_y, row, wanted, gradients);
#pragma unroll
        for (int u = 0; u < NORM_TURN; u++) {
            const int r = row + u * At::ROWS;
            float v[At::NUMBERS], grad[At::NUMBERS];
            unpack_16<Number>(words[u], v);
            unpack_16<Number>(gradients[u], grad);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) v[i] -= mean[i];
            behind_clip<Number, CLIPPED>(grad, v, scale, shift, clip);
#pragma unroll
            for (int i = 0; i < At::NUMBERS; i++) {
                v[i] = scale[i] * (grad[i] - offset[i] - v[i] * slope[i]);
                if (RAGGED && !wanted[u]) v[i] = 0.0f;
            }
            if (r < at.end)
                reinterpret_cast<uint4*>(grad_x)[(size_t(r) * p.channels + at.column) / At::NUMBERS] = pack_16<Number>(v);
        }
    }
}

}  // namespace ds2
