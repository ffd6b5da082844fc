// The best of many scores, chosen by a whole block without sorting: a histogram of their distances to the best score, refined
// digit by digit until it parts those wanted from the rest. What is chosen, and its rank, depends on the scores and their
// places alone, not on the order in which threads run.
#pragma once

namespace ds2 {

constexpr unsigned ALL = 0xffffffffu;
constexpr int DIGIT_BITS = 8, BINS = 1 << DIGIT_BITS, KEY_BITS = 7 * DIGIT_BITS;
constexpr double MOST_DISTANCE = 1e6;  // scores further from the best than this are told apart by place only

__device__ inline double none() { return __longlong_as_double(0xfff0000000000000ll); }  // log 0

// The largest of a warp's doubles, as integers in the same order.
__device__ inline unsigned long long ordered(double value) {
    const unsigned long long bits = __double_as_longlong(value);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ inline double from_ordered(unsigned long long code) {
    return __longlong_as_double(code >> 63 ? code & ~(1ull << 63) : ~code);
}
__device__ inline unsigned long long warp_max(unsigned long long code) {
    const unsigned high = __reduce_max_sync(ALL, unsigned(code >> 32));
    const unsigned low = __reduce_max_sync(ALL, unsigned(code >> 32) == high ? unsigned(code) : 0u);
    return (unsigned long long)(high) << 32 | low;
}

template <int WARPS>
struct SelectionMemory {
    unsigned long long best[WARPS];
    int histogram[BINS];  // bin b at (b % 8) x 32 + b / 8: a lane adds up 8 consecutive ones without bank conflicts
    int above[WARPS], level[WARPS];
};

// Use: clear and offer, a barrier, choose, which ends with one.
template <int WARPS>
struct Selection {
    static constexpr int THREADS = 32 * WARPS;
    static_assert(THREADS >= BINS, "a thread clears one bin");

    SelectionMemory<WARPS>& memory;
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ void clear() {
        if (thread < BINS) memory.histogram[thread] = 0;
    }

    // The best score that a thread knows of.
    __device__ void offer(double best) {
        const unsigned long long code = warp_max(ordered(best));
        if (lane == 0) memory.best[warp] = code;
    }

    // Calls take(rank, place) for the `wanted` best scores that are above -inf and no further than `prune` from the best:
    // ranks are 0, 1, ... without gaps, and of scores that tie the first places win.
    template <class Take>
    __device__ void choose(const double* scores, int count, int wanted, double prune, Take take) {
        double best = none();
        for (int w = 0; w < WARPS; w++) {
            const double other = from_ordered(memory.best[w]);
            best = other > best ? other : best;
        }
        const Keys keys{best, prune, double(1ll << KEY_BITS) / (prune < MOST_DISTANCE ? prune : MOST_DISTANCE)};
        long long prefix = 0;
        int shift = KEY_BITS;
        for (;;) {
            shift -= DIGIT_BITS;
            for (int place = thread; place < count; place += THREADS) {
                const long long key = keys.of(scores[place]);
                if (key < 0 || key >> shift >> DIGIT_BITS != prefix) continue;
                const int bin = int(key >> shift & (BINS - 1));
                atomicAdd(memory.histogram + bin % (BINS / 32) * 32 + bin / (BINS / 32), 1);
            }
            __syncthreads();
            const Cut cut = find_cut(wanted);
            wanted -= cut.before;
            prefix = prefix * BINS + cut.bin;
            if (cut.level == wanted || cut.bin == BINS || shift == 0) break;
            __syncthreads();
            clear();
            __syncthreads();
        }
        list(scores, count, keys, prefix, shift, wanted, take);
    }

  private:
    struct Keys {
        double best, prune, scale;
        // Distance to the best as an integer of KEY_BITS bits, or -1: out.
        __device__ long long of(double score) const {
            if (!(score > none() && score >= best - prune)) return -1;
            const double distance = (best - score) * scale;
            return distance < double(1ll << KEY_BITS) ? (long long)(distance) : (1ll << KEY_BITS) - 1;
        }
    };

    struct Cut {
        int bin, before, level;  // the bin that holds the wanted-th score, how many are in better ones, and in it
    };
    __device__ Cut find_cut(int wanted) const {
        int counts[BINS / 32], sum = 0;
        for (int i = 0; i < BINS / 32; i++) sum += counts[i] = memory.histogram[i * 32 + lane];
        int upto = sum;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(ALL, upto, distance);
            if (lane >= distance) upto += other;
        }
        const unsigned crossed = __ballot_sync(ALL, upto >= wanted);
        if (crossed == 0) return {BINS, 0, 0};  // all are wanted
        int bin = 0, before = upto - sum, level = counts[0];
        for (int i = 1; i < BINS / 32; i++) {
            if (bin == i - 1 && before + level < wanted) before += level, level = counts[i], bin = i;
        }
        const int owner = __ffs(crossed) - 1;
        return {owner * (BINS / 32) + __shfl_sync(ALL, bin, owner), __shfl_sync(ALL, before, owner),
                __shfl_sync(ALL, level, owner)};
    }

    // Those above the cut in the order of their places, then `wanted` of those level with it.
    template <class Take>
    __device__ void list(const double* scores, int count, const Keys& keys, long long prefix, int shift, int wanted,
                         Take take) {
        const int chunk = (count + THREADS - 1) / THREADS * 32, first = warp * chunk;
        const int end = first + chunk < count ? first + chunk : count;
        int above = 0, level = 0;
        for (int base = first; base < end; base += 32) {
            const long long key = base + lane < end ? keys.of(scores[base + lane]) : -1;
            above += __popc(__ballot_sync(ALL, key >= 0 && key >> shift < prefix));
            level += __popc(__ballot_sync(ALL, key >= 0 && key >> shift == prefix));
        }
        if (lane == 0) memory.above[warp] = above, memory.level[warp] = level;
        __syncthreads();
        int all_above = 0;
        above = level = 0;
        for (int w = 0; w < WARPS; w++) {
            all_above += memory.above[w];
            above += w < warp ? memory.above[w] : 0;
            level += w < warp ? memory.level[w] : 0;
        }
        const unsigned below = (1u << lane) - 1;
        for (int base = first; base < end; base += 32) {
            const int place = base + lane;
            const long long key = place < end ? keys.of(scores[place]) : -1;
            const bool is_above = key >= 0 && key >> shift < prefix, is_level = key >= 0 && key >> shift == prefix;
            const unsigned those_above = __ballot_sync(ALL, is_above), those_level = __ballot_sync(ALL, is_level);
            const int rank = level + __popc(those_level & below);
            if (is_above) take(above + __popc(those_above & below), place);
            if (is_level && rank < wanted) take(all_above + rank, place);
            above += __popc(those_above);
            level += __popc(those_level);
        }
        __syncthreads();
    }
};

}  // namespace ds2
