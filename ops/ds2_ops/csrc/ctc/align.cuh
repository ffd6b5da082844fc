// Forced alignment (Viterbi) of a batch in one launch: a block an utterance, the scores of a frame in shared memory.
//
// State 2 i + 1 is label i of the target, the even ones are blanks between. A path stays, goes to the next state, or leaves
// out a blank between two labels that differ.
// Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target, S = 2 L + 1 states.
#pragma once

namespace ds2 {

constexpr int ALIGN_THREADS = 256;

struct Targets {
    const float* log_probs;     // (T, B, V)
    const long long* frames;    // (B) valid frames, at least 1
    const int* labels;          // (B, L)
    const int* sizes;           // (B) labels of each target
    unsigned char* moves;       // (B, T, S) how far each state's best path came
    float* log_prob;            // (B) of the best path; -inf: too few frames
    int* spans;                 // (B, 2, L) first frame of each label and the frame after its last
    float* peaks;               // (B, L) highest log-prob of each label on its frames
    int length, batch, vocabulary, longest;
};

// `scores` is (2, S) shared memory.
__device__ inline void align_utterance(const Targets& t, float* scores) {
    const int utterance = blockIdx.x, size = t.sizes[utterance], states = 2 * size + 1, stride = 2 * t.longest + 1;
    const int frames = int(t.frames[utterance]);
    const int* labels = t.labels + size_t(utterance) * t.longest;
    unsigned char* moves = t.moves + size_t(utterance) * t.length * stride;
    const float none = -__int_as_float(0x7f800000);
    for (int frame = 0; frame < frames; frame++) {
        const float* row = t.log_probs + (size_t(frame) * t.batch + utterance) * t.vocabulary;
        const float* before = scores + (frame + 1) % 2 * stride;
        float* now = scores + frame % 2 * stride;
        for (int s = threadIdx.x; s < states; s += ALIGN_THREADS) {
            const int label = s % 2 ? labels[s / 2] : 0;
            int move = 0;
            float best = s < 2 ? 0.0f : none;
            if (frame > 0) {
                best = before[s];
                if (s > 0 && before[s - 1] > best) best = before[s - 1], move = 1;
                if (s > 2 && s % 2 && label != labels[s / 2 - 1] && before[s - 2] > best) best = before[s - 2], move = 2;
            }
            now[s] = best + row[label];
            moves[size_t(frame) * stride + s] = (unsigned char)(move);
        }
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const float* last = scores + (frames - 1) % 2 * stride;
    int state = size > 0 && last[states - 2] > last[states - 1] ? states - 2 : states - 1;
    t.log_prob[utterance] = last[state];
    int* starts = t.spans + size_t(utterance) * 2 * t.longest;
    float peak = none;
    for (int frame = frames - 1; frame >= 0; frame--) {
        const int move = moves[size_t(frame) * stride + state];
        if (state % 2) {
            const int label = state / 2;
            const float value = t.log_probs[(size_t(frame) * t.batch + utterance) * t.vocabulary + labels[label]];
            if (peak == none) starts[t.longest + label] = frame + 1;
            peak = value > peak ? value : peak;
            starts[label] = frame;
            t.peaks[size_t(utterance) * t.longest + label] = peak;
        }
        if (move > 0) peak = none;
        state -= move;
    }
}

}  // namespace ds2
