// Persistent recurrence over the whole chip for batches that fill the warp-group matrix unit: groups of 32 utterances, two
// of which take turns, so that one's messages travel while the other's products run. All blocks must run at the same time.
//
// A cluster owns 128 rows of the matrix; its blocks split K between them, so that a block reads only its part of the state.
// The weights are the instruction's first operand and lie in registers, 64 rows a warp group; the state is its second and
// lies in shared memory. One turn of one block:
//   1. 4 polling warps, each with a quarter of the block's K. A warp polls its words of all utterances (exchange.cuh), lays
//      them into shared memory as they are, and tells the multiplying warps.
//   2. 2 multiplying warp groups. When the last quarter is multiplied, they send their sums, in parcels of 8 words x 8
//      utterances, to the blocks of the cluster, which share the parcels out.
//   3. 4 finishing warps. They add the cluster's sums and the input, apply the cell, publish the words; then store y and
//      fetch x.
//
// Two buffers of received sums for each group, by parity of the state's number, are enough: who sends the sums of state
// e + 2 has read words of it, which some cluster published after its blocks together had read all of e + 1, which all owners
// had published after they had received and read the sums of e. For the same reason a warp that owns words never waits for
// a phase that has passed unseen; one that owns none does not wait, but for the first, which arms the mbarriers. A block that
// owns none gets none.
#pragma once

#include "cells.cuh"
#include "turns.cuh"
#include "wgmma.cuh"

namespace ds2 {

template <class Number_, class Cell_, int CLUSTER_, int K_TILES_, bool BACKWARD_>
struct WideShape {
    using Number = Number_;
    using Cell = Cell_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int PER_WORD = Number::PER_WORD;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr int K_TILES = K_TILES_;       // matrix instructions along K, one block
    static constexpr int GROUPS = 2;               // at most, of one tile
    static constexpr int SAMPLES = WGMMA_SAMPLES;  // of a group, at most
    static constexpr int WORDS = 64;               // of a cluster, of each utterance

    static constexpr int POLLERS = 128, FINISHERS = 128;  // threads
    static constexpr int ALL_THREADS = THREADS + POLLERS + FINISHERS;
    // Registers a thread: as many at launch for all, then moved to the multiplying warps, which hold the weights.
    static constexpr int MULTIPLY_REGISTERS = K_TILES <= 28 ? 160 : 176;
    static constexpr int POLL_REGISTERS = K_TILES <= 28 ? 104 : 88, FINISH_REGISTERS = K_TILES <= 28 ? 88 : 72;
    static_assert(THREADS * MULTIPLY_REGISTERS + POLLERS * POLL_REGISTERS + FINISHERS * FINISH_REGISTERS <=
                      65536 / ALL_THREADS / 8 * 8 * ALL_THREADS,
                  "what some warps gain, others have given");
    static_assert(K_TILES <= 32, "the weights of more do not fit the registers");

    // Each polling warp has a part of K, which it hands on in pieces: the products of the first run while the next is stored.
    static constexpr int PARTS = 4, PART_TILES = (K_TILES + PARTS - 1) / PARTS;
    static constexpr int PIECES = 2, PIECE_TILES = (PART_TILES + PIECES - 1) / PIECES;
    // The first instruction of a piece, and one past its last.
    static constexpr __device__ int begin_of(int part, int piece) {
        return lesser(part * PART_TILES + piece * PIECE_TILES, K_TILES);
    }
    static constexpr __device__ int end_of(int part, int piece) {
        return lesser(lesser(part * PART_TILES + (piece + 1) * PIECE_TILES, (part + 1) * PART_TILES), K_TILES);
    }
    static constexpr __device__ int lesser(int a, int b) { return a < b ? a : b; }

    // Sums travel in parcels: of a multiplying warp's 8 words and of 8 utterances, 16 bytes a lane.
    static constexpr int PARCELS = WARPS * SAMPLES / 8, PARCEL_BYTES = 512;
    static constexpr int OWN_PARCELS = (PARCELS + CLUSTER - 1) / CLUSTER;  // that a block finishes, at most
    static constexpr int UNITS = (OWN_PARCELS + 3) / 4;  // a finishing thread's: one word of two utterances each

    // Shared memory. The state: [turn % 2][instruction][half of its K][utterance][4 words]. Received sums: [group][state % 2]
    // [own parcel][block][lane][2 rows][2 utterances]. Inputs: [turn % AHEAD][array][own word][thread].
    static constexpr int STATE_BYTES = K_TILES * WGMMA_STATE_BYTES;
    static constexpr int RECEIVED_AT = 2 * STATE_BYTES;
    static constexpr int RECEIVED_BYTES = OWN_PARCELS * CLUSTER * PARCEL_BYTES;
    static constexpr int INPUTS = BACKWARD ? 2 : 1;
    static constexpr int AHEAD = 8;
    static_assert(AHEAD % GROUPS == 0, "the turn that is fetched is of the group that has just finished one");
    static constexpr int INPUTS_AT = RECEIVED_AT + 2 * GROUPS * RECEIVED_BYTES;
    static constexpr int FRAMES_AT = INPUTS_AT + AHEAD * INPUTS * UNITS * 2 * FINISHERS * 4;  // of each group's own words
    static constexpr int BARRIERS_AT = FRAMES_AT + GROUPS * UNITS * 2 * FINISHERS * 4;
    // mbarriers: of received sums, then of pieces of the state that are full, then of states whose products are done.
    static constexpr int FULL = 2 * GROUPS, READ = FULL + 2 * PARTS * PIECES, BARRIERS = READ + 2;
    static constexpr int SMEM_BYTES = BARRIERS_AT + 8 * BARRIERS;
    static constexpr int TILE_DONE = 1;  // named barrier of the finishing warps; 0 is __syncthreads

    static __device__ int full(int turn, int part, int piece) { return FULL + (turn % 2 * PARTS + part) * PIECES + piece; }
    static __device__ int read(int turn) { return READ + turn % 2; }

    static_assert(Cell::GATES == 1, "a cluster's rows are its units: cells with gates need their own pointwise end");
    static_assert(PER_WORD == 2, "two rows of a lane are one word: 16-bit numbers only");
};

template <class Shape>
struct WideBlock {
    const Pass& pass;
    char* const smem;
    const int rank = cluster_rank(), lane = threadIdx.x % 32;
    const int state_words = 4 * state_units<typename Shape::Number>(pass);
    const int first_word = blockIdx.x / Shape::CLUSTER * Shape::WORDS;
    const int slice_word = rank * Shape::K_TILES * MMA_WORDS;

    __device__ WideBlock(const Pass& pass, char* smem) : pass(pass), smem(smem) {}
    __device__ unsigned barrier(int i) const { return smem_address(smem) + Shape::BARRIERS_AT + 8 * i; }
    // Whether anything in a parcel exists, in a group of `live` utterances. What does not is neither sent nor waited for.
    __device__ bool alive(int parcel, int live) const {
        return first_word + parcel / (Shape::SAMPLES / 8) * 8 < state_words && parcel % (Shape::SAMPLES / 8) * 8 < live;
    }
};

template <class Shape>
struct WidePoller : WideBlock<Shape> {
    using Block = WideBlock<Shape>;
    using Block::lane;
    static constexpr int LOADS = 2 * Shape::PART_TILES, PIECE_LOADS = 2 * Shape::PIECE_TILES;
    const uint4* const exchange;  // [group][slot][4 words of K][utterance]
    const int part = threadIdx.x / 32 % Shape::PARTS;
    const int first_unit = Block::slice_word / 4 + part * LOADS;

    __device__ WidePoller(const Pass& pass, const unsigned* exchange, char* smem)
        : Block(pass, smem), exchange(reinterpret_cast<const uint4*>(exchange)) {}

    __device__ void run() const {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(this->pass); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups))
                receive(at, turn, tile.live_of(at.group));
    }

    // A lane has one utterance: units of 4 words of it.
    __device__ void receive(Turn at, int turn, int live) const {
        const int units = this->state_words / 4;
        const uint4* from =
            exchange + ((at.group * SLOTS + unsigned(at.epoch) % SLOTS) * units + first_unit) * Shape::SAMPLES + lane;
        const int left = lane < live ? units - first_unit : 0;
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) v[i] = unread(i < left && part * LOADS + i < 2 * Shape::K_TILES);
#pragma unroll
        for (int i = 0; i < LOADS; i++) load_relaxed_if(has_empty(v[i]), v[i], from + i * Shape::SAMPLES);
        const unsigned to =
            smem_address(this->smem) + turn % 2 * Shape::STATE_BYTES + (part * LOADS * Shape::SAMPLES + lane) * 16;
        WaitLimit limit;
#pragma unroll
        for (int piece = 0; piece < Shape::PIECES; piece++) {
            const int first = piece * PIECE_LOADS, last = min(first + PIECE_LOADS, LOADS);
            while (true) {
                bool missing = false;
#pragma unroll
                for (int i = first; i < last; i++) missing |= has_empty(v[i]);
                if (!__any_sync(0xffffffffu, missing)) break;
#pragma unroll
                for (int i = first; i < LOADS; i++) load_relaxed_if(has_empty(v[i]), v[i], from + i * Shape::SAMPLES);
                limit.check(at.epoch);
            }
            if (piece == 0 && turn >= 2)
                barrier_wait<true>(this->barrier(Shape::read(turn)), (turn / 2 + 1) % 2, "the products before", at.epoch);
#pragma unroll
            for (int i = first; i < last; i++)
                if (part * LOADS + i < 2 * Shape::K_TILES) store_shared_16(to + i * Shape::SAMPLES * 16, v[i]);
            fence_async_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(this->barrier(Shape::full(turn, part, piece)));
            // Ends a basic block: the compiler would test the next piece before it stores this one.
            const unsigned now = clock();
            while (int(clock() - now) < 0) {
            }
        }
    }
};

template <class Shape>
struct WideMultiplier : WideBlock<Shape> {
    using Number = typename Shape::Number;
    using Block = WideBlock<Shape>;
    using Block::lane;
    static constexpr int K_TILES = Shape::K_TILES, COLUMNS = Shape::SAMPLES / 8;  // of parcels
    const int warp = threadIdx.x / 32;
    unsigned weights[K_TILES][4];
    unsigned to[COLUMNS];  // shared memory of the blocks that this warp's parcels go to

    __device__ WideMultiplier(const Pass& pass, char* smem) : Block(pass, smem) {
        const int row = 2 * (this->first_word + 8 * warp + lane / 4);  // and row + 1, 8 further down in the instruction
#pragma unroll
        for (int k = 0; k < K_TILES; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = 2 * (this->slice_word + MMA_WORDS * k + i / 2 * 4 + lane % 4);
                weights[k][i] = row + i % 2 < pass.hidden
                                    ? load_word<Number>(pass.matrix, size_t(row + i % 2) * pass.hidden + column,
                                                        pass.hidden - column, pass.whole_words)
                                    : 0;
            }
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) to[j] = remote_address(smem_address(smem), (warp * COLUMNS + j) % Shape::CLUSTER);
    }

    __device__ void run() const {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(this->pass); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) {
                float c[Shape::SAMPLES / 2];
                multiply(c, turn, at.epoch);
                send(c, buffer_of(at), tile.live_of(at.group));
            }
    }

    __device__ void multiply(float (&c)[Shape::SAMPLES / 2], int turn, int epoch) const {
#pragma unroll
        for (int i = 0; i < Shape::SAMPLES / 2; i++) c[i] = 0.f;
        const unsigned state = smem_address(this->smem) + turn % 2 * Shape::STATE_BYTES;
#pragma unroll
        for (int piece = 0; piece < Shape::PIECES; piece++)
#pragma unroll
            for (int part = 0; part < Shape::PARTS; part++) {
                barrier_wait<true>(this->barrier(Shape::full(turn, part, piece)), turn / 2 % 2, "its part of the state", epoch);
                wgmma_fence();
#pragma unroll
                for (int k = Shape::begin_of(part, piece); k < Shape::end_of(part, piece); k++)
                    wgmma<Number>(c, weights[k], state_descriptor(state + k * WGMMA_STATE_BYTES));
                wgmma_commit();
            }
        wgmma_wait();
        __syncwarp();
        if (lane == 0) barrier_arrive(this->barrier(Shape::read(turn)));
    }

    // Parcels for this block itself need no network: its mbarrier is told what st.async tells those of the others.
    __device__ void send(const float (&c)[Shape::SAMPLES / 2], int buffer, int live) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int parcel = warp * COLUMNS + j;
            if (!this->alive(parcel, live)) continue;
            const uint4 v = make_uint4(__float_as_uint(c[4 * j]), __float_as_uint(c[4 * j + 1]), __float_as_uint(c[4 * j + 2]),
                                       __float_as_uint(c[4 * j + 3]));
            const int place = Shape::RECEIVED_AT + buffer * Shape::RECEIVED_BYTES + lane * 16 +
                              (parcel / Shape::CLUSTER * Shape::CLUSTER + this->rank) * Shape::PARCEL_BYTES;
            if (parcel % Shape::CLUSTER == this->rank) {
                store_shared_16(smem_address(this->smem) + place, v);
                __syncwarp();
                if (lane == 0) barrier_complete(this->barrier(buffer), Shape::PARCEL_BYTES);
            } else {
                store_async(to[j] + place, to[j] + Shape::BARRIERS_AT + 8 * buffer, v.x, v.y, v.z, v.w);
            }
        }
    }
};

template <class Shape>
struct WideFinisher : WideBlock<Shape> {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    using Block = WideBlock<Shape>;
    using Block::lane, Block::pass, Block::rank, Block::smem;
    using Tile = GridTile<Shape>;
    static constexpr int UNITS = Shape::UNITS, OWN = 2 * UNITS;  // words of a thread: utterances 2 i and 2 i + 1 of unit i

    unsigned* const exchange;
    const int thread = threadIdx.x % Shape::FINISHERS, warp = thread / 32;
    const int slot_words = Block::state_words * Shape::SAMPLES;
    int offset[UNITS];      // of the unit's first word in a (B, H) array, from its group's first utterance on
    unsigned place[UNITS];  // and in a slot
    // Of the current tile, in one register. Bit OWN * group + own word: it exists; from bit STORED on the same, without what
    // pads the state to whole units; from bit PARCELS on, 8 bits a group: how many parcels the block finishes.
    unsigned owned;
    static constexpr int STORED = Shape::GROUPS * OWN, PARCELS = 2 * STORED;
    static_assert(PARCELS + 8 * Shape::GROUPS <= 32, "all these bits are one register");

    __device__ WideFinisher(const Pass& pass, unsigned* exchange, char* smem) : Block(pass, smem), exchange(exchange) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            offset[i] = sample(i) * pass.hidden + 2 * word(i);
            place[i] = (word(i) / 4 * Shape::SAMPLES + sample(i)) * 4 + word(i) % 4;
        }
    }

    // Unit i: a word of two utterances of a group, what this lane has of a parcel.
    __device__ int parcel(int i) const { return (warp + 4 * i) * Shape::CLUSTER + rank; }
    __device__ int word(int i) const { return this->first_word + parcel(i) / (Shape::SAMPLES / 8) * 8 + lane / 4; }
    __device__ int sample(int i) const { return parcel(i) % (Shape::SAMPLES / 8) * 8 + lane % 4 * 2; }
    __device__ int valid(int i) const { return min(2, pass.hidden - 2 * word(i)); }
    __device__ bool owns(int group, int n) const { return owned >> (OWN * group + n) & 1; }
    __device__ bool stores(int group, int n) const { return owned >> (STORED + OWN * group + n) & 1; }
    // Own word n lies at element(origin(.., t), n) of a (T, B, H) array, and with t = 0 of a (B, H) array.
    __device__ size_t origin(const Tile& tile, int group, int t) const {
        return size_t(unsigned(t * pass.batch + tile.first + group * pass.samples)) * unsigned(pass.hidden);
    }
    __device__ size_t element(size_t origin, int i, int n) const { return origin + unsigned(offset[i] + n % 2 * pass.hidden); }
    __device__ size_t element(size_t origin, int n) const { return element(origin, n / 2, n); }
    __device__ unsigned load_state(const Tile& tile, int group, int n) const {
        return pass.state && stores(group, n) ? load_word<Number>(pass.state, element(origin(tile, group, 0), n), valid(n / 2),
                                                                  pass.whole_words)
                                              : 0;
    }
    __device__ void store_state(const Tile& tile, int group, int n, unsigned value) const {
        if (stores(group, n))
            store_word<Number>(pass.last_state, element(origin(tile, group, 0), n), value, valid(n / 2), pass.whole_words);
    }
    __device__ unsigned* slot(int group, int epoch) const {
        return exchange + (group * SLOTS + unsigned(epoch) % SLOTS) * slot_words;
    }
    __device__ unsigned frames_at(int group, int n) const {
        return smem_address(smem) + Shape::FRAMES_AT + ((group * OWN + n) * Shape::FINISHERS + thread) * 4;
    }
    __device__ unsigned input_at(int turn, int array, int n) const {
        return smem_address(smem) + Shape::INPUTS_AT +
               (((turn % Shape::AHEAD * Shape::INPUTS + array) * OWN + n) * Shape::FINISHERS + thread) * 4;
    }

    __device__ void run() {
        int epoch = 0;
        for (Tile tile(pass); tile.exists(); tile.next()) {
            const int iterations = tile.iterations(), turns = tile.turns();
            open(tile, epoch);
            Turn at{epoch, 0};
            for (int i = 0; i < Shape::AHEAD; i++) fetch(tile, i % tile.groups, i / tile.groups, i);
            for (int i = 0; i < turns; i++, at.next(tile.groups)) {
                const int iteration = at.epoch - epoch;
                finish(tile, at, Shape::BACKWARD ? tile.steps - 1 - iteration : iteration, i, iteration + 1 < iterations);
                fetch(tile, at.group, iteration + Shape::AHEAD / tile.groups, i + Shape::AHEAD);
            }
            copies_wait<0>();
            epoch += iterations;
            for (int g = 0; g < tile.groups; g++)
                for (int n = 0; n < OWN; n++)
                    for (int t = tile.steps; t < pass.frames && stores(g, n); t++)  // padding
                        store_word<Number>(pass.result, element(origin(tile, g, t), n), 0, valid(n / 2), pass.whole_words);
            block_wait(Shape::TILE_DONE, Shape::FINISHERS);  // a warp without words in the next tile has seen all phases
        }
    }

    // Notes what the thread owns and its utterances' frames, and publishes their first state.
    __device__ void open(const Tile& tile, int epoch) {
        owned = 0;
        for (int g = 0; g < tile.groups; g++) {
            for (int p = rank; p < Shape::PARCELS; p += Shape::CLUSTER)
                owned += unsigned(this->alive(p, tile.live_of(g))) << (PARCELS + 8 * g);
#pragma unroll
            for (int i = 0; i < UNITS; i++)
#pragma unroll 1
                for (int n = 2 * i; n < 2 * i + 2; n++) {
                    const int s = sample(i) + n % 2;
                    const bool mine = parcel(i) < Shape::PARCELS && word(i) < this->state_words && s < tile.live_of(g);
                    owned |= unsigned(mine) << (OWN * g + n);
                    owned |= unsigned(mine && valid(i) > 0) << (STORED + OWN * g + n);
                    const int frames = mine ? length_of(pass, tile.first + g * pass.samples + s) : 0;
                    store_shared_4(frames_at(g, n), frames);
                    if (!mine) continue;
                    const size_t at = element(origin(tile, g, 0), i, n);
                    const unsigned state = pass.state ? load_word<Number>(pass.state, at, valid(i), pass.whole_words) : 0;
                    // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps.
                    if (frames == 0 && (!Shape::BACKWARD || tile.steps == 0))
                        store_word<Number>(pass.last_state, at, state, valid(i), pass.whole_words);
                    if (tile.steps > 0)
                        store_relaxed(slot(g, epoch) + place[i] + n % 2 * 4, publishable(Shape::BACKWARD ? 0 : state));
                }
        }
        if (tile.steps > 0) empty_slots(tile, epoch);
    }

    // Asks for what turn number `turn` of the tile consumes. Each thread reads only what itself has fetched.
    __device__ void fetch(const Tile& tile, int group, int iteration, int turn) const {
        const int t = Shape::BACKWARD ? tile.steps - 1 - iteration : iteration;
        const size_t from = origin(tile, group, max(t, 0));
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const bool wanted = t >= 0 && t < int(load_shared_4(frames_at(group, n))) && stores(group, n);
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) {
                const auto* array = static_cast<const typename Number::Storage*>(a == 0 ? pass.input : pass.output_y);
                if (pass.whole_words)
                    copy_async(input_at(turn, a, n), array + (wanted ? element(from, n) : 0), wanted);
                else  // rows that start between words cannot be copied behind the thread's back
                    store_shared_4(input_at(turn, a, n),
                                   wanted ? load_word<Number>(array, element(from, n), valid(n / 2), false) : 0);
            }
        }
        copies_commit();  // one a turn: copies_wait counts them
    }

    // The pointwise end of one turn at frame t; t = -1 is the gradient of the first state. First everything that other
    // blocks wait for, and as much of it as can be done before the wait.
    __device__ void finish(const Tile& tile, Turn at, int t, int turn, bool more) const {
        const int buffer = buffer_of(at);
        const unsigned from = smem_address(smem) + Shape::RECEIVED_AT + buffer * Shape::RECEIVED_BYTES +
                              warp * Shape::CLUSTER * Shape::PARCEL_BYTES + lane * 16;
        unsigned* const to = pinned(slot(at.group, at.epoch + 1));
        unsigned word[OWN], y[OWN];
        float in[OWN][2];
        unsigned speaks = 0, ends = 0;  // bit n: own word n's utterance has frame t, or any at all if t = -1; it is its last
        copies_wait<Shape::AHEAD - 1>();
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            Number::unpack(load_shared_4(input_at(turn, 0, n)), in[n]);
            y[n] = load_shared_4(input_at(turn, Shape::INPUTS - 1, n));
            const int frames = load_shared_4(frames_at(at.group, n));
            speaks |= unsigned(max(t, 0) < frames) << n;
            ends |= unsigned(t >= 0 && t == frames - 1) << n;
            if (Shape::BACKWARD && pass.state && ends >> n & 1) {
                float last[2];
                Number::unpack(load_state(tile, at.group, n), last);
                in[n][0] += last[0], in[n][1] += last[1];
            }
        }
        const int parcels = owned >> (PARCELS + 8 * at.group) & 0xff;
        if (thread == 0 && parcels > 0) barrier_expect(this->barrier(buffer), parcels * Shape::CLUSTER * Shape::PARCEL_BYTES);
        if (warp == 0 ? parcels > 0 : __any_sync(0xffffffffu, owned >> (OWN * at.group) & ((1 << OWN) - 1)))
            barrier_wait<true>(this->barrier(buffer), at.epoch / 2 % 2, "its cluster's sums", at.epoch);
        float sum[OWN][2] = {};
#pragma unroll
        for (int i = 0; i < UNITS; i++)  // for a parcel that a thread does not have it reads what it will not use
#pragma unroll
            for (int source = 0; source < Shape::CLUSTER; source++) {
                const uint4 v = load_shared_16(from + (4 * i * Shape::CLUSTER + source) * Shape::PARCEL_BYTES);
                sum[2 * i][0] += __uint_as_float(v.x), sum[2 * i + 1][0] += __uint_as_float(v.y);
                sum[2 * i][1] += __uint_as_float(v.z), sum[2 * i + 1][1] += __uint_as_float(v.w);
            }
        if (Shape::BACKWARD && t < 0) {
            for (int n = 0; n < OWN; n++)
                store_state(tile, at.group, n, speaks >> n & 1 ? Number::pack(sum[n]) : load_state(tile, at.group, n));
            return;
        }
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            float y_out[2];
            Number::unpack(y[n], y_out);
#pragma unroll
            for (int e = 0; e < 2; e++)
                sum[n][e] = Shape::BACKWARD ? Cell::backward(sum[n][e] + in[n][e], y_out[e], pass.clip)
                                            : Cell::forward(sum[n][e] + in[n][e], pass.clip);
            word[n] = speaks >> n & 1 ? Number::pack(sum[n]) : 0;
        }
#pragma unroll
        for (int n = 0; n < OWN; n++)
            store_relaxed_if(more && owns(at.group, n), to + place[n / 2] + n % 2 * 4, publishable(word[n]));
        const size_t there = origin(tile, at.group, t);
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            if (stores(at.group, n))
                store_word<Number>(pass.result, element(there, n), word[n], valid(n / 2), pass.whole_words);
            if (!Shape::BACKWARD && ends >> n & 1) store_state(tile, at.group, n, word[n]);
        }
        if (more && at.group == tile.groups - 1) empty_slots(tile, at.epoch + 1);
    }

    // Empties what this thread has stored for the EMPTY_EVERY states up to epoch - 2, if it is time to, after it has
    // published state `epoch` of all groups.
    __device__ void empty_slots(const Tile& tile, int epoch) const {
        if (epoch % EMPTY_EVERY != EMPTY_EVERY - 1) return;
        for (int g = 0; g < tile.groups; g++)
#pragma unroll 1
            for (int k = epoch + SLOTS - 1 - EMPTY_EVERY; k <= epoch + SLOTS - 2; k++)
#pragma unroll
                for (int n = 0; n < OWN; n++)
                    if (owns(g, n)) store_relaxed(slot(g, k) + place[n / 2] + n % 2 * 4, EMPTY);
        fence_stores();
    }
};

template <class Shape>
__device__ void wide_recurrence(const Pass& pass, unsigned* exchange) {
    extern __shared__ __align__(128) char wide_smem[];
    if (threadIdx.x < Shape::BARRIERS)
        barrier_init(smem_address(wide_smem) + Shape::BARRIERS_AT + 8 * threadIdx.x, threadIdx.x < Shape::READ ? 1 : WARPS);
    barrier_init_fence();
    cluster_barrier();
    // In each role's end: no block leaves while its last sums may be on their way to a peer.
    if (threadIdx.x < THREADS) {
        registers_up<Shape::MULTIPLY_REGISTERS>();
        WideMultiplier<Shape>(pass, wide_smem).run();
        cluster_barrier();
    } else if (threadIdx.x < THREADS + Shape::POLLERS) {
        registers_down<Shape::POLL_REGISTERS>();
        WidePoller<Shape>(pass, exchange, wide_smem).run();
        cluster_barrier();
    } else {
        registers_down<Shape::FINISH_REGISTERS>();
        WideFinisher<Shape>(pass, exchange, wide_smem).run();
        cluster_barrier();
    }
}

}  // namespace ds2
