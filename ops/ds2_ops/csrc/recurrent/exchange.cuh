// How the blocks of a whole-chip design hand the state to each other through L2.
//
// Data is its own flag. A slot holds one state; a word of it is EMPTY, a pattern that no state contains, until its owner
// has stored it. Readers poll the very words that the matrix unit wants, straight into registers, so that a step pays one
// trip to L2 and one back: no flag, and no barrier over the grid.
//
// State number e (an epoch) lies in slot e % SLOTS. A thread that owns words stores each of them once a state, right after
// that empties what it stored for state e - 2, and after every FENCE_EVERYth state fences before it publishes again: a fence
// takes longer than half a step. Why that is safe:
//   - The cluster of a block that publishes e has read all of e - 1, so every block has published e - 1, so every cluster
//     has read e - 2.
//   - State k is emptied after publishing k + 2; the next fence comes after publishing some e <= k + 1 + FENCE_EVERY and puts
//     this before e + 1 <= k + SLOTS - 1. A warp polls words of k + SLOTS only after it has read the words of k + SLOTS - 1
//     that the same threads own. So it finds EMPTY or the new word, never the old one.
//   - Every 32-bit word is compared with EMPTY: nothing is assumed about the order in which the words that a wide load
//     covers were stored.
//
// The buffer comes with whatever lay in it. The finishing warps of each block empty a part of it while others load weights;
// who publishes or polls first waits until all blocks have. So nothing is filled before the launch, nothing is kept from one
// call to the next, and calls on any streams or in graphs may overlap, each with a buffer of its own.
#pragma once

#include "ptx/grid_barrier.cuh"
#include "ptx/sync.cuh"
#include "recurrent/pass.cuh"

namespace ds2 {

constexpr unsigned EMPTY = 0xffffffffu;  // a NaN in every number type

// What a design's shape is made of. The more slots, the fewer fences, and the more words to be emptied at first.
template <int SLOTS_, int FENCE_EVERY_>
struct Slots {
    static constexpr int SLOTS = SLOTS_, FENCE_EVERY = FENCE_EVERY_;
    static_assert(FENCE_EVERY + 3 <= SLOTS, "a state's slot is emptied, and the fence passed, two states before its reuse");
    // After publishing so many states the next one waits for a fence.
    static __device__ bool fences(int epoch) { return epoch % FENCE_EVERY == FENCE_EVERY - 1; }
};

// What a lane starts to poll with: it asks for what is EMPTY.
__device__ inline uint4 unread(bool wanted) {
    const unsigned word = wanted ? EMPTY : 0;
    return make_uint4(word, word, word, word);
}

__device__ inline bool has_empty(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) == EMPTY; }

// A state word that holds NaN in EMPTY's pattern is published as another NaN.
__device__ inline unsigned publishable(unsigned word) { return word == EMPTY ? EMPTY ^ 0x80008000u : word; }
__device__ inline uint4 publishable(uint4 v) {
    return make_uint4(publishable(v.x), publishable(v.y), publishable(v.z), publishable(v.w));
}

// Cycles that a warp's first poll of the next turn waits, after a turn that took so many rounds of polls. A round that comes too
// early costs a whole trip to L2, and slows the other warps' trips; so the first one waits, for as long as the last turns have
// shown to be right: LATER more after a turn of several rounds, SOONER less after any other.
template <int LATER, int SOONER>
__device__ int next_pause(int pause, int rounds) {
    constexpr int LONGEST = 4096;
    return rounds > 1 ? min(pause + LATER, LONGEST) : max(pause - SOONER, 0);
}

// For a warp that has read state `epoch` of all groups. Multiprocessors satisfy a warp's polls in their order; PTX does not
// promise it: without a fence a poll of a slot might be given what lay there before it was emptied. Slots emptied until a
// writer's fence after state e are used again from e + SLOTS - FENCE_EVERY - 1 on; a fence at any state from e + 1 until before
// that orders polls of them behind the emptying, which the writer's own fence puts before e + 1.
template <class Shape>
__device__ void order_polls(int epoch) {
    if (epoch % Shape::FENCE_EVERY == 3) fence_loads();
}

// In debug builds, a wait of more than MAX_WAIT_NS names itself and traps.
struct WaitLimit {
#ifdef DS2_DEBUG_WAIT
    unsigned long long start = now_ns();
    __device__ void check(int epoch) const {
        rest_at_random();
        if (now_ns() - start < MAX_WAIT_NS) return;
        printf("ds2: block %d warp %d waits for state %d for more than 2 s\n", blockIdx.x, threadIdx.x / 32, epoch);
        __trap();
    }
#else
    __device__ void check(int) const { rest_at_random(); }
#endif
};

// For those of a block who poll first, or whom they wait for.
template <class Shape>
__device__ void await_empty() {
    block_wait(Shape::ALL_EMPTY, Shape::BEGINNERS);
}

// For the finishing warps of a block: `thread` of them. Empties this block's part, and waits for the others.
template <class Shape>
__device__ void empty_exchange(unsigned* exchange, int words, int thread) {
    for (int i = blockIdx.x * Shape::FINISHERS + thread; i < words / 4; i += gridDim.x * Shape::FINISHERS)
        store_relaxed(exchange + 4 * i, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    block_wait(Shape::TILE_DONE, Shape::FINISHERS);
    const unsigned before = thread == 0 ? grid_arrive() : 0;
    WaitLimit limit;
    // Lanes stay together: for a loop of one of them the compiler keeps registers that some tiles do not have.
    for (bool waits = thread == 0; __any_sync(0xffffffffu, waits); limit.check(0)) waits = waits & !grid_complete(before);
    await_empty<Shape>();
}

__device__ inline int length_of(const Pass& pass, int utterance) {
    if (utterance >= pass.batch) return 0;
    return pass.lengths ? max(0, min(pass.frames, __ldg(pass.lengths + utterance))) : pass.frames;
}

}  // namespace ds2
