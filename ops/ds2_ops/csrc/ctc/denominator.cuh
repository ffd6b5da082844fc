// The sum over all label sequences that a graph weights, and its gradient: the denominator of CTC-CRF (Xiang and Ou 2019).
// Two blocks an utterance run forward and backward at once; then a block a frame sums the shares of its labels. No atomics,
// no waits between blocks: the same bits on every run.
//
// A path is in a node of the graph, and its last frame was the node's label or a blank. In a frame it stays, goes on to the
// blank, or takes an arc; from the label to the same label there is no arc without a blank between. A node may take the arcs
// of its parent too, for a share of its weight (back-off), so a parent's arcs are followed once for all its children.
// Scores are probabilities, scaled by a power of two a frame: sums of positive numbers, each rounded once.
// Rows are nodes in the order of their arcs' number, one numbering for each direction; 32 make a slice, a warp takes it. The
// arcs of a slice are stored arc by arc, lane by lane, as many for each lane as for the one with most. The row with most by
// far may be the first of each warp's first slice: all lanes share its arcs. Arcs that fit stay in shared memory. An arc is a
// word: 16 bits of weight, which is 2^-31 to 2 with 12 significant bits, above 16 bits of what it reads.
// Shape letters: T frames, B utterances, V labels (0 is the blank), P rows (padded nodes).
#pragma once

#include "ptx/sync.cuh"

namespace ds2 {

struct Arcs {
    const int* first;             // (slices + 1) arcs before each slice, then (warps + 1) before those that lanes share
    const unsigned* words;
};

struct Graph {
    const int* labels;          // (P) forward rows
    const float* ends;          // (P) weight of ending there
    Arcs arcs;                  // into each row, from row or P + parent; P + parents + 1 more: weight after blanks alone
    Arcs children;              // of each parent, from row
    const int* parent_rows;     // (parents) row of each; a multiple of 32 of them
    const int* parent_numbers;  // (P) backward rows: number of a parent, or -1
    int start, parents;          // a row; how many
    const int* mirrored_labels;  // (P) backward rows
    const float* mirrored_ends;
    Arcs mirrored_arcs;         // out of each row to other labels, to row
    const unsigned* same_words;   // (P) the arc to the same label, to row
    const unsigned* parent_words;  // (P) the share of the weight that takes the parent's arcs too, and the parent's number
};

struct Sums {
    const float* log_probs;   // (T, B, V)
    const long long* frames;  // (B) valid frames
    float* alpha;             // (B, T, P) of paths that end in the row's label, the frame's emission included
    float* beta;              // (B, T, P) from there to the end, without it
    int* alpha_exponent;      // (B, T) alpha is to be multiplied with 2 to the power of it
    int* beta_exponent;       // (B, T)
    float* mantissa;          // (B) the sum over all paths
    int* exponent;            // (B)
    int length, batch, vocabulary, rows, smem_bytes;
};

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The exponent of a positive number; 0 of others.
__device__ inline int exponent_of(float x) {
    const int exponent = int(__float_as_uint(x) >> 23);
    return exponent > 0 && exponent < 255 ? exponent - 127 : 0;
}

__device__ inline float weight_of(unsigned word) { return __int_as_float(int((word >> 4 & 0x0ffff000u) | 0x30000000u)); }

__device__ inline float warp_sum(float x) {
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// THREADS of a block, a multiple of 32; ROWS of a thread.
template <int THREADS, int ROWS>
struct DenominatorSums {
    static constexpr int WARPS = THREADS / 32;
    static_assert(THREADS % 32 == 0 && WARPS <= 32, "partial sums of warps are read by one warp's lanes");
    const Graph& graph;
    const Sums& sums;
    float* probs;    // (2, V) of this frame and of the next, in shared memory
    float* partial;  // (32) sums of warps
    float* values;   // forward (2, P + parents + 1), backward (P + 2) and (parents + 1, 2); what follows these is 0
    int* first = nullptr;  // of the arcs, in shared memory
    int near = 0;          // of the arcs' words are there
    int free_at = 0, arcs_at = -1, children_at = -1, same_at = -1, parents_at = -1;  // where words begin; -1: not there
    float coming = 0.0f;  // log-prob of a frame that is not needed yet
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, utterance = blockIdx.x / 2;
    const int frames = int(sums.frames[blockIdx.x / 2]), slices = sums.rows / 32;

    __device__ DenominatorSums(const Graph& graph_, const Sums& sums_, float* shared)
        : graph(graph_), sums(sums_), probs(shared), partial(shared + 2 * sums_.vocabulary),
          values(shared + (2 * sums_.vocabulary + 32 + 1) / 2 * 2) {}

    __device__ void run() {
        if (thread < 32) partial[thread] = 0.0f;
        if (blockIdx.x % 2) {
            keep_near(graph.mirrored_arcs, values + sums.rows + 2 * (graph.parents + 2));
            backward();
        } else {
            keep_near(graph.arcs, values + 2 * (sums.rows + graph.parents + 1));
            forward();
        }
    }

  private:
    __device__ const float* log_probs(int frame) const {
        return sums.log_probs + (size_t(frame) * sums.batch + utterance) * sums.vocabulary;
    }

    // Probabilities of a frame to shared memory. Those of small alphabets were asked for a frame ago: a row takes longer to
    // come from L2 than a step. `next`: the frame after it, or -1.
    __device__ void read_probs(int frame, int next) {
        float* to = probs + frame % 2 * sums.vocabulary;
        if (thread < sums.vocabulary) {
            to[thread] = expf(coming);
            if (next >= 0) coming = log_probs(next)[thread];
        }
        for (int v = thread + THREADS; v < sums.vocabulary; v += THREADS) to[v] = expf(log_probs(frame)[v]);
    }

    __device__ void ask_for(int frame) {
        if (thread < sums.vocabulary) coming = log_probs(frame)[thread];
    }

    // Copies the offsets of arcs to shared memory behind the values; then words, as long as they fit.
    __device__ void keep_near(const Arcs& arcs, float* after) {
        const int offsets = slices + 1 + WARPS + 1;
        first = reinterpret_cast<int*>(after);
        free_at = int(after - probs) + offsets;
        for (int i = thread; i < offsets; i += THREADS) first[i] = arcs.first[i];
        if (blockIdx.x % 2) {
            same_at = keep_near(graph.same_words, sums.rows);
            parents_at = keep_near(graph.parent_words, sums.rows);
        } else {
            children_at = keep_near(graph.children.words, graph.children.first[graph.parents / 32]);
        }
        const int fit = sums.smem_bytes / 4 - free_at, all = arcs.first[offsets - 1];
        near = fit < all ? fit : all;
        arcs_at = keep_near(arcs.words, near);
    }

    __device__ unsigned* shared_words() const { return reinterpret_cast<unsigned*>(probs); }

    // Returns where the copy begins in shared memory, or -1 if it does not fit.
    __device__ int keep_near(const unsigned* words, int count) {
        if (count > sums.smem_bytes / 4 - free_at) return -1;
        const int at = free_at;
        for (int i = thread; i < count; i += THREADS) shared_words()[at + i] = words[i];
        free_at += count;
        return at;
    }

    __device__ unsigned word(int at, const unsigned* words, int i) const {
        return at >= 0 ? shared_words()[at + i] : __ldg(words + i);
    }

    // Call between barriers; `partial` may be written after the next one.
    __device__ float total() const { return warp_sum(lane < WARPS ? partial[lane] : 0.0f); }

    __device__ float sum_arcs(const Arcs& arcs, int part) const {
        float sum = 0.0f;
        const int begin = first[part] + lane, end = first[part + 1];
        if (end <= near) {
#pragma unroll 4
            for (int arc = begin; arc < end; arc += 32) {
                const unsigned arc_word = shared_words()[arcs_at + arc];
                sum += weight_of(arc_word) * values[arc_word & 0xffff];
            }
        } else {
#pragma unroll 4
            for (int arc = begin; arc < end; arc += 32) {
                const unsigned arc_word = __ldg(arcs.words + arc);
                sum += weight_of(arc_word) * values[arc_word & 0xffff];
            }
        }
        return sum;
    }

    // The sum over the arcs of the row of this lane in slice `round` of this warp.
    __device__ float gather(const Arcs& arcs, int round) const {
        const float own = sum_arcs(arcs, round * WARPS + warp);
        if (round > 0) return own;
        const float together = warp_sum(sum_arcs(arcs, slices + 1 + warp));
        return lane == 0 ? own + together : own;
    }

    __device__ void forward() {
        float label_part[ROWS], blank_part[ROWS];
        int labels[ROWS];
        float* sources = values;
        float* blanks = values + sums.rows + graph.parents + 1;  // of the sources, the weight after a blank
        float* alpha = sums.alpha + size_t(utterance) * sums.length * sums.rows;
        int exponent = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = r * THREADS + thread;
            if (row >= sums.rows) continue;
            labels[r] = graph.labels[row];
            label_part[r] = 0.0f;
            blank_part[r] = row == graph.start ? 1.0f : 0.0f;
            sources[row] = blanks[row] = blank_part[r];
        }
        if (thread == 0) sources[sums.rows + graph.parents] = blanks[sums.rows + graph.parents] = 0.0f;
        if (frames > 0) {
            ask_for(0);
            read_probs(0, frames > 1 ? 1 : -1);
        }
        __syncthreads();
        for (int frame = 0; frame < frames; frame++) {
            const float* now = probs + frame % 2 * sums.vocabulary;
            const int down = exponent_of(total());
            const float scale = power_of_two(-down);
            exponent += down;
            if (thread == 0) sums.alpha_exponent[size_t(utterance) * sums.length + frame] = exponent;
            for (int slice = warp; slice < graph.parents / 32; slice += WARPS) {
                const int parent = slice * 32 + lane, row = graph.parent_rows[parent];
                float both = sources[row], blank = blanks[row];
                const int end = graph.children.first[slice + 1];
#pragma unroll 4
                for (int arc = graph.children.first[slice] + lane; arc < end; arc += 32) {
                    const unsigned arc_word = word(children_at, graph.children.words, arc), child = arc_word & 0xffff;
                    const float weight = weight_of(arc_word);
                    both += weight * sources[child];
                    blank += weight * blanks[child];
                }
                sources[sums.rows + parent] = both;
                blanks[sums.rows + parent] = blank;
            }
            if (frame + 1 < frames) read_probs(frame + 1, frame + 2 < frames ? frame + 2 : -1);
            __syncthreads();
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = r * THREADS + thread;
                if (row >= sums.rows) continue;
                const float came = gather(graph.arcs, r);
                blank_part[r] = (label_part[r] + blank_part[r]) * now[0] * scale;
                label_part[r] = (label_part[r] + came) * now[labels[r]] * scale;
                alpha[size_t(frame) * sums.rows + row] = label_part[r];
                sum += label_part[r] + blank_part[r];
            }
            sum = warp_sum(sum);
            if (lane == 0) partial[warp] = sum;
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = r * THREADS + thread;
                if (row >= sums.rows) continue;
                sources[row] = label_part[r] + blank_part[r];
                blanks[row] = blank_part[r];
            }
            __syncthreads();
        }
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = r * THREADS + thread;
            if (row < sums.rows) sum += (label_part[r] + blank_part[r]) * graph.ends[row];
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[warp] = sum;
        __syncthreads();
        const float all = total();
        if (thread == 0) {
            sums.mantissa[utterance] = all;
            sums.exponent[utterance] = exponent;
        }
    }

    __device__ void backward() {
        float label_part[ROWS], blank_part[ROWS];
        unsigned labels[ROWS];
        float* targets = values;
        float* sent = values + sums.rows + 2;
        float* beta = sums.beta + size_t(utterance) * sums.length * sums.rows;
        int exponent = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = r * THREADS + thread;
            if (row >= sums.rows) continue;
            labels[r] = unsigned(graph.mirrored_labels[row]) << 16 | unsigned(graph.parent_numbers[row] + 1);
            label_part[r] = blank_part[r] = graph.mirrored_ends[row];
            if (frames > 0) beta[size_t(frames - 1) * sums.rows + row] = label_part[r];
        }
        if (frames > 0) {
            ask_for(frames - 1);
            read_probs(frames - 1, frames - 2);
            if (thread == 0) sums.beta_exponent[size_t(utterance) * sums.length + frames - 1] = 0;
        }
        if (thread < 2) targets[sums.rows + thread] = sent[2 * graph.parents + thread] = 0.0f;
        __syncthreads();
        for (int frame = frames - 1; frame > 0; frame--) {
            const float* now = probs + frame % 2 * sums.vocabulary;
            const int down = exponent_of(total());
            const float scale = power_of_two(-down);
            exponent += down;
            if (thread == 0) sums.beta_exponent[size_t(utterance) * sums.length + frame - 1] = exponent;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = r * THREADS + thread;
                if (row >= sums.rows) continue;
                label_part[r] *= now[labels[r] >> 16] * scale;
                blank_part[r] *= now[0] * scale;
                targets[row] = label_part[r];
            }
            read_probs(frame - 1, frame - 2);
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = r * THREADS + thread;
                if (row >= sums.rows) continue;
                const float other = gather(graph.mirrored_arcs, r);
                const unsigned same_word = word(same_at, graph.same_words, row);
                const float same = weight_of(same_word) * targets[same_word & 0xffff];
                const int parent = int(labels[r] & 0xffff) - 1;
                if (parent >= 0) {
                    sent[2 * parent] = other;
                    sent[2 * parent + 1] = same;
                }
                label_part[r] += blank_part[r] + other;
                blank_part[r] += other + same;
            }
            __syncthreads();
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = r * THREADS + thread;
                if (row >= sums.rows) continue;
                const unsigned parent_word = word(parents_at, graph.parent_words, row);
                const float* of_parent = sent + 2 * (parent_word & 0xffff);
                const float share = weight_of(parent_word);
                label_part[r] += share * of_parent[0];
                blank_part[r] += share * (of_parent[0] + of_parent[1]);
                beta[size_t(frame - 1) * sums.rows + row] = label_part[r];
                sum += label_part[r] + blank_part[r];
            }
            sum = warp_sum(sum);
            if (lane == 0) partial[warp] = sum;
            __syncthreads();
        }
    }
};

constexpr int SHARES_THREADS = 256;

struct Shares {
    const float* log_probs;         // as in Sums, which filled the next six
    const long long* frames;
    const float* alpha;
    const float* beta;
    const int* alpha_exponent;
    const int* beta_exponent;
    const float* mantissa;
    const int* exponent;
    const float* grad_log_sums;     // (B)
    float* grad_logits;             // (T, B, V)
    const int* of_label;            // (V + 1) where a label's nodes begin in the next two; none of label 0
    const unsigned short* forward_row;
    const unsigned short* backward_row;
    int length, batch, vocabulary, rows;
};

// Block t B + b. `memory` is shared: the share of paths that emit each label in frame t (V), alpha (P) and beta (P).
__device__ inline void shares_of_frame(const Shares& p, float* memory) {
    const int frame = blockIdx.x / p.batch, utterance = blockIdx.x % p.batch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t at = (size_t(frame) * p.batch + utterance) * p.vocabulary;
    float* grad = p.grad_logits + at;
    if (frame >= p.frames[utterance]) {
        for (int v = threadIdx.x; v < p.vocabulary; v += SHARES_THREADS) grad[v] = 0.0f;
        return;
    }
    const size_t row = size_t(utterance) * p.length + frame;
    float* shares = memory;
    float* alpha = memory + p.vocabulary;
    float* beta = alpha + p.rows;
    // In two factors: neither overflows where alpha and beta are far below 1.
    const int up = p.alpha_exponent[row] + p.beta_exponent[row] - p.exponent[utterance];
    const float first = ldexpf(1.0f, up / 2), second = ldexpf(1.0f / p.mantissa[utterance], up - up / 2);
    for (int i = threadIdx.x; i < p.rows; i += SHARES_THREADS) {
        alpha[i] = p.alpha[row * p.rows + i] * first;
        beta[i] = p.beta[row * p.rows + i] * second;
    }
    __syncthreads();
    for (int v = warp; v < p.vocabulary; v += SHARES_THREADS / 32) {
        float sum = 0.0f;
        for (int i = p.of_label[v] + lane; i < p.of_label[v + 1]; i += 32)
            sum += alpha[p.forward_row[i]] * beta[p.backward_row[i]];
        sum = warp_sum(sum);
        if (lane == 0) shares[v] = sum;
    }
    __syncthreads();
    const float weight = p.grad_log_sums[utterance];
    if (warp == 0) {
        float labels = 0.0f;
        for (int v = 1 + lane; v < p.vocabulary; v += 32) labels += shares[v];
        labels = warp_sum(labels);
        if (lane == 0) grad[0] = (1.0f - labels - expf(p.log_probs[at])) * weight;  // every path emits something
    }
    for (int v = 1 + int(threadIdx.x); v < p.vocabulary; v += SHARES_THREADS)
        grad[v] = (shares[v] - expf(p.log_probs[at + v])) * weight;
}

}  // namespace ds2
