// The numbers of the design for small layers: what a warp owns, where a state lies, shared memory. What they are for: units.cuh.
#pragma once

#include "recurrent/exchange.cuh"
#include "recurrent/frame.cuh"

namespace ds2 {

// One number a word: what a lane finishes begins and ends anywhere.
template <class Several>
struct Single {
    using Storage = typename Several::Storage;
    static constexpr int PER_WORD = 1;
    static constexpr bool COARSE = Several::COARSE;
    static __device__ void unpack(unsigned word, float (&v)[1]) {
        float all[Several::PER_WORD];
        Several::unpack(word, all);
        v[0] = all[0];
    }
    static __device__ unsigned pack(const float (&v)[1]) {
        float all[Several::PER_WORD] = {v[0]};
        return Several::pack(all);
    }
};

template <class Matrix_, class Cell_, int CLUSTER_, int BLOCK_WARPS, int COLUMNS_, bool BACKWARD_, bool WHOLE_WORDS_>
struct UnitsShape {
    using Matrix = Matrix_;         // numbers as they are multiplied,
    using Number = Single<Matrix>;  // and as lanes read and write them
    using Cell = Cell_;
    static constexpr bool SPREAD = COLUMNS_ == 0;  // a tile is one utterance: four lanes share a unit, a gate each
    static constexpr int CLUSTER = CLUSTER_, COLUMNS = SPREAD ? 1 : COLUMNS_, ALL_THREADS = 32 * BLOCK_WARPS, PER_WORD = 1;
    static constexpr bool BACKWARD = BACKWARD_, GATED = Cell::GATES > 1;
    static constexpr bool WHOLE_WORDS = WHOLE_WORDS_;  // every row of H elements starts on a word boundary
    static constexpr int PHASES = cell_phases<Cell>();
    static constexpr int SUMS = BACKWARD ? 1 : Cell::GATES;  // of each hidden unit that a step needs
    static constexpr int LANE_UNITS = SUMS == 1 ? 2 : 1, WARP_UNITS = 8 * LANE_UNITS;
    static constexpr bool HALVES = sizeof(typename Number::Storage) == 2;
    static constexpr int WORD_UNITS = WHOLE_WORDS && HALVES ? LANE_UNITS : 1;  // of a lane that are read and written together
    static constexpr int LANE_WORDS = LANE_UNITS / WORD_UNITS;
    static constexpr int TILES = SUMS == 1 ? 1 : (SUMS + 1) / 2;  // of rows; two gates each, if there are several
    static constexpr int PHASE_TILES = PHASES == 1 ? TILES : 1;
    static constexpr int CHAINS = 4 / PHASE_TILES;  // of sums: an instruction waits for the one before it in its chain
    static constexpr int OWNED = BLOCK_WARPS * WARP_UNITS;
    static constexpr int SENT = BACKWARD ? Cell::GATES : 1;  // vectors of its units that a block sends in a step
    static constexpr int VECTORS = BACKWARD ? SENT - (PHASES - 1) : 1;  // at most, in one epoch
    static constexpr int OWN_WORDS = (OWNED / Matrix::PER_WORD + 15) / 16 * 16;  // of one of them
    static constexpr int PAIRS = CLUSTER * OWN_WORDS / 16;  // of matrix instructions along a vector: a 16-byte load each
    // A cluster has time while the state travels; but what is made ready then is kept through the products.
    static constexpr bool IN_FLIGHT = CLUSTER > 1 && TILES * PAIRS * SENT <= 20;
    static constexpr int SAMPLES = SPREAD ? 1 : 4 * COLUMNS;
    // State: [source block][sample][vector][words]. Two samples' 64 bytes fall into different banks.
    static constexpr int SAMPLE_PITCH = (4 * VECTORS * OWN_WORDS + 63) / 128 * 128 + 64;
    static constexpr int SOURCE_PITCH = SAMPLES * SAMPLE_PITCH;
    static constexpr int STATE_BYTES = CLUSTER * SOURCE_PITCH;
    // Of a lane. Spread: x of its gate; h, what is saved of its gate, the carry.
    static constexpr int INPUTS = SPREAD ? 1 : pass_inputs<Cell, BACKWARD>();
    static constexpr int OUTPUTS = SPREAD ? 3 : pass_outputs<Cell, BACKWARD>();
    static constexpr int READY = pass_ready<Cell, BACKWARD>();
    static constexpr int LAST_SENT = OUTPUTS > SENT && BACKWARD ? SENT : SENT - 1;  // the last vector sent, among these
    static constexpr int AHEAD = 8 / COLUMNS;  // steps that inputs are fetched early
    static constexpr int INPUT_AT = 2 * STATE_BYTES;
    static constexpr int STEP_BYTES = COLUMNS * LANE_WORDS * INPUTS * ALL_THREADS * 4;
    static constexpr int BARRIER_AT = INPUT_AT + AHEAD * STEP_BYTES;
    static constexpr int SMEM_BYTES = BARRIER_AT + 16;

    static_assert(CLUSTER == 1 || OWNED % (16 * Matrix::PER_WORD) == 0, "each pair of instructions has one source");
    static_assert(!SPREAD || (GATED && !BACKWARD), "a unit needs several gates and their sums");
    static_assert(BLOCK_WARPS <= 32, "a block has at most 1024 threads");

    // Where the pair-th 64 bytes of a sample's state lie.
    static constexpr __device__ int pair_at(int pair) {
        const int vector = pair / PAIRS, own = OWN_WORDS / 16, source = pair % PAIRS / own;
        return source * SOURCE_PITCH + 4 * vector * OWN_WORDS + 64 * (pair % own);
    }
};

}  // namespace ds2
