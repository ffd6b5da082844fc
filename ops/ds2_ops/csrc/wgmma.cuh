// The warp-group matrix product, 64 samples at once: state from registers, weights from shared memory.
#pragma once

#include "number.cuh"

namespace ds2 {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Shared memory of the weights of one instruction, in core matrices of 8 rows x 16 bytes without swizzle: all rows of its
// first half of K, then all rows of its second.
template <int ROWS>
__device__ unsigned long long weights_descriptor(unsigned address) {
    const unsigned long long k_stride = ROWS * 16, row_stride = 128;
    return (address & 0x3ffff) >> 4 | (k_stride >> 4) << 16 | (row_stride >> 4) << 32;
}

#define DS2_R4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define DS2_R8(i) DS2_R4(i), DS2_R4(i + 4)
#define DS2_P8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define DS2_P0 DS2_P8(0, 1, 2, 3, 4, 5, 6, 7)
#define DS2_P1 DS2_P0 "," DS2_P8(8, 9, 10, 11, 12, 13, 14, 15)
#define DS2_P2 DS2_P1 "," DS2_P8(16, 17, 18, 19, 20, 21, 22, 23)
#define DS2_P3 DS2_P2 "," DS2_P8(24, 25, 26, 27, 28, 29, 30, 31)
#define DS2_P4 DS2_P3 "," DS2_P8(32, 33, 34, 35, 36, 37, 38, 39)
#define DS2_P5 DS2_P4 "," DS2_P8(40, 41, 42, 43, 44, 45, 46, 47)
#define DS2_P6 DS2_P5 "," DS2_P8(48, 49, 50, 51, 52, 53, 54, 55)
#define DS2_P7 DS2_P6 "," DS2_P8(56, 57, 58, 59, 60, 61, 62, 63)
#define DS2_WGMMA(ROWS, K, TYPE, SCALES, REGISTERS, A0, A1, A2, A3, B)                                                          \
    asm volatile("{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #ROWS K ".f32." TYPE "." TYPE " {" REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 \
                 ",%" #A3 "}, %" #B ", accumulate, " SCALES ";}"                                                                          \
                 : DS2_OUT                                                                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#define DS2_WGMMA_ROWS(ROWS, REGISTERS, A0, A1, A2, A3, B)                                     \
    if constexpr (Number::PER_WORD == 1)                                                       \
        DS2_WGMMA(ROWS, "k8", "tf32", "1, 1", REGISTERS, A0, A1, A2, A3, B);                   \
    else if constexpr (IS_SAME<Number, Fp16>)                                                  \
        DS2_WGMMA(ROWS, "k16", "f16", "1, 1, 0", REGISTERS, A0, A1, A2, A3, B);                \
    else                                                                                       \
        DS2_WGMMA(ROWS, "k16", "bf16", "1, 1, 0", REGISTERS, A0, A1, A2, A3, B)

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

// The operand lists of an asm statement cannot be computed, hence the macros: DS2_R name accumulators, DS2_P their places.
// c += state * weights^T, asynchronously: c[4 j ..] is this lane's part of output rows 8 j .. 8 j + 7.
template <class Number, int ROWS>
__device__ void wgmma(float (&c)[ROWS / 2], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {
    static_assert(ROWS % 16 == 0 && ROWS <= 128, "one of the shapes below");
#define DS2_OUT DS2_R8(0)
    if constexpr (ROWS == 16) { DS2_WGMMA_ROWS(16, DS2_P0, 8, 9, 10, 11, 12); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8)
    if constexpr (ROWS == 32) { DS2_WGMMA_ROWS(32, DS2_P1, 16, 17, 18, 19, 20); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16)
    if constexpr (ROWS == 48) { DS2_WGMMA_ROWS(48, DS2_P2, 24, 25, 26, 27, 28); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16), DS2_R8(24)
    if constexpr (ROWS == 64) { DS2_WGMMA_ROWS(64, DS2_P3, 32, 33, 34, 35, 36); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16), DS2_R8(24), DS2_R8(32)
    if constexpr (ROWS == 80) { DS2_WGMMA_ROWS(80, DS2_P4, 40, 41, 42, 43, 44); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16), DS2_R8(24), DS2_R8(32), DS2_R8(40)
    if constexpr (ROWS == 96) { DS2_WGMMA_ROWS(96, DS2_P5, 48, 49, 50, 51, 52); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16), DS2_R8(24), DS2_R8(32), DS2_R8(40), DS2_R8(48)
    if constexpr (ROWS == 112) { DS2_WGMMA_ROWS(112, DS2_P6, 56, 57, 58, 59, 60); }
#undef DS2_OUT
#define DS2_OUT DS2_R8(0), DS2_R8(8), DS2_R8(16), DS2_R8(24), DS2_R8(32), DS2_R8(40), DS2_R8(48), DS2_R8(56)
    if constexpr (ROWS == 128) { DS2_WGMMA_ROWS(128, DS2_P7, 64, 65, 66, 67, 68); }
#undef DS2_OUT
}

#undef DS2_R4
#undef DS2_R8
#undef DS2_P8
#undef DS2_P0
#undef DS2_P1
#undef DS2_P2
#undef DS2_P3
#undef DS2_P4
#undef DS2_P5
#undef DS2_P6
#undef DS2_P7
#undef DS2_WGMMA
#undef DS2_WGMMA_ROWS

}  // namespace ds2
