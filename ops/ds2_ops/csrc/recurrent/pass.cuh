// What every design of the persistent recurrence shares: its parameters, its weights in registers, its product with them.
//
//   forward        y_t    = f(x_t + W y_{t-1})                               t = 0, 1, ...
//   backward_data  dpre_t = (dy_t + [t = last] dh_n + W^T dpre_{t+1}) f'(y_t)  t = T-1, T-2, ...
//
// Both are one loop over "input + matrix * state" with a pointwise end; backward is given W^T as its matrix.
// A cell with G gates has G rows of W a unit, gate after gate, so x is (T, B, G H), and backward's state is the gradient of
// all of them: its matrix is (H, G H). What the cell keeps for backward, SAVED numbers a unit, is (T, B, SAVED, H).
// Shape letters: T frames, B batch, H hidden. Arrays are contiguous, x like: (T, B, H), state like: (B, H).
#pragma once

#include "ptx/sync.cuh"
#include "recurrent/words.cuh"

namespace ds2 {

struct Pass {
    const void* input;     // forward: x; backward: dy
    const void* output_y;  // backward: y of the forward pass
    const void* matrix;    // forward: W; backward: W^T; (H, H) row-major
    const void* state;     // forward: h0 or null (zeros); backward: dh_n or null (zeros)
    const int* lengths;    // (B) or null (all T)
    void* result;          // forward: y; backward: dx
    void* last_state;      // forward: h_n; backward: dh0
    int frames, batch, hidden;
    int samples;       // utterances of one tile
    int whole_words;   // rows of every (.., H) array start on a word boundary
    int wide_rows;     // they start on a 16-byte boundary, and so do the matrix's
    float clip;        // of ClippedRelu
    // Of cells with gates only.
    void* saved;         // forward: written, or null; backward: read
    const void* bias;    // (H) or null: of (W h) of the last gate
    const float* carry;  // (B, H) or null (zeros), of a cell that carries c; forward: c0; backward: dc_n
    float* last_carry;   // forward: c_n; backward: dc0
    void* result_last;   // backward: (T, B, H), the gradient of (W h) of the last gate, where it is not that of x
};

// Where words of the matrix lie: their first element, its column among the H of its gate, and whether the row exists.
struct Place {
    size_t element;
    int column;
    bool exists;
};

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MMA_ROWS = 16;   // rows of the matrix in one instruction
constexpr int MMA_WORDS = 8;   // words of K in one instruction
constexpr int MMA_SAMPLES = 8; // columns of the state in one instruction

// Where K lies inside a fragment. The sum over K may run in any order as long as matrix and state agree, so a lane takes
// 4 consecutive words (one 16-byte load) for two instructions, instead of the documented 2 + 2 words at a distance:
// lane (g, q) = (lane / 4, lane % 4) holds words 16 j + 4 q .. + 3 of instructions 2 j and 2 j + 1. A last odd
// instruction takes words 8 * (K_TILES - 1) + 2 q .. + 1.

// Registers of one warp: rows first_row .. + 16 M_TILES - 1 of the matrix, words first_word .. + 8 K_TILES - 1 of K.
// Rows from end_row on, and elements outside the matrix, are 0.
template <class Number, int M_TILES, int K_TILES>
struct Weights {
    unsigned a[M_TILES][K_TILES][4];

    __device__ void load(const Pass& pass, int first_row, int end_row, int first_word) {
        load_permuted(pass, first_row, end_row,
                      [=](int k, int q, int words) { return first_word + MMA_WORDS * k + words * q; });
    }

    // Of a matrix (H, H).
    static __device__ Place place(int row, int end_row, int word, int hidden) {
        const int column = word * Number::PER_WORD;
        return {size_t(row) * hidden + column, column, row < end_row && row < hidden};
    }

    // K in another order: word(k, q, words) is the first of the `words` (4, or 2 for a last odd instruction) that lane
    // (g, q) holds from instruction k on.
    template <class WordOf>
    __device__ void load_permuted(const Pass& pass, int first_row, int end_row, WordOf word) {
        load_permuted(pass, word, [=, hidden = pass.hidden](int row, int word) {
            return place(first_row + row, end_row, word, hidden);
        });
    }

    // And another matrix: place(row, word) is where a word of the warp's row lies.
    template <class WordOf, class PlaceOf>
    __device__ void load_permuted(const Pass& pass, WordOf word, PlaceOf place) {
        if (pass.wide_rows && K_TILES < LONG_TILES)
            load_at_once(pass, word, place);
        else
            load_in_turn(pass, word, place);
    }

  private:
    // From so many instructions on, what all loads at once need has no registers beside the weights: one after the other.
    static constexpr int LONG_TILES = 40;

    // Rows on 16-byte boundaries: a group of 4 words, or of 2, is inside the row or outside as a whole. All of a row tile is
    // asked for before any of it is used, with no branch between: a load that is waited for before the next one is asked for
    // costs a trip to L2 or memory, and 60 of them as much as 20 time steps.
    template <class WordOf, class PlaceOf>
    __device__ void load_at_once(const Pass& pass, WordOf word, PlaceOf place) {
        const auto* matrix = static_cast<const typename Number::Storage*>(pass.matrix);
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        constexpr int PAIRS = (K_TILES + 1) / 2;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            uint4 group[2][PAIRS];
            bool inside[2][PAIRS];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int k = 0; k < K_TILES; k += 2) {
                    const bool both = k + 1 < K_TILES;
                    const Place from = place(MMA_ROWS * m + 8 * half + g, word(k, q, both ? 4 : 2));
                    inside[half][k / 2] = from.exists && from.column < pass.hidden;
                    const auto* at = matrix + (inside[half][k / 2] ? from.element : 0);
                    uint4& v = group[half][k / 2];
                    if (both) {
                        v = load_early_16(at);
                    } else {
                        const uint2 two = load_early_8(at);
                        v = make_uint4(two.x, two.y, 0, 0);
                    }
                }
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int k = 0; k < K_TILES; k += 2) {
                    const uint4 v = group[half][k / 2];
                    const unsigned w[4] = {v.x, v.y, v.z, v.w};
                    keep(m, half, k, w, inside[half][k / 2]);
                }
        }
    }

    template <class WordOf, class PlaceOf>
    __device__ void load_in_turn(const Pass& pass, WordOf word, PlaceOf place) {
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int k = 0; k < K_TILES; k += 2) {
                    const int words = k + 1 < K_TILES ? 4 : 2;
                    const Place from = place(MMA_ROWS * m + 8 * half + g, word(k, q, words));
                    unsigned w[4] = {};
                    if (K_TILES >= LONG_TILES && pass.wide_rows && words == 4) {
                        uint4 v = make_uint4(0, 0, 0, 0);
                        if (from.exists && from.column < pass.hidden)
                            v = load_early_16(static_cast<const typename Number::Storage*>(pass.matrix) + from.element);
                        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
                        keep(m, half, k, w, true);
                        continue;
                    }
#pragma unroll
                    for (int i = 0; i < words; i++)
                        w[i] = load_word<Number>(pass.matrix, from.element + i * Number::PER_WORD,
                                                 from.exists ? pass.hidden - (from.column + i * Number::PER_WORD) : 0,
                                                 pass.whole_words);
                    keep(m, half, k, w, true);
                }
    }

    // Words of one row for instructions k and, if it exists, k + 1.
    __device__ void keep(int m, int half, int k, const unsigned (&w)[4], bool inside) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (k + i / 2 < K_TILES) a[m][k + i / 2][half + i % 2 * 2] = inside ? Number::operand(w[i]) : 0;
    }
};

// c += weights * state, for row tiles FIRST .. + TILES - 1 of the weights and instructions BEGIN .. END - 1 of K. This lane's
// 4 words for instructions k and k + 1 (k even) lie at the shared-memory address state + k PITCH, its 2 words for a last odd
// one at tail.
template <int PITCH, int FIRST, int BEGIN, int END, class Number, int TILES, int M_TILES, int K_TILES>
__device__ void multiply_add(float (&c)[TILES][4], const Weights<Number, M_TILES, K_TILES>& weights, unsigned state,
                             unsigned tail) {
    static_assert(BEGIN % 2 == 0 && (END % 2 == 0 || END == K_TILES), "words of two instructions are loaded together");
#pragma unroll
    for (int k = BEGIN; k + 1 < END; k += 2) {
        const uint4 b = load_shared_16(state + k * PITCH);
#pragma unroll
        for (int m = 0; m < TILES; m++) Number::multiply_add(c[m], weights.a[FIRST + m][k], b.x, b.y);
#pragma unroll
        for (int m = 0; m < TILES; m++) Number::multiply_add(c[m], weights.a[FIRST + m][k + 1], b.z, b.w);
    }
    if constexpr (END % 2 == 1) {
        const uint2 b = load_shared_8(tail);
#pragma unroll
        for (int m = 0; m < TILES; m++) Number::multiply_add(c[m], weights.a[FIRST + m][END - 1], b.x, b.y);
    }
}

}  // namespace ds2
