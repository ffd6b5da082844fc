// The wide whole-chip design's shape: how its blocks share the work, and where things lie in their memory (grid_wide.cuh).
#pragma once

#include "ptx/wgmma.cuh"
#include "recurrent/frame.cuh"
#include "recurrent/turns.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int WARP_GROUPS_, int K_TILES_, bool BACKWARD_, int STREAMS_ = 1>
struct WideShape : Slots<16, 8> {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr int K_TILES = K_TILES_;       // matrix instructions along K, one block
    static constexpr int STREAMS = STREAMS_;       // parts of the chip, each with all weights and utterances of its own
    static constexpr int GROUPS = STREAMS > 1 ? 1 : 2;  // at most, of one tile
    static constexpr int SAMPLES = WGMMA_SAMPLES;  // of a group, at most
    static constexpr bool GATED = Cell::GATES > 1;
    static constexpr int SUMS = BACKWARD ? 1 : Cell::GATES;  // of each hidden unit that a step needs
    static constexpr int SENT = BACKWARD ? Cell::GATES : 1;  // planes of the state
    static constexpr int MULTIPLIERS = 128 * WARP_GROUPS_, POLLERS = 128, FINISHERS = 128;  // threads
    static constexpr int ALL_THREADS = MULTIPLIERS + POLLERS + FINISHERS;
    static constexpr int MULTIPLYING_WARPS = MULTIPLIERS / 32;
    // A set of multiplying warps has all sums of 8 words. Where gates do not divide the warps, some multiply nothing.
    static constexpr int SETS = MULTIPLYING_WARPS / SUMS;
    static constexpr int WORDS = 8 * SETS;  // of a cluster, of each utterance's h

    // Registers a thread: as many at launch for all, then moved to the multiplying warps, which hold the weights.
    static constexpr bool THREE = WARP_GROUPS_ == 3;
    // Where a cell's gates leave too few for those of all instructions, weights of the last lie in shared memory.
    static constexpr int SMEM_TILES = GATED && !THREE && K_TILES > 28 ? K_TILES - 28 : 0;
    static constexpr int REGISTER_TILES = K_TILES - SMEM_TILES;
    static constexpr bool FEW = REGISTER_TILES <= (THREE ? 13 : 28);
    static constexpr int MULTIPLY_REGISTERS = THREE ? (FEW ? 104 : 112) : FEW ? 160 : 176;
    static constexpr int POLL_REGISTERS = THREE ? (FEW ? 80 : 56) : GATED ? 88 : FEW ? 104 : 88;
    static constexpr int FINISH_REGISTERS = THREE ? 88 : GATED ? 104 : FEW ? 88 : 72;
    static_assert(MULTIPLIERS * MULTIPLY_REGISTERS + POLLERS * POLL_REGISTERS + FINISHERS * FINISH_REGISTERS <=
                      65536 / ALL_THREADS / 8 * 8 * ALL_THREADS,
                  "what some warps gain, others have given");
    static_assert(REGISTER_TILES <= (THREE ? 16 : GATED ? 28 : 32), "the weights of more do not fit the registers");

    // Each polling warp has a part of K, which it hands on in pieces: products of one run while the next is stored.
    static constexpr int PARTS = 4, PART_TILES = (K_TILES + PARTS - 1) / PARTS;
    static constexpr int PIECE_TILES = 2, PIECES = (PART_TILES + PIECE_TILES - 1) / PIECE_TILES;

    // Sums travel in parcels: of a set's 8 words and of 8 utterances, for each sum of a unit 16 bytes a lane.
    static constexpr int PARCELS = SETS * SAMPLES / 8, SUM_BYTES = 512, PARCEL_BYTES = SUMS * SUM_BYTES;
    static constexpr int SOURCES = DEBUG_WAITS ? CLUSTER : CLUSTER - 1;  // of a parcel's sums, by st.async
    static constexpr int OWN_PARCELS = (PARCELS + CLUSTER - 1) / CLUSTER;  // that a block finishes, at most
    static constexpr int FINISHING_WARPS = FINISHERS / 32;
    static constexpr int WARP_PARCELS = (OWN_PARCELS + FINISHING_WARPS - 1) / FINISHING_WARPS;  // the block's i: warp i % 4

    // Shared memory. The state: [turn % 2][instruction][half of its K][utterance][4 words]. Received sums: [group][state % 2]
    // [own parcel][sum of a unit][block][lane][2 rows][2 utterances]. What is read and written: [turn % AHEAD][array]
    // [finishing warp][its parcel][utterance][word]. Frames: [finishing warp][group][utterance]. What is carried: [group]
    // [own word of a lane][its element][finishing lane].
    static constexpr int STATE_BYTES = K_TILES * WGMMA_STATE_BYTES;
    static constexpr int RECEIVED_AT = 2 * STATE_BYTES;
    static constexpr int RECEIVED_BYTES = OWN_PARCELS * CLUSTER * PARCEL_BYTES;
    static constexpr int INPUTS = pass_inputs<Cell, BACKWARD>(), OUTPUTS = pass_outputs<Cell, BACKWARD>();
    static constexpr int READY = pass_ready<Cell, BACKWARD>();
    static constexpr int LAST_SENT = BACKWARD && OUTPUTS > SENT ? SENT : SENT - 1;  // the last plane, among the outputs
    static constexpr int ARRAYS = INPUTS > OUTPUTS ? INPUTS : OUTPUTS;
    static constexpr int AHEAD = GATED ? 4 : 8;
    static_assert(AHEAD % GROUPS == 0, "the turn that is fetched is of the group that has just finished one");
    static constexpr int INPUTS_AT = RECEIVED_AT + 2 * GROUPS * RECEIVED_BYTES;
    static constexpr int PARCEL_INPUT_BYTES = 8 * 8 * 4, WARP_INPUT_BYTES = WARP_PARCELS * PARCEL_INPUT_BYTES;
    static constexpr int FRAMES_AT = INPUTS_AT + AHEAD * ARRAYS * FINISHING_WARPS * WARP_INPUT_BYTES;
    static constexpr int CARRY_AT = FRAMES_AT + FINISHING_WARPS * GROUPS * SAMPLES * 4;
    static constexpr int CARRY_BYTES = GATED ? WARP_PARCELS * 2 * PER_WORD * FINISHERS * 4 : 0;  // of a group
    // What is ready before the sums are, where registers do not hold it beside them: [own word of a lane][4][finishing lane].
    static constexpr bool READY_APART = GATED && BACKWARD && THREE;
    static constexpr int READY_AT = CARRY_AT + GROUPS * CARRY_BYTES;
    static constexpr int READY_BYTES = READY_APART ? WARP_PARCELS * 2 * 4 * FINISHERS * 16 : 0;
    static_assert(!READY_APART || READY * PER_WORD <= 16, "16 numbers of a word");
    static constexpr int WEIGHTS_AT = READY_AT + READY_BYTES;  // [warp group][instruction]
    static constexpr int GROUP_WEIGHT_BYTES = SMEM_TILES * WGMMA_WEIGHT_BYTES;
    static_assert(SMEM_TILES == 0 || WEIGHTS_AT % 128 == 0, "core matrices start so");
    static constexpr int BARRIERS_AT = WEIGHTS_AT + WARP_GROUPS_ * GROUP_WEIGHT_BYTES;
    // mbarriers: of received sums, then of pieces of the state that are full, then of states whose products are done.
    static constexpr int FULL = 2 * GROUPS, READ = FULL + 2 * PIECES, BARRIERS = READ + 2;
    static constexpr int SMEM_BYTES = BARRIERS_AT + 8 * BARRIERS;
    // Named barriers: of the finishing warps, of the multiplying ones, of those who begin with the exchange; 0 is __syncthreads.
    static constexpr int TILE_DONE = 1, WEIGHTS_THERE = 2, ALL_EMPTY = 15, BEGINNERS = POLLERS + FINISHERS;

    static __device__ int full(int turn, int piece) { return FULL + turn % 2 * PIECES + piece; }
    static __device__ int arrivals(int barrier) {
        return barrier < FULL ? 1 + MULTIPLYING_WARPS : barrier < READ ? PARTS : MULTIPLYING_WARPS;
    }
    static __device__ int read(int turn) { return READ + turn % 2; }

    static_assert(PER_WORD == 2, "two rows of a lane are one word: 16-bit numbers only");
};

template <class Shape>
struct WideBlock {
    const Pass& pass;
    char* const smem;
    const int rank = cluster_rank(), lane = threadIdx.x % 32;
    const int state_words = 4 * state_units<typename Shape::Number>(pass);  // of one plane
    const int stream = Shape::STREAMS > 1 ? blockIdx.x / (gridDim.x / Shape::STREAMS) : 0;
    const int first_word = (blockIdx.x - stream * (gridDim.x / Shape::STREAMS)) / Shape::CLUSTER * Shape::WORDS;
    const int slice_word = rank * Shape::K_TILES * MMA_WORDS;

    __device__ WideBlock(const Pass& pass, char* smem) : pass(pass), smem(smem) {}
    __device__ unsigned barrier(int i) const { return smem_address(smem) + Shape::BARRIERS_AT + 8 * i; }
    // Whether anything in a parcel exists, in a group of `live` utterances. What does not is neither sent nor waited for.
    __device__ bool alive(int parcel, int live) const {
        return first_word + parcel / (Shape::SAMPLES / 8) * 8 < state_words && parcel % (Shape::SAMPLES / 8) * 8 < live;
    }
    // How many of a group's parcels this block finishes.
    __device__ int parcels_of(int live) const {
        int count = 0;
        for (int parcel = rank; parcel < Shape::PARCELS; parcel += Shape::CLUSTER) count += alive(parcel, live);
        return count;
    }
};

}  // namespace ds2
