// The warp-group matrix product, 64 rows of the matrix by 32 utterances: weights from registers, the state from shared memory.
#pragma once

#include "ptx/number.cuh"
#include "ptx/product.cuh"

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
__device__ inline unsigned long long state_descriptor(unsigned address) { return operand_at(address, WGMMA_SAMPLES * 16, 128); }

// And of weights that do not lie in registers, of 8 rows x 16 bytes: the first 4 words of K of all 64 rows, then the other 4.
// weight_place is where number i of a lane's fragment, of warp w of the group, lies among them.
constexpr int WGMMA_WEIGHT_BYTES = 2048;  // of one instruction
__device__ inline unsigned weight_place(int warp, int lane, int i) {
    return i / 2 * 1024 + (warp * 2 + i % 2) * 128 + lane / 4 * 16 + lane % 4 * 4;
}
__device__ inline unsigned long long weights_descriptor(unsigned address) { return operand_at(address, 1024, 128); }

// WEIGHTS, STATE: operands from %16 on, and what else the instruction takes behind the signs; then what they are.
#define DS2_WGMMA(TYPE, WEIGHTS, STATE, MORE, ...)                                                                        \
    asm volatile(                                                                                                         \
        "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                                       \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, " WEIGHTS ", " STATE ", accumulate, 1, 1" MORE ";}"     \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),     \
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                        \
        : __VA_ARGS__)
#define DS2_WGMMA_REGISTERS(TYPE) \
    DS2_WGMMA(TYPE, "{%16,%17,%18,%19}", "%20", ", 0", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(state))
#define DS2_WGMMA_MEMORY(TYPE) DS2_WGMMA(TYPE, "%16", "%17", ", 0, 0", "l"(weights), "l"(state))

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

// c += weights * state, asynchronously: c[4 j ..] is this lane's part of utterances 8 j .. 8 j + 7.
template <class Number>
__device__ void wgmma(float (&c)[WGMMA_SAMPLES / 2], const unsigned (&a)[4], unsigned long long state) {
    static_assert(Number::PER_WORD == 2, "16-bit numbers");
    if constexpr (IS_SAME<Number, Fp16>)
        DS2_WGMMA_REGISTERS("f16");
    else
        DS2_WGMMA_REGISTERS("bf16");
}
// The same with the weights in shared memory.
template <class Number>
__device__ void wgmma(float (&c)[WGMMA_SAMPLES / 2], unsigned long long weights, unsigned long long state) {
    if constexpr (IS_SAME<Number, Fp16>)
        DS2_WGMMA_MEMORY("f16");
    else
        DS2_WGMMA_MEMORY("bf16");
}

#undef DS2_WGMMA
#undef DS2_WGMMA_REGISTERS
#undef DS2_WGMMA_MEMORY

}  // namespace ds2
