// CTC loss of a batch: forward and backward variables in one launch, two blocks an utterance, then the gradient, a block a
// frame of an utterance (Graves et al. 2006, section 4.1). No atomics, no waits between blocks: the same bits on every run.
//
// State 2 i + 1 is label i of the target, the even ones are blanks between. A path stays, goes to the next state, or leaves
// out a blank between two labels that differ. Lengths are read on the GPU; what lies past them is never looked at.
//
// With a delay penalty p a path counts exp(p d) times, d the sum over labels of (frames - 1) / 2 less the label's first
// frame (Yao et al. 2023, "Delay-penalized CTC implemented based on finite state transducer"): see `earliness`.
// Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target, S = 2 L + 1 states.
#pragma once

namespace ds2 {

constexpr int LOSS_THREADS = 256;

struct Paths {
    const float* log_probs;     // (T, B, V)
    const long long* frames;    // (B) valid frames
    const long long* labels;    // (B, L)
    const long long* sizes;     // (B) labels of each target
    float* alpha;               // (B, T, S) log-prob of all ways to a state, its frame's emission included
    float* beta;                // (B, T, S) log-prob of all ways from a state to the end, likewise
    float* losses;              // (B) nats; infinite: fewer frames than the labels need
    int length, batch, vocabulary, longest;
    float delay_penalty;        // natural log a label and frame; 0: plain CTC
};

struct Slopes {
    const float* log_probs;     // as in Paths, which filled alpha, beta and losses
    const long long* frames;
    const long long* labels;
    const long long* sizes;
    const float* alpha;
    const float* beta;
    const float* losses;
    const float* grad_losses;   // (B)
    float* grad_logits;         // (T, B, V)
    int length, batch, vocabulary, longest;
    float delay_penalty;        // natural log a label and frame; 0: plain CTC
};

__device__ inline float log_sum(float a, float b, float c) {
    const float most = fmaxf(a, fmaxf(b, c));
    if (!(most > -__int_as_float(0x7f800000))) return a + b + c;  // nothing but -inf, and NaN where there is one
    return most + logf(expf(a - most) + expf(b - most) + expf(c - most));
}

// What a state adds to a path's log-prob in a frame. It counts the labels that have started, less a share that grows evenly
// from frame to frame and keeps the sums small. Along a path it adds up to delay_penalty d.
__device__ inline float earliness(float delay_penalty, int state, int size, int frame, int frames) {
    return delay_penalty * (float((state + 1) / 2) - float(size) * float(frame + 1) / float(frames));
}

// Blocks 2 b and 2 b + 1 run utterance b from its start and, frames and states mirrored, from its end. `memory` is shared:
// two rows of log-probs (V), two of scores (S), and the label of each state (S), as ~label where a path may leave out the
// blank before it.
__device__ inline void sum_paths(const Paths& p, float* memory) {
    const int utterance = blockIdx.x / 2, mirrored = blockIdx.x % 2, stride = 2 * p.longest + 1;
    const int frames = int(p.frames[utterance]), size = int(p.sizes[utterance]), states = 2 * size + 1;
    const float none = -__int_as_float(0x7f800000);
    const long long* labels = p.labels + size_t(utterance) * p.longest;
    float* rows = memory;
    float* scores = memory + 2 * p.vocabulary;
    int* label_of = reinterpret_cast<int*>(scores + 2 * stride);
    float* result = (mirrored ? p.beta : p.alpha) + size_t(utterance) * p.length * stride;
    const auto row_of = [&](int step) {
        return p.log_probs + (size_t(mirrored ? frames - 1 - step : step) * p.batch + utterance) * p.vocabulary;
    };
    for (int s = threadIdx.x; s < states; s += LOSS_THREADS) {
        const int i = mirrored ? size - 1 - s / 2 : s / 2;
        const int label = s % 2 ? int(labels[i]) : 0;
        label_of[s] = s > 2 && s % 2 && label != int(labels[mirrored ? i + 1 : i - 1]) ? ~label : label;
    }
    if (frames > 0)
        for (int v = threadIdx.x; v < p.vocabulary; v += LOSS_THREADS) rows[v] = row_of(0)[v];
    const bool mine = int(threadIdx.x) < p.vocabulary;
    // A row takes longer to come from L2 than a step: it is asked for two steps ahead.
    float coming = mine && frames > 1 ? row_of(1)[threadIdx.x] : 0.0f;
    __syncthreads();
    for (int step = 0; step < frames; step++) {
        const bool more = step + 1 < frames;
        const float after_it = mine && step + 2 < frames ? row_of(step + 2)[threadIdx.x] : 0.0f;
        const float* row = rows + step % 2 * p.vocabulary;
        float* next_row = rows + (step + 1) % 2 * p.vocabulary;
        const float* before = scores + (step + 1) % 2 * stride;
        float* now = scores + step % 2 * stride;
        const int frame = mirrored ? frames - 1 - step : step;
        for (int s = threadIdx.x; s < states; s += LOSS_THREADS) {
            const int code = label_of[s], label = code < 0 ? ~code : code;
            float sum = s < 2 ? 0.0f : none;
            if (step > 0) {
                const bool skips = code < 0;
                sum = log_sum(before[s], s > 0 ? before[s - 1] : none, skips ? before[s - 2] : none);
            }
            const int state = mirrored ? states - 1 - s : s;
            now[s] = sum + row[label] + earliness(p.delay_penalty, state, size, frame, frames);
            result[size_t(frame) * stride + state] = now[s];
        }
        if (mine) next_row[threadIdx.x] = coming;
        coming = after_it;
        if (more && p.vocabulary > LOSS_THREADS)
            for (int v = threadIdx.x + LOSS_THREADS; v < p.vocabulary; v += LOSS_THREADS) next_row[v] = row_of(step + 1)[v];
        __syncthreads();
    }
    if (threadIdx.x != 0 || mirrored) return;
    const float* last = scores + (frames + 1) % 2 * stride;
    if (frames > 0)
        p.losses[utterance] = -log_sum(last[states - 1], size > 0 ? last[states - 2] : none, none);
    else
        p.losses[utterance] = size > 0 ? -none : 0.0f;
}

// Block t B + b. `memory` is shared: the share of each state in frame t (S), and the labels (L).
__device__ inline void slope_of_frame(const Slopes& p, float* memory) {
    const int frame = blockIdx.x / p.batch, utterance = blockIdx.x % p.batch, stride = 2 * p.longest + 1;
    const int frames = int(p.frames[utterance]), size = int(p.sizes[utterance]), states = 2 * size + 1;
    const size_t at = (size_t(frame) * p.batch + utterance) * p.vocabulary;
    const float* row = p.log_probs + at;
    float* grad = p.grad_logits + at;
    if (frame >= frames) {
        for (int v = threadIdx.x; v < p.vocabulary; v += LOSS_THREADS) grad[v] = 0.0f;
        return;
    }
    float* shares = memory;
    int* labels = reinterpret_cast<int*>(memory + stride);
    const size_t first = (size_t(utterance) * p.length + frame) * stride;
    const float loss = p.losses[utterance], weight = p.grad_losses[utterance];
    for (int s = threadIdx.x; s < states; s += LOSS_THREADS) {
        const int label = s % 2 ? int(p.labels[size_t(utterance) * p.longest + s / 2]) : 0;
        // alpha and beta both hold what a state adds in their frame: one of them goes
        const float emitted = row[label] + earliness(p.delay_penalty, s, size, frame, frames);
        const float log_share = p.alpha[first + s] + p.beta[first + s] - emitted + loss;
        shares[s] = log_share < __int_as_float(0x7f800000) ? expf(log_share) : 0.0f;
        if (s % 2) labels[s / 2] = label;
    }
    __syncthreads();
    for (int v = threadIdx.x; v < p.vocabulary; v += LOSS_THREADS) {
        float share = v == 0 ? shares[2 * size] : 0.0f;
        for (int i = 0; i < size; i++) {
            if (v == 0) share += shares[2 * i];
            if (labels[i] == v) share += shares[2 * i + 1];
        }
        grad[v] = (expf(row[v]) - share) * weight;
    }
}

}  // namespace ds2
