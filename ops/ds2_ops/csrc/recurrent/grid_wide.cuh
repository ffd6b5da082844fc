// Persistent recurrence over the whole chip for batches that fill the warp-group matrix unit: groups of 32 utterances, two
// of which take turns, so that one's messages travel while the other's products run. All blocks must run at the same time.
//
// A cluster owns 128 rows of the matrix; its blocks split K between them, so that a block reads only its part of the state.
// The weights are the instruction's first operand and lie in registers, 64 rows a warp group; the state is its second and
// lies in shared memory. One turn of one block:
//   1. 4 polling warps, each with a quarter of the block's K. A warp polls its words of all utterances (exchange.cuh), lays
//      them into shared memory as they are, and tells the multiplying warps, piece by piece.
//   2. 2 multiplying warp groups. When the last piece is multiplied, they send their sums, in parcels of 8 words x 8
//      utterances, to the blocks of the cluster, which share the parcels out.
//   3. 4 finishing warps. They add the cluster's sums and the input, apply the cell, publish the words; then store y and
//      fetch x. All this counts when two groups take turns, so that each touches memory 16 bytes at a time.
//
// Two buffers of received sums for each group, by parity of the state's number, are enough: who sends the sums of state
// e + 2 has read words of it, which some cluster published after its blocks together had read all of e + 1, which all owners
// had published after they had received and read the sums of e. For the same reason a warp that owns words never waits for
// a phase that has passed unseen; one that owns none does not wait, but for the first, which arms the mbarriers. A block that
// owns none gets none.
#pragma once

#include "recurrent/pointwise.cuh"
#include "recurrent/turns.cuh"
#include "ptx/wgmma.cuh"

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

    // Each polling warp has a part of K, which it hands on in pieces: products of one run while the next is stored.
    static constexpr int PARTS = 4, PART_TILES = (K_TILES + PARTS - 1) / PARTS;
    static constexpr int PIECE_TILES = 2, PIECES = (PART_TILES + PIECE_TILES - 1) / PIECE_TILES;

    // Sums travel in parcels: of a multiplying warp's 8 words and of 8 utterances, 16 bytes a lane.
    static constexpr int PARCELS = WARPS * SAMPLES / 8, PARCEL_BYTES = 512;
    static constexpr int OWN_PARCELS = (PARCELS + CLUSTER - 1) / CLUSTER;  // that a block finishes, at most
    static constexpr int FINISHING_WARPS = FINISHERS / 32;
    static constexpr int WARP_PARCELS = (OWN_PARCELS + FINISHING_WARPS - 1) / FINISHING_WARPS;  // the block's i: warp i % 4

    // Shared memory. The state: [turn % 2][instruction][half of its K][utterance][4 words]. Received sums: [group][state % 2]
    // [own parcel][block][lane][2 rows][2 utterances]. Inputs: [turn % AHEAD][array][finishing warp][its parcel][utterance]
    // [word]. Frames: [finishing warp][group][utterance].
    static constexpr int STATE_BYTES = K_TILES * WGMMA_STATE_BYTES;
    static constexpr int RECEIVED_AT = 2 * STATE_BYTES;
    static constexpr int RECEIVED_BYTES = OWN_PARCELS * CLUSTER * PARCEL_BYTES;
    static constexpr int INPUTS = BACKWARD ? 2 : 1;
    static constexpr int AHEAD = 8;
    static_assert(AHEAD % GROUPS == 0, "the turn that is fetched is of the group that has just finished one");
    static constexpr int INPUTS_AT = RECEIVED_AT + 2 * GROUPS * RECEIVED_BYTES;
    static constexpr int PARCEL_INPUT_BYTES = 8 * 8 * 4, WARP_INPUT_BYTES = WARP_PARCELS * PARCEL_INPUT_BYTES;
    static constexpr int FRAMES_AT = INPUTS_AT + AHEAD * INPUTS * FINISHING_WARPS * WARP_INPUT_BYTES;
    static constexpr int BARRIERS_AT = FRAMES_AT + FINISHING_WARPS * GROUPS * SAMPLES * 4;
    // mbarriers: of received sums, then of pieces of the state that are full, then of states whose products are done.
    static constexpr int FULL = 2 * GROUPS, READ = FULL + 2 * PIECES, BARRIERS = READ + 2;
    static constexpr int SMEM_BYTES = BARRIERS_AT + 8 * BARRIERS;
    static constexpr int TILE_DONE = 1;  // named barrier of the finishing warps; 0 is __syncthreads

    static __device__ int full(int turn, int piece) { return FULL + turn % 2 * PIECES + piece; }
    static __device__ int arrivals(int barrier) { return barrier < FULL ? 1 : barrier < READ ? PARTS : WARPS; }
    static __device__ int read(int turn) { return READ + turn % 2; }

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
    const int own = 2 * Shape::K_TILES - part * LOADS;  // loads of this warp, if less than LOADS
    int pause = 0;  // before the first poll of a turn

    __device__ WidePoller(const Pass& pass, const unsigned* exchange, char* smem)
        : Block(pass, smem), exchange(reinterpret_cast<const uint4*>(exchange)) {}

    __device__ void run() {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(this->pass); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) {
                receive(at, turn, tile.live_of(at.group));
                if (at.group == tile.groups - 1) order_polls(at.epoch);
            }
    }

    // A lane has one utterance: units of 4 words of it.
    __device__ void receive(Turn at, int turn, int live) {
        const unsigned began = clock();
        bool early = false;
        const int units = this->state_words / 4;
        const uint4* from =
            exchange + ((at.group * SLOTS + unsigned(at.epoch) % SLOTS) * units + first_unit) * Shape::SAMPLES + lane;
        const int left = lane < live ? min(own, units - first_unit) : 0;
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) v[i] = unread(i < left);
        while (int(clock() - began) < pause) {
        }
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
                early = true;
            }
            if (piece == 0 && turn >= 2)
                barrier_wait<true>(this->barrier(Shape::read(turn)), (turn / 2 + 1) % 2, "the products before", at.epoch);
#pragma unroll
            for (int i = first; i < last; i++)
                if (Shape::K_TILES % Shape::PARTS == 0 || i < own) store_shared_16(to + i * Shape::SAMPLES * 16, v[i]);
            fence_async_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(this->barrier(Shape::full(turn, piece)));
            // Ends a basic block: the compiler would test the next piece before it stores this one.
            const unsigned now = clock();
            while (int(clock() - now) < 0) {
            }
        }
        pause = next_pause<16, 8>(pause, early ? 2 : 1);
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
        const unsigned long long descriptor = state_descriptor(__shfl_sync(0xffffffffu, state, 0));
#pragma unroll
        for (int piece = 0; piece < Shape::PIECES; piece++) {
            barrier_wait<true>(this->barrier(Shape::full(turn, piece)), turn / 2 % 2, "its part of the state", epoch);
            wgmma_fence();
#pragma unroll
            for (int part = 0; part < Shape::PARTS; part++)
#pragma unroll
                for (int i = piece * Shape::PIECE_TILES; i < min((piece + 1) * Shape::PIECE_TILES, Shape::PART_TILES); i++)
                    if (const int k = part * Shape::PART_TILES + i; k < K_TILES)
                        wgmma<Number>(c, weights[k], descriptor + k * (WGMMA_STATE_BYTES / 16));
            wgmma_commit();
        }
        wgmma_wait();
        __syncwarp();
        if (lane == 0) barrier_arrive(this->barrier(Shape::read(turn)));
    }

    // Parcels for this block itself need no network: its mbarrier is told what st.async tells those of the others. Not in
    // debug builds, as race checkers do not know that this orders anything.
    __device__ void send(const float (&c)[Shape::SAMPLES / 2], int buffer, int live) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int parcel = warp * COLUMNS + j;
            if (!this->alive(parcel, live)) continue;
            const uint4 v = make_uint4(__float_as_uint(c[4 * j]), __float_as_uint(c[4 * j + 1]), __float_as_uint(c[4 * j + 2]),
                                       __float_as_uint(c[4 * j + 3]));
            const int place = Shape::RECEIVED_AT + buffer * Shape::RECEIVED_BYTES + lane * 16 +
                              (parcel / Shape::CLUSTER * Shape::CLUSTER + this->rank) * Shape::PARCEL_BYTES;
            if (!DEBUG_WAITS && parcel % Shape::CLUSTER == this->rank) {
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
    using Block = WideBlock<Shape>;
    using Block::lane, Block::pass, Block::rank, Block::smem;
    using Tile = GridTile<Shape>;
    static constexpr int WARP_PARCELS = Shape::WARP_PARCELS;
    static_assert(WARP_PARCELS <= 2, "a lane for every 16 bytes of a warp's parcels");

    // A lane computes one word of two utterances of each parcel: OWN words. In memory it has a unit instead, 4 words of one
    // utterance, 16 bytes: unit lane % 16 of parcel lane / 16. Words become units in shared memory.
    static constexpr int OWN = 2 * WARP_PARCELS;
    unsigned* const exchange;
    const int thread = threadIdx.x % Shape::FINISHERS, warp = thread / 32;
    const int slot_words = Block::state_words * Shape::SAMPLES;
    const int sample = first_sample(lane / 16) + lane / 2 % 8;  // of the unit, in its group
    const int word = parcel_word(lane / 16) + lane % 2 * 4;     // of the unit, its first
    const unsigned place = pinned(unsigned(word / 4 * Shape::SAMPLES + sample) * 4);  // of the unit in a slot, in words
    const unsigned offset = pinned(unsigned(sample * this->pass.hidden + 2 * word));  // in a (B, H) array, from its group on
    // Shared memory: the unit and the first own word in the inputs, own part of received sums, frames of the unit's utterance.
    const unsigned base = pinned(smem_address(this->smem));
    const unsigned unit_at = pinned(base + Shape::INPUTS_AT + warp * Shape::WARP_INPUT_BYTES + lane * 16);
    const unsigned word_at = pinned(unit_at - lane * 16 + lane % 4 * 64 + lane / 4 * 4);
    const unsigned sums_at = pinned(base + Shape::RECEIVED_AT + warp * Shape::CLUSTER * Shape::PARCEL_BYTES + lane * 16);
    const unsigned frames_at = pinned(base + Shape::FRAMES_AT + (warp * Shape::GROUPS * Shape::SAMPLES + sample) * 4);
    // Of the current tile. Bit g: the unit of group g exists; from bit COUNTS on, 8 bits a group: how many parcels the
    // block finishes.
    unsigned owned;
    static constexpr int COUNTS = Shape::GROUPS;

    __device__ WideFinisher(const Pass& pass, unsigned* exchange, char* smem) : Block(pass, smem), exchange(exchange) {}

    __device__ int parcel(int i) const { return (warp + Shape::FINISHING_WARPS * i) * Shape::CLUSTER + rank; }
    __device__ int parcel_word(int i) const { return this->first_word + parcel(i) / (Shape::SAMPLES / 8) * 8; }
    __device__ int first_sample(int i) const { return parcel(i) % (Shape::SAMPLES / 8) * 8; }
    __device__ bool owns(int group) const { return owned >> group & 1; }
    __device__ int frames_of(int group) const { return load_shared_4(frames_at + group * Shape::SAMPLES * 4); }
    // Where the unit of a group lies in a (T, B, H) array, and with t = 0 in a (B, H) array.
    __device__ size_t element(const Tile& tile, int group, int t) const {
        return size_t(unsigned(t * pass.batch + tile.first + group * pass.samples)) * unsigned(pass.hidden) + offset;
    }
    __device__ int valid() const { return pass.hidden - 2 * word; }  // elements from its start to the row's end
    __device__ uint4 load_unit(const void* array, size_t at) const {
        return make_uint4(load_word<Number>(array, at, valid(), pass.whole_words),
                          load_word<Number>(array, at + 2, valid() - 2, pass.whole_words),
                          load_word<Number>(array, at + 4, valid() - 4, pass.whole_words),
                          load_word<Number>(array, at + 6, valid() - 6, pass.whole_words));
    }
    __device__ void store_unit(void* array, size_t at, uint4 v) const {
        if (pass.wide_rows) {
            *reinterpret_cast<uint4*>(static_cast<typename Number::Storage*>(array) + at) = v;
            return;
        }
        store_word<Number>(array, at, v.x, valid(), pass.whole_words);
        store_word<Number>(array, at + 2, v.y, valid() - 2, pass.whole_words);
        store_word<Number>(array, at + 4, v.z, valid() - 4, pass.whole_words);
        store_word<Number>(array, at + 6, v.w, valid() - 6, pass.whole_words);
    }
    __device__ uint4 load_state(const Tile& tile, int group) const {
        return pass.state ? load_unit(pass.state, element(tile, group, 0)) : make_uint4(0, 0, 0, 0);
    }
    __device__ unsigned slot(int group, int epoch) const {  // the word of the exchange at which the unit starts
        return (group * SLOTS + unsigned(epoch) % SLOTS) * slot_words + place;
    }
    static __device__ unsigned input(int turn, int array, int n = 0) {  // from unit_at on, or from word_at to own word n
        return (turn % Shape::AHEAD * Shape::INPUTS + array) * Shape::FINISHING_WARPS * Shape::WARP_INPUT_BYTES +
               n / 2 * Shape::PARCEL_INPUT_BYTES + n % 2 * 32;
    }

    __device__ void run() {
        int epoch = 0;
        for (Tile tile(pass); tile.exists(); tile.next()) {
            const int iterations = tile.iterations(), turns = tile.turns(), ahead = Shape::AHEAD >> (tile.groups - 1);
            open(tile, epoch);
            Turn at{epoch, 0};
            for (int i = 0; i < Shape::AHEAD; i++, at.next(tile.groups)) fetch(tile, at.group, at.epoch - epoch, i);
            at = {epoch, 0};
            for (int i = 0; i < turns; i++, at.next(tile.groups)) {
                const int iteration = at.epoch - epoch;
                finish(tile, at, Shape::BACKWARD ? tile.steps - 1 - iteration : iteration, i, iteration + 1 < iterations);
                fetch(tile, at.group, iteration + ahead, i + Shape::AHEAD);
            }
            copies_wait<0>();
            epoch += iterations;
            for (int g = 0; g < tile.groups; g++)
                for (int t = tile.steps; t < pass.frames && owns(g); t++)  // padding
                    store_unit(pass.result, element(tile, g, t), make_uint4(0, 0, 0, 0));
            block_wait(Shape::TILE_DONE, Shape::FINISHERS);  // a warp without words in the next tile has seen all phases
        }
    }

    // Notes what the thread owns and its warp's utterances' frames, and publishes their first state.
    __device__ void open(const Tile& tile, int epoch) {
        owned = 0;
        for (int g = 0; g < tile.groups; g++) {
            const int live = tile.live_of(g);
            for (int p = rank; p < Shape::PARCELS; p += Shape::CLUSTER)
                owned += unsigned(this->alive(p, live)) << (COUNTS + 8 * g);
            store_shared_4(frames_at + (g * Shape::SAMPLES + lane - sample) * 4,
                           lane < live ? length_of(pass, tile.first + g * pass.samples + lane) : 0);
            __syncwarp();
            if (lane < 16 * WARP_PARCELS && parcel(lane / 16) < Shape::PARCELS && word < this->state_words && sample < live) {
                owned |= 1u << g;
                const uint4 state = load_state(tile, g);
                // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps.
                if (frames_of(g) == 0 && (!Shape::BACKWARD || tile.steps == 0))
                    store_unit(pass.last_state, element(tile, g, 0), state);
                if (tile.steps > 0)
                    store_relaxed(exchange + slot(g, epoch), Shape::BACKWARD ? make_uint4(0, 0, 0, 0) : publishable(state));
            }
        }
        if (tile.steps > 0) empty_slots(tile, epoch);
    }

    // Asks for what turn number `turn` of the tile consumes: each lane its unit.
    __device__ void fetch(const Tile& tile, int group, int iteration, int turn) const {
        const int t = Shape::BACKWARD ? tile.steps - 1 - iteration : iteration;
        const bool wanted = owns(group) && t >= 0 && t < frames_of(group);
        const size_t from = wanted ? element(tile, group, t) : 0;
#pragma unroll
        for (int a = 0; a < Shape::INPUTS && lane < 16 * WARP_PARCELS; a++) {
            const auto* array = static_cast<const typename Number::Storage*>(a == 0 ? pass.input : pass.output_y);
            const unsigned to = unit_at + input(turn, a);
            if (pass.wide_rows)
                copy_async_16(to, array + from, wanted);
            else if (pass.whole_words)
                for (int n = 0; n < 4; n++)
                    copy_async(to + 4 * n, array + (2 * n < valid() ? from + 2 * n : 0), wanted && 2 * n < valid());
            else  // rows that start between words cannot be copied behind the thread's back
                store_shared_16(to, wanted ? load_unit(array, from) : make_uint4(0, 0, 0, 0));
        }
        copies_commit();  // one a turn: copies_wait counts them
    }

    // Adds the gradient of the last state to the sums of utterances whose last frame is t.
    __device__ void add_last(const Tile& tile, int group, int t, float (&sum)[OWN][2]) const {
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int s = first_sample(n / 2) + lane % 4 * 2 + n % 2, row = tile.first + group * pass.samples + s;
            const int element = 2 * (parcel_word(n / 2) + lane / 4);
            if (t != int(load_shared_4(frames_at + (group * Shape::SAMPLES + s - sample) * 4)) - 1) continue;
            float last[2];
            Number::unpack(load_word<Number>(pass.state, size_t(row) * pass.hidden + element, pass.hidden - element,
                                             pass.whole_words),
                           last);
            sum[n][0] += last[0], sum[n][1] += last[1];
        }
    }

    // The cell.
    __device__ void apply(int turn, float (&sum)[OWN][2]) const {
        float y[OWN][2] = {};
#pragma unroll
        for (int n = 0; n < OWN && Shape::BACKWARD; n++)
            Number::unpack(load_shared_4(word_at + input(turn, Shape::INPUTS - 1, n)), y[n]);
#pragma unroll
        for (int n = 0; n < OWN; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) sum[n][e] = apply_cell<Shape>(sum[n][e], y[n][e], pass.clip);
    }

    // The pointwise end of one turn at frame t; t = -1 is the gradient of the first state. First everything that other
    // blocks wait for, and as much of it as can be done before the wait.
    __device__ void finish(const Tile& tile, Turn at, int t, int turn, bool more) const {
        const int buffer = buffer_of(at), frames = frames_of(at.group);
        const unsigned to = pinned(slot(at.group, at.epoch + 1));
        float sum[OWN][2];
        copies_wait<Shape::AHEAD - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < OWN; n++) Number::unpack(load_shared_4(word_at + input(turn, 0, n)), sum[n]);
        if (Shape::BACKWARD && pass.state && __any_sync(0xffffffffu, owns(at.group) && t >= 0 && t == frames - 1))
            add_last(tile, at.group, t, sum);
        const int parcels = owned >> (COUNTS + 8 * at.group) & 0xff;
        const unsigned barrier = base + Shape::BARRIERS_AT + 8 * buffer;
        if (thread == 0 && parcels > 0) barrier_expect(barrier, parcels * Shape::CLUSTER * Shape::PARCEL_BYTES);
        if (warp == 0 ? parcels > 0 : __any_sync(0xffffffffu, owns(at.group)))
            barrier_wait<true>(barrier, at.epoch / 2 % 2, "its cluster's sums", at.epoch);
        // A warp without a second parcel adds up its first again, and makes no use of it.
        const int step = parcel(1) < Shape::PARCELS ? Shape::FINISHING_WARPS * Shape::CLUSTER * Shape::PARCEL_BYTES : 0;
        const unsigned from = sums_at + buffer * Shape::RECEIVED_BYTES;
#pragma unroll
        for (int i = 0; i < WARP_PARCELS; i++)
#pragma unroll
            for (int source = 0; source < Shape::CLUSTER; source++) {
                const uint4 v = load_shared_16(from + i * step + source * Shape::PARCEL_BYTES);
                sum[2 * i][0] += __uint_as_float(v.x), sum[2 * i + 1][0] += __uint_as_float(v.y);
                sum[2 * i][1] += __uint_as_float(v.z), sum[2 * i + 1][1] += __uint_as_float(v.w);
            }
        if (!Shape::BACKWARD || t >= 0) apply(turn, sum);
#pragma unroll
        for (int n = 0; n < OWN; n++)  // in the place of its input
            store_shared_4(word_at + input(turn, 0, n), Number::pack(sum[n]));
        __syncwarp();
        if (!owns(at.group)) return;
        uint4 unit = load_shared_16(unit_at + input(turn, 0));
        if (max(t, 0) >= frames) unit = make_uint4(0, 0, 0, 0);  // the utterance is over
        if (Shape::BACKWARD && t < 0) {
            store_unit(pass.last_state, element(tile, at.group, 0), frames > 0 ? unit : load_state(tile, at.group));
            return;
        }
        if (more) store_relaxed(exchange + to, publishable(unit));
        store_unit(pass.result, element(tile, at.group, t), unit);
        if (!Shape::BACKWARD && t == frames - 1) store_unit(pass.last_state, element(tile, at.group, 0), unit);
        if (more && at.group == tile.groups - 1) empty_slots(tile, at.epoch + 1);
    }

    // Empties what this thread has stored for the EMPTY_EVERY states up to epoch - 2, if it is time to, after it has
    // published state `epoch` of all groups.
    __device__ void empty_slots(const Tile& tile, int epoch) const {
        if (epoch % EMPTY_EVERY != EMPTY_EVERY - 1) return;
        for (int g = 0; g < tile.groups; g++)
#pragma unroll 1
            for (int k = epoch + SLOTS - 1 - EMPTY_EVERY; k <= epoch + SLOTS - 2 && owns(g); k++)
                store_relaxed(exchange + slot(g, k), make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
        fence_stores();
    }
};

template <class Shape>
__device__ void wide_recurrence(const Pass& pass, unsigned* exchange) {
    extern __shared__ __align__(128) char wide_smem[];
    if (threadIdx.x < Shape::BARRIERS)
        barrier_init(smem_address(wide_smem) + Shape::BARRIERS_AT + 8 * threadIdx.x, Shape::arrivals(threadIdx.x));
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
