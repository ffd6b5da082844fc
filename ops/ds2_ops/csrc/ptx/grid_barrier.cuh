// A barrier over the grid of a cooperative launch, in a word that the driver sets aside for each such launch: special registers
// hold its address, behind a word that is not ours (cooperative groups' this_grid().sync() has no other). All blocks together
// add 2^31: the sign changes when the last one has arrived, and the word is as the next launch needs it.
#pragma once

namespace ds2 {

__device__ inline unsigned* grid_word() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    return reinterpret_cast<unsigned*>(static_cast<unsigned long long>(high) << 32 | low) + 1;
}

// For one thread of each block, behind a barrier of it. Returns the word as it was.
__device__ inline unsigned grid_arrive() {
    const unsigned count = blockIdx.x ? 1 : 0x80000001u - gridDim.x;
    unsigned before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(grid_word()), "r"(count) : "memory");
    return before;
}

__device__ inline bool grid_complete(unsigned before) {
    unsigned now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(grid_word()) : "memory");
    return (now ^ before) >> 31;
}

}  // namespace ds2
