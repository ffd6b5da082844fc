// Frames that streams carry, and those of their next block behind them, as the convolutions of a block take them.
//
// What is new is no layer's output yet: a bias is added and all is clipped on the way, frames outside a stream are 0. What is
// to be carried on is written into the table from which the old was read: by the same thread or warp, behind it.
// Shape letters: B streams, F bins, T new frames, R carried ones, C = 32 channels in chunks of 8, P places.
#pragma once

#include "ptx/number.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

// Which frames of a block are a stream's: none of these before its start or from `ends` on. Without blocks: all.
struct Span {
    const long long* blocks;  // (B) that were heard before
    const long long* ends;    // (B)
    int frames, delay;
    __device__ bool fresh(int b) const { return blocks && blocks[b] == 0; }
    __device__ bool has(int b, int t) const {
        const long long at = blocks ? blocks[b] * frames - delay + t : 0;
        return !blocks || (at >= 0 && at < ends[b]);
    }
};

__device__ inline unsigned activated(unsigned word, unsigned bias, float clip) {
    float v[2], w[2];
    Bf16::unpack(word, v);
    Bf16::unpack(bias, w);
    for (int e = 0; e < 2; e++) v[e] += w[e];
    Bf16::unpack(Bf16::pack(v), v);
    for (int e = 0; e < 2; e++) v[e] = v[e] < 0 ? 0 : v[e] > clip ? clip : v[e];  // NaN stays
    return Bf16::pack(v);
}

// What a layer gives, (B, F, T, C) wherever it lies.
struct Given {
    const uint4* x;
    int of_bin, of_stream, of_frame;  // steps, in chunks
    const uint4* bias;                // (C)
    float clip;
    Span span;
    __device__ uint4 at(int f, int b, int t, int chunk) const {
        if (!span.has(b, t)) return make_uint4(0, 0, 0, 0);
        const uint4 v = x[size_t(f) * of_bin + size_t(b) * of_stream + size_t(t) * of_frame + chunk], w = bias[chunk];
        return make_uint4(activated(v.x, w.x, clip), activated(v.y, w.y, clip), activated(v.z, w.z, clip),
                          activated(v.w, w.w, clip));
    }
};

// (F, B, NEEDED, C): the first of R carried frames and T new ones. A warp has a stream's frames of a bin, CHUNKS lanes a frame.
template <int THREADS>
__device__ void join(const Given& given, uint4* table, const long long* places, uint4* out, int batch, int bins, int carried,
                     int needed) {
    constexpr int CHUNKS = 4, LANES = 32 / CHUNKS, TURN = 4;  // frames of a warp at once, and turns of them on their way
    const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, b = unit % batch, f = unit / batch;
    const int chunk = threadIdx.x % CHUNKS, lane = threadIdx.x % 32 / CHUNKS;
    release_kernel_behind();
    await_kernel_before();
    if (f >= bins) return;
    uint4* const row = table + (size_t(places[b]) * bins + f) * carried * CHUNKS + chunk;
    uint4* const to = out + (size_t(f) * batch + b) * needed * CHUNKS + chunk;
    const bool fresh = given.span.fresh(b);
    const auto value = [&](int t) {
        if (t >= carried) return given.at(f, b, t - carried, chunk);
        return fresh ? make_uint4(0, 0, 0, 0) : row[t * CHUNKS];
    };
    const auto move = [&](int count, int skipped, uint4* there) {
        for (int first = lane; first - lane < count; first += TURN * LANES) {
            uint4 v[TURN];
#pragma unroll
            for (int j = 0; j < TURN; j++)
                if (first + j * LANES < count) v[j] = value(skipped + first + j * LANES);
            __syncwarp();  // all have read what lies where this goes; later turns read behind it
#pragma unroll
            for (int j = 0; j < TURN; j++)
                if (first + j * LANES < count) there[(first + j * LANES) * CHUNKS] = v[j];
        }
    };
    move(needed, 0, to);
    __syncwarp();
    move(carried, given.span.frames, row);
}

// (T, B, C F) of what a layer gives, as recurrent layers take it.
template <int THREADS>
__device__ void flatten(const Given& given, unsigned short* out, int batch, int bins, int chunks) {
    const int i = blockIdx.x * THREADS + threadIdx.x, f = i % bins, row = i / bins / chunks, chunk = i / bins % chunks;
    release_kernel_behind();
    await_kernel_before();
    const int b = row % batch, t = row / batch;
    if (t >= given.span.frames) return;
    const uint4 v = given.at(f, b, t, chunk);
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned short* const to = out + (size_t(row) * chunks + chunk) * 8 * bins + f;
#pragma unroll
    for (int e = 0; e < 8; e++) to[e * bins] = (unsigned short)(words[e / 2] >> e % 2 * 16);
}

// Windows of 16 frames, a stride apart, of pairs of bins of features: (F / 2 rounded up, B, COUNT, 2, 16) of R carried frames
// and T new ones, zeros behind them and beside an odd bin. A warp has a pair of bins of a stream.
template <int THREADS>
__device__ void windows(const float* x, const Span& span, unsigned short* table, const long long* places, uint4* out, int batch,
                        int bins, int carried, int count, int stride) {
    const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, b = unit % batch, pair = unit / batch;
    release_kernel_behind();
    await_kernel_before();
    if (2 * pair >= bins) return;
    unsigned short* const row = table + (size_t(places[b]) * bins + 2 * pair) * carried;
    const float* const from = x + (size_t(b) * bins + 2 * pair) * span.frames;
    const bool fresh = span.fresh(b);
    const auto value = [&](int half, int t) {
        const bool there = 2 * pair + half < bins;
        float v[2] = {0, 0};
        if (there && t < carried) return fresh ? 0u : unsigned(row[half * carried + t]);
        t -= carried;
        if (there && t < span.frames && span.has(b, t)) v[0] = from[half * span.frames + t];
        return Bf16::pack(v) & 0xffffu;
    };
    uint4* const to = out + (size_t(pair) * batch + b) * count * 4;
    for (int i = lane; i < 4 * count; i += 32) {
        unsigned word[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = i % 4 / 2, t = i / 4 * stride + i % 2 * 8 + 2 * e;
            word[e] = value(half, t) | value(half, t + 1) << 16;
        }
        to[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    for (int half = 0; half < 2 && 2 * pair + half < bins; half++)
        for (int first = 0; first < carried; first += 32) {
            const unsigned v = value(half, span.frames + first + lane);
            __syncwarp();  // all have read what lies here
            if (first + lane < carried) row[half * carried + first + lane] = (unsigned short)v;
            __syncwarp();
        }
}

}  // namespace ds2
