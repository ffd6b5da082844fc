// A classifier of few labels on few frames: logits = x W^T + b with x of 16 bits and all else fp32.
//
// A warp has a label, then another one; a block has ROWS rows of x, of which each lane keeps its words in registers. Products
// are fp32 and exact in x; each lane adds up its own K, then the lanes are added up pairwise: no row meets another, and the
// order of a sum depends on K alone.
// Shape letters: R rows, K their width, V labels.
#pragma once

#include "ptx/number.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

template <class Number, int ROWS, int WIDTH, int WARPS_OF_BLOCK>
__device__ void classify(const uint2* x, const float4* weight, const float* bias, float* logits, int rows, int labels) {
    static_assert(Number::PER_WORD == 2 && WIDTH % 4 == 0, "a lane takes 4 numbers of 16 bits at once");
    constexpr int GROUPS = WIDTH / 4, MINE = (GROUPS + 31) / 32;  // of 4 numbers
    const int lane = threadIdx.x % 32, first = blockIdx.x * ROWS;
    release_kernel_behind();
    await_kernel_before();
    uint2 words[ROWS][MINE];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const bool there = first + r < rows && 32 * i + lane < GROUPS;
            words[r][i] = there ? x[size_t(first + r) * GROUPS + 32 * i + lane] : make_uint2(0, 0);
        }
    for (int label = threadIdx.x / 32; label < labels; label += WARPS_OF_BLOCK) {
        float4 w[MINE];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const bool there = 32 * i + lane < GROUPS;
            w[i] = weight[size_t(label) * GROUPS + (there ? 32 * i + lane : 0)];  // times 0 where there is none
        }
        float sum[ROWS] = {};
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float low[2], high[2];
                Number::unpack(words[r][i].x, low);
                Number::unpack(words[r][i].y, high);
                sum[r] = fmaf(w[i].x, low[0], sum[r]);
                sum[r] = fmaf(w[i].y, low[1], sum[r]);
                sum[r] = fmaf(w[i].z, high[0], sum[r]);
                sum[r] = fmaf(w[i].w, high[1], sum[r]);
            }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int apart = 16; apart > 0; apart /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], apart);
            if (lane == 0 && first + r < rows) logits[size_t(first + r) * labels + label] = sum[r] + bias[label];
        }
    }
}

}  // namespace ds2
