// How the blocks of a whole-chip design hand the state to each other through L2.
//
// Data is its own flag. A slot holds one state; a word of it is EMPTY, a pattern that no state contains, until its owner
// has stored it. Readers poll the very words that the matrix unit wants, straight into registers, so that a step pays one
// trip to L2 and one back: no flag, and no barrier over the grid.
//
// State number e (an epoch) lies in slot e % SLOTS. Why that is safe:
//   - A block that publishes e has read all of e - 1, so every block has published e - 1, so every block has read e - 2:
//     right after publishing e, each thread empties its word of e - 2, that is the slot of e + 2.
//   - A block polls e + 2 only after it has read all of e + 1, each word of which its owner published after its emptying
//     of the slot of e + 2 had reached L2. So it finds EMPTY or the new word, never the old one.
//   - Every 32-bit word is compared with EMPTY: nothing is assumed about the order in which the words that a wide load
//     covers were stored.
// All slots must be EMPTY when the kernel starts.
#pragma once

#include "recurrence.cuh"
#include "sync.cuh"

namespace ds2 {

constexpr unsigned EMPTY = 0xffffffffu;  // a NaN in every number type
constexpr int SLOTS = 4;

__device__ inline uint4 load_relaxed(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ inline void store_relaxed(unsigned* at, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ inline bool has_empty(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) == EMPTY; }

// A state word that holds NaN in EMPTY's pattern is published as another NaN.
__device__ inline unsigned publishable(unsigned word) { return word == EMPTY ? EMPTY ^ 0x80008000u : word; }

// In debug builds, a wait of more than MAX_WAIT_NS names itself and traps.
struct WaitLimit {
#ifdef DS2_DEBUG_WAIT
    unsigned long long start = now_ns();
    __device__ void check(int epoch) const {
        if (now_ns() - start < MAX_WAIT_NS) return;
        printf("ds2: block %d warp %d waits for state %d for more than 2 s\n", blockIdx.x, threadIdx.x / 32, epoch);
        __trap();
    }
#else
    __device__ void check(int) const {}
#endif
};

__device__ inline int length_of(const Pass& pass, int utterance) {
    if (utterance >= pass.batch) return 0;
    return pass.lengths ? max(0, min(pass.frames, __ldg(pass.lengths + utterance))) : pass.frames;
}

template <class Number>
__device__ void prefetch(const void* array, size_t element) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const typename Number::Storage*>(array) + element));
}

}  // namespace ds2
