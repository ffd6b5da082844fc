// Persistent recurrence over the whole chip, up to 64 utterances at a time. Reading the whole state on every
// multiprocessor would take too long, so K is split over a cluster: cluster c owns ROWS rows of the matrix, and its block of
// rank r the r-th slice of K, kept in shared memory for all time steps. All blocks must run at the same time.
//
// One step of one block, 2 warp groups that split its slice of K:
//   1. Each warp polls its 16 utterances' words of its group's slice (exchange.cuh), all at once and right into the
//      registers that the warp-group matrix unit reads; the group multiplies 64 utterances by ROWS rows, in two halves of K.
//   2. The groups add their sums through shared memory and send them, utterance by utterance, to the block of the cluster
//      that finishes it.
//   3. That block adds the cluster's sums and the input, applies the cell, and publishes the words.
//
// Received sums alternate between two buffers: who sends at a step has read a state that exists only because every block,
// the receiver too, has finished the step before, and so has read what came two steps ago. That says nothing of the step
// before itself, so there is a barrier before the local buffer, of which there is one, is written again.
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
    static constexpr int ALL_THREADS = THREADS;
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
    static constexpr int WAVE = K_PAIRS;  // instructions of one half

    const Pass& pass;
    char* const smem;
    // SLOTS of (state_words / 2, 4 warps, 8 lane / 4) units of 2 words of utterance s and 2 of s + 32, interleaved: what one
    // lane needs for one instruction, in the order of its registers. Utterance s < 32 of a tile is the (s / 4)th of warp s % 4.
    unsigned* const exchange;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / WARP_GROUP;
    const int rank = cluster_rank();
    const int state_words = (pass.hidden + 7) / 8 * 4;  // whole 16-byte units
    const int first_word = blockIdx.x / CLUSTER * (ROWS / 2);
    const int slice_word = (rank * Shape::GROUPS + group) * 16 * K_PAIRS;
    const int slot_words = state_words * 64;

    // Of the current tile; per unit of this thread and utterance of the unit.
    int first, live;
    int length[Shape::THREAD_UNITS][2];
    int element[Shape::THREAD_UNITS][2];  // within (B, H)
    unsigned input[Shape::THREAD_UNITS][2], output_y[Shape::THREAD_UNITS][2];

    __device__ WideLoop(const Pass& pass, unsigned* exchange, char* smem) : pass(pass), smem(smem), exchange(exchange) {
        if (threadIdx.x < 2) barrier_init(barrier(threadIdx.x), 1);
        barrier_init_fence();
        cluster_barrier();
        // A thread moves 16 words of one row, permuted as the state's fragments are: the quad's lane q has words 2 q and
        // 2 q + 1 of 8, the first in the first half of K.
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
                        make_uint4(w[8 * s + half], w[8 * s + 2 + half], w[8 * s + 4 + half], w[8 * s + 6 + half]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the matrix unit reads the weights by another path
        __syncthreads();
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
    __device__ unsigned* mine(int i, int epoch) const {
        const Unit u = unit(i);
        const int word = word_of(u), position = (word / 2 * 4 + u.warp) * 8 + u.lane / 4;
        return exchange + unsigned(epoch) % SLOTS * slot_words + position * 4 + word % 2 * 2;
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

    __device__ void publish(int i, unsigned value0, unsigned value1, int epoch) const {
        store_relaxed(mine(i, epoch), publishable(value0), publishable(value1));
    }
    // Empties what this thread has stored for the EMPTY_EVERY states up to epoch - 2, if it is time to, after it has
    // published state `epoch`.
    __device__ void empty_slots(int epoch) const {
        if (epoch % EMPTY_EVERY != EMPTY_EVERY - 1) return;
        for (int i = 0; i < Shape::THREAD_UNITS; i++)
            for (int k = epoch + SLOTS - 1 - EMPTY_EVERY; k <= epoch + SLOTS - 2 && wanted(i, 0); k++)
                store_relaxed(mine(i, k), EMPTY, EMPTY);
        fence_stores();
    }

    // What this lane has for one half of the instructions, or still waits for.
    struct Wave {
        uint4 a[WAVE];
    };
    __device__ void expect(Wave& wave, int w) const {
        const int left = state_words / 2 - slice_word / 2 - lane % 4;  // units from this lane's first on
#pragma unroll
        for (int k = 0; k < WAVE; k++) wave.a[k] = unread(4 * (w * WAVE + k) < left && lane / 4 * 4 + warp < live);
    }
    // Asks for all units that are not there.
    __device__ void ask(Wave& wave, int w, int epoch) const {
        const uint4* from = reinterpret_cast<const uint4*>(exchange + unsigned(epoch) % SLOTS * slot_words) +
                            ((slice_word / 2 + lane % 4) * 4 + warp) * 8 + lane / 4;
#pragma unroll
        for (int k = 0; k < WAVE; k++)
            load_relaxed_if(has_empty(wave.a[k]), wave.a[k], from + (w * WAVE + k) * 128);
    }
    static __device__ bool waits(const Wave& wave) {
        bool any = false;
#pragma unroll
        for (int k = 0; k < WAVE; k++) any |= has_empty(wave.a[k]);
        return __any_sync(0xffffffffu, any);
    }

    // Polls this warp's words and multiplies the first half of K while the second is polled.
    __device__ void receive_and_multiply(float (&c)[ROWS / 2], int epoch) const {
        Wave waves[2];
#pragma unroll
        for (int w = 0; w < 2; w++) {
            expect(waves[w], w);
            ask(waves[w], w, epoch);
        }
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) c[i] = 0.f;
        WaitLimit limit;
#pragma unroll
        for (int w = 0; w < 2; w++) {
            while (waits(waves[w])) {
                ask(waves[w], w, epoch);
                limit.check(epoch);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < WAVE; k++) {
                const uint4 a = waves[w].a[k];
                const unsigned weights =
                    smem_address(smem) + group * Shape::GROUP_BYTES + (w * WAVE + k) * Shape::INSTRUCTION_BYTES;
                wgmma<Number, ROWS>(c, a.x, a.y, a.z, a.w, weights_descriptor<ROWS>(weights));
            }
            wgmma_commit();
        }
        wgmma_wait();
    }

    // Adds the two groups' sums, each for half of the rows, and sends every utterance to the block that finishes it.
    __device__ void reduce(const float (&c)[ROWS / 2], int turn) {
        const bool any = 4 * (lane / 4) + warp < live;
        __syncthreads();  // the other group has read what came here before
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
            if (Shape::BACKWARD && t < 0) {
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (wanted(i, h))
                        store_word<Number>(pass.last_state, element[i][h],
                                           length[i][h] == 0 ? load_state(i, h) : Number::pack(sum[h]), valid(i),
                                           pass.whole_words);
                continue;
            }
            const unsigned result[2] = {finish_word(i, 0, sum[0], t), finish_word(i, 1, sum[1], t)};
            if (more) publish(i, result[0], result[1], next_epoch);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (!wanted(i, h)) continue;
                store_word<Number>(pass.result, t * stride() + element[i][h], result[h], valid(i), pass.whole_words);
                if (!Shape::BACKWARD && t == length[i][h] - 1)
                    store_word<Number>(pass.last_state, element[i][h], result[h], valid(i), pass.whole_words);
            }
        }
        load_inputs(Shape::BACKWARD ? t - 1 : t + 1);
        if (more) empty_slots(next_epoch);
    }

    // The new word of one utterance; 0 at its padding, and where there is no utterance.
    __device__ unsigned finish_word(int i, int h, float (&value)[2], int t) const {
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
        return t < length[i][h] ? Number::pack(value) : 0;
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
                if (wanted(i, 0))
                    publish(i, Shape::BACKWARD ? 0 : load_state(i, 0), Shape::BACKWARD ? 0 : load_state(i, 1), epoch);
            if (iterations > 0) empty_slots(epoch);
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
