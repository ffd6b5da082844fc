// Matrix products of a warp group with both operands in shared memory, in core matrices of 8 x 16 bytes without swizzle: any
// row of 16 bytes can be the first, so a window that slides by a row is another start address.
#pragma once

#include "ptx/sync.cuh"

namespace ds2 {

__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Bytes between core matrices along the leading and the other dimension, as the PTX manual names them. An operand whose
// K is contiguous: from one 16 bytes of K to the next, and from 8 rows to the next 8. One whose rows are contiguous
// (TRANSPOSED): from 8 of K to the next 8, and from one 16 bytes of rows to the next.
__device__ inline unsigned long long operand_at(unsigned address, unsigned leading, unsigned stride) {
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
           static_cast<unsigned long long>(stride >> 4) << 32;
}

// c += a * b, asynchronously, for 64 rows, N columns and 16 of K: c[4 j ..] is this lane's part of columns 8 j .. 8 j + 7.
// Each instance is written by whoever needs its N (DS2_PRODUCT), for PTX names every register.
template <int N, bool TRANSPOSED>
struct Product;

#define DS2_PRODUCT(N, TRANSPOSED, INSTRUCTION, ...)                                                              \
    namespace ds2 {                                                                                               \
    template <>                                                                                                   \
    struct Product<N, TRANSPOSED> {                                                                               \
        static __device__ void add(float (&c)[N / 2], unsigned long long a, unsigned long long b) {               \
            asm volatile(INSTRUCTION : __VA_ARGS__ : "l"(a), "l"(b));                                             \
        }                                                                                                         \
    };                                                                                                            \
    }

}  // namespace ds2
