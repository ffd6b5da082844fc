// Persistent recurrence inside one thread-block cluster: every block keeps ROWS rows of the matrix in registers for all
// time steps and gets the whole state of its utterances from its peers through distributed shared memory at every step.
// Clusters are independent of one another (each has its own utterances), so they need not run at the same time.
//
// One step of one block, 8 warps:
//   1. Warp w owns K slice w, that is what 2 (cluster of 16) or 1 (cluster of 8) blocks produced. It waits for these
//      alone, multiplies ROWS rows by its slice, and leaves a partial sum in shared memory.
//   2. One block barrier. Then each thread takes one word (2 rows of 16-bit numbers, 1 of fp32) of one utterance: adds
//      the 8 partial sums and the input, applies the cell, and with its quad of lanes sends 16 bytes to all blocks.
//
// Buffers and why no other barrier is needed. State and mbarriers are double-buffered by iteration parity.
//   - A peer may write my state buffer s at its iteration i only if I have read it at iteration i - 1. It writes after
//     its block barrier of iteration i, which its warps reach only after they together received what every block,
//     mine too, sent at iteration i - 1; I sent that after my block barrier of i - 1, which my warps reach only after
//     they have read buffer s.
//   - Partial sums alternate between two buffers: a warp that writes one has passed the block barrier of the turn in
//     between, which every reader of that buffer reaches only after it has read.
//   - An mbarrier is armed for its next phase before the block barrier of the preceding iteration. Bytes that land
//     before that are counted as negative and cannot end the phase, since its one arrival is still missing.
//   - What is sent is always received: nothing is sent in the last iteration, so no block leaves with stores under way.
#pragma once

#include "cells.cuh"
#include "recurrence.cuh"
#include "sync.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int ROWS_, int GROUPS_, bool BACKWARD_>
struct ClusterShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr int CLUSTER = CLUSTER_, ROWS = ROWS_, GROUPS = GROUPS_;
    static constexpr bool BACKWARD = BACKWARD_;

    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int WORDS = ROWS / PER_WORD;   // of one utterance's state that a block produces
    static constexpr int CHUNKS = WORDS / 4;        // of 16 bytes, the unit of exchange
    static constexpr int K_WORDS = CLUSTER * WORDS; // of one utterance's whole state
    static constexpr int M_TILES = (ROWS + MMA_ROWS - 1) / MMA_ROWS;
    static constexpr int K_TILES = K_WORDS / MMA_WORDS / WARPS;
    static constexpr int SOURCES = CLUSTER / WARPS; // blocks that feed one warp
    static constexpr int MAX_SAMPLES = THREADS / 4 / CHUNKS < MMA_SAMPLES ? THREADS / 4 / CHUNKS : MMA_SAMPLES;

    // Two samples of a 16-byte load's quarter warp fall into different halves of the banks.
    static constexpr int STATE_STRIDE = 4 * K_WORDS + 64;
    // The four sample pairs of a fragment's store fall 8 banks apart.
    static constexpr int PARTIAL_STRIDE = MMA_ROWS * M_TILES + 4;

    static constexpr int STATE_BYTES = MMA_SAMPLES * STATE_STRIDE;                            // one group, one stage
    static constexpr int PARTIAL_BYTES = WARPS * MMA_SAMPLES * PARTIAL_STRIDE * 4;            // one turn
    static constexpr int INPUTS = BACKWARD ? 2 : 1;                                           // arrays read every step
    static constexpr int AHEAD = 8;                                                           // steps, a power of 2
    static constexpr int INPUT_BYTES = AHEAD * INPUTS * THREADS * 4;                          // one group
    static constexpr int PARTIAL_AT = 2 * GROUPS * STATE_BYTES;
    static constexpr int INPUT_AT = PARTIAL_AT + 2 * PARTIAL_BYTES;
    static constexpr int BARRIER_AT = INPUT_AT + GROUPS * INPUT_BYTES;
    static constexpr int SMEM_BYTES = BARRIER_AT + 2 * GROUPS * WARPS * 8;

    static_assert(Cell::GATES == 1, "a block's rows are its units: cells with gates need their own pointwise end");
    static_assert(CLUSTER % WARPS == 0, "each warp's K slice is what whole blocks produced");
    static_assert(WORDS % 4 == 0, "blocks exchange units of 16 bytes");
    static_assert(K_WORDS % (MMA_WORDS * WARPS) == 0, "each warp's K slice is whole matrix instructions");
    static_assert(STATE_STRIDE % 128 == 64, "16-byte state loads are free of bank conflicts");
    static_assert(MAX_SAMPLES >= 1, "one thread finishes one word of one utterance");
};

template <class Shape>
struct ClusterLoop {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;

    const Pass& pass;
    char* const smem;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned rank = cluster_rank();
    // This thread's word at the pointwise end: word `quad_lane` of 16-byte chunk `chunk` of utterance `sample`.
    const int quad_lane = threadIdx.x % 4, chunk = threadIdx.x / 4 % Shape::CHUNKS, sample = threadIdx.x / 4 / Shape::CHUNKS;
    const int row = rank * Shape::ROWS + (4 * chunk + quad_lane) * Shape::PER_WORD;  // its first element
    const int valid = min(Shape::PER_WORD, pass.hidden - row);                        // its elements that exist
    unsigned peer[Shape::CLUSTER / 4];  // shared memory of the blocks this lane sends to

    // Of the current tile; arrays are per group.
    int first;                  // utterance
    int length[Shape::GROUPS];  // frames of this thread's utterance; 0 if it has none

    __device__ ClusterLoop(const Pass& pass, char* smem) : pass(pass), smem(smem) {
#pragma unroll
        for (int j = 0; j < Shape::CLUSTER / 4; j++)  // each block begins with another peer, so that none is flooded
            peer[j] = remote_address(smem_address(smem), (rank + 1 + quad_lane + 4 * j) % Shape::CLUSTER);
    }

    static __device__ int state_at(int stage, int g) { return (stage * Shape::GROUPS + g) * Shape::STATE_BYTES; }
    static __device__ int barrier_at(int stage, int g, int warp) {
        return Shape::BARRIER_AT + 8 * ((stage * Shape::GROUPS + g) * WARPS + warp);
    }
    __device__ int live(int g) const { return max(0, min(pass.samples, pass.batch - first - g * pass.samples)); }
    // This thread's word in a (T, B, H) array, and with t = 0 in a (B, H) array.
    __device__ size_t element(int g, int t) const {
        return (size_t(t) * pass.batch + (first + g * pass.samples + sample)) * pass.hidden + row;
    }

    __device__ void init_barriers() {
        if (threadIdx.x < 2 * Shape::GROUPS * WARPS) barrier_init(smem_address(smem + barrier_at(0, 0, threadIdx.x)), 1);
        barrier_init_fence();
    }

    __device__ int length_of(int utterance) const {
        if (utterance >= pass.batch) return 0;
        return pass.lengths ? max(0, min(pass.frames, __ldg(pass.lengths + utterance))) : pass.frames;
    }

    // Sets the tile's fields and fills stage 0 with the first state; returns the frames of its longest utterance.
    __device__ int begin_tile(int tile) {
        copies_wait<0>();  // the previous tile's last ones still write
        int steps = 0;
        first = tile * Shape::GROUPS * pass.samples;
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++) {
            const int begin = first + g * pass.samples;
            length[g] = sample < live(g) ? length_of(begin + sample) : 0;
            for (int s = 0; s < live(g); s++) steps = max(steps, length_of(begin + s));
            for (int i = threadIdx.x; i < live(g) * Shape::K_WORDS; i += THREADS) {
                const int s = i / Shape::K_WORDS, word = i % Shape::K_WORDS, column = word * Shape::PER_WORD;
                unsigned value = 0;
                if (!Shape::BACKWARD && pass.state)
                    value = load_word<Number>(pass.state, size_t(begin + s) * pass.hidden + column, pass.hidden - column,
                                              pass.whole_words);
                *reinterpret_cast<unsigned*>(smem + state_at(0, g) + s * Shape::STATE_STRIDE + 4 * word) =
                    Number::operand(value);
            }
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++) {
            if (!Shape::BACKWARD && sample < live(g) && length[g] == 0) {
                // An utterance without frames: its last state is its first.
                const unsigned word = pass.state ? load_word<Number>(pass.state, element(g, 0), valid, pass.whole_words) : 0;
                store_word<Number>(pass.last_state, element(g, 0), word, valid, pass.whole_words);
            }
        }
        for (int i = 0; i < Shape::AHEAD - 1; i++)
#pragma unroll
            for (int g = 0; g < Shape::GROUPS; g++) fetch_inputs(g, i, Shape::BACKWARD ? steps - 1 - i : i);
        return steps;
    }

    // Fetches what iteration i, frame t, consumes. Each thread reads only what itself has fetched.
    __device__ void fetch_inputs(int g, int i, int t) {
        const bool wanted = t >= 0 && t < length[g] && valid > 0;
        const size_t from = wanted ? element(g, t) : 0;
#pragma unroll
        for (int a = 0; a < Shape::INPUTS; a++) {
            const void* array = a == 0 ? pass.input : pass.output_y;
            char* to = smem + input_at(g, i, a);
            if (pass.whole_words || Shape::PER_WORD == 1)
                copy_async(smem_address(to), static_cast<const typename Number::Storage*>(array) + from, wanted);
            else  // rows that start between words cannot be copied behind the thread's back
                *reinterpret_cast<unsigned*>(to) = wanted ? load_word<Number>(array, from, valid, false) : 0;
        }
        copies_commit();
    }
    static __device__ int input_at(int g, int i, int a) {
        return Shape::INPUT_AT + g * Shape::INPUT_BYTES + ((i % Shape::AHEAD * Shape::INPUTS + a) * THREADS + threadIdx.x) * 4;
    }

    __device__ void store_partial(const float (&c)[Shape::M_TILES][4], int turn, int g) {
        float* mine = reinterpret_cast<float*>(smem + Shape::PARTIAL_AT + turn * Shape::PARTIAL_BYTES) +
                      (warp * MMA_SAMPLES + 2 * (lane % 4)) * Shape::PARTIAL_STRIDE + lane / 4;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (2 * (lane % 4) + n >= live(g)) break;
#pragma unroll
            for (int m = 0; m < Shape::M_TILES; m++) {
                mine[n * Shape::PARTIAL_STRIDE + MMA_ROWS * m] = c[m][n];
                if (MMA_ROWS * m + 8 < Shape::ROWS) mine[n * Shape::PARTIAL_STRIDE + MMA_ROWS * m + 8] = c[m][2 + n];
            }
        }
    }

    // The matrix times the state, for this thread's word. The order of the sum is fixed.
    __device__ void sum_partials(float (&sum)[Shape::PER_WORD], int turn) const {
        const float* from = reinterpret_cast<const float*>(smem + Shape::PARTIAL_AT + turn * Shape::PARTIAL_BYTES) +
                            sample * Shape::PARTIAL_STRIDE + (4 * chunk + quad_lane) * Shape::PER_WORD;
        float part[WARPS][Shape::PER_WORD];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float* p = from + w * MMA_SAMPLES * Shape::PARTIAL_STRIDE;
            if constexpr (Shape::PER_WORD == 2) {
                const float2 pair = *reinterpret_cast<const float2*>(p);
                part[w][0] = pair.x, part[w][1] = pair.y;
            } else {
                part[w][0] = *p;
            }
        }
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            sum[e] = ((part[0][e] + part[1][e]) + (part[2][e] + part[3][e])) +
                     ((part[4][e] + part[5][e]) + (part[6][e] + part[7][e]));
    }

    // This thread's quad holds 16 bytes of the new state: each lane sends them to a quarter of the blocks.
    __device__ void send(unsigned word, int stage, int g) {
        const unsigned operand = Number::operand(word);
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = __shfl_sync(0xffffffffu, operand, (lane & ~3) + j);
        if (sample >= live(g)) return;
        const int to = state_at(stage, g) + sample * Shape::STATE_STRIDE + 4 * (rank * Shape::WORDS + 4 * chunk);
        const int barrier = barrier_at(stage, g, rank / Shape::SOURCES);
#pragma unroll
        for (int j = 0; j < Shape::CLUSTER / 4; j++)
            store_async(peer[j] + to, peer[j] + barrier, w[0], w[1], w[2], w[3]);
    }

    // The pointwise end of iteration i, at frame t; t = -1 is the gradient of the first state.
    __device__ void finish(int g, int i, int t, int turn, bool more) {
        if (8 * warp >= Shape::CHUNKS * live(g)) {  // a warp is 8 chunks
            copies_commit();                        // all commit alike: copies_wait counts commits
            return;
        }
        copies_wait<(Shape::AHEAD - 1) * Shape::GROUPS - 1>();
        float value[Shape::PER_WORD], in[Shape::PER_WORD], y[Shape::PER_WORD], last[Shape::PER_WORD] = {};
        Number::unpack(*reinterpret_cast<const unsigned*>(smem + input_at(g, i, 0)), in);
        if (Shape::BACKWARD) Number::unpack(*reinterpret_cast<const unsigned*>(smem + input_at(g, i, Shape::INPUTS - 1)), y);
        sum_partials(value, turn);
        const int mine = sample < live(g) ? valid : 0;
        if (Shape::BACKWARD && t < 0) {
            unsigned word = Number::pack(value);
            if (length[g] == 0) word = pass.state ? load_word<Number>(pass.state, element(g, 0), mine, pass.whole_words) : 0;
            store_word<Number>(pass.last_state, element(g, 0), word, mine, pass.whole_words);
            return;
        }
        if (Shape::BACKWARD && pass.state && t == length[g] - 1)
            Number::unpack(load_word<Number>(pass.state, element(g, 0), mine, pass.whole_words), last);
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            value[e] = Shape::BACKWARD ? Cell::backward(value[e] + in[e] + last[e], y[e], pass.clip)
                                       : Cell::forward(value[e] + in[e], pass.clip);
        const unsigned word = t < length[g] ? Number::pack(value) : 0;
        if (more) send(word, i + 1 & 1, g);
        store_word<Number>(pass.result, element(g, t), word, mine, pass.whole_words);
        if (!Shape::BACKWARD && t == length[g] - 1)
            store_word<Number>(pass.last_state, element(g, 0), word, mine, pass.whole_words);
        fetch_inputs(g, i + Shape::AHEAD - 1, Shape::BACKWARD ? t - (Shape::AHEAD - 1) : t + Shape::AHEAD - 1);
    }

    __device__ void clear_padding(int steps) {
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++) {
            if (sample >= live(g)) continue;
            for (int t = steps; t < pass.frames; t++)
                store_word<Number>(pass.result, element(g, t), 0, valid, pass.whole_words);
        }
    }

    __device__ void run() {
        Weights<Number, Shape::M_TILES, Shape::K_TILES> weights;
        weights.load(pass, rank * Shape::ROWS, (rank + 1) * Shape::ROWS, warp * Shape::K_TILES * MMA_WORDS);
        init_barriers();
        unsigned parity = 0;  // bit s: of the phase that stage s's mbarriers are in
        const int tiles = (pass.batch + pass.samples * Shape::GROUPS - 1) / (pass.samples * Shape::GROUPS);
        for (int tile = blockIdx.x / Shape::CLUSTER; tile < tiles; tile += gridDim.x / Shape::CLUSTER) {
            cluster_barrier();  // every block's mbarriers are ready, and none still reads the previous tile's state
            const int steps = begin_tile(tile);
            const int iterations = Shape::BACKWARD ? steps + 1 : steps;
            for (int i = 0; i < iterations; i++) {
                const int stage = i & 1, t = Shape::BACKWARD ? steps - 1 - i : i;
                const bool more = i + 1 < iterations;
#pragma unroll
                for (int g = 0; g < Shape::GROUPS; g++) {
                    const int turn = Shape::GROUPS % 2 == 0 ? g & 1 : (i * Shape::GROUPS + g) & 1;
                    if (i > 0) barrier_wait(smem_address(smem + barrier_at(stage, g, warp)), parity >> stage & 1, "its peers' state", i);
                    const int column = lane / 4 < live(g) ? lane / 4 : 0;  // columns without utterance repeat the first
                    float c[Shape::M_TILES][4];
                    multiply(c, weights, smem + state_at(stage, g) + column * Shape::STATE_STRIDE +
                                             4 * MMA_WORDS * Shape::K_TILES * warp);
                    if (more && lane == 0)
                        barrier_expect(smem_address(smem + barrier_at(stage ^ 1, g, warp)),
                                       live(g) * Shape::SOURCES * Shape::WORDS * 4);
                    store_partial(c, turn, g);
                    __syncthreads();
                    finish(g, i, t, turn, more);
                }
                if (i > 0) parity ^= 1u << stage;
            }
            clear_padding(steps);
        }
    }
};

template <class Shape>
__device__ void cluster_recurrence(const Pass& pass) {
    extern __shared__ __align__(128) char dynamic_smem[];
    ClusterLoop<Shape>(pass, dynamic_smem).run();
}

}  // namespace ds2
