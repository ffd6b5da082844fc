// The numbers of the narrow design and of the portable one: what a block owns, its threads, its shared memory. What they are for:
// grid_narrow.cuh.
#pragma once

#include "recurrent/exchange.cuh"
#include "recurrent/frame.cuh"
#include "recurrent/turns.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int BLOCK_WORDS_, int K_PAIRS_, int K_PAIRS_SMEM_, int GROUPS_,
          bool BACKWARD_, bool PORTABLE_ = CLUSTER_ == 1>
struct GridShape : Slots<(Cell_::GATES > 1 && !PORTABLE_ ? 64 : 16), (Cell_::GATES > 1 && !PORTABLE_ ? 56 : 8)> {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int CLUSTER = CLUSTER_, BLOCK_WORDS = BLOCK_WORDS_;  // of h, or of one gate
    static constexpr bool PORTABLE = PORTABLE_, TEAM = PORTABLE && CLUSTER > 1;
    static constexpr bool GATED = Cell::GATES > 1;
    static constexpr int SUMS = BACKWARD ? 1 : Cell::GATES;     // of each hidden unit that a step needs
    static constexpr int SENT = BACKWARD ? Cell::GATES : 1;     // planes of the state
    static constexpr int BLOCK_UNITS = BLOCK_WORDS * PER_WORD;  // hidden units of a block
    static constexpr int BLOCK_ROWS = SUMS * BLOCK_UNITS, ROWS = CLUSTER * BLOCK_ROWS;
    static constexpr int M_TILES = (ROWS + MMA_ROWS - 1) / MMA_ROWS;
    static constexpr int SPLITS = CLUSTER * WARPS;      // warps that split K
    static constexpr int K_PAIRS = K_PAIRS_;            // pairs of matrix instructions along K, one warp
    static constexpr int K_PAIRS_SMEM = K_PAIRS_SMEM_;  // the first of these have weights in shared memory
    static constexpr int K_PAIRS_REGISTERS = K_PAIRS - K_PAIRS_SMEM;
    static constexpr int GROUPS = GROUPS_;              // at most, of one tile
    static constexpr int STREAMS = 1;

    // Threads: warpgroups, the unit of register reallocation.
    static constexpr int ADDERS = CLUSTER == 1 ? 0 : 128, FINISHERS = 128;
    static constexpr int ALL_THREADS = THREADS + ADDERS + FINISHERS;
    // In clusters, registers a thread: as many at launch for all, then moved to the multiplying warps, which hold the weights.
    static constexpr int MULTIPLY_REGISTERS = GATED ? 192 : 208, ADD_REGISTERS = 40, FINISH_REGISTERS = GATED ? 88 : 56;
    static_assert(PORTABLE || THREADS * MULTIPLY_REGISTERS + ADDERS * ADD_REGISTERS + FINISHERS * FINISH_REGISTERS <=
                      65536 / ALL_THREADS / 8 * 8 * ALL_THREADS,
                  "what some warps gain, others have given");

    // Partial sums: [turn % 2][warp][row][sample]. Received ones: [group][state % 2][block][row][sample]. Both have room for
    // as many samples as a group has, rounded up to 2, 4 or 8. A finishing thread adds up SOURCES of either.
    static constexpr int PARTIAL_BYTES = WARPS * M_TILES * MMA_ROWS * MMA_SAMPLES * 4;
    static constexpr int RECEIVED_AT = 2 * PARTIAL_BYTES;
    static constexpr int RECEIVED_BYTES = PORTABLE ? 0 : CLUSTER * BLOCK_ROWS * MMA_SAMPLES * 4;
    static constexpr int SOURCES = CLUSTER == 1 ? WARPS : CLUSTER, SOURCE_ROWS = CLUSTER == 1 ? M_TILES * MMA_ROWS : BLOCK_ROWS;
    // What a finishing thread keeps of each group, its utterance's frames, and of the next turns, a word of each input.
    static constexpr int INPUTS = pass_inputs<Cell, BACKWARD>(), OUTPUTS = pass_outputs<Cell, BACKWARD>();
    static constexpr int READY = pass_ready<Cell, BACKWARD>();
    static constexpr int LAST_SENT = BACKWARD && OUTPUTS > SENT ? SENT : SENT - 1;  // the last plane, among the outputs
    static constexpr int CARRIED = GATED ? PER_WORD : 0;                            // of each group
    // And of the first phase of a step for the second: forward the sums of r and z, backward the gradient of z.
    static constexpr int PHASES = cell_phases<Cell>(), KEPT = PHASES == 1 ? 0 : BACKWARD ? 1 : 2 * PER_WORD;
    static constexpr int AHEAD = 8;
    static constexpr int LENGTHS_AT = RECEIVED_AT + 2 * GROUPS * RECEIVED_BYTES;
    static constexpr int CARRY_AT = LENGTHS_AT + GROUPS * FINISHERS * 4;
    static constexpr int KEPT_AT = CARRY_AT + GROUPS * CARRIED * FINISHERS * 4;
    static constexpr int INPUTS_AT = KEPT_AT + GROUPS * KEPT * FINISHERS * 4;
    static constexpr int BARRIERS_AT = INPUTS_AT + AHEAD * INPUTS * FINISHERS * 4;  // of received sums
    static constexpr int WEIGHTS_AT = BARRIERS_AT + (PORTABLE ? 0 : 2 * GROUPS * 8);
    static constexpr int SMEM_BYTES = WEIGHTS_AT + THREADS * K_PAIRS_SMEM * M_TILES * 32;

    static_assert(PORTABLE || CLUSTER > 1, "shared memory of a block without a cluster has no remote address");
    static_assert(BLOCK_WORDS <= FINISHERS, "a finishing thread has one word of an utterance");

    static __device__ unsigned rank() {
        if constexpr (PORTABLE) return blockIdx.x % CLUSTER;
        else return cluster_rank();
    }
    static __device__ void meet_cluster() {
        if constexpr (!PORTABLE) cluster_barrier();
    }

    // Named barriers of partial sums, between multiplying warps and those that add, and of finishing warps; 0 is __syncthreads. In
    // debug builds everybody waits at those of partial sums: race checkers follow no barrier of a part of a block.
    static __device__ int written(int turn) { return 1 + turn % 2; }
    static __device__ int read(int turn) { return 3 + turn % 2; }
    static constexpr int SUM_THREADS = DEBUG_WAITS || CLUSTER == 1 ? ALL_THREADS : THREADS + ADDERS;
    static constexpr int TILE_DONE = 5, ALL_EMPTY = 6, BEGINNERS = ADDERS + FINISHERS;
};

// The sums have room for 2, 4 or 8 samples: log2 of how many pairs.
__device__ inline int log_sample_pairs(const Pass& pass) { return pass.samples > 4 ? 2 : pass.samples > 2 ? 1 : 0; }
__device__ inline int sample_pairs(const Pass& pass) { return 1 << log_sample_pairs(pass); }

// Blocks of this cluster that own words: the last cluster may have too many.
template <class Shape>
__device__ int owning_blocks(const Pass& pass, int words) {
    const int left = words - blockIdx.x / Shape::CLUSTER * (Shape::CLUSTER * Shape::BLOCK_WORDS);
    return min(Shape::CLUSTER, (left + Shape::BLOCK_WORDS - 1) / Shape::BLOCK_WORDS);
}

}  // namespace ds2
