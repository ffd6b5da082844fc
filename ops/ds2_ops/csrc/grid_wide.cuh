// Persistent recurrence over the whole chip, up to 64 utterances at a time. Reading the whole state on every
// multiprocessor would take too long, so K is split over a cluster: cluster c owns ROWS rows of the matrix, and its block of
// rank r the r-th slice of K, kept in shared memory for all time steps. All blocks must run at the same time.
//
// One step of one block, 2 warp groups that split its slice of K:
//   1. Each warp polls its 16 utterances' words of its group's slice (exchange.cuh) into the registers that the warp-group
//      matrix unit reads, and the group multiplies 64 utterances by ROWS rows as the chunks come.
//   2. The groups add their sums through shared memory and send them, utterance by utterance, to the block of the cluster
//      that finishes it.
//   3. That block adds the cluster's sums and the input, applies the cell, and publishes the words.
//
// Received sums alternate between two buffers: who sends at a step has read a state that exists only because every block,
// the receiver too, has finished the step before, and so has read what came two steps ago. The local buffer is written
// again only when all utterances' next state is there, which needs everything that was read from it.
#pragma once

#include "cells.cuh"
#include "exchange.cuh"
#include "wgmma.cuh"

namespace ds2 {

constexpr int WARP_GROUP = 128;  // threads

template <class Number_, class Cell_, int CLUSTER_, int ROWS_, int K_PAIRS_, bool BACKWARD_>
struct WideShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr int ROWS = ROWS_;                            // of a cluster
    static constexpr int K_PAIRS = K_PAIRS_;                      // pairs of matrix instructions along K, one warp group
    static constexpr int GROUPS = THREADS / WARP_GROUP;
    static constexpr int ROW_GROUPS = ROWS / 8;
    static constexpr int FINISH_WARPS = CLUSTER < 4 ? 4 / CLUSTER : 1;  // warps of a group whose utterances a block finishes
    static constexpr int UNITS = FINISH_WARPS * ROW_GROUPS * 32;  // of 2 rows x 2 utterances, that a block finishes
    static constexpr int THREAD_UNITS = (UNITS + THREADS - 1) / THREADS;

    static constexpr int INSTRUCTION_BYTES = ROWS * 32;
    static constexpr int GROUP_BYTES = 2 * K_PAIRS * INSTRUCTION_BYTES;
    static constexpr int LOCAL_AT = GROUPS * GROUP_BYTES;
    static constexpr int LOCAL_BYTES = ROW_GROUPS * WARP_GROUP * 16;
    static constexpr int RECEIVE_AT = LOCAL_AT + LOCAL_BYTES;
    static constexpr int RECEIVE_BYTES = CLUSTER * UNITS * 16;
    static constexpr int BARRIER_AT = RECEIVE_AT + 2 * RECEIVE_BYTES;
    static constexpr int SMEM_BYTES = BARRIER_AT + 16;

    static_assert(Cell::GATES == 1, "a cluster's rows are its units: cells with gates need their own pointwise end");
    static_assert(Number::PER_WORD == 2, "a lane's two neighbouring rows are one word: 16-bit numbers only");
    static_assert(CLUSTER == 2 || CLUSTER == 4, "the 4 warps of a group are dealt to the blocks of the cluster");
};

template <class Shape>
struct WideLoop {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    static constexpr int ROWS = Shape::ROWS, CLUSTER = Shape::CLUSTER, K_PAIRS = Shape::K_PAIRS;
    static constexpr int PREFETCH_STEPS = 8;

    const Pass& pass;
    char* const smem;
    unsigned* const exchange;  // SLOTS of (state_words / 4, 4 warps, per_warp) units of 4 words
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / WARP_GROUP;
    const int rank = cluster_rank();
    const int state_words = (pass.hidden + 7) / 8 * 4;  // whole 16-byte units
    const int first_word = blockIdx.x / CLUSTER * (ROWS / 2);
    const int slice_word = (rank * Shape::GROUPS + group) * 16 * K_PAIRS;
    const int per_warp = (pass.samples + 3) / 4;  // utterance s of a tile is the (s / 4)th of warp s % 4
    const int slot_words = state_words * 4 * per_warp;

    // Of the current tile; per unit of this thread and utterance of the unit.
    int first, live;
    int length[Shape::THREAD_UNITS][2];
    int element[Shape::THREAD_UNITS][2];  // within (B, H)
    unsigned input[Shape::THREAD_UNITS][2], output_y[Shape::THREAD_UNITS][2];
    unsigned emptied[Shape::THREAD_UNITS][2] = {};  // what the last emptied word held

    __device__ WideLoop(const Pass& pass, unsigned* exchange, char* smem) : pass(pass), smem(smem), exchange(exchange) {
        // A thread moves 16 words of one row, permuted as the state's fragments are (recurrence.cuh).
        for (int i = threadIdx.x; i < Shape::GROUPS * K_PAIRS * ROWS; i += THREADS) {
            const int local_row = i % ROWS, pair = i / ROWS, row = 2 * first_word + local_row;
            const int k = 2 * (rank * Shape::GROUPS * 16 * K_PAIRS + 16 * pair);
            unsigned w[16];
#pragma unroll
            for (int j = 0; j < 16; j++)
                w[j] = row < pass.hidden ? load_word<Number>(pass.matrix, size_t(row) * pass.hidden + k + 2 * j,
                                                             pass.hidden - k - 2 * j, pass.whole_words)
                                         : 0;
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *reinterpret_cast<uint4*>(smem + (2 * pair + s) * Shape::INSTRUCTION_BYTES + half * ROWS * 16 +
                                              local_row * 16) =
                        make_uint4(w[2 * s + half], w[4 + 2 * s + half], w[8 + 2 * s + half], w[12 + 2 * s + half]);
        }
        if (threadIdx.x < 2) barrier_init(barrier(threadIdx.x), 1);
        barrier_init_fence();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the matrix unit reads the weights by another path
        cluster_barrier();
    }

    __device__ unsigned barrier(int turn) const { return smem_address(smem + Shape::BARRIER_AT + 8 * turn); }
    __device__ size_t stride() const { return size_t(pass.batch) * pass.hidden; }

    // Unit i of this thread: rows 8 row_group + 2 (lane % 4) .. + 1 of utterances lane / 4 and lane / 4 + 8 of `warp`.
    struct Unit {
        int index, warp, lane, row_group;
    };
    __device__ Unit unit(int i) const {
        const int u = threadIdx.x + THREADS * i;
        return {u, rank * 4 / CLUSTER + u / 32 / Shape::ROW_GROUPS, u % 32, u / 32 % Shape::ROW_GROUPS};
    }
    __device__ int sample_of(Unit u, int half) const { return 4 * (u.lane / 4 + 8 * half) + u.warp; }
    __device__ int word_of(Unit u) const { return first_word + 4 * u.row_group + u.lane % 4; }
    __device__ bool wanted(int i, int half) const {
        const Unit u = unit(i);
        return u.index < Shape::UNITS && sample_of(u, half) < live && word_of(u) < state_words;
    }
    __device__ unsigned* mine(int i, int half, int epoch) const {
        const Unit u = unit(i);
        const int position = u.warp * per_warp + u.lane / 4 + 8 * half, word = word_of(u);
        return exchange + epoch % SLOTS * slot_words + (word / 4 * 4 * per_warp + position) * 4 + word % 4;
    }
    __device__ int valid(int i) const { return min(2, pass.hidden - 2 * word_of(unit(i))); }

    // Sets the tile's fields; returns the frames of its longest utterance.
    __device__ int begin_tile(int tile) {
        first = tile * pass.samples;
        live = min(pass.samples, pass.batch - first);
        int steps = 0;
        for (int s = 0; s < live; s++) steps = max(steps, length_of(pass, first + s));
        for (int i = 0; i < Shape::THREAD_UNITS; i++)
            for (int h = 0; h < 2; h++) {
                const int utterance = first + sample_of(unit(i), h);
                element[i][h] = utterance * pass.hidden + 2 * word_of(unit(i));
                length[i][h] = wanted(i, h) ? length_of(pass, utterance) : 0;
                input[i][h] = output_y[i][h] = 0;
                // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps.
                if (wanted(i, h) && length[i][h] == 0 && (!Shape::BACKWARD || steps == 0))
                    store_word<Number>(pass.last_state, element[i][h], load_state(i, h), valid(i), pass.whole_words);
            }
        load_inputs(Shape::BACKWARD ? steps - 1 : 0);
        return steps;
    }
    __device__ unsigned load_state(int i, int h) const {
        return pass.state && wanted(i, h) ? load_word<Number>(pass.state, element[i][h], valid(i), pass.whole_words) : 0;
    }

    // What the next step needs, a step early, from L2, where it was asked for PREFETCH_STEPS earlier.
    __device__ void load_inputs(int t) {
#pragma unroll
        for (int i = 0; i < Shape::THREAD_UNITS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (t < 0 || t >= length[i][h]) continue;
                const size_t at = t * stride() + element[i][h];
                input[i][h] = load_word<Number>(pass.input, at, valid(i), pass.whole_words);
                if (Shape::BACKWARD) output_y[i][h] = load_word<Number>(pass.output_y, at, valid(i), pass.whole_words);
                const int ahead = Shape::BACKWARD ? t - PREFETCH_STEPS : t + PREFETCH_STEPS;
                if (valid(i) > 0 && ahead >= 0 && ahead < length[i][h] && lane % 4 == 0) {
                    const size_t there = ahead * stride() + element[i][h];
                    prefetch<Number>(pass.input, there);
                    if (Shape::BACKWARD) prefetch<Number>(pass.output_y, there);
                }
            }
    }

    // An exchange returns only when it is done, so waiting for what the last one returned puts it before the new word. From
    // state 3 on, the emptied slot held a state; the comparison is there to be waited for.
    __device__ void publish(int i, int h, unsigned value, int epoch) {
        if (epoch >= 3 && emptied[i][h] == EMPTY) __trap();
        store_relaxed(mine(i, h, epoch), publishable(value));
    }
    __device__ void empty(int i, int h, int epoch) {
        asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
                     : "=r"(emptied[i][h])
                     : "l"(mine(i, h, epoch)), "r"(EMPTY)
                     : "memory");
    }

    // Polls this warp's words and multiplies. The first chunk is polled alone, as in grid.cuh.
    __device__ void receive_and_multiply(float (&c)[ROWS / 2], int epoch) {
        const int unit = slice_word / 4 + lane % 4;
        const uint4* from = reinterpret_cast<const uint4*>(exchange + epoch % SLOTS * slot_words) + unit * 4 * per_warp +
                            warp * per_warp + lane / 4;
        const int units = state_words / 4 - unit;  // of this lane, before the state ends
        const int pitch = 16 * per_warp;
        const int units0 = 4 * (lane / 4) + warp < live ? units : 0, units1 = 4 * (lane / 4 + 8) + warp < live ? units : 0;
        WaitLimit limit;
        uint4 b[K_PAIRS][2];
        b[0][0] = b[0][1] = make_uint4(0, 0, 0, 0);
        if (units0 > 0) b[0][0] = load_relaxed(from);
        while (__any_sync(0xffffffffu, has_empty(b[0][0]))) {
            if (has_empty(b[0][0])) b[0][0] = load_relaxed(from);
            limit.check(epoch);
        }
        if (units1 > 0) b[0][1] = load_relaxed(from + 8);
#pragma unroll
        for (int p = 1; p < K_PAIRS; p++) {
            b[p][0] = b[p][1] = make_uint4(0, 0, 0, 0);
            if (4 * p < units0) b[p][0] = load_relaxed(from + p * pitch);
            if (4 * p < units1) b[p][1] = load_relaxed(from + p * pitch + 8);
        }
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) c[i] = 0.f;
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < K_PAIRS; p++) {
            while (__any_sync(0xffffffffu, has_empty(b[p][0]) || has_empty(b[p][1]))) {
#pragma unroll
                for (int j = p; j < K_PAIRS; j++) {
                    if (has_empty(b[j][0])) b[j][0] = load_relaxed(from + j * pitch);
                    if (has_empty(b[j][1])) b[j][1] = load_relaxed(from + j * pitch + 8);
                }
                limit.check(epoch);
            }
            const unsigned weights = smem_address(smem) + group * Shape::GROUP_BYTES + 2 * p * Shape::INSTRUCTION_BYTES;
            wgmma_fence();
            wgmma<Number, ROWS>(c, b[p][0].x, b[p][1].x, b[p][0].y, b[p][1].y, weights_descriptor<ROWS>(weights));
            wgmma<Number, ROWS>(c, b[p][0].z, b[p][1].z, b[p][0].w, b[p][1].w,
                                weights_descriptor<ROWS>(weights + Shape::INSTRUCTION_BYTES));
            wgmma_commit();
        }
        wgmma_wait();
    }

    // Adds the two groups' sums, each for half of the rows, and sends every utterance to the block that finishes it.
    __device__ void reduce(const float (&c)[ROWS / 2], int turn) {
        const bool any = 4 * (lane / 4) + warp < live;
        float4* local = reinterpret_cast<float4*>(smem + Shape::LOCAL_AT) + threadIdx.x % WARP_GROUP;
        if (any)
#pragma unroll
            for (int j = 0; j < Shape::ROW_GROUPS; j++)
                if (j % 2 != group) local[j * WARP_GROUP] = make_float4(c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]);
        __syncthreads();
        if (!any) return;
        const unsigned to = remote_address(smem_address(smem), warp * CLUSTER / 4);
        const unsigned at = to + Shape::RECEIVE_AT + turn * Shape::RECEIVE_BYTES +
                            ((rank * Shape::FINISH_WARPS + warp % Shape::FINISH_WARPS) * Shape::ROW_GROUPS * 32 + lane) * 16;
#pragma unroll
        for (int j = 0; j < Shape::ROW_GROUPS; j++)
            if (j % 2 == group) {
                const float4 v = local[j * WARP_GROUP];
                store_async(at + j * 32 * 16, to + Shape::BARRIER_AT + 8 * turn, __float_as_uint(c[4 * j] + v.x),
                            __float_as_uint(c[4 * j + 1] + v.y), __float_as_uint(c[4 * j + 2] + v.z),
                            __float_as_uint(c[4 * j + 3] + v.w));
            }
    }
    // Bytes that the cluster sends to this block at each step.
    __device__ unsigned expected() const {
        unsigned bytes = 0;
        for (int w = 0; w < Shape::FINISH_WARPS; w++)
            for (int g = 0; g < 8; g++)
                if (4 * g + rank * 4 / CLUSTER + w < live) bytes += CLUSTER * 4 * 16 * Shape::ROW_GROUPS;
        return bytes;
    }

    // The pointwise end of one step at frame t; t = -1 is the gradient of the first state.
    __device__ void finish(int t, int turn, int next_epoch, bool more) {
        const char* from = smem + Shape::RECEIVE_AT + turn * Shape::RECEIVE_BYTES;
#pragma unroll
        for (int i = 0; i < Shape::THREAD_UNITS; i++) {
            if (!wanted(i, 0)) continue;
            float sum[2][2] = {};
#pragma unroll
            for (int source = 0; source < CLUSTER; source++) {
                const float4 v = *reinterpret_cast<const float4*>(from + (source * Shape::UNITS + unit(i).index) * 16);
                sum[0][0] += v.x, sum[0][1] += v.y, sum[1][0] += v.z, sum[1][1] += v.w;
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (wanted(i, h)) finish_word(i, h, sum[h], t, next_epoch, more);
        }
        load_inputs(Shape::BACKWARD ? t - 1 : t + 1);
    }

    __device__ void finish_word(int i, int h, float (&value)[2], int t, int next_epoch, bool more) {
        if (Shape::BACKWARD && t < 0) {
            store_word<Number>(pass.last_state, element[i][h], length[i][h] == 0 ? load_state(i, h) : Number::pack(value),
                               valid(i), pass.whole_words);
            return;
        }
        float in[2], y[2], last[2] = {};
        Number::unpack(input[i][h], in);
        if (Shape::BACKWARD) {
            Number::unpack(output_y[i][h], y);
            if (t == length[i][h] - 1) Number::unpack(load_state(i, h), last);
        }
#pragma unroll
        for (int e = 0; e < 2; e++)
            value[e] = Shape::BACKWARD ? Cell::backward(value[e] + in[e] + last[e], y[e], pass.clip)
                                       : Cell::forward(value[e] + in[e], pass.clip);
        const unsigned result = t < length[i][h] ? Number::pack(value) : 0;
        if (more) publish(i, h, result, next_epoch);
        store_word<Number>(pass.result, t * stride() + element[i][h], result, valid(i), pass.whole_words);
        if (!Shape::BACKWARD && t == length[i][h] - 1)
            store_word<Number>(pass.last_state, element[i][h], result, valid(i), pass.whole_words);
        if (more) empty(i, h, next_epoch + 2);
    }

    __device__ void clear_padding(int steps) {
        for (int i = 0; i < Shape::THREAD_UNITS; i++)
            for (int h = 0; h < 2; h++)
                for (int t = steps; t < pass.frames && wanted(i, h); t++)
                    store_word<Number>(pass.result, t * stride() + element[i][h], 0, valid(i), pass.whole_words);
    }

    __device__ void run() {
        int epoch = 0;
        for (int tile = 0; tile * pass.samples < pass.batch; tile++) {
            const int steps = begin_tile(tile);
            const unsigned bytes = expected();
            const int iterations = Shape::BACKWARD && steps > 0 ? steps + 1 : steps;
            for (int i = 0; i < Shape::THREAD_UNITS && iterations > 0; i++)
                for (int h = 0; h < 2; h++)
                    if (wanted(i, h)) {
                        publish(i, h, Shape::BACKWARD ? 0 : load_state(i, h), epoch);
                        empty(i, h, epoch + 2);
                    }
            for (int i = 0; i < iterations; i++, epoch++) {
                const int turn = epoch % 2;
                if (threadIdx.x == 0) barrier_expect(barrier(turn), bytes);
                float c[ROWS / 2];
                receive_and_multiply(c, epoch);
                reduce(c, turn);
                barrier_wait(barrier(turn), epoch / 2 % 2, "its cluster's sums", epoch);
                finish(Shape::BACKWARD ? steps - 1 - i : i, turn, epoch + 1, i + 1 < iterations);
            }
            clear_padding(steps);
        }
        cluster_barrier();  // no block leaves while its peers' last sums may be on their way from it
    }
};

template <class Shape>
__device__ void wide_recurrence(const Pass& pass, unsigned* exchange) {
    extern __shared__ __align__(128) char dynamic_smem[];
    WideLoop<Shape>(pass, exchange, dynamic_smem).run();
}

}  // namespace ds2
