// Convolution over bins and frames with 32 channels on both sides, as matrix products over windows that slide in shared memory.
//
// A bin's frames lie in shared memory once, a row of 16 bytes a frame and 8 channels; each tap in time reads them from
// another row on, so nothing is copied together (no im2col) and a number that was loaded meets all taps in time and both
// bins of the output that a block makes. Shape letters: B utterances, F bins, T frames.
#pragma once

#include "ptx/number.cuh"
#include "ptx/product.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

constexpr int CHANNELS = 32, CHUNKS = 4;        // of 8 channels, 16 bytes
constexpr int PRODUCERS = 128;                  // threads that fill stages
constexpr int BARRIERS_BYTES = 128;             // at the head of shared memory
constexpr int PAIR = 2 * CHANNELS;              // rows of a product: two bins

// Rows of a window: 2 more than a multiple of 8, so that the chunks of a warp's copies fall into different banks.
__device__ constexpr int padded_rows(int rows) { return rows + (10 - rows % 8) % 8; }

// Full and empty stages between producers and consumers.
template <int STAGES, int CONSUMER_WARPS>
struct Stages {
    unsigned barriers;
    __device__ explicit Stages(unsigned memory) : barriers(memory) {
        if (threadIdx.x == 0)
            for (int s = 0; s < STAGES; s++) {
                barrier_init(full(s), PRODUCERS);
                barrier_init(empty(s), CONSUMER_WARPS);
            }
        __syncthreads();
    }
    __device__ unsigned full(int n) const { return barriers + n % STAGES * 16; }
    __device__ unsigned empty(int n) const { return barriers + n % STAGES * 16 + 8; }
    __device__ void wait_empty(int n) const {
        if (n >= STAGES) barrier_wait(empty(n), (n / STAGES - 1) % 2, "an empty stage", n);
    }
    __device__ void wait_full(int n) const { barrier_wait(full(n), n / STAGES % 2, "a full stage", n); }
    // This thread has asked for the copies of stage n: those of the stage before the last PENDING have landed.
    template <int PENDING>
    __device__ void asked(int n) const {
        copies_commit();
        copies_wait<PENDING>();
        fence_shared_writes();
        if (n >= PENDING) barrier_arrive(full(n - PENDING));
    }
    // No stage follows the first `count`.
    template <int PENDING>
    __device__ void finished(int count) const {
        copies_wait<0>();
        fence_shared_writes();
        for (int n = count > PENDING ? count - PENDING : 0; n < count; n++) barrier_arrive(full(n));
    }
    __device__ void emptied(int n) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(n));
    }
};

// One bin's frames from `first` on into shared memory [chunk][row]; zeros outside [0, T) and where there is no such bin.
__device__ inline void copy_window(unsigned to, const unsigned short* bin, bool exists, int first, int rows, int row_stride,
                                   int frames, int thread) {
    for (int i = thread; i < rows * CHUNKS; i += PRODUCERS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, frame = first + row;
        const bool wanted = exists && frame >= 0 && frame < frames;
        copy_async_16(to + (chunk * row_stride + row) * 16, bin + (wanted ? size_t(frame) * CHANNELS + chunk * 8 : 0), wanted);
    }
}

struct Correlation {
    const unsigned short* x;        // (B, bins_in, T, 32)
    const unsigned short* weights;  // (rows, TAPS, 4, 64, 8): of row i of the window for bins 2 q and 2 q + 1
    unsigned short* y;              // (B, bins_out, T, 32)
    int bins_in, bins_out, frames, rows;
    int step, first;                // bin q step + first + i is row i of pair q
    int pairs, tiles;               // of bins, of frames
};

// y[2 q + h] = sum over i and taps of weights[i][tap][h] x[q step + first + i], shifted by tap - TAPS / 2 frames. Block: a
// pair of bins and 2 N frames of an utterance; two warp groups multiply N frames each, the third fills stages.
template <int N, int TAPS, int STAGES>
__device__ void correlate(const Correlation& p, unsigned char* memory) {
    constexpr int FRAMES = 2 * N, ROWS = FRAMES + TAPS - 1, ROW_STRIDE = padded_rows(ROWS);
    constexpr int WINDOW_BYTES = CHUNKS * ROW_STRIDE * 16, TAP_BYTES = CHANNELS * PAIR * 2;
    constexpr int STAGE_BYTES = WINDOW_BYTES + TAPS * TAP_BYTES;
    const unsigned base = smem_address(memory), stages_at = base + BARRIERS_BYTES;
    const int pair = blockIdx.x % p.pairs, tile = blockIdx.x / p.pairs % p.tiles, utterance = blockIdx.x / p.pairs / p.tiles;
    const int first_bin = pair * p.step + p.first, first_frame = tile * FRAMES;
    const int begin = first_bin < 0 ? -first_bin : 0;
    const int end = first_bin + p.rows > p.bins_in ? p.bins_in - first_bin : p.rows;
    const Stages<STAGES, 8> stages(base);
    const int group = threadIdx.x / 128;
    if (group == 2) {
        const int thread = threadIdx.x - 256;
        for (int n = 0; n < end - begin; n++) {
            const int row = begin + n;
            const unsigned stage = stages_at + n % STAGES * STAGE_BYTES;
            stages.wait_empty(n);
            const unsigned short* bin = p.x + (size_t(utterance) * p.bins_in + first_bin + row) * p.frames * CHANNELS;
            copy_window(stage, bin, true, first_frame - TAPS / 2, ROWS, ROW_STRIDE, p.frames, thread);
            const unsigned short* taps = p.weights + size_t(row) * TAPS * TAP_BYTES / 2;
            for (int i = thread; i < TAPS * TAP_BYTES / 16; i += PRODUCERS)
                copy_async_16(stage + WINDOW_BYTES + i * 16, taps + i * 8, true);
            stages.template asked<STAGES - 2>(n);
        }
        stages.template finished<STAGES - 2>(end - begin);
        return;
    }
    float sums[N / 2] = {};
    for (int n = 0; n < end - begin; n++) {
        const unsigned stage = stages_at + n % STAGES * STAGE_BYTES;
        stages.wait_full(n);
        products_fence();
        const auto taps = operand_at(stage + WINDOW_BYTES, PAIR * 16, 128);
        const auto window = operand_at(stage + group * N * 16, ROW_STRIDE * 16, 128);
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                Product<N, false>::add(sums, taps + (tap * TAP_BYTES + half * 2 * PAIR * 16) / 16,
                                       window + tap + half * 2 * ROW_STRIDE);
        products_commit();
        products_wait();
        stages.emptied(n);
    }
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int below = 0; below < 2; below++) {
        const int bin = 2 * pair + (row + 8 * below) / CHANNELS, channel = (row + 8 * below) % CHANNELS;
        unsigned short* to = p.y + (size_t(utterance) * p.bins_out + bin) * p.frames * CHANNELS + channel;
        if (bin >= p.bins_out) continue;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const int frame = first_frame + group * N + 8 * j + lane % 4 * 2;
            const float both[2] = {sums[4 * j + 2 * below], sums[4 * j + 2 * below + 1]};
            const unsigned word = Bf16::pack(both);
            if (frame < p.frames) to[size_t(frame) * CHANNELS] = static_cast<unsigned short>(word);
            if (frame + 1 < p.frames) to[size_t(frame + 1) * CHANNELS] = static_cast<unsigned short>(word >> 16);
        }
    }
}

struct WeightSums {
    const unsigned short* x;       // (B, bins_in, T, 32)
    const unsigned short* grad_y;  // (B, bins_out, T, 32)
    float* partial;                // (splits, pairs, TAPS, 64, 32): taps 2 d and 2 d + 1 of bins by input channel, output channel
    int utterances, bins_in, bins_out, frames, stride, first, pairs, splits, tiles;
};

// partial[d][tap][h][i][o] = sum over b, f, t of x[f stride + first + 2 d + h][t + tap - TAPS / 2][i] grad_y[f][t][o]. Block: a pair
// of taps of bins and a share of all (b, f, tile of frames); one warp group multiplies, the other fills stages.
template <int FRAMES, int TAPS, int STAGES>
__device__ void sum_weights(const WeightSums& p, unsigned char* memory) {
    constexpr int ROWS = FRAMES + TAPS - 1, ROW_STRIDE = padded_rows(ROWS), GRAD_STRIDE = padded_rows(FRAMES);
    constexpr int WINDOW_BYTES = CHUNKS * ROW_STRIDE * 16, STAGE_BYTES = 2 * WINDOW_BYTES + CHUNKS * GRAD_STRIDE * 16;
    const unsigned base = smem_address(memory), stages_at = base + BARRIERS_BYTES;
    const int pair = blockIdx.x % p.pairs, split = blockIdx.x / p.pairs;
    const Stages<STAGES, 4> stages(base);
    const int items = p.utterances * p.bins_out * p.tiles;
    const int begin = int(static_cast<long long>(items) * split / p.splits);
    const int end = int(static_cast<long long>(items) * (split + 1) / p.splits);
    if (threadIdx.x >= 128) {
        const int thread = threadIdx.x - 128;
        for (int n = 0; n < end - begin; n++) {
            const int item = begin + n, tile = item % p.tiles, plane = item / p.tiles, utterance = plane / p.bins_out;
            const int bin = (plane - utterance * p.bins_out) * p.stride + p.first + 2 * pair, frame = tile * FRAMES;
            const unsigned stage = stages_at + n % STAGES * STAGE_BYTES;
            stages.wait_empty(n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const bool exists = bin + h >= 0 && bin + h < p.bins_in;
                const unsigned short* from =
                    p.x + (size_t(utterance) * p.bins_in + (exists ? bin + h : 0)) * p.frames * CHANNELS;
                copy_window(stage + h * WINDOW_BYTES, from, exists, frame - TAPS / 2, ROWS, ROW_STRIDE, p.frames, thread);
            }
            const unsigned short* grad = p.grad_y + size_t(plane) * p.frames * CHANNELS;
            copy_window(stage + 2 * WINDOW_BYTES, grad, true, frame, FRAMES, GRAD_STRIDE, p.frames, thread);
            stages.template asked<STAGES - 2>(n);
        }
        stages.template finished<STAGES - 2>(end - begin);
        return;
    }
    float sums[TAPS][CHANNELS / 2] = {};
    for (int n = 0; n < end - begin; n++) {
        const unsigned stage = stages_at + n % STAGES * STAGE_BYTES;
        stages.wait_full(n);
        products_fence();
        const auto window = operand_at(stage, 128, ROW_STRIDE * 16);
        const auto grad = operand_at(stage + 2 * WINDOW_BYTES, 128, GRAD_STRIDE * 16);
#pragma unroll
        for (int step = 0; step < FRAMES / 16; step++)
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                Product<CHANNELS, true>::add(sums[tap], window + 16 * step + tap, grad + 16 * step);
        products_commit();
        products_wait();
        stages.emptied(n);
    }
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float* to = p.partial + (size_t(split) * p.pairs + pair) * TAPS * PAIR * CHANNELS;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
        for (int i = 0; i < CHANNELS / 2; i++) {
            const int at = (tap * PAIR + row + i / 2 % 2 * 8) * CHANNELS + i / 4 * 8 + lane % 4 * 2 + i % 2;
            to[at] = sums[tap][i];
        }
}

// The same without taps over frames and with stride 1, where a block would only load: all pairs of taps at once. Bins come one
// after the other into a ring of which a bin of the gradient meets the last 2 PAIRS - 1; a pair that begins in the ring's last slot
// ends in a copy of the first. Block: every `splits`-th (utterance, tile of frames).
template <int FRAMES, int PAIRS, int AHEAD>
__device__ void sum_weights_of_bins(const WeightSums& p, unsigned char* memory) {
    constexpr int SPAN = 2 * PAIRS - 2, SLOTS = SPAN + AHEAD, ROW_STRIDE = padded_rows(FRAMES);
    constexpr int SLOT_BYTES = CHUNKS * ROW_STRIDE * 16, HEAD_BYTES = (SLOTS * 16 + 127) / 128 * 128;
    const unsigned base = smem_address(memory), ring = base + HEAD_BYTES, grads = ring + (SLOTS + 1) * SLOT_BYTES;
    const Stages<SLOTS, 4> stages(base);
    const int bins = p.bins_out + SPAN, columns = p.utterances * p.tiles;
    const int own = (columns - int(blockIdx.x) + p.splits - 1) / p.splits, count = own * bins;
    if (threadIdx.x >= 128) {
        const int thread = threadIdx.x - 128;
        for (int n = 0; n < count; n++) {
            const int column = blockIdx.x + n / bins * p.splits, utterance = column / p.tiles, tile = column % p.tiles;
            const int bin = n % bins + p.first, grad_bin = n % bins - SPAN, slot = n % SLOTS;
            if (n >= AHEAD) barrier_wait(stages.empty(n - AHEAD), (n - AHEAD) / SLOTS % 2, "an empty slot", n);
            const bool exists = bin >= 0 && bin < p.bins_in;
            const unsigned short* from = p.x + (size_t(utterance) * p.bins_in + (exists ? bin : 0)) * p.frames * CHANNELS;
            for (int copy = slot; copy <= SLOTS; copy += SLOTS)
                copy_window(ring + copy * SLOT_BYTES, from, exists, tile * FRAMES, FRAMES, ROW_STRIDE, p.frames, thread);
            if (grad_bin >= 0) {
                const unsigned short* grad = p.grad_y + (size_t(utterance) * p.bins_out + grad_bin) * p.frames * CHANNELS;
                copy_window(grads + n % AHEAD * SLOT_BYTES, grad, true, tile * FRAMES, FRAMES, ROW_STRIDE, p.frames, thread);
            }
            stages.template asked<AHEAD - 2>(n);
        }
        stages.template finished<AHEAD - 2>(count);
        return;
    }
    float sums[PAIRS][CHANNELS / 2] = {};
    for (int n = 0; n < count; n++) {
        stages.wait_full(n);
        if (n % bins >= SPAN) {
            products_fence();
            const auto grad = operand_at(grads + n % AHEAD * SLOT_BYTES, 128, ROW_STRIDE * 16);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const int slot = (n - SPAN + 2 * pair) % SLOTS;
                const auto window = operand_at(ring + slot * SLOT_BYTES, 128, ROW_STRIDE * 16);
#pragma unroll
                for (int step = 0; step < FRAMES / 16; step++)
                    Product<CHANNELS, true>::add(sums[pair], window + 16 * step, grad + 16 * step);
            }
            products_commit();
            products_wait();
        }
        stages.emptied(n);
    }
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float* to = p.partial + size_t(blockIdx.x) * PAIRS * PAIR * CHANNELS;
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
        for (int i = 0; i < CHANNELS / 2; i++) {
            const int at = (pair * PAIR + row + i / 2 % 2 * 8) * CHANNELS + i / 4 * 8 + lane % 4 * 2 + i % 2;
            to[at] = sums[pair][i];
        }
}

}  // namespace ds2
