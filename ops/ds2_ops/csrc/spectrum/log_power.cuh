// Normalised log power spectra of windows of samples, straight from where these were written.
//
// A window's sum over W samples is one over W / 4: what two samples have in common is added up first, as cos(2 pi k n / W) is the
// same at W - n and at W / 2 - n but for its sign, which for the latter depends on whether k is odd. Even bins are one half of a
// block's threads, odd ones the other. Sums are short, so that they err little more than a fast transform's: 16 products each.
// Shape letters: R rows of samples, B streams, F = W / 2 + 1 bins, T frames, W samples of a window.
#pragma once

#include "ptx/number.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

struct LogPower {
    const float* samples;      // (R, row)
    const long long* rows;     // (B)
    const long long* lengths;  // (B) frames: 0 behind them
    const float* window;       // (W)
    const float* turns;        // (W, 2): cos and sin of 2 pi m / W
    const float* mean;         // (F)
    const float* std;          // (F)
    float* out;                // (B, F, T)
    int row, frames, step;
    float floor;
};

template <int W, int FRAMES>
struct LogPowerShape {
    static constexpr int QUARTER = W / 4 + 1, HALF = (W / 4 + 32) / 32 * 32, THREADS = 2 * HALF;  // threads of even bins, all
    static constexpr int LINE = 4 * ((2 * FRAMES + 3) / 4);  // of smem: the parts of all frames at a sample, for one parity
    static constexpr int SMEM_BYTES = 4 * (2 * QUARTER * LINE + 2 * W);  // and the block's samples behind
    static_assert(W % 4 == 0, "windows are folded twice");
};

// A block each for FRAMES frames of a stream.
template <int W, int FRAMES>
__device__ void log_power(const LogPower& given, unsigned char* shared) {
    using Shape = LogPowerShape<W, FRAMES>;
    constexpr int LINE = Shape::LINE, QUARTER = Shape::QUARTER, SHORT = 16;
    const int groups = (given.frames + FRAMES - 1) / FRAMES;
    const int b = blockIdx.x / groups, first = blockIdx.x % groups * FRAMES, thread = threadIdx.x;
    float* const parts = reinterpret_cast<float*>(shared);  // (2 parities, W / 4 + 1, FRAMES, 2): those of cos and of sin
    float* const turns = parts + 2 * QUARTER * LINE;
    float* const from = turns + 2 * W;
    release_kernel_behind();
    for (int i = thread; i < 2 * W; i += Shape::THREADS) turns[i] = given.turns[i];
    await_kernel_before();
    const int here = (given.frames - first < FRAMES ? given.frames - first : FRAMES) - 1;
    const float* const there = given.samples + size_t(given.rows[b]) * given.row + size_t(first) * given.step;
#pragma unroll 8
    for (int i = thread; i < here * given.step + W; i += Shape::THREADS) from[i] = there[i];  // once: they come a long way
    __syncthreads();
    for (int i = thread; i < QUARTER * FRAMES; i += Shape::THREADS) {
        const int frame = i / QUARTER, n = i % QUARTER;
        const auto x = [&](int m) { return frame <= here ? given.window[m] * from[frame * given.step + m] : 0.0f; };
        const int far = W / 2 - n;
        const float near_cos = n == 0 ? x(0) : x(n) + x(W - n), near_sin = n == 0 ? 0.0f : x(n) - x(W - n);
        const float far_cos = n == 0 ? x(far) : x(far) + x(W - far), far_sin = n == 0 ? 0.0f : x(far) - x(W - far);
        const bool middle = n == W / 4;  // its own counterpart
        float* const even = parts + n * LINE + 2 * frame;
        float* const odd = even + QUARTER * LINE;
        even[0] = middle ? near_cos : near_cos + far_cos;
        even[1] = middle ? near_sin : near_sin - far_sin;
        odd[0] = middle ? near_cos : near_cos - far_cos;
        odd[1] = middle ? near_sin : near_sin + far_sin;
    }
    __syncthreads();
    const int parity = thread / Shape::HALF, bin = 2 * (thread % Shape::HALF) + parity;
    if (bin > W / 2) return;
    const float* const mine = parts + parity * QUARTER * LINE;
    float sum[2 * FRAMES] = {};
    int m = 0;
    for (int start = 0; start < QUARTER; start += SHORT) {
        float some[2 * FRAMES] = {};
        const int end = start + SHORT < QUARTER ? start + SHORT : QUARTER;
#pragma unroll 4
        for (int n = start; n < end; n++) {
            const float c = turns[2 * m], s = turns[2 * m + 1];
            float v[LINE];
#pragma unroll
            for (int i = 0; i < LINE; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(mine + n * LINE + i);
                v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < FRAMES; i++) {
                some[2 * i] = fmaf(c, v[2 * i], some[2 * i]);
                some[2 * i + 1] = fmaf(s, v[2 * i + 1], some[2 * i + 1]);
            }
            m += bin;
            if (m >= W) m -= W;
        }
#pragma unroll
        for (int i = 0; i < 2 * FRAMES; i++) sum[i] += some[i];
    }
    const float mean = given.mean[bin], std = given.std[bin];
    float* const to = given.out + (size_t(b) * (W / 2 + 1) + bin) * given.frames + first;
    const int valid = int(given.lengths[b] - first < FRAMES ? given.lengths[b] - first : FRAMES);
#pragma unroll
    for (int i = 0; i < FRAMES; i++) {
        if (first + i >= given.frames) break;
        const float power = fmaf(sum[2 * i], sum[2 * i], sum[2 * i + 1] * sum[2 * i + 1]);
        to[i] = i < valid ? (logf(power + given.floor) - mean) / std : 0.0f;
    }
}

}  // namespace ds2
