// The warp-group matrix product, 64 rows of the matrix by 32 utterances: weights from registers, the state from shared memory.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

constexpr int WGMMA_SAMPLES = 32;
constexpr int WGMMA_STATE_BYTES = 2 * WGMMA_SAMPLES * 16;  // of one instruction: 8 words of K

// What this thread has written to shared memory is seen by the matrix unit, which reads it by another path.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Shared memory of the state of one instruction, in core matrices of 8 utterances x 16 bytes without swizzle: the first 4
// words of K of all utterances, then the other 4.
__device__ inline unsigned long long state_descriptor(unsigned address) {
    const unsigned long long k_stride = WGMMA_SAMPLES * 16, utterance_stride = 128;
    return (address & 0x3ffff) >> 4 | (k_stride >> 4) << 16 | (utterance_stride >> 4) << 32;
}

#define DS2_WGMMA(TYPE)                                                                                                   \
    asm volatile(                                                                                                         \
        "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                                       \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, accumulate, 1, 1, 0;}"          \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),     \
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(state))

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

// c += weights * state, asynchronously: c[4 j ..] is this lane's part of utterances 8 j .. 8 j + 7.
template <class Number>
__device__ void wgmma(float (&c)[WGMMA_SAMPLES / 2], const unsigned (&a)[4], unsigned long long state) {
    static_assert(Number::PER_WORD == 2, "16-bit numbers");
    if constexpr (IS_SAME<Number, Fp16>)
        DS2_WGMMA("f16");
    else
        DS2_WGMMA("bf16");
}

#undef DS2_WGMMA

// The same with the weights in shared memory, in core matrices of 8 rows x 16 bytes without swizzle: the first 4 words of K of
// all 64 rows, then the other 4. In the words of a fragment: of warp w of the group, number i of a lane.
constexpr int WGMMA_WEIGHT_BYTES = 2048;  // of one instruction
__device__ inline unsigned weight_place(int warp, int lane, int i) {
    return i / 2 * 1024 + (warp * 2 + i % 2) * 128 + lane / 4 * 16 + lane % 4 * 4;
}
__device__ inline unsigned long long weights_descriptor(unsigned address) {
    const unsigned long long k_stride = 1024, row_stride = 128;
    return (address & 0x3ffff) >> 4 | (k_stride >> 4) << 16 | (row_stride >> 4) << 32;
}

#define DS2_WGMMA(TYPE)                                                                                                   \
    asm volatile(                                                                                                         \
        "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                                       \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, accumulate, 1, 1, 0, 0;}"                     \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),     \
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                        \
        : "l"(weights), "l"(state))

template <class Number>
__device__ void wgmma(float (&c)[WGMMA_SAMPLES / 2], unsigned long long weights, unsigned long long state) {
    if constexpr (IS_SAME<Number, Fp16>)
        DS2_WGMMA("f16");
    else
        DS2_WGMMA("bf16");
}

#undef DS2_WGMMA

}  // namespace ds2
