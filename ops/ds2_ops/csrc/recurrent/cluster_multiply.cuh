// The multiplying warps of the cluster design; see cluster.cuh.
#pragma once

#include "recurrent/cluster_shape.cuh"

namespace ds2 {

template <class Shape>
struct Multiplier {
    using Number = typename Shape::Number;
    Weights<Number, Shape::WARP_TILES, Shape::M_SPLIT * Shape::K_TILES> weights;
    unsigned parity = 0;  // bit s: of the phase that stage s's mbarriers are in

    // Within the warp's K slice a lane takes 16-byte chunks k + q / 2 of source q % 2, or 2 k + q of its only source.
    static constexpr int PITCH = Shape::SOURCES == 2 ? 16 : 32;

    // The first of the M_SPLIT portions of a warp's K, K_SPLIT apart, and of its rows. Portion w is one of warp w's own.
    static __device__ int first_portion(int warp) { return Shape::M_SPLIT == 1 ? warp : warp % Shape::K_SPLIT; }
    static __device__ int first_row(int warp) {
        return Shape::M_SPLIT == 1 ? 0 : warp / Shape::K_SPLIT * (MMA_ROWS * Shape::WARP_TILES);
    }

    // Of a matrix that begins at element `begin`.
    __device__ void load_weights(const Pass& pass, size_t begin) {
        const int rank = cluster_rank(), warp = threadIdx.x / 32;
        const auto word = [=](int k, int q, int words) {
            const int portion = first_portion(warp) + k / Shape::K_TILES * Shape::K_SPLIT, tile = k % Shape::K_TILES;
            return Shape::SOURCES == 2 ? (2 * portion + q % 2) * Shape::WORDS + 4 * tile + words * (q / 2)
                                       : portion * Shape::WORDS + MMA_WORDS * tile + words * q;
        };
        weights.load_permuted(pass, word, [=, first = first_row(warp), hidden = pass.hidden](int row, int word) -> Place {
            row += first;
            if constexpr (!Shape::GATED) {
                Place place =
                    Weights<Number, 1, 1>::place(rank * Shape::ROWS + row, (rank + 1) * Shape::ROWS, word, hidden);
                place.element += begin;
                return place;
            } else if constexpr (Shape::BACKWARD) {  // a row holds all gates, and so does what a block sends
                const int source = word / Shape::WORDS, sent = word % Shape::WORDS, unit = rank * Shape::OWNED + row;
                const int column = source * Shape::OWNED + sent % Shape::OWN_WORDS * Shape::PER_WORD;
                return {begin + (size_t(unit) * Shape::SENT + sent / Shape::OWN_WORDS) * hidden + column,
                        column, row < Shape::ROWS && unit < hidden};
            } else {
                const int column = word * Shape::PER_WORD, unit = rank * Shape::OWNED + row % Shape::OWNED;
                return {begin + (size_t(row / Shape::OWNED) * hidden + unit) * hidden + column,
                        column, row < Shape::ROWS && unit < hidden};
            }
        });
    }

    // Words are the matrix unit's as they are, so they need not pass through registers.
    static constexpr bool COPIED = Shape::WHOLE_WORDS && sizeof(typename Number::Storage) == 2;

    // The warp's own K slice of the first state, which no other warp reads unless it shares it.
    static __device__ void take_first_state(const Tile<Shape>& tile, char* smem) {
        const Pass& pass = tile.pass;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int g = 0; g < Shape::GROUPS; g++)
#pragma unroll 1
            for (int s = 0; s < tile.live(g); s++)
#pragma unroll 1
                for (int i = lane; i < Shape::SOURCES * Shape::WORDS; i += 32) {
                    const int source = Shape::SOURCES * warp + i / Shape::WORDS, word = i % Shape::WORDS;
                    const int column = (source * Shape::WORDS + word) * Shape::PER_WORD;
                    const unsigned to = smem_address(smem) + Shape::state_at(0, g) + source * Shape::SOURCE_PITCH +
                                        s * Shape::SAMPLE_PITCH + 4 * word;
                    const bool there = !Shape::BACKWARD && pass.state;
                    const size_t from = there ? size_t(tile.row(tile.begin(g), s)) * pass.hidden + column : 0;
                    if constexpr (COPIED) {  // all at once: a load that is waited for costs as much as a time step
                        if (there)
                            copy_async(to, static_cast<const typename Number::Storage*>(pass.state) + from, column < pass.hidden);
                        else
                            store_shared_4(to, 0);
                    } else {
                        const unsigned value =
                            there ? load_word<Number, false>(pass.state, from, pass.hidden - column, Shape::WHOLE_WORDS) : 0;
                        store_shared_4(to, Number::operand(value));
                    }
                }
        if constexpr (COPIED) {
            copies_commit();
            copies_wait<0>();
        }
        __syncwarp();
        if constexpr (Shape::M_SPLIT > 1) block_wait(Shape::FIRST_STATE, THREADS);
    }

    __device__ void run(const Tile<Shape>& tile, char* smem) {
        take_first_state(tile, smem);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, quad_lane = lane % 4;
        const int iterations = tile.iterations();
        // Addresses of stage 0, group 0.
        const unsigned barrier = pinned(smem_address(smem + Shape::barrier_at(0, 0, warp)));
        const int portion = first_portion(warp);
        const unsigned partial =
            pinned(smem_address(smem + Shape::partial_at(0, 0)) +
                   4 * ((portion * MMA_SAMPLES + 2 * quad_lane) * Shape::PARTIAL_STRIDE + first_row(warp) + column));
        const unsigned first_barrier = Shape::M_SPLIT == 1 ? barrier : pinned(barrier + 8 * (portion - warp));
        const int source = Shape::SOURCES * portion + quad_lane % Shape::SOURCES, chunk = quad_lane / Shape::SOURCES;
        unsigned state[Shape::GROUPS];  // columns without utterance repeat the first
        unsigned columns = 0;           // how many of this lane's two columns of the result have one, a byte a group
#pragma unroll
        for (int g = 0; g < Shape::GROUPS; g++) {
            state[g] = pinned(smem_address(smem + Shape::state_at(0, g)) + source * Shape::SOURCE_PITCH +
                              (column < tile.live(g) ? column : 0) * Shape::SAMPLE_PITCH + 16 * chunk);
            columns |= max(0, min(2, tile.live(g) - 2 * quad_lane)) << 8 * g;
        }
        columns = pinned(columns);
        const unsigned tail = pinned((Shape::K_TILES - 1) * PITCH - 8 * chunk);
        for (int i = 0; i < iterations; i++) {
            const int stage = i & 1;
#pragma unroll
            for (int g = 0; g < Shape::GROUPS; g++) {
                const int first_unit = g * Shape::PARTS, live = tile.live(g);
                // Nothing would hold warps that share at each other's pace. No tile follows one with such a group.
                if (Shape::M_SPLIT > 1 && live <= 0) continue;
                if (i + 1 < iterations && lane < Shape::PARTS)
                    barrier_expect(barrier + ((stage ^ 1) * Shape::UNITS + first_unit + lane) * 8 * WARPS,
                                   live * Shape::SOURCES * 16 *
                                       (lane == 0 ? Shape::HEAD_CHUNKS : Shape::CHUNKS - Shape::HEAD_CHUNKS));
                const auto await = [&](int part, int portion) {
                    if (i > 0)
                        barrier_wait(first_barrier + (stage * Shape::UNITS + first_unit + part) * 8 * WARPS +
                                         portion * 8 * Shape::K_SPLIT,
                                     parity >> stage & 1, "its peers' state", i);
                };
                const unsigned from = state[g] + stage * Shape::GROUPS * Shape::STATE_BYTES;
                if constexpr (Shape::M_SPLIT > 1) {
                    float c[Shape::WARP_TILES][4] = {}, odd[Shape::WARP_TILES][4] = {};  // more sums, fewer waits for each
                    multiply_portions<0>(c, odd, from, [&](int portion) { await(0, portion); });
                    report<0>(c, i, g, live, partial, columns >> 8 * g & 0xff);
                    continue;
                }
                float c[Shape::HEAD_TILES][4] = {};
                await(0, 0);
                multiply_add<PITCH, 0, 0, Shape::HEAD_K_TILES>(c, weights, from, from + tail);
                if constexpr (Shape::PARTS == 2) {
                    await(1, 0);
                    multiply_add<PITCH, 0, Shape::HEAD_K_TILES, Shape::K_TILES>(c, weights, from, from + tail);
                }
                report<0>(c, i, g, live, partial, columns >> 8 * g & 0xff);
                if constexpr (Shape::PARTS == 2) {
                    float rest[Shape::M_TILES - Shape::HEAD_TILES][4] = {};
                    multiply_add<PITCH, Shape::HEAD_TILES, 0, Shape::K_TILES>(rest, weights, from, from + tail);
                    report<1>(rest, i, g, live, partial, columns >> 8 * g & 0xff);
                }
            }
            if (i > 0) parity ^= 1u << stage;
        }
    }

    // One portion after the other, as they come, with sums of their own for every second one.
    template <int PORTION, class Await>
    __device__ void multiply_portions(float (&c)[Shape::WARP_TILES][4], float (&odd)[Shape::WARP_TILES][4], unsigned from,
                                      Await await) {
        if constexpr (PORTION == Shape::M_SPLIT) {
#pragma unroll
            for (int m = 0; m < Shape::WARP_TILES; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[m][e] += odd[m][e];
        } else {
            constexpr int APART = Shape::K_SPLIT * Shape::SOURCES * Shape::SOURCE_PITCH - Shape::K_TILES * PITCH;
            await(PORTION);
            multiply_add<PITCH, 0, PORTION * Shape::K_TILES, (PORTION + 1) * Shape::K_TILES>(
                PORTION % 2 ? odd : c, weights, from + PORTION * APART, 0);
            multiply_portions<PORTION + 1>(c, odd, from, await);
        }
    }

    // Hands partial sums c of one part, the first `columns` of this lane's two columns, to the finishing warps.
    template <int PART, int TILES>
    static __device__ void report(const float (&c)[TILES][4], int i, int g, int live, unsigned partial, int columns) {
        const int stage = i & 1, unit = g * Shape::PARTS + PART;
        const int threads = Shape::takes_part(live) ? Shape::PARTIALS_THREADS : THREADS;
        const unsigned to = partial + (stage * Shape::GROUPS + g) * Shape::PARTIAL_BYTES;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (n >= columns) break;
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = MMA_ROWS * (PART * Shape::HEAD_TILES + m) + 8 * half;
                    if (Shape::M_SPLIT > 1 || row < Shape::ROWS)
                        store_shared_4(to + 4 * (n * Shape::PARTIAL_STRIDE + row), __float_as_uint(c[m][2 * half + n]));
                }
        }
        block_arrive_or_wait(Shape::partials_ready(stage, unit), threads);
    }
};

// Backward by pushing: a block multiplies the gradients of its own gates, its part of K, by all rows, and sends the sums of each
// row, in fp32, to the block whose hidden units these are. Half the bytes of handing all gradients to all, no partial sums
// between warps, and what is ready is sent while the rest is multiplied. A warp has the rows of DESTINATIONS blocks.
template <class Shape>
struct PushMultiplier {
    using Number = typename Shape::Number;
    static constexpr int DESTINATIONS = Shape::CLUSTER / WARPS;
    static constexpr int TILES = Shape::OWNED / MMA_ROWS;  // row tiles of a block's hidden units
    static constexpr int K_TILES = Shape::WORDS / MMA_WORDS;
    static_assert(TILES == 2, "a lane's sums of two tiles are 16 bytes of neighbouring units of an utterance");
    Weights<Number, DESTINATIONS * TILES, K_TILES> weights;

    __device__ void load_weights(const Pass& pass, size_t begin) {
        const int rank = cluster_rank(), warp = threadIdx.x / 32;
        const auto word = [](int k, int q, int words) { return MMA_WORDS * k + words * q; };
        weights.load_permuted(pass, word, [=, hidden = pass.hidden](int row, int word) -> Place {
            // Rows g and g + 8 of both tiles are units 4 g to 4 g + 3.
            const int tile = row / MMA_ROWS, unit = row % 8 * 4 + tile % TILES * 2 + row % MMA_ROWS / 8;
            const int to = (DESTINATIONS * warp + tile / TILES) * Shape::OWNED + unit;
            const int column = rank * Shape::OWNED + word % Shape::OWN_WORDS * Shape::PER_WORD;
            return {begin + (size_t(to) * Shape::SENT + word / Shape::OWN_WORDS) * hidden + column, column,
                    to < hidden};
        });
    }

    __device__ void run(const Tile<Shape>& tile, char* smem) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, quad_lane = lane % 4;
        const int products = tile.iterations() - 1;
        // At the receiver, of its group 0 and stage 0: this lane's units of its first sample.
        const unsigned sums = pinned(smem_address(smem + Shape::state_at(0, 0)) +
                                     (cluster_rank() * MMA_SAMPLES + 2 * quad_lane) * Shape::OWNED * 4 + 16 * column);
        const unsigned barrier = pinned(smem_address(smem + Shape::barrier_at(0, 0, 0)));
        const unsigned operand = pinned(smem_address(smem + Shape::partial_at(0, 0)) + 16 * quad_lane);
#pragma unroll 1
        for (int i = 0; i < products; i++) {
            const int stage = i & 1, next = stage ^ 1;
#pragma unroll
            for (int g = 0; g < Shape::GROUPS; g++) {
                const int live = tile.live(g);
                if (live <= 0) continue;
                const unsigned from = operand + (stage * Shape::GROUPS + g) * Shape::PARTIAL_BYTES +
                                      (column < live ? column : 0) * Shape::OPERAND_PITCH;
                block_wait(Shape::partials_ready(stage, g), Shape::PUSH_THREADS);
                const unsigned to = sums + (next * Shape::GROUPS + g) * Shape::STATE_BYTES;
                const unsigned to_barrier = barrier + (next * Shape::UNITS + g) * 8 * WARPS;
                push<0>(from, to, to_barrier, warp, live - 2 * quad_lane);
            }
        }
    }

    template <int D>
    __device__ void push(unsigned from, unsigned to, unsigned to_barrier, int warp, int samples) {
        if constexpr (D < DESTINATIONS) {
            float c[TILES][4] = {};
            multiply_add<32, TILES * D, 0, K_TILES>(c, weights, from, from + (K_TILES - 1) * 32);
            const unsigned peer = DESTINATIONS * warp + D;
#pragma unroll
            for (int n = 0; n < 2; n++)
                if (n < samples)
                    store_async(remote_address(to + n * Shape::OWNED * 4, peer), remote_address(to_barrier, peer),
                                __float_as_uint(c[0][n]), __float_as_uint(c[0][2 + n]), __float_as_uint(c[1][n]),
                                __float_as_uint(c[1][2 + n]));
            push<D + 1>(from, to, to_barrier, warp, samples);
        }
    }
};

template <bool PUSH, class Shape>
struct IfPush {
    using Multiplier = ds2::Multiplier<Shape>;
};
template <class Shape>
struct IfPush<true, Shape> {
    using Multiplier = PushMultiplier<Shape>;
};

}  // namespace ds2
