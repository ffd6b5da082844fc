// The labels of prefixes that a beam search (beam.cuh) left: read out at the end, or kept from chunk to chunk.
// Shape letters: T frames, B utterances, K beam, N best prefixes, L labels that there is place for, M taken away at once.
#pragma once

#include "ctc/select.cuh"
#include "ptx/sync.cuh"

namespace ds2 {

// What prefixes spell that go on from chunk to chunk.
struct Spelled {
    const long long* frames;  // (B) of the last chunk
    const int* places;        // (B) rows of the tables
    const int2* grown;        // (B, T, K) of the last chunk
    const double* halves;     // (2, rows, K) after it
    const long long* names;   // (rows, K, 4) after it
    const short* before;      // (B, K, L) labels before it
    const int* had;           // (B, K) how many
    short* labels;            // (rows, K, L)
    int* counts;              // (rows, K)
    short* certain;           // (B, M + 2): how many first labels all share, how many a prefix has left, the first
    int length, rows, beam, room, most;  // T, K, L, M
};

// Puts a chunk's labels behind those before it; what all prefixes share, M at most, goes to the utterance. A block each.
template <int THREADS>
struct Speller {
    const Spelled& spelled;
    int* counts;  // (K) and (M) flags in shared memory
    int* differs;
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, utterance = blockIdx.x;
    const int beam = spelled.beam, room = spelled.room;
    const size_t first = size_t(spelled.places[blockIdx.x]) * spelled.beam;  // of its prefixes

    __device__ Speller(const Spelled& spelled_, unsigned char* shared)
        : spelled(spelled_), counts(reinterpret_cast<int*>(shared)), differs(counts + spelled_.beam) {}

    __device__ void run() {
        for (int k = warp; k < beam; k += THREADS / 32) append(k);
        __syncthreads();
        int least = room, most = 0, example = -1;  // all threads find the same
        for (int k = 0; k < beam; k++) {
            if (counts[k] < 0) continue;
            if (example < 0) example = k;
            least = counts[k] < least ? counts[k] : least;
            most = counts[k] > most ? counts[k] : most;
        }
        if (example < 0) least = 0;
        least = least < spelled.most ? least : spelled.most;
        for (int i = thread; i < least; i += THREADS) {
            int other = 0;
            for (int k = 0; k < beam; k++) other |= counts[k] >= 0 && label(k, i) != label(example, i);
            differs[i] = other;
        }
        __syncthreads();
        int shared_labels = 0;
        while (shared_labels < least && !differs[shared_labels]) shared_labels++;
        short* out = spelled.certain + size_t(utterance) * (spelled.most + 2);
        if (thread == 0) out[0] = short(shared_labels), out[1] = short(most - shared_labels);
        for (int i = thread; i < shared_labels; i += THREADS) out[2 + i] = label(example, i);
        __syncthreads();
        if (shared_labels > 0)
            for (int k = warp; k < beam; k += THREADS / 32) drop(k, shared_labels);
    }

  private:
    __device__ short& label(int k, int i) const { return spelled.labels[(first + k) * room + i]; }

    __device__ void append(int k) {
        const int2* own = spelled.grown + size_t(utterance) * spelled.length * beam;
        int entry = int(spelled.names[4 * (first + k) + 3]), added = 0;
        const bool heard = spelled.frames[utterance] > 0;
        if (!heard) entry = -1 - k;
        const int last = entry;
        for (; entry > 0; added++) entry = own[entry - 1].x;
        const int from = -1 - entry, had = spelled.had[size_t(utterance) * beam + from];
        const short* before = spelled.before + (size_t(utterance) * beam + from) * room;
        for (int i = lane; i < had; i += 32) label(k, i) = before[i];
        if (lane == 0) {
            int at = had + added;
            for (int e = last; e > 0; e = own[e - 1].x) label(k, --at) = short(own[e - 1].y);
            spelled.counts[first + k] = had + added;
            const double none_here = none();
            const bool alive = spelled.halves[first + k] > none_here
                || spelled.halves[size_t(spelled.rows) * beam + first + k] > none_here;
            counts[k] = alive ? had + added : -1;
        }
    }

    __device__ void drop(int k, int shared_labels) {
        const int count = spelled.counts[first + k], left = count > shared_labels ? count - shared_labels : 0;
        for (int start = 0; start < left; start += 32) {
            const int i = start + lane;
            const short moved = i < left ? label(k, i + shared_labels) : short(0);
            __syncwarp();
            if (i < left) label(k, i) = moved;
            __syncwarp();
        }
        if (lane == 0) spelled.counts[first + k] = left;
    }
};

// Follows entries (B, N) to the root: labels (B, N, T), the last first, and -1 after them.
__device__ inline void trace_entries(const long long* entries, const int2* grown, short* labels, int count, int utterances,
                                     int slots, int width) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= utterances * count) return;
    const int2* own = grown + size_t(at / count) * slots;
    int turn = 0;
    for (int entry = int(entries[at]); entry > 0; turn++) {
        const int2 made = own[entry - 1];
        labels[size_t(at) * width + turn] = short(made.y);
        entry = made.x;
    }
    if (turn < width) labels[size_t(at) * width + turn] = -1;
}

}  // namespace ds2
