// Row convolutions one behind the other on a block of a stream, and the skip around them, in one pass.
//
//   r_t = sum over j = 0 .. TAU of w_j h_(t + j), N times;  out_t = r_t + skip_t
//
// A block's first outputs belong to frames before it: each convolution carries its last TAU inputs, the skip the N TAU frames
// that wait for the convolutions. Every feature of every utterance is on its own: a thread takes a word of them through all
// frames, what is carried in registers. Sums are fp32, rounded behind each convolution as if it were a launch of its own.
// What is carried lies in a table of P places, where this launch finds it and leaves it: a thread has read a row before it
// writes it, since what it writes to a row was in one behind it.
// Shape letters: T frames, B batch, H hidden, R = N TAU rows that are carried, twice that with a skip.
#pragma once

#include "ptx/number.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

struct Chain {
    const unsigned* y;     // (T, B, H), as words
    const unsigned* taps;  // (N, TAU + 1, H)
    unsigned* held;        // (R, P, H)
    const long long* places;  // (B) or null: utterance b has place b
    const unsigned* skip;  // (T, B, H) or null
    unsigned* out;         // (T, B, H)
    int frames, words, row_words, places_words;  // words of (B, H), of H, and of (P, H)
};

template <class Number, int N, int TAU, bool SKIP, int THREADS>
__device__ void chain(const Chain& given) {
    constexpr int PER_WORD = Number::PER_WORD, WAITING = N * TAU, TURN = 8, TAPS = N * (TAU + 1);
    release_kernel_behind();
    const int word = blockIdx.x * THREADS + threadIdx.x;
    const bool exists = word < given.words;
    unsigned tap[TAPS + 1];
#pragma unroll
    for (int i = 0; i < TAPS; i++)
        tap[i] = load_early_4(given.taps + size_t(i) * given.row_words + (exists ? word % given.row_words : 0));
    await_kernel_before();
    if (!exists) return;
    const size_t step = given.words, held_step = given.places_words;
    const int at = word / given.row_words;
    unsigned* const held = given.held + (given.places ? given.places[at] : at) * given.row_words + word % given.row_words;
    // What is added to frame t: of the skip's frames those that wait come first.
    const auto skipped = [&](int t) {
        return t < WAITING ? held[(WAITING + t) * held_step] : given.skip[(t - WAITING) * step + word];
    };
    unsigned window[N + 1][TAU + 1];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < TAU; i++) window[n][i] = held[(n * TAU + i) * held_step];
    for (int first = 0; first < given.frames; first += TURN) {
        unsigned in[TURN], beside[TURN];
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            const bool there = first + i < given.frames;
            in[i] = there ? given.y[(first + i) * step + word] : 0;
            beside[i] = SKIP && there ? skipped(first + i) : 0;
        }
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            if (first + i >= given.frames) break;
            float v[PER_WORD], w[PER_WORD], sum[PER_WORD];
#pragma unroll
            for (int n = 0; n < N; n++) {
                window[n][TAU] = in[i];
#pragma unroll
                for (int j = 0; j <= TAU; j++) {
                    Number::unpack(window[n][j], v);
                    Number::unpack(tap[n * (TAU + 1) + j], w);
#pragma unroll
                    for (int e = 0; e < PER_WORD; e++) sum[e] = j == 0 ? w[e] * v[e] : fmaf(w[e], v[e], sum[e]);
                }
#pragma unroll
                for (int j = 0; j < TAU; j++) window[n][j] = window[n][j + 1];
                in[i] = Number::pack(sum);
            }
            if (SKIP) {
                Number::unpack(in[i], v);
                Number::unpack(beside[i], w);
#pragma unroll
                for (int e = 0; e < PER_WORD; e++) v[e] += w[e];
                in[i] = Number::pack(v);
            }
            given.out[(first + i) * step + word] = in[i];
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < TAU; i++) held[(n * TAU + i) * held_step] = window[n][i];
    if (SKIP)
#pragma unroll
        for (int i = 0; i < WAITING; i++) held[(WAITING + i) * held_step] = skipped(given.frames + i);
}

}  // namespace ds2
