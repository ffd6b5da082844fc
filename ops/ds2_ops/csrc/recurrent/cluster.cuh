// Persistent recurrence inside one thread-block cluster: every block keeps ROWS rows of the matrix in registers for all
// time steps and gets the whole state of its utterances from its peers through distributed shared memory at every step.
// Clusters are independent of one another (each has its own utterances), so they need not run at the same time.
//
// One step of one block, for one group of up to 8 utterances:
//   1. 8 multiplying warps. Warp w owns K slice w, which 2 peers (cluster of 16) or 1 (cluster of 8) produced. It waits for
//      these alone, multiplies all ROWS rows by its slice, leaves partial sums in shared memory and goes on.
//   2. 4 finishing warps a unit, which hold no weights. When all 8 partial sums of their unit are there, a quad of lanes
//      takes 16 bytes of one utterance's new state: adds up, applies the cell, sends them to all blocks; then stores y
//      and fetches x.
// A unit is a group, or one of two parts of the only group's rows. With two groups, the second one's arithmetic runs while
// the first one's state is finished and travels. With two parts, so does the second part's arithmetic, and the product with
// what the first part sends begins before the second part arrives.
//
// Why two buffers of everything, by iteration parity, and no other barrier are enough. "Iteration i" is of one group.
//   (a) A block finishes any part of iteration i only after all its multiplying warps reported partial sums of it, that is
//       after they together received every part of what every block, mine too, sent at i - 1.
//   (b) State: a peer writes my buffer at i that I read at i - 1. By (a) my last part's sends of i - 1 came before; these
//       came after my multiplying warps reported its partial sums of i - 1, so after they had read that buffer.
//   (c) Partial sums: my multiplying warps overwrite at i those of i - 2. They first waited for state of i - 1 from some
//       peer, which by (a) had received my sends of i - 2, which came after my finishing warps read those sums.
//   (d) An mbarrier is armed for iteration i + 1 during i, after its phase of i - 1 ended. Bytes that land earlier are
//       counted as negative and cannot end the phase, since its one arrival is still missing.
//   (e) What is sent is always received: nothing is sent in the last iteration, so no block leaves with stores under way.
#pragma once

#include "ptx/sync.cuh"
#include "recurrent/pointwise.cuh"
#include "recurrent/pass.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int ROWS_, int GROUPS_, int HEAD_TILES_, bool BACKWARD_,
          bool WHOLE_WORDS_>
struct ClusterShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr int CLUSTER = CLUSTER_, ROWS = ROWS_, GROUPS = GROUPS_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr bool WHOLE_WORDS = WHOLE_WORDS_;  // every row of H elements starts on a word boundary

    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int WORDS = ROWS / PER_WORD;   // of one utterance's state that a block produces
    static constexpr int CHUNKS = WORDS / 4;        // of 16 bytes, the unit of exchange
    static constexpr int K_WORDS = CLUSTER * WORDS; // of one utterance's whole state
    static constexpr int M_TILES = (ROWS + MMA_ROWS - 1) / MMA_ROWS;
    static constexpr int K_TILES = K_WORDS / MMA_WORDS / WARPS;
    static constexpr int SOURCES = CLUSTER / WARPS; // blocks that feed one warp
    // The first part: as many of the rows, of the chunks that a block sends, and of a warp's K that consists of such chunks.
    static constexpr int HEAD_TILES = HEAD_TILES_, PARTS = HEAD_TILES < M_TILES ? 2 : 1;
    static constexpr int HEAD_CHUNKS = PARTS == 1 ? CHUNKS : HEAD_TILES * MMA_ROWS / PER_WORD / 4;
    static constexpr int HEAD_K_TILES = PARTS == 1 ? K_TILES : HEAD_CHUNKS * SOURCES / 4 * 2;
    static constexpr int UNITS = GROUPS * PARTS;
    static constexpr int FINISHERS = 128;  // threads of one unit: a warpgroup, which registers are reallocated by
    static constexpr int ALL_THREADS = THREADS + UNITS * FINISHERS;
    // Registers a thread: as many at launch for all, then moved from finishing to multiplying warps, which hold the weights.
    static constexpr int MULTIPLY_REGISTERS = UNITS == 1 ? 224 : 216, FINISH_REGISTERS = UNITS == 1 ? 56 : 40;
    static constexpr int LAUNCH_REGISTERS = 65536 / ALL_THREADS / 8 * 8;
    static_assert(THREADS * MULTIPLY_REGISTERS + UNITS * FINISHERS * FINISH_REGISTERS <= LAUNCH_REGISTERS * ALL_THREADS,
                  "what some warps gain, others have given");
    static constexpr int QUADS = FINISHERS / 4;
    static constexpr int ROUND_SAMPLES = QUADS / HEAD_CHUNKS; // whose chunks the quads finish at the same time
    static constexpr int ROUNDS = (MMA_SAMPLES + ROUND_SAMPLES - 1) / ROUND_SAMPLES;

    // State: [source block][sample][words], so that what a block sends is nearly contiguous (the network carries 32-byte
    // sectors and likes few, long, aligned pieces). The paddings keep the 8 lanes of a quarter warp's 16-byte loads, two
    // samples of one source or of two alternating sources, in different banks.
    static constexpr int SAMPLE_PITCH = SOURCES == 2 ? (4 * WORDS + 31) / 64 * 64 + 32 : (4 * WORDS + 63) / 128 * 128 + 64;
    static constexpr int SOURCE_PITCH = MMA_SAMPLES * SAMPLE_PITCH + 64;
    // The four sample pairs of a fragment's store fall 8 banks apart.
    static constexpr int PARTIAL_STRIDE = MMA_ROWS * M_TILES + 4;

    static constexpr int STATE_BYTES = CLUSTER * SOURCE_PITCH;                      // one group, one stage, like the next
    static constexpr int PARTIAL_BYTES = WARPS * MMA_SAMPLES * PARTIAL_STRIDE * 4;
    static constexpr int INPUTS = BACKWARD ? 2 : 1;                                 // arrays read every step
    static constexpr int AHEAD = 4;                                                 // steps that inputs are fetched early
    // One unit: a word a thread and round for each step and array, and one for the utterance's frames.
    static constexpr int INPUT_BYTES = (AHEAD * INPUTS + 1) * ROUNDS * FINISHERS * 4;
    static constexpr int PARTIAL_AT = 2 * GROUPS * STATE_BYTES;
    static constexpr int INPUT_AT = PARTIAL_AT + 2 * GROUPS * PARTIAL_BYTES;
    static constexpr int BARRIER_AT = INPUT_AT + UNITS * INPUT_BYTES;
    static constexpr int SMEM_BYTES = BARRIER_AT + 2 * UNITS * WARPS * 8;

    static_assert(UNITS <= 2, "two groups or two parts: registers for two finishing warpgroups, not more");
    static_assert(HEAD_CHUNKS <= CHUNKS && CHUNKS <= 2 * HEAD_CHUNKS, "the first part is not the smaller one");
    static_assert(SOURCES == 1 || SOURCES == 2, "each warp's K slice is what one or two whole blocks produced");
    static_assert(WORDS % 4 == 0, "blocks exchange units of 16 bytes");
    static_assert(ROUND_SAMPLES >= 1, "the finishing threads cover one utterance's words of a part");
    static_assert(K_WORDS % (MMA_WORDS * WARPS) == 0, "each warp's K slice is whole matrix instructions");
    static_assert(SAMPLE_PITCH >= 4 * WORDS, "a sample's words fit its pitch");

    static __device__ int state_at(int stage, int g) { return (stage * GROUPS + g) * STATE_BYTES; }
    static __device__ int partial_at(int stage, int g) { return PARTIAL_AT + (stage * GROUPS + g) * PARTIAL_BYTES; }
    static __device__ int barrier_at(int stage, int unit, int warp) {
        return BARRIER_AT + 8 * ((stage * UNITS + unit) * WARPS + warp);
    }
    // Named barrier of a unit's finishers and all multipliers; 0 is __syncthreads. In debug builds everybody waits at all of
    // them: race checkers do not look into other blocks, where what (c) rests on lies, and follow no barrier of a part of a
    // block, but see then that partial sums are read after they were written and before they are overwritten.
    static __device__ int partials_ready(int stage, int unit) { return 1 + stage * UNITS + unit; }
    // The finishers of a group without utterances rest: nothing would hold the multiplying warps at their pace.
    static __device__ bool takes_part(int live) { return GROUPS == 1 || DEBUG_WAITS || live > 0; }
    static constexpr int PARTIALS_THREADS = DEBUG_WAITS ? ALL_THREADS : THREADS + FINISHERS;
};

// One tile: the utterances that a cluster runs together, in groups.
template <class Shape>
struct Tile {
    using Number = typename Shape::Number;
    const Pass& pass;
    int first;  // utterance of the thread's own group: of the one that it finishes, or of group 0 if it multiplies
    int steps;  // frames of the longest

    static __device__ int own_unit() {
        return Shape::UNITS == 1 || threadIdx.x < THREADS ? 0 : (threadIdx.x - THREADS) / Shape::FINISHERS;
    }
    static __device__ int own_group() { return Shape::GROUPS == 1 ? 0 : own_unit(); }
    __device__ int begin(int g) const { return first + (g - own_group()) * pass.samples; }
    __device__ int live(int g) const { return max(0, min(pass.samples, pass.batch - begin(g))); }
    __device__ int length(int utterance) const {
        return pass.lengths ? max(0, min(pass.frames, __ldg(pass.lengths + utterance))) : pass.frames;
    }
    __device__ int iterations() const { return Shape::BACKWARD ? steps + 1 : steps; }

    __device__ explicit Tile(const Pass& pass)
        : pass(pass), first((blockIdx.x / Shape::CLUSTER * Shape::GROUPS + own_group()) * pass.samples), steps(0) {}
    __device__ bool exists() const { return begin(0) < pass.batch; }
    __device__ void next() { first += gridDim.x / Shape::CLUSTER * Shape::GROUPS * pass.samples; }

    // All threads of the cluster: waits until no block uses the previous tile.
    __device__ void open() {
        cluster_barrier();
        steps = 0;
#pragma unroll 1
        for (int g = 0; g < Shape::GROUPS; g++)
#pragma unroll 1
            for (int s = 0; s < live(g); s++) steps = max(steps, length(begin(g) + s));
    }
};

template <class Shape>
struct Multiplier {
    using Number = typename Shape::Number;
    Weights<Number, Shape::M_TILES, Shape::K_TILES> weights;
    unsigned parity = 0;  // bit s: of the phase that stage s's mbarriers are in

    // Within the warp's K slice a lane takes 16-byte chunks k + q / 2 of source q % 2, or 2 k + q of its only source.
    static constexpr int PITCH = Shape::SOURCES == 2 ? 16 : 32;

    __device__ void load_weights(const Pass& pass) {
        const int rank = cluster_rank(), warp = threadIdx.x / 32;
        weights.load_permuted(pass, rank * Shape::ROWS, (rank + 1) * Shape::ROWS, [=](int k, int q, int words) {
            return Shape::SOURCES == 2 ? (2 * warp + q % 2) * Shape::WORDS + 4 * k + words * (q / 2)
                                       : warp * Shape::WORDS + MMA_WORDS * k + words * q;
        });
    }

    // The warp's own K slice of the first state, which no other warp reads.
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
                    unsigned value = 0;
                    if (!Shape::BACKWARD && pass.state)
                        value = load_word<Number>(pass.state, size_t(tile.begin(g) + s) * pass.hidden + column,
                                                  pass.hidden - column, Shape::WHOLE_WORDS);
                    store_shared_4(smem_address(smem) + Shape::state_at(0, g) + source * Shape::SOURCE_PITCH +
                                       s * Shape::SAMPLE_PITCH + 4 * word,
                                   Number::operand(value));
                }
        __syncwarp();
    }

    __device__ void run(const Tile<Shape>& tile, char* smem) {
        take_first_state(tile, smem);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, quad_lane = lane % 4;
        const int iterations = tile.iterations();
        // Addresses of stage 0, group 0.
        const unsigned barrier = pinned(smem_address(smem + Shape::barrier_at(0, 0, warp)));
        const unsigned partial = pinned(smem_address(smem + Shape::partial_at(0, 0)) +
                                        4 * ((warp * MMA_SAMPLES + 2 * quad_lane) * Shape::PARTIAL_STRIDE + column));
        const int source = Shape::SOURCES * warp + quad_lane % Shape::SOURCES, chunk = quad_lane / Shape::SOURCES;
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
                if (i + 1 < iterations && lane < Shape::PARTS)
                    barrier_expect(barrier + ((stage ^ 1) * Shape::UNITS + first_unit + lane) * 8 * WARPS,
                                   live * Shape::SOURCES * 16 *
                                       (lane == 0 ? Shape::HEAD_CHUNKS : Shape::CHUNKS - Shape::HEAD_CHUNKS));
                const auto await = [&](int part) {
                    if (i > 0)
                        barrier_wait(barrier + (stage * Shape::UNITS + first_unit + part) * 8 * WARPS, parity >> stage & 1,
                                     "its peers' state", i);
                };
                const unsigned from = state[g] + stage * Shape::GROUPS * Shape::STATE_BYTES;
                float c[Shape::HEAD_TILES][4] = {};
                await(0);
                multiply_add<PITCH, 0, 0, Shape::HEAD_K_TILES>(c, weights, from, from + tail);
                if constexpr (Shape::PARTS == 2) {
                    await(1);
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
                    if (row < Shape::ROWS)
                        store_shared_4(to + 4 * (n * Shape::PARTIAL_STRIDE + row), __float_as_uint(c[m][2 * half + n]));
                }
        }
        block_arrive_or_wait(Shape::partials_ready(stage, unit), threads);
    }
};

template <class Shape>
struct Finisher {
    using Number = typename Shape::Number;
    static constexpr int PEERS = Shape::CLUSTER / 4;  // that one lane of a quad sends to

    const Pass& pass;
    // This thread finishes one word of utterances sample(), sample() + ROUND_SAMPLES, ... of one unit.
    unsigned place;  // row(), sample() and first_peer() in 16, 8, 8 bits: registers are scarce
    // Addresses of stage 0.
    unsigned chunk, barrier;  // at the peers, for what this quad sends of sample 0
    unsigned partial;         // here, for this thread's word of sample 0
    unsigned input;           // here, for what this thread reads of x, dy and y

    __device__ Finisher(const Pass& pass, char* smem) : pass(pass) {
        // Neighbours stay together: one instruction sends 128 bytes to each of 4 peers.
        const int unit = Tile<Shape>::own_unit(), group = unit / Shape::PARTS, part = unit % Shape::PARTS;
        const int rank = cluster_rank(), thread = threadIdx.x % Shape::FINISHERS, quad = thread / 4, lane = thread % 4;
        const int part_chunk = quad % Shape::HEAD_CHUNKS, own_chunk = part * Shape::HEAD_CHUNKS + part_chunk;
        // A quad too many never has an utterance; each block begins to send to another one, so that none is flooded.
        const bool needed = quad / Shape::HEAD_CHUNKS < Shape::ROUND_SAMPLES && own_chunk < Shape::CHUNKS;
        const int sample = needed ? quad / Shape::HEAD_CHUNKS : MMA_SAMPLES;
        const int word = 4 * (needed ? own_chunk : 0) + lane;
        place = pinned(rank * Shape::ROWS + word * Shape::PER_WORD | sample << 16 | rank + 1 + lane << 24);
        chunk = pinned(smem_address(smem) + Shape::state_at(0, group) + rank * Shape::SOURCE_PITCH + 16 * own_chunk);
        barrier = pinned(smem_address(smem + Shape::barrier_at(0, unit, rank / Shape::SOURCES)));
        partial = pinned(smem_address(smem + Shape::partial_at(0, group)) + 4 * word * Shape::PER_WORD);
        input = pinned(smem_address(smem + Shape::INPUT_AT) + unit * Shape::INPUT_BYTES + 4 * thread);
    }

    __device__ int row() const { return pinned(place) & 0xffff; }           // the word's first element in a row of H
    __device__ int sample() const { return pinned(place) >> 16 & 0xff; }    // in the first round
    __device__ unsigned first_peer() const { return pinned(place) >> 24; }  // of the blocks that this lane sends to
    __device__ int valid() const { return min(Shape::PER_WORD, pass.hidden - row()); }  // elements of the word that exist
    // This thread's own place for its word of round r of array a of iteration i.
    __device__ unsigned input_at(int i, int r, int a) const {
        return input + ((i % Shape::AHEAD * Shape::INPUTS + a) * Shape::ROUNDS + r) * Shape::FINISHERS * 4;
    }
    // And for the frames of its utterance of round r.
    __device__ unsigned length_at(int r) const {
        return input + (Shape::AHEAD * Shape::INPUTS * Shape::ROUNDS + r) * Shape::FINISHERS * 4;
    }
    // This thread's word of sample s in a (T, B, H) array, and with t = 0 in a (B, H) array.
    __device__ size_t element(const Tile<Shape>& tile, int s, int t) const {
        return size_t(unsigned(t * pass.batch + tile.first + s)) * unsigned(pass.hidden) + unsigned(row());  // T B < 2^31
    }
    __device__ unsigned load_state(const Tile<Shape>& tile, int s) const {
        return pass.state ? load_word<Number>(pass.state, element(tile, s, 0), valid(), Shape::WHOLE_WORDS) : 0;
    }
    __device__ void store_state(const Tile<Shape>& tile, int s, unsigned value) const {
        store_word<Number>(pass.last_state, element(tile, s, 0), value, valid(), Shape::WHOLE_WORDS);
    }
    static __device__ int frame(const Tile<Shape>& tile, int i) { return Shape::BACKWARD ? tile.steps - 1 - i : i; }

    __device__ void run(const Tile<Shape>& tile) {
        copies_wait<0>();  // the previous tile's last ones still write
        const int live = tile.live(tile.own_group());
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const int frames = tile.length(tile.first + s);
            store_shared_4(length_at(r), frames);
            if (!Shape::BACKWARD && frames == 0) store_state(tile, s, load_state(tile, s));
        }
#pragma unroll 1
        for (int i = 0; i < Shape::AHEAD - 1; i++) fetch_inputs(tile, i, live);
#pragma unroll 1
        for (int i = 0; i < (live || DEBUG_WAITS ? tile.iterations() : 0); i++) {
            finish(tile, i, live);
            fetch_inputs(tile, i + Shape::AHEAD - 1, live);
        }
#pragma unroll 1
        for (int s = sample(); s < live; s += Shape::ROUND_SAMPLES)
#pragma unroll 1
            for (int t = tile.steps; t < pass.frames; t++)
                store_word<Number>(pass.result, element(tile, s, t), 0, valid(), Shape::WHOLE_WORDS);
    }

    // Asks for what iteration i consumes. Each thread reads only what itself has fetched.
    __device__ void fetch_inputs(const Tile<Shape>& tile, int i, int live) {
        const int t = frame(tile, i);
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const bool wanted = t >= 0 && t < int(load_shared_4(length_at(r))) && valid() > 0;
            const size_t from = wanted ? element(tile, s, t) : 0;
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) {
                const void* array = a == 0 ? pass.input : pass.output_y;
                const unsigned to = input_at(i, r, a);
                if constexpr (Shape::WHOLE_WORDS)
                    copy_async(to, static_cast<const typename Number::Storage*>(array) + from, wanted);
                else  // rows that start between words cannot be copied behind the thread's back
                    store_shared_4(to, wanted ? load_word<Number>(array, from, valid(), false) : 0);
            }
        }
        copies_commit();  // one an iteration: copies_wait counts them
    }

    // The matrix times the state, for this thread's word. The order of the sum is fixed.
    static __device__ void sum_partials(float (&sum)[Shape::PER_WORD], unsigned from) {
        float part[WARPS][Shape::PER_WORD];
#pragma unroll
        for (int w = 0; w < WARPS; w++) load_floats(part[w], from + w * 4 * MMA_SAMPLES * Shape::PARTIAL_STRIDE);
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            sum[e] = ((part[0][e] + part[1][e]) + (part[2][e] + part[3][e])) +
                     ((part[4][e] + part[5][e]) + (part[6][e] + part[7][e]));
    }
    static __device__ void load_floats(float (&v)[2], unsigned from) {
        const uint2 pair = load_shared_8(from);
        v[0] = __uint_as_float(pair.x), v[1] = __uint_as_float(pair.y);
    }
    static __device__ void load_floats(float (&v)[1], unsigned from) { v[0] = __uint_as_float(load_shared_4(from)); }

    // A quad holds 16 bytes of the new state: each of its lanes sends them to a quarter of the blocks.
    __device__ void send(unsigned value, int stage, int s, bool mine) {
        const unsigned operand = Number::operand(value);
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = __shfl_sync(0xffffffffu, operand, j, 4);
        if (!mine) return;
        const unsigned to = chunk + stage * Shape::GROUPS * Shape::STATE_BYTES + s * Shape::SAMPLE_PITCH;
        const unsigned to_barrier = barrier + stage * Shape::UNITS * 8 * WARPS;
        const unsigned first = first_peer();
        unsigned address[PEERS][2];  // all before the first store: a register is busy until its store has left
#pragma unroll
        for (int j = 0; j < PEERS; j++) {
            const unsigned peer = (first + 4 * j) % Shape::CLUSTER;
            address[j][0] = pinned(remote_address(to, peer));
            address[j][1] = pinned(remote_address(to_barrier, peer));
        }
#pragma unroll
        for (int j = 0; j < PEERS; j++) store_async(address[j][0], address[j][1], w[0], w[1], w[2], w[3]);
    }

    static __device__ void wait_with_units(int stage, int first_unit, int end_unit) {
        for (int unit = first_unit; unit < end_unit; unit++)
            block_wait(Shape::partials_ready(stage, unit), Shape::PARTIALS_THREADS);
    }

    __device__ void finish(const Tile<Shape>& tile, int i, int live) {
        const int stage = i & 1, t = frame(tile, i);
        copies_wait<Shape::AHEAD - 2>();
        // First everything that peers wait for, and as much of it as can be done before the wait. A warp stays together,
        // whether its lanes' utterances exist or not.
#pragma unroll 1
        for (int first = 0; first == 0 || first < live; first += Shape::ROUND_SAMPLES) {
            const bool mine = first + sample() < live;
            const int s = min(first + sample(), MMA_SAMPLES - 1), r = first / Shape::ROUND_SAMPLES;
            const unsigned from =
                pinned(partial + stage * Shape::GROUPS * Shape::PARTIAL_BYTES + 4 * s * Shape::PARTIAL_STRIDE);
            const unsigned input_word = load_shared_4(input_at(i, r, 0));
            const unsigned saved_word = Shape::BACKWARD ? load_shared_4(input_at(i, r, 1)) : 0;
            const int frames = mine ? int(load_shared_4(length_at(r))) : 0;
            if (DEBUG_WAITS && first == 0) wait_with_units(stage, 0, tile.own_unit());
            if (first == 0) block_wait(Shape::partials_ready(stage, tile.own_unit()), Shape::PARTIALS_THREADS);
            if (!__any_sync(0xffffffffu, mine)) continue;
            float value[Shape::PER_WORD], in[Shape::PER_WORD], y[Shape::PER_WORD], last[Shape::PER_WORD] = {};
            sum_partials(value, from);
            if (Shape::BACKWARD && t < 0) {  // the gradient of the first state
                if (mine) store_state(tile, s, frames ? Number::pack(value) : load_state(tile, s));
                continue;
            }
            Number::unpack(input_word, in);
            if (Shape::BACKWARD) Number::unpack(saved_word, y);
            if (Shape::BACKWARD && pass.state && t == frames - 1) Number::unpack(load_state(tile, s), last);
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++)
                value[e] = apply_cell<Shape>(Shape::BACKWARD ? value[e] + in[e] + last[e] : value[e] + in[e], y[e], pass.clip);
            const unsigned result = t < frames ? Number::pack(value) : 0;
            if (i + 1 < tile.iterations()) send(result, stage ^ 1, s, mine);
            store_shared_4(input_at(i, r, 0), result);
        }
        if (DEBUG_WAITS) wait_with_units(stage, tile.own_unit() + 1, Shape::UNITS);
        if (Shape::BACKWARD && t < 0) return;
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const unsigned result = load_shared_4(input_at(i, r, 0));
            store_word<Number>(pass.result, element(tile, s, t), result, valid(), Shape::WHOLE_WORDS);
            if (!Shape::BACKWARD && t == int(load_shared_4(length_at(r))) - 1) store_state(tile, s, result);
        }
    }
};

template <class Shape>
__device__ void cluster_recurrence(const Pass& pass) {
    extern __shared__ __align__(128) char smem[];
    if (threadIdx.x < 2 * Shape::UNITS * WARPS) barrier_init(smem_address(smem + Shape::barrier_at(0, 0, threadIdx.x)), 1);
    barrier_init_fence();
    if (threadIdx.x < THREADS) {
        registers_up<Shape::MULTIPLY_REGISTERS>();
        Multiplier<Shape> multiplier;
        multiplier.load_weights(pass);
#pragma unroll 1
        for (Tile<Shape> tile(pass); tile.exists(); tile.next()) {
            tile.open();
            multiplier.run(tile, smem);
        }
    } else {
        registers_down<Shape::FINISH_REGISTERS>();
        Finisher<Shape> finisher(pass, smem);
#pragma unroll 1
        for (Tile<Shape> tile(pass); tile.exists(); tile.next()) {
            tile.open();
            finisher.run(tile);
        }
    }
    __syncthreads();  // nobody leaves while others wait where it has arrived
}

}  // namespace ds2
