// How a cluster runs the recurrence: its numbers of everything, its shared memory, and the utterances that it takes together.
// What they are for: cluster.cuh.
#pragma once

#include "ptx/sync.cuh"
#include "recurrent/frame.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int OWNED_, int GROUPS_, int HEAD_TILES_, bool BACKWARD_,
          bool WHOLE_WORDS_, int DIRECTIONS_ = 1>
struct ClusterShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr int CLUSTER = CLUSTER_, GROUPS = GROUPS_;
    static constexpr int OWNED = OWNED_;  // hidden units of a block
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr bool GATED = Cell::GATES > 1;
    static constexpr int SUMS = BACKWARD ? 1 : Cell::GATES;  // of each hidden unit that a step needs
    static constexpr int SENT = BACKWARD ? Cell::GATES : 1;  // vectors of its hidden units that a block sends
    static constexpr int ROWS = SUMS * OWNED;                // of the matrix that a block keeps, gate after gate
    static constexpr bool WHOLE_WORDS = WHOLE_WORDS_;  // every row of H elements starts on a word boundary
    // 2: rows of both directions alternate in every array but the matrix, and the second hears an utterance from its end.
    // There is a cluster for every tile then.
    static constexpr int DIRECTIONS = DIRECTIONS_;

    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int OWN_WORDS = OWNED / PER_WORD;  // of one vector of a block
    static constexpr int WORDS = SENT * OWN_WORDS;      // of one utterance's state that a block produces
    static constexpr int CHUNKS = WORDS / 4;        // of 16 bytes, the unit of exchange
    static constexpr int K_WORDS = CLUSTER * WORDS; // of one utterance's whole state
    static constexpr int M_TILES = (ROWS + MMA_ROWS - 1) / MMA_ROWS;
    static constexpr int K_TILES = K_WORDS / MMA_WORDS / WARPS;
    static constexpr int SOURCES = CLUSTER / WARPS; // blocks that make one of the 8 portions of K
    // Warps that share a portion of K, each with some of the rows: fewer partial sums of many rows. K_TILES: of a portion.
    static constexpr int M_SPLIT = SUMS == 1 || K_TILES % 2 ? 1 : M_TILES % 2 ? 1 : 2;
    static constexpr int K_SPLIT = WARPS / M_SPLIT, WARP_TILES = M_TILES / M_SPLIT;
    // The first part: as many of the rows, of the chunks that a block sends, and of a warp's K that consists of such chunks.
    static constexpr int HEAD_TILES = HEAD_TILES_, PARTS = HEAD_TILES < M_TILES ? 2 : 1;
    static constexpr int HEAD_CHUNKS = PARTS == 1 ? CHUNKS : HEAD_TILES * MMA_ROWS / PER_WORD / 4;
    static constexpr int HEAD_K_TILES = PARTS == 1 ? K_TILES : HEAD_CHUNKS * SOURCES / 4 * 2;
    static constexpr int QUAD_CHUNKS = PARTS == 1 ? OWN_WORDS / 4 : HEAD_CHUNKS; // of one vector that quads finish
    static constexpr int UNITS = GROUPS * PARTS;
    static constexpr int FINISHERS = 128;  // threads of one unit: a warpgroup, which registers are reallocated by
    static constexpr int ALL_THREADS = THREADS + UNITS * FINISHERS;
    // Registers a thread: as many at launch for all, then moved from finishing to multiplying warps, which hold the weights.
    static constexpr int MULTIPLY_REGISTERS = (UNITS == 1 ? 224 : 216) - (GATED ? UNITS * 16 : 0);
    static constexpr int FINISH_REGISTERS = (UNITS == 1 ? 56 : 40) + (GATED ? 32 : 0);
    static constexpr int LAUNCH_REGISTERS = 65536 / ALL_THREADS / 8 * 8;
    static_assert(THREADS * MULTIPLY_REGISTERS + UNITS * FINISHERS * FINISH_REGISTERS <= LAUNCH_REGISTERS * ALL_THREADS,
                  "what some warps gain, others have given");
    static constexpr int QUADS = FINISHERS / 4;
    static constexpr int ROUND_SAMPLES = QUADS / QUAD_CHUNKS; // whose chunks the quads finish at the same time
    static constexpr int ROUNDS = (MMA_SAMPLES + ROUND_SAMPLES - 1) / ROUND_SAMPLES;

    // State: [source block][sample][words], so that what a block sends is nearly contiguous (the network carries 32-byte
    // sectors and likes few, long, aligned pieces). The paddings keep the 8 lanes of a quarter warp's 16-byte loads, two
    // samples of one source or of two alternating sources, in different banks.
    static constexpr int SAMPLE_PITCH = SOURCES == 2 ? (4 * WORDS + 31) / 64 * 64 + 32 : (4 * WORDS + 63) / 128 * 128 + 64;
    static constexpr int SOURCE_PITCH = MMA_SAMPLES * SAMPLE_PITCH + 64;
    // The four sample pairs of a fragment's store fall 8 banks apart.
    static constexpr int PARTIAL_STRIDE = MMA_ROWS * M_TILES + 4;

    // Backward pushes where lanes send 16 bytes of sums: received ones in place of the state, [source][sample][unit] in fp32, and
    // the block's own gradients, the operand, in place of partial sums, [sample][words].
    static constexpr bool PUSH = BACKWARD && GATED && OWNED == 2 * MMA_ROWS;
    static constexpr int OPERAND_PITCH = (4 * WORDS + 63) / 128 * 128 + 64;
    static constexpr int PUSH_THREADS = THREADS + FINISHERS;
    // One group, one stage:
    static constexpr int STATE_BYTES = CLUSTER * (PUSH ? MMA_SAMPLES * OWNED * 4 : SOURCE_PITCH);
    static constexpr int PARTIAL_BYTES = MMA_SAMPLES * (PUSH ? OPERAND_PITCH : K_SPLIT * PARTIAL_STRIDE * 4);
    static constexpr int INPUTS = pass_inputs<Cell, BACKWARD>();    // words read every step
    static constexpr int OUTPUTS = pass_outputs<Cell, BACKWARD>();  // and written
    static constexpr int SLOTS = INPUTS > OUTPUTS ? INPUTS : OUTPUTS;
    static constexpr int READY = pass_ready<Cell, BACKWARD>();
    static constexpr int LAST_SENT = OUTPUTS > SENT && BACKWARD ? SENT : SENT - 1;  // the last vector sent, among these
    static constexpr int AHEAD = 4;                                 // steps that inputs are fetched early
    // One unit: a word a thread and round for each step and slot, one for the utterance's frames, and what is carried.
    static constexpr int INPUT_BYTES = (AHEAD * SLOTS + 1 + (GATED ? PER_WORD : 0)) * ROUNDS * FINISHERS * 4;
    static constexpr int PARTIAL_AT = 2 * GROUPS * STATE_BYTES;
    static constexpr int INPUT_AT = PARTIAL_AT + 2 * GROUPS * PARTIAL_BYTES;
    static constexpr int BARRIER_AT = INPUT_AT + UNITS * INPUT_BYTES;
    static constexpr int SMEM_BYTES = BARRIER_AT + 2 * UNITS * WARPS * 8;

    static_assert(!GATED || PARTS == 1, "a part would have to hold all gates of its hidden units");
    static_assert(UNITS <= 2, "two groups or two parts: registers for two finishing warpgroups, not more");
    static_assert(HEAD_CHUNKS <= CHUNKS && CHUNKS <= 2 * HEAD_CHUNKS, "the first part is not the smaller one");
    static_assert(SOURCES == 1 || SOURCES == 2, "each warp's K slice is what one or two whole blocks produced");
    static_assert(OWN_WORDS % 4 == 0, "blocks exchange units of 16 bytes");
    static_assert(ROUND_SAMPLES >= 1, "the finishing threads cover one utterance's words of a part");
    static_assert(K_WORDS % (MMA_WORDS * WARPS) == 0, "each warp's K slice is whole matrix instructions");
    static_assert(SAMPLE_PITCH >= 4 * WORDS, "a sample's words fit its pitch");

    static __device__ int state_at(int stage, int g) { return (stage * GROUPS + g) * STATE_BYTES; }
    static __device__ int partial_at(int stage, int g) { return PARTIAL_AT + (stage * GROUPS + g) * PARTIAL_BYTES; }
    static __device__ int barrier_at(int stage, int unit, int warp) {
        return BARRIER_AT + 8 * ((stage * UNITS + unit) * WARPS + warp);
    }
    static constexpr int FIRST_STATE = 1 + 2 * UNITS;  // the named barrier of multipliers that share portions
    // Named barrier of a unit's finishers and all multipliers; 0 is __syncthreads. In debug builds everybody waits at all of
    // them: race checkers do not look into other blocks, where what (c) rests on lies, and follow no barrier of a part of a
    // block, but see then that partial sums are read after they were written and before they are overwritten.
    static __device__ int partials_ready(int stage, int unit) { return 1 + stage * UNITS + unit; }
    // The finishers of a group without utterances rest: nothing would hold the multiplying warps at their pace.
    static __device__ bool takes_part(int live) { return GROUPS == 1 || DEBUG_WAITS || live > 0; }
    static constexpr int PARTIALS_THREADS = DEBUG_WAITS ? ALL_THREADS : THREADS + FINISHERS;
};

// One tile: the utterances that a cluster runs together, in groups, in one direction.
template <class Shape>
struct Tile {
    using Number = typename Shape::Number;
    const Pass& pass;
    int first;  // utterance of the thread's own group: of the one that it finishes, or of group 0 if it multiplies
    int steps;  // frames of the longest
    int direction = 0;

    static __device__ int own_unit() {
        return Shape::UNITS == 1 || threadIdx.x < THREADS ? 0 : (threadIdx.x - THREADS) / Shape::FINISHERS;
    }
    static __device__ int own_group() { return Shape::GROUPS == 1 ? 0 : own_unit(); }
    __device__ int begin(int g) const { return first + (g - own_group()) * pass.samples; }
    __device__ int live(int g) const { return max(0, min(pass.samples, pass.batch - begin(g))); }
    __device__ int length(int utterance) const {
        return pass.lengths ? max(0, min(pass.frames, pass.lengths[utterance])) : pass.frames;
    }
    __device__ int iterations() const { return Shape::BACKWARD ? steps + 1 : steps; }

    __device__ explicit Tile(const Pass& pass)
        : pass(pass), first((blockIdx.x / Shape::CLUSTER * Shape::GROUPS + own_group()) * pass.samples), steps(0) {
        turn_around();
    }
    __device__ bool exists() const { return begin(0) < pass.batch; }
    // The second direction's tiles follow those of the first; no cluster has a tile of both.
    __device__ void turn_around() {
        if constexpr (Shape::DIRECTIONS > 1) {
            const int full = Shape::GROUPS * pass.samples, past = (pass.batch + full - 1) / full * full;
            if (direction == 0 && begin(0) >= past) direction = 1, first -= past;
        }
    }
    // Of the matrix of its direction.
    __device__ size_t first_element() const {
        return Shape::DIRECTIONS == 1 ? 0 : size_t(direction * Shape::Cell::GATES) * pass.hidden * pass.hidden;
    }
    // Of (T, B, H) arrays, and with t = 0 of (B, H) arrays: the row of an utterance in the tile's direction.
    __device__ unsigned row(int first, int s, int t = 0) const {
        return unsigned(t * pass.batch + first + s) * Shape::DIRECTIONS + direction;  // T B < 2^31
    }
    // Where step t of an utterance lies in time; its padding stays where it is.
    __device__ int frame_of(int t, int frames) const {
        return Shape::DIRECTIONS > 1 && direction && t < frames ? frames - 1 - t : t;
    }

    // All threads of the cluster: waits until no block uses the previous tile.
    __device__ void next() {
        first += gridDim.x / Shape::CLUSTER * Shape::GROUPS * pass.samples;
        if (exists()) cluster_barrier();
    }
    __device__ void open() {
        steps = 0;
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++)
#pragma unroll
            for (int s = 0; s < MMA_SAMPLES; s++)
                if (s < live(g)) steps = max(steps, length(begin(g) + s));
    }
};

}  // namespace ds2
