// The sum of something large over two GPUs: the copy engine of each brings its numbers into the other's memory, beside whatever
// runs; then each adds what came. Copies take no multiprocessor, and so hold no cluster of blocks back.
#pragma once

#include "ptx/sync.cuh"
#include "ptx/number.cuh"
#include "ptx/system.cuh"

namespace ds2 {

constexpr int EXCHANGE_THREADS = 512;

// Words ahead of the numbers in either rank's memory. The other rank writes `arrived` and `taken`: the last sum for which its
// numbers lie here, and the last one for which it has read ours.
enum ExchangeWord { SUMS, DONE, ARRIVED = 32, TAKEN = 64 };

// Before a copy: the other rank has read the one before.
__device__ void await_taken(const unsigned* own) {
    if (threadIdx.x == 0) await_system(own + TAKEN, own[SUMS]);
}

// Behind the copy of this rank's numbers (count), to which those that came are added.
__device__ void add_arrived(unsigned* own, unsigned* other, float* numbers, const float* came, int count, int blocks) {
    const unsigned sum = own[SUMS] + 1;
    if (threadIdx.x == 0) {
        signal_system(other + ARRIVED, sum);  // every block, lest one wait for another that has yet to start
        await_system(own + ARRIVED, sum);
    }
    __syncthreads();
    const int stride = blocks * EXCHANGE_THREADS, first = blockIdx.x * EXCHANGE_THREADS + threadIdx.x;
    const auto pieces = reinterpret_cast<float4*>(numbers);
    const auto others = reinterpret_cast<const float4*>(came);
#pragma unroll 4
    for (int i = first; i < count / 4; i += stride) {
        float4 mine = pieces[i];
        const float4 more = others[i];
        mine.x += more.x, mine.y += more.y, mine.z += more.z, mine.w += more.w;
        pieces[i] = mine;
    }
    if (const int i = count / 4 * 4 + first; i < count) numbers[i] += came[i];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(own + DONE, 1u) == unsigned(blocks - 1)) {
        own[DONE] = 0;
        own[SUMS] = sum;
        signal_system(other + TAKEN, sum);
    }
}

}  // namespace ds2
