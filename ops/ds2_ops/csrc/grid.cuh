// Persistent recurrence over the whole chip, up to 8 utterances at a time: every block keeps a few rows of the matrix for
// all time steps, in registers and, where these do not suffice, in shared memory, and gets the whole state from all other
// blocks through L2 at every step (exchange.cuh). All blocks must run at the same time.
//
// One step of one block, 8 warps:
//   1. Warp w owns K slice w. It polls the words of that slice, multiplies all rows of the block by each chunk as it
//      comes, and leaves a partial sum in shared memory.
//   2. One block barrier. Then each thread takes one word (2 rows of 16-bit numbers, 1 of fp32) of one utterance: adds
//      the 8 partial sums and the input, applies the cell, and publishes the word.
//
// Partial sums alternate between two buffers: a warp that writes one has passed the block barrier of the step in between,
// which every reader of that buffer reaches only after it has read.
#pragma once

#include "cells.cuh"
#include "exchange.cuh"

namespace ds2 {

template <class Number_, class Cell_, int M_TILES_, int K_PAIRS_, int K_PAIRS_REGISTERS_, bool BACKWARD_>
struct GridShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int M_TILES = M_TILES_;
    static constexpr int K_PAIRS = K_PAIRS_;                      // pairs of matrix instructions along K, one warp
    static constexpr int K_PAIRS_REGISTERS = K_PAIRS_REGISTERS_;  // of these with weights in registers
    static constexpr int K_PAIRS_SMEM = K_PAIRS - K_PAIRS_REGISTERS;

    static constexpr int PARTIAL_STRIDE = MMA_ROWS * M_TILES + 4;  // a fragment's four sample pairs fall 8 banks apart
    static constexpr int PARTIAL_BYTES = WARPS * MMA_SAMPLES * PARTIAL_STRIDE * 4;
    static constexpr int WEIGHTS_AT = 2 * PARTIAL_BYTES;
    static constexpr int SMEM_BYTES = WEIGHTS_AT + THREADS * K_PAIRS_SMEM * M_TILES * 32;

    static_assert(Cell::GATES == 1, "a block's rows are its units: cells with gates need their own pointwise end");
    static_assert(M_TILES * MMA_ROWS * MMA_SAMPLES / PER_WORD <= THREADS, "one thread finishes one word of one utterance");
};

template <class Shape>
struct GridLoop {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    static constexpr int IN_FLIGHT = Shape::K_PAIRS < 10 ? Shape::K_PAIRS : 10;  // 16-byte loads of one lane
    static constexpr int PREFETCH_STEPS = 8;

    const Pass& pass;
    char* const smem;
    unsigned* const exchange;  // SLOTS of (state_words / 4, samples) units of 4 words
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int state_words = (pass.hidden + 4 * Shape::PER_WORD - 1) / (4 * Shape::PER_WORD) * 4;  // whole 16-byte units
    const int slot_words = state_words * pass.samples;
    const int block_words = (state_words + gridDim.x - 1) / gridDim.x;
    const int first_word = block_words * blockIdx.x;
    // This thread's word at the pointwise end.
    const int local_word = threadIdx.x % block_words, sample = threadIdx.x / block_words;
    const int word = first_word + local_word;
    const int row = word * Shape::PER_WORD;
    const bool owner = sample < pass.samples && word < state_words;
    const int valid = owner ? min(Shape::PER_WORD, pass.hidden - row) : 0;  // its elements that exist
    unsigned* const mine = exchange + (word / 4 * pass.samples + sample) * 4 + word % 4;
    Weights<Number, Shape::M_TILES, 2 * Shape::K_PAIRS_REGISTERS> weights;

    // Of the current tile.
    int first, live;         // utterances
    int length;              // of this thread's utterance; 0 if it has none
    size_t at;               // element of this thread's word at the current t
    unsigned input, output_y;

    __device__ GridLoop(const Pass& pass, unsigned* exchange, char* smem) : pass(pass), smem(smem), exchange(exchange) {
        const int warp_word = 16 * Shape::K_PAIRS * warp;
        const int first_row = first_word * Shape::PER_WORD, end_row = (first_word + block_words) * Shape::PER_WORD;
        weights.load(pass, first_row, end_row, warp_word);
        for (int p = 0; p < Shape::K_PAIRS_SMEM; p++) {
            Weights<Number, Shape::M_TILES, 2> pair;
            pair.load(pass, first_row, end_row, warp_word + 16 * (Shape::K_PAIRS_REGISTERS + p));
            for (int m = 0; m < Shape::M_TILES; m++)
                for (int k = 0; k < 2; k++)
                    *smem_weight(p, m, k) = make_uint4(pair.a[m][k][0], pair.a[m][k][1], pair.a[m][k][2], pair.a[m][k][3]);
        }
    }

    __device__ uint4* smem_weight(int pair, int m, int k) const {  // only ever touched by this lane
        return reinterpret_cast<uint4*>(smem + Shape::WEIGHTS_AT) + ((pair * Shape::M_TILES + m) * 2 + k) * THREADS + threadIdx.x;
    }
    __device__ float* partial(int turn, int of_warp, int of_sample) const {
        return reinterpret_cast<float*>(smem + turn * Shape::PARTIAL_BYTES) +
               (of_warp * MMA_SAMPLES + of_sample) * Shape::PARTIAL_STRIDE;
    }
    __device__ size_t stride() const { return size_t(pass.batch) * pass.hidden; }

    // Sets the tile's fields; returns the frames of its longest utterance.
    __device__ int begin_tile(int tile) {
        first = tile * pass.samples;
        live = min(pass.samples, pass.batch - first);
        int steps = 0;
        for (int s = 0; s < live; s++) steps = max(steps, length_of(pass, first + s));
        const bool any = owner && sample < live;
        length = any ? length_of(pass, first + sample) : 0;
        const int t = Shape::BACKWARD ? steps - 1 : 0;
        at = (size_t(max(t, 0)) * pass.batch + first + sample) * pass.hidden + row;
        input = output_y = 0;
        load_inputs(t);
        // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps at all.
        if (any && length == 0 && (!Shape::BACKWARD || steps == 0))
            store_word<Number>(pass.last_state, state_element(), load_state(), valid, pass.whole_words);
        return steps;
    }

    __device__ size_t state_element() const { return size_t(first + sample) * pass.hidden + row; }
    __device__ unsigned load_state() const {
        return pass.state && sample < live ? load_word<Number>(pass.state, state_element(), valid, pass.whole_words) : 0;
    }

    // What the next step needs, a step early, from L2, where it was asked for PREFETCH_STEPS earlier.
    __device__ void load_inputs(int t) {
        if (t < 0 || t >= length) return;
        input = load_word<Number>(pass.input, at, valid, pass.whole_words);
        if (Shape::BACKWARD) output_y = load_word<Number>(pass.output_y, at, valid, pass.whole_words);
        const int ahead = Shape::BACKWARD ? t - PREFETCH_STEPS : t + PREFETCH_STEPS;
        if (valid > 0 && ahead >= 0 && ahead < length) {
            const size_t there = Shape::BACKWARD ? at - PREFETCH_STEPS * stride() : at + PREFETCH_STEPS * stride();
            prefetch<Number>(pass.input, there);
            if (Shape::BACKWARD) prefetch<Number>(pass.output_y, there);
        }
    }

    __device__ void publish(unsigned value, int epoch) {
        if (owner) store_relaxed(mine + epoch % SLOTS * slot_words, publishable(Number::operand(value)));
    }
    // The fence lies between this and the thread's next publish().
    __device__ void empty(int epoch) {
        if (!owner) return;
        store_relaxed(mine + epoch % SLOTS * slot_words, EMPTY);
        __threadfence();
    }

    __device__ void multiply_pair(float (&c)[2][Shape::M_TILES][4], int p, uint4 b) const {
#pragma unroll
        for (int m = 0; m < Shape::M_TILES; m++) {
            if (p < Shape::K_PAIRS_REGISTERS) {
                Number::multiply_add(c[0][m], weights.a[m][2 * p], b.x, b.y);
                Number::multiply_add(c[1][m], weights.a[m][2 * p + 1], b.z, b.w);
            } else {
                const uint4 w0 = *smem_weight(p - Shape::K_PAIRS_REGISTERS, m, 0);
                const uint4 w1 = *smem_weight(p - Shape::K_PAIRS_REGISTERS, m, 1);
                const unsigned a0[4] = {w0.x, w0.y, w0.z, w0.w}, a1[4] = {w1.x, w1.y, w1.z, w1.w};
                Number::multiply_add(c[0][m], a0, b.x, b.y);
                Number::multiply_add(c[1][m], a1, b.z, b.w);
            }
        }
    }

    // Polls this warp's slice of the state and leaves its partial sums. The first chunk is polled alone: all chunks of all
    // warps at once would keep L2 too busy for the stores that they wait for.
    __device__ void receive_and_multiply(int epoch, int turn) {
        const int column = lane / 4;
        const int unit = 4 * Shape::K_PAIRS * warp + lane % 4;
        const uint4* from =
            reinterpret_cast<const uint4*>(exchange + epoch % SLOTS * slot_words) + unit * pass.samples + column;
        const int units = column < live ? state_words / 4 - unit : 0;  // of this lane, before the state ends
        const int pitch = 4 * pass.samples;
        uint4 b[IN_FLIGHT];
        b[0] = make_uint4(0, 0, 0, 0);
        if (units > 0) b[0] = load_relaxed(from);
        await(b[0], from, epoch);
#pragma unroll
        for (int p = 1; p < IN_FLIGHT; p++) {
            b[p] = make_uint4(0, 0, 0, 0);
            if (4 * p < units) b[p] = load_relaxed(from + p * pitch);
        }
        float c[2][Shape::M_TILES][4] = {};  // two sums, since a matrix instruction that waits for the last one is slow
#pragma unroll
        for (int p = 0; p < Shape::K_PAIRS; p++) {
            uint4& chunk = b[p % IN_FLIGHT];
            await(chunk, from + p * pitch, epoch);
            multiply_pair(c, p, chunk);
            if (p + IN_FLIGHT < Shape::K_PAIRS) {
                chunk = make_uint4(0, 0, 0, 0);
                if (4 * (p + IN_FLIGHT) < units) chunk = load_relaxed(from + (p + IN_FLIGHT) * pitch);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (2 * (lane % 4) + n >= live) break;
            float* to = partial(turn, warp, 2 * (lane % 4) + n) + lane / 4;
#pragma unroll
            for (int m = 0; m < Shape::M_TILES; m++) {
                to[MMA_ROWS * m] = c[0][m][n] + c[1][m][n];
                to[MMA_ROWS * m + 8] = c[0][m][2 + n] + c[1][m][2 + n];
            }
        }
    }

    __device__ void await(uint4& chunk, const uint4* from, int epoch) const {
        WaitLimit limit;
        while (__any_sync(0xffffffffu, has_empty(chunk))) {
            if (has_empty(chunk)) chunk = load_relaxed(from);
            limit.check(epoch);
        }
    }

    // The pointwise end of one step at frame t; t = -1 is the gradient of the first state.
    __device__ void finish(int t, int turn, int next_epoch, bool more) {
        if (!owner || sample >= live) return;
        float value[Shape::PER_WORD] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++) value[e] += partial(turn, w, sample)[local_word * Shape::PER_WORD + e];
        if (Shape::BACKWARD && t < 0) {
            store_word<Number>(pass.last_state, state_element(), length == 0 ? load_state() : Number::pack(value), valid,
                               pass.whole_words);
            return;
        }
        float in[Shape::PER_WORD];
        Number::unpack(input, in);
        float y[Shape::PER_WORD], last[Shape::PER_WORD] = {};
        if (Shape::BACKWARD) {
            Number::unpack(output_y, y);
            if (t == length - 1) Number::unpack(load_state(), last);
        }
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            value[e] = Shape::BACKWARD ? Cell::backward(value[e] + in[e] + last[e], y[e], pass.clip)
                                       : Cell::forward(value[e] + in[e], pass.clip);
        const unsigned result = t < length ? Number::pack(value) : 0;
        if (more) publish(result, next_epoch);
        store_word<Number>(pass.result, at, result, valid, pass.whole_words);
        if (!Shape::BACKWARD && t == length - 1)
            store_word<Number>(pass.last_state, state_element(), result, valid, pass.whole_words);
        at = Shape::BACKWARD ? at - stride() : at + stride();
        load_inputs(Shape::BACKWARD ? t - 1 : t + 1);
        if (more) empty(next_epoch + 2);
    }

    __device__ void clear_padding(int steps) {
        if (!owner || sample >= live) return;
        for (int t = steps; t < pass.frames; t++)
            store_word<Number>(pass.result, (size_t(t) * pass.batch + first + sample) * pass.hidden + row, 0, valid,
                               pass.whole_words);
    }

    __device__ void run() {
        int epoch = 0;
        for (int tile = 0; tile * pass.samples < pass.batch; tile++) {
            const int steps = begin_tile(tile);
            const int iterations = Shape::BACKWARD && steps > 0 ? steps + 1 : steps;
            if (iterations > 0) {
                publish(Shape::BACKWARD ? 0 : load_state(), epoch);
                empty(epoch + 2);
            }
            for (int i = 0; i < iterations; i++, epoch++) {
                receive_and_multiply(epoch, epoch % 2);
                __syncthreads();
                finish(Shape::BACKWARD ? steps - 1 - i : i, epoch % 2, epoch + 1, i + 1 < iterations);
            }
            clear_padding(steps);
        }
    }
};

template <class Shape>
__device__ void grid_recurrence(const Pass& pass, unsigned* exchange) {
    extern __shared__ __align__(128) char dynamic_smem[];
    GridLoop<Shape>(pass, exchange, dynamic_smem).run();
}

}  // namespace ds2
