// Persistent recurrence inside one thread-block cluster: every block keeps ROWS rows of the matrix in registers for all
// time steps and gets the whole state of its utterances from its peers through distributed shared memory at every step.
// Clusters are independent of one another (each has its own utterances), so they need not run at the same time.
//
// One step of one block, for one group of up to 8 utterances:
//   1. 8 multiplying warps. Warp w owns K slice w, which 2 peers (cluster of 16) or 1 (cluster of 8) produced. It waits for
//      these alone, multiplies all ROWS rows by its slice, leaves partial sums in shared memory and goes on.
//   2. 4 finishing warps, which hold no weights. When all 8 partial sums are there, a quad of lanes takes 16 bytes of
//      one utterance's new state: adds up, applies the cell, sends them to all blocks; then stores and fetches.
// So a second group's arithmetic runs while the first one's state is finished and travels.
//
// Why two buffers of everything, by iteration parity, and no other barrier are enough. "Iteration i" is of one group.
//   (a) A block finishes iteration i only after all its multiplying warps took part in it, that is after they together
//       received what every block, mine too, sent at i - 1.
//   (b) State: a peer writes my buffer at i that I read at i - 1. By (a) my sends of i - 1 came before; these came after
//       my multiplying warps reported partial sums of i - 1, so after they had read that buffer.
//   (c) Partial sums: my multiplying warps overwrite at i those of i - 2. They first waited for state of i - 1 from some
//       peer, which by (a) had received my sends of i - 2, which came after my finishing warps read those sums.
//   (d) An mbarrier is armed for iteration i + 1 during i, after its phase of i - 1 ended. Bytes that land earlier are
//       counted as negative and cannot end the phase, since its one arrival is still missing.
//   (e) What is sent is always received: nothing is sent in the last iteration, so no block leaves with stores under way.
#pragma once

#include "cells.cuh"
#include "recurrence.cuh"
#include "sync.cuh"

namespace ds2 {

constexpr int FINISH_WARPS = 4;  // one warpgroup, the unit of register reallocation
constexpr int CLUSTER_THREADS = THREADS + 32 * FINISH_WARPS;
// Registers a thread: 168 at launch (65536 / 384, in steps of 8), then moved from the finishing to the multiplying warps.
constexpr int MULTIPLY_REGISTERS = 224, FINISH_REGISTERS = 56;
static_assert(8 * 32 * MULTIPLY_REGISTERS + 4 * 32 * FINISH_REGISTERS <= 168 * 384, "the register file is shared out");

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
    static constexpr int QUADS = 8 * FINISH_WARPS;
    static constexpr int ROUND_SAMPLES = QUADS / CHUNKS; // whose chunks the quads finish at the same time
    static constexpr int ROUNDS = (MMA_SAMPLES + ROUND_SAMPLES - 1) / ROUND_SAMPLES;

    // Two samples of a 16-byte load's quarter warp fall into different halves of the banks.
    static constexpr int STATE_STRIDE = 4 * K_WORDS + 64;
    // The four sample pairs of a fragment's store fall 8 banks apart.
    static constexpr int PARTIAL_STRIDE = MMA_ROWS * M_TILES + 4;

    static constexpr int STATE_BYTES = MMA_SAMPLES * STATE_STRIDE;                  // one group, one stage, like the next
    static constexpr int PARTIAL_BYTES = WARPS * MMA_SAMPLES * PARTIAL_STRIDE * 4;
    static constexpr int INPUTS = BACKWARD ? 2 : 1;                                 // arrays read every step
    static constexpr int AHEAD = 4;                                                 // steps that inputs are fetched early
    static constexpr int INPUT_BYTES = INPUTS * ROUNDS * QUADS * 16;                // one group, one step
    static constexpr int PARTIAL_AT = 2 * GROUPS * STATE_BYTES;
    static constexpr int INPUT_AT = PARTIAL_AT + 2 * GROUPS * PARTIAL_BYTES;
    static constexpr int BARRIER_AT = INPUT_AT + AHEAD * GROUPS * INPUT_BYTES;
    static constexpr int LENGTH_AT = BARRIER_AT + 2 * GROUPS * WARPS * 8;
    static constexpr int SMEM_BYTES = LENGTH_AT + GROUPS * MMA_SAMPLES * 4;

    static_assert(Cell::GATES == 1, "a block's rows are its units: cells with gates need their own pointwise end");
    static_assert(CLUSTER % WARPS == 0, "each warp's K slice is what whole blocks produced");
    static_assert(WORDS % 4 == 0, "blocks exchange units of 16 bytes");
    static_assert(ROUND_SAMPLES >= 1, "the finishing threads cover one utterance's words");
    static_assert(K_WORDS % (MMA_WORDS * WARPS) == 0, "each warp's K slice is whole matrix instructions");
    static_assert(STATE_STRIDE % 128 == 64, "16-byte state loads are free of bank conflicts");

    static __device__ int state_at(int stage, int g) { return (stage * GROUPS + g) * STATE_BYTES; }
    static __device__ int partial_at(int stage, int g) { return PARTIAL_AT + (stage * GROUPS + g) * PARTIAL_BYTES; }
    static __device__ int barrier_at(int stage, int g, int warp) {
        return BARRIER_AT + 8 * ((stage * GROUPS + g) * WARPS + warp);
    }
    // Named barrier of the block; 0 is __syncthreads.
    static __device__ int partials_ready(int stage, int g) { return 1 + stage * GROUPS + g; }
};

// One tile: the utterances that a cluster runs together, in groups.
template <class Shape>
struct Tile {
    using Number = typename Shape::Number;
    const Pass& pass;
    int first;  // utterance
    int steps;  // frames of the longest

    __device__ int begin(int g) const { return first + g * pass.samples; }
    __device__ int live(int g) const { return max(0, min(pass.samples, pass.batch - begin(g))); }
    __device__ int length(int utterance) const {
        return pass.lengths ? max(0, min(pass.frames, __ldg(pass.lengths + utterance))) : pass.frames;
    }
    __device__ int iterations() const { return Shape::BACKWARD ? steps + 1 : steps; }

    // All threads of the cluster: waits until no block uses the previous tile, then fills stage 0 with the first state.
    __device__ void open(int tile, char* smem) {
        first = tile * Shape::GROUPS * pass.samples;
        steps = 0;
        cluster_barrier();
        for (int g = 0; g < Shape::GROUPS; g++) {
            for (int s = 0; s < live(g); s++) steps = max(steps, length(begin(g) + s));
            if (threadIdx.x < MMA_SAMPLES)
                reinterpret_cast<int*>(smem + Shape::LENGTH_AT)[g * MMA_SAMPLES + threadIdx.x] =
                    threadIdx.x < live(g) ? length(begin(g) + threadIdx.x) : 0;
            for (int i = threadIdx.x; i < live(g) * Shape::K_WORDS; i += CLUSTER_THREADS) {
                const int s = i / Shape::K_WORDS, word = i % Shape::K_WORDS, column = word * Shape::PER_WORD;
                unsigned value = 0;
                if (!Shape::BACKWARD && pass.state)
                    value = load_word<Number>(pass.state, size_t(begin(g) + s) * pass.hidden + column, pass.hidden - column,
                                              pass.whole_words);
                *reinterpret_cast<unsigned*>(smem + Shape::state_at(0, g) + s * Shape::STATE_STRIDE + 4 * word) =
                    Number::operand(value);
            }
        }
        __syncthreads();
    }
};

template <class Shape>
struct Multiplier {
    using Number = typename Shape::Number;
    Weights<Number, Shape::M_TILES, Shape::K_TILES> weights;
    unsigned parity = 0;  // bit s: of the phase that stage s's mbarriers are in

    __device__ void run(const Tile<Shape>& tile, char* smem) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, quad_lane = lane % 4;
        const int iterations = tile.iterations();
        // Addresses of stage 0, group 0.
        const unsigned barrier = pinned(smem_address(smem + Shape::barrier_at(0, 0, warp)));
        const unsigned partial = pinned(smem_address(smem + Shape::partial_at(0, 0)) +
                                        4 * ((warp * MMA_SAMPLES + 2 * quad_lane) * Shape::PARTIAL_STRIDE + column));
        unsigned state[Shape::GROUPS];  // columns without utterance repeat the first
        int live[Shape::GROUPS];        // of this lane's two columns of the result
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++) {
            state[g] = pinned(smem_address(smem + Shape::state_at(0, g)) +
                              (column < tile.live(g) ? column : 0) * Shape::STATE_STRIDE +
                              4 * MMA_WORDS * Shape::K_TILES * warp + 16 * quad_lane);
            live[g] = pinned(max(0, min(2, tile.live(g) - 2 * quad_lane)));
        }
        for (int i = 0; i < iterations; i++) {
            const int stage = i & 1;
#pragma unroll
            for (int g = 0; g < Shape::GROUPS; g++) {
                const unsigned there = stage * Shape::GROUPS + g;
                if (i > 0) barrier_wait(barrier + there * 8 * WARPS, parity >> stage & 1, "its peers' state", i);
                float c[Shape::M_TILES][4];
                multiply(c, weights, state[g] + stage * Shape::GROUPS * Shape::STATE_BYTES);
                if (i + 1 < iterations && lane == 0)
                    barrier_expect(barrier + ((stage ^ 1) * Shape::GROUPS + g) * 8 * WARPS,
                                   tile.live(g) * Shape::SOURCES * Shape::WORDS * 4);
                store_partial(c, partial + there * Shape::PARTIAL_BYTES, live[g]);
                block_arrive(Shape::partials_ready(stage, g), CLUSTER_THREADS);
            }
            if (i > 0) parity ^= 1u << stage;
        }
    }

    static __device__ void store_partial(const float (&c)[Shape::M_TILES][4], unsigned to, int columns) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (n >= columns) break;
#pragma unroll
            for (int m = 0; m < Shape::M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (MMA_ROWS * m + 8 * half < Shape::ROWS)
                        store_shared_4(to + 4 * (n * Shape::PARTIAL_STRIDE + MMA_ROWS * m + 8 * half),
                                       __float_as_uint(c[m][2 * half + n]));
        }
    }
};

template <class Shape>
struct Finisher {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    static constexpr int PEERS = Shape::CLUSTER / 4;  // that one lane of a quad sends to

    const Pass& pass;
    char* const smem;
    const unsigned rank = cluster_rank();
    // This thread finishes word `lane % 4` of 16-byte chunk `chunk` of utterances sample + r ROUND_SAMPLES of a group.
    int chunk, sample;
    int row, valid;  // the word's first element in a row of H, and how many of its elements exist
    // Addresses of stage 0, group 0.
    unsigned peer[PEERS];              // shared memory of the blocks that this lane sends to
    unsigned own_chunk, own_barrier;   // there, for what this block sends
    unsigned input, partial;           // here, for this thread's word of sample 0

    __device__ Finisher(const Pass& pass, char* smem) : pass(pass), smem(smem) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - WARPS, quad = lane / 4;
        // One utterance's chunks are spread over all warps, by twos for the sake of 32-byte memory sectors.
        const int item = 2 * (FINISH_WARPS * (quad / 2) + warp) + quad % 2;
        chunk = item % Shape::CHUNKS;
        sample = item / Shape::CHUNKS;
        if (sample >= Shape::ROUND_SAMPLES) sample = MMA_SAMPLES;  // a quad too many: never has an utterance
        row = rank * Shape::ROWS + word() * Shape::PER_WORD;
        valid = min(Shape::PER_WORD, pass.hidden - row);
#pragma unroll
        for (int j = 0; j < PEERS; j++)  // each block begins with another peer, so that none is flooded
            peer[j] = pinned(remote_address(smem_address(smem), (rank + 1 + lane % 4 + 4 * j) % Shape::CLUSTER));
        own_chunk = pinned(Shape::state_at(0, 0) + 4 * (rank * Shape::WORDS + 4 * chunk));
        own_barrier = pinned(Shape::barrier_at(0, 0, rank / Shape::SOURCES));
        input = pinned(smem_address(smem + Shape::INPUT_AT) + 4 * (threadIdx.x - THREADS));
        partial = pinned(smem_address(smem + Shape::partial_at(0, 0)) + 4 * word() * Shape::PER_WORD);
    }

    __device__ int word() const { return 4 * chunk + threadIdx.x % 4; }
    // This thread's word in a (T, B, H) array, and with t = 0 in a (B, H) array.
    __device__ size_t element(const Tile<Shape>& tile, int g, int s, int t) const {
        return (size_t(t) * pass.batch + tile.begin(g) + s) * pass.hidden + row;
    }
    __device__ int length(int g, int s) const {
        return reinterpret_cast<const int*>(smem + Shape::LENGTH_AT)[g * MMA_SAMPLES + s];
    }
    __device__ static int frame(const Tile<Shape>& tile, int i) { return Shape::BACKWARD ? tile.steps - 1 - i : i; }

    __device__ void run(const Tile<Shape>& tile) {
        copies_wait<0>();  // the previous tile's last ones still write
        for (int g = 0; g < Shape::GROUPS; g++)
            for (int s = sample; s < tile.live(g); s += Shape::ROUND_SAMPLES)
                if (!Shape::BACKWARD && length(g, s) == 0) store_state(tile, g, s, load_state(tile, g, s));
        for (int i = 0; i < Shape::AHEAD - 1; i++)
            for (int g = 0; g < Shape::GROUPS; g++) fetch_inputs(tile, g, i);
        const int iterations = tile.iterations();
        for (int i = 0; i < iterations; i++)
#pragma unroll
            for (int g = 0; g < Shape::GROUPS; g++) finish(tile, g, i, i + 1 < iterations);
        for (int g = 0; g < Shape::GROUPS; g++)
            for (int s = sample; s < tile.live(g); s += Shape::ROUND_SAMPLES)
                for (int t = tile.steps; t < pass.frames; t++)
                    store_word<Number>(pass.result, element(tile, g, s, t), 0, valid, pass.whole_words);
    }

    __device__ unsigned load_state(const Tile<Shape>& tile, int g, int s) const {
        return pass.state ? load_word<Number>(pass.state, element(tile, g, s, 0), valid, pass.whole_words) : 0;
    }
    __device__ void store_state(const Tile<Shape>& tile, int g, int s, unsigned value) const {
        store_word<Number>(pass.last_state, element(tile, g, s, 0), value, valid, pass.whole_words);
    }
    // This thread's own place for its word of round r, of array a, of iteration i.
    __device__ unsigned input_at(int i, int g, int r, int a) const {
        return input + (i % Shape::AHEAD * Shape::GROUPS + g) * Shape::INPUT_BYTES + (a * Shape::ROUNDS + r) * 16 * Shape::QUADS;
    }

    // Asks for what iteration i consumes. Each thread reads only what itself has fetched.
    __device__ void fetch_inputs(const Tile<Shape>& tile, int g, int i) {
        const int t = frame(tile, i), live = tile.live(g);
#pragma unroll 1
        for (int r = 0, s = sample; s < live; r++, s += Shape::ROUND_SAMPLES) {
            const bool wanted = t >= 0 && t < length(g, s) && valid > 0;
            const size_t from = wanted ? element(tile, g, s, t) : 0;
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) {
                const void* array = a == 0 ? pass.input : pass.output_y;
                const unsigned to = input_at(i, g, r, a);
                if (pass.whole_words || Shape::PER_WORD == 1)
                    copy_async(to, static_cast<const typename Number::Storage*>(array) + from, wanted);
                else  // rows that start between words cannot be copied behind the thread's back
                    store_shared_4(to, wanted ? load_word<Number>(array, from, valid, false) : 0);
            }
        }
        copies_commit();  // one an iteration and group: copies_wait counts them
    }

    // The matrix times the state, for this thread's word. The order of the sum is fixed.
    static __device__ void sum_partials(float (&sum)[Shape::PER_WORD], unsigned from) {
        float part[WARPS][Shape::PER_WORD];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const unsigned p = from + w * 4 * MMA_SAMPLES * Shape::PARTIAL_STRIDE;
            if constexpr (Shape::PER_WORD == 2) {
                const uint2 pair = load_shared_8(p);
                part[w][0] = __uint_as_float(pair.x), part[w][1] = __uint_as_float(pair.y);
            } else {
                part[w][0] = __uint_as_float(load_shared_4(p));
            }
        }
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            sum[e] = ((part[0][e] + part[1][e]) + (part[2][e] + part[3][e])) +
                     ((part[4][e] + part[5][e]) + (part[6][e] + part[7][e]));
    }

    // A quad holds 16 bytes of the new state: each of its lanes sends them to a quarter of the blocks.
    __device__ void send(unsigned value, int stage, int g, int s, bool mine) {
        const unsigned operand = Number::operand(value);
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = __shfl_sync(0xffffffffu, operand, j, 4);
        if (!mine) return;
        const unsigned there = stage * Shape::GROUPS + g;
        const unsigned to = there * Shape::STATE_BYTES + s * Shape::STATE_STRIDE + own_chunk;
        const unsigned barrier = there * 8 * WARPS + own_barrier;
#pragma unroll
        for (int j = 0; j < PEERS; j++) store_async(peer[j] + to, peer[j] + barrier, w[0], w[1], w[2], w[3]);
    }

    __device__ void finish(const Tile<Shape>& tile, int g, int i, bool more) {
        const int stage = i & 1, t = frame(tile, i), live = tile.live(g);
        const unsigned from = partial + (stage * Shape::GROUPS + g) * Shape::PARTIAL_BYTES;
        copies_wait<(Shape::AHEAD - 1) * Shape::GROUPS - 1>();
        block_wait(Shape::partials_ready(stage, g), CLUSTER_THREADS);
        // First everything that peers wait for. A warp stays together, whether its utterances exist or not.
#pragma unroll 1
        for (int first = 0; first < live; first += Shape::ROUND_SAMPLES) {
            const int s = min(first + sample, MMA_SAMPLES - 1);
            const bool mine = first + sample < live;
            float value[Shape::PER_WORD], in[Shape::PER_WORD], y[Shape::PER_WORD], last[Shape::PER_WORD] = {};
            const unsigned input = input_at(i, g, first / Shape::ROUND_SAMPLES, 0);
            Number::unpack(load_shared_4(input), in);
            if (Shape::BACKWARD) Number::unpack(load_shared_4(input_at(i, g, first / Shape::ROUND_SAMPLES, 1)), y);
            sum_partials(value, from + 4 * s * Shape::PARTIAL_STRIDE);
            const int frames = mine ? length(g, s) : 0;
            if (Shape::BACKWARD && t < 0) {  // the gradient of the first state
                if (mine) store_state(tile, g, s, frames ? Number::pack(value) : load_state(tile, g, s));
                continue;
            }
            if (Shape::BACKWARD && pass.state && t == frames - 1) Number::unpack(load_state(tile, g, s), last);
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++)
                value[e] = Shape::BACKWARD ? Cell::backward(value[e] + in[e] + last[e], y[e], pass.clip)
                                           : Cell::forward(value[e] + in[e], pass.clip);
            const unsigned result = t < frames ? Number::pack(value) : 0;
            if (more) send(result, stage ^ 1, g, s, mine);
            store_shared_4(input, result);
        }
        if (Shape::BACKWARD && t < 0) return;
#pragma unroll 1
        for (int r = 0, s = sample; s < live; r++, s += Shape::ROUND_SAMPLES) {
            const unsigned result = load_shared_4(input_at(i, g, r, 0));
            store_word<Number>(pass.result, element(tile, g, s, t), result, valid, pass.whole_words);
            if (!Shape::BACKWARD && t == length(g, s) - 1) store_state(tile, g, s, result);
        }
        fetch_inputs(tile, g, i + Shape::AHEAD - 1);
    }
};

template <class Shape>
__device__ void cluster_recurrence(const Pass& pass) {
    extern __shared__ __align__(128) char smem[];
    if (threadIdx.x < 2 * Shape::GROUPS * WARPS) barrier_init(smem_address(smem + Shape::barrier_at(0, 0, threadIdx.x)), 1);
    barrier_init_fence();
    Tile<Shape> tile{pass};
    const int tiles = (pass.batch + pass.samples * Shape::GROUPS - 1) / (pass.samples * Shape::GROUPS);
    const int clusters = gridDim.x / Shape::CLUSTER;
    if (threadIdx.x < THREADS) {
        registers_up<MULTIPLY_REGISTERS>();
        Multiplier<Shape> multiplier;
        const int rank = cluster_rank(), warp = threadIdx.x / 32;
        multiplier.weights.load(pass, rank * Shape::ROWS, (rank + 1) * Shape::ROWS, warp * Shape::K_TILES * MMA_WORDS);
        for (int index = blockIdx.x / Shape::CLUSTER; index < tiles; index += clusters) {
            tile.open(index, smem);
            multiplier.run(tile, smem);
        }
    } else {
        registers_down<FINISH_REGISTERS>();
        Finisher<Shape> finisher(pass, smem);
        for (int index = blockIdx.x / Shape::CLUSTER; index < tiles; index += clusters) {
            tile.open(index, smem);
            finisher.run(tile);
        }
    }
}

}  // namespace ds2
