// Persistent recurrence over the whole chip: every block keeps a part of the matrix for all time steps, in registers or else in
// shared memory, and gets the state from all others through L2 at every step (exchange.cuh). All must run at the same time.
// A cluster of CLUSTER blocks owns CLUSTER x BLOCK_WORDS words of each utterance's state and the rows of the matrix that
// make them. Its blocks, and their warps, split K between them, so that a block reads only its share of the state: L2 has
// little to spare while all multiprocessors poll the same lines.
//
// Up to 8 utterances are a group, the columns of one matrix instruction; up to GROUPS groups are a tile and take turns, so
// that the arithmetic of one hides the exchange of the others. One turn:
//   1. 8 multiplying warps. A warp polls the words of its part of K, multiplies all rows of the cluster by them, leaves a
//      partial sum in shared memory and goes on to the next turn.
//   2. 4 adding warps. When all 8 partial sums are there, they add them up and send them, row by row, to the block of the
//      cluster that owns the row.
//   3. 4 finishing warps. There each thread takes one word (2 rows of 16-bit numbers, 1 of fp32) of one utterance: adds the
//      cluster's sums and the input, applies the cell, publishes the word; then stores y and fetches x.
//
// A cell with gates: a block owns all gates' rows of its words of h, gate after gate. Backward the state is the gradients of all
// gates, plane after plane, each as long as h: one thread finishes a word of all of them.
//
// A GRU that resets before its last gate's product takes two states a step (GRNN, Holmes et al. 2019, section 5.1: two
// synchronisations), numbered like all others. Forward the first is h and gives the sums of r and z; the second, r h, gives that of
// n. Backward the first is the gradients of r and z, with n's plane 0; the second that of n, with zeros for r and z. Every product
// is with all rows, whose other sums nobody takes: a step waits for messages, not for products.
//
// The portable design is this one without clusters: it has no instruction that compute capability 8.0 lacks. Where CLUSTER is 1,
// a block reads the whole state; nobody sends sums, as a finishing thread adds up its word's 8 partial sums itself. Else CLUSTER
// blocks are a team, which divides K as a cluster does, and sums go through L2 (teams.cuh). Registers stay where they are at
// launch, the same for all threads.
//
// Why two buffers of received sums for each group, by parity of the state's number, are enough, and their mbarriers may be
// armed for state e + 2 when partial sums of e + 2 are there. Whoever has those has read words of state e + 2, as every warp
// has a part of K. Some cluster published them after its blocks together had read all of e + 1, which all owners had
// published after they had received and read the sums of e. For the same reason a warp that owns words never waits for a
// phase that has passed unseen; one that owns none does not wait.
#pragma once

#include "recurrent/grid_narrow_shape.cuh"
#include "recurrent/teams.cuh"

namespace ds2 {

template <class Shape>
struct GridMultiplier {
    using Number = typename Shape::Number;
    static constexpr int M_TILES = Shape::M_TILES, K_PAIRS = Shape::K_PAIRS;
    static constexpr int WAVES = (K_PAIRS + 5) / 6;             // of 16-byte loads that a lane has under way together: more
    static constexpr int WAVE = (K_PAIRS + WAVES - 1) / WAVES;  // would need registers

    const Pass& pass;
    char* const smem;
    const uint4* const exchange;  // [group][slot][unit][sample], as many samples as a group has
    const int units = Shape::SENT * state_units<Number>(pass);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = warp * Shape::CLUSTER + Shape::rank();  // this warp has pairs split, split + SPLITS, ... of K
    const int own_pairs = (units + 4 * (Shape::SPLITS - 1 - split) + 3) / (4 * Shape::SPLITS);
    const int unit = 4 * split + lane % 4;                     // this lane's first
    const unsigned partial =
        smem_address(smem) + ((warp * M_TILES * MMA_ROWS + lane / 4) * sample_pairs(pass) + lane % 4) * 8;
    Weights<Number, M_TILES, 2 * Shape::K_PAIRS_REGISTERS> weights;
    int pause = 0;  // before the first poll of a turn

    __device__ GridMultiplier(const Pass& pass, const unsigned* exchange, char* smem)
        : pass(pass), smem(smem), exchange(reinterpret_cast<const uint4*>(exchange)) {
        const int cluster = blockIdx.x / Shape::CLUSTER, first_row = cluster * Shape::ROWS;
        const auto place = [=, plane = 4 * state_units<Number>(pass), hidden = pass.hidden](int row, int word) -> Place {
            if constexpr (!Shape::GATED)
                return Weights<Number, 1, 1>::place(first_row + row, first_row + Shape::ROWS, word, hidden);
            const int block = cluster * Shape::CLUSTER + row / Shape::BLOCK_ROWS, column = word % plane * Shape::PER_WORD;
            const int gate = row % Shape::BLOCK_ROWS / Shape::BLOCK_UNITS;
            const int unit = pinned(block * Shape::BLOCK_UNITS + row % Shape::BLOCK_UNITS);  // else all rows' addresses spill
            const size_t vector = Shape::BACKWARD ? size_t(unit) * Shape::SENT + word / plane : size_t(gate) * hidden + unit;
            return {vector * hidden + column, column, row < Shape::ROWS && unit < hidden && word < Shape::SENT * plane};
        };
        const auto from_pair = [=](int first) {
            return [=](int k, int q, int words) { return 16 * (split + Shape::SPLITS * (first + k / 2)) + words * q; };
        };
        weights.load_permuted(pass, from_pair(Shape::K_PAIRS_SMEM), place);
        for (int p = 0; p < Shape::K_PAIRS_SMEM; p++) {
            Weights<Number, M_TILES, 2> pair;
            pair.load_permuted(pass, from_pair(p), place);
            for (int m = 0; m < M_TILES; m++)
                for (int k = 0; k < 2; k++)
                    *smem_weight(p, m, k) = make_uint4(pair.a[m][k][0], pair.a[m][k][1], pair.a[m][k][2], pair.a[m][k][3]);
        }
    }

    __device__ uint4* smem_weight(int pair, int m, int k) const {  // only ever touched by this lane
        return reinterpret_cast<uint4*>(smem + Shape::WEIGHTS_AT) + ((pair * M_TILES + m) * 2 + k) * THREADS + threadIdx.x;
    }

    __device__ void run() {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(pass); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) {
                block_wait(Shape::read(turn), Shape::SUM_THREADS);
                const int live = tile.live_of(at.group);
                float c[M_TILES][4] = {};
#pragma unroll
                for (int w = 0; w < WAVES; w++) receive_and_multiply(c, at, live, w, w == 0 && tile.groups == 1);
                store_partial(c, turn, live);
                block_arrive_or_wait(Shape::written(turn), Shape::SUM_THREADS);
                if (at.group == tile.groups - 1) order_polls<Shape>(at.epoch);
            }
    }

    // Polls one wave in rounds, each of which asks again for everything that was not there, and multiplies, in a fixed
    // order, what has come. `paces` where no other group fills the time until it comes.
    __device__ void receive_and_multiply(float (&c)[M_TILES][4], Turn at, int live, int w, bool paces) {
        const unsigned began = clock();
        const uint4* from =
            exchange + ((at.group * Shape::SLOTS + unsigned(at.epoch) % Shape::SLOTS) * units + unit) * pass.samples + lane / 4;
        const int left = lane / 4 < live ? units - unit : 0;  // units from this lane's first on
        uint4 chunk[WAVE];
#pragma unroll
        for (int p = 0; p < WAVE; p++)
            chunk[p] = unread(w * WAVE + p < K_PAIRS && 4 * Shape::SPLITS * (w * WAVE + p) < left);
        while (paces && int(clock() - began) < pause) {
        }
        WaitLimit limit;
        int rounds = 0;
        for (int done = 0; done < min(WAVE, own_pairs - w * WAVE); rounds++) {
#pragma unroll
            for (int p = 0; p < WAVE; p++)
                if (w * WAVE + p < K_PAIRS)
                    load_relaxed_if(has_empty(chunk[p]), chunk[p],
                                    from + (w * WAVE + p) * 4 * Shape::SPLITS * pass.samples);
#pragma unroll
            for (int p = 0; p < WAVE; p++)
                if (w * WAVE + p < K_PAIRS && done == p && !__any_sync(0xffffffffu, has_empty(chunk[p]))) {
                    multiply_pair(c, w * WAVE + p, chunk[p]);
                    done = p + 1;
                }
            limit.check(at.epoch);
        }
        if (paces) pause = next_pause<32, 2>(pause, rounds);
    }

    __device__ void multiply_pair(float (&c)[M_TILES][4], int p, uint4 b) const {
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const unsigned b0 = k == 0 ? b.x : b.z, b1 = k == 0 ? b.y : b.w;
                if (p >= Shape::K_PAIRS_SMEM) {
                    Number::multiply_add(c[m], weights.a[m][2 * (p - Shape::K_PAIRS_SMEM) + k], b0, b1);
                } else {
                    const uint4 w = *smem_weight(p, m, k);
                    const unsigned a[4] = {w.x, w.y, w.z, w.w};
                    Number::multiply_add(c[m], a, b0, b1);
                }
            }
    }

    __device__ void store_partial(const float (&c)[M_TILES][4], int turn, int live) const {
        if (2 * (lane % 4) < live) {
            unsigned to = partial + turn % 2 * Shape::PARTIAL_BYTES;
            const unsigned pitch = MMA_ROWS / 2 * 8 * sample_pairs(pass);
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++, to += pitch)
                    store_shared_8(to, __float_as_uint(c[m][2 * half]), __float_as_uint(c[m][2 * half + 1]));
        }
    }
};

template <class Shape>
struct GridAdder {
    const Pass& pass;
    const int log_pairs = log_sample_pairs(pass);
    const int thread = threadIdx.x - THREADS;
    const int first_row = thread >> log_pairs;  // then every (ADDERS >> log_pairs)th: of the thread's pair of samples
    const int owners = owning_blocks<Shape>(pass, 4 * state_units<typename Shape::Number>(pass));
    const int rows = owners * Shape::BLOCK_ROWS;
    const bool arms = thread == 0 && int(Shape::rank()) < owners;
    // Shared memory: partial sums of turn 0; where to send them, in the owner's memory; mbarriers.
    const unsigned partial, sent, barriers;

    __device__ GridAdder(const Pass& pass, char* smem)
        : pass(pass),
          partial(smem_address(smem) + thread * 8),
          sent(smem_address(smem) + Shape::RECEIVED_AT +
               ((Shape::rank() * Shape::BLOCK_ROWS << log_pairs) + thread % (1 << log_pairs)) * 8),
          barriers(smem_address(smem) + Shape::BARRIERS_AT) {}

    template <class... TeamSums>
    __device__ void run(TeamSums... sums) const {
        int turn = 0;
        Turn at{0, 0};
        if (!DEBUG_WAITS) {
            block_arrive(Shape::read(0), Shape::SUM_THREADS);
            block_arrive(Shape::read(1), Shape::SUM_THREADS);
        }
        for (GridTile<Shape> tile(pass); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) add_and_send(at, turn, sums...);
    }

    // Without clusters: a word's sums of one utterance at a time, to the owner by way of L2.
    __device__ void add_and_send(Turn at, int turn, const TeamSums<Shape>& sums) const {
        constexpr int PER_WORD = Shape::PER_WORD;
        const int log_samples = log_pairs + 1, sample = thread & (1 << log_samples) - 1;
        const unsigned base = partial - thread * 8 + turn % 2 * Shape::PARTIAL_BYTES + sample * 4;
        const unsigned row_pitch = pinned(8 << log_pairs), warp_pitch = Shape::M_TILES * MMA_ROWS * row_pitch;
        const int first = blockIdx.x / Shape::CLUSTER * Shape::CLUSTER, source = Shape::rank();
        if (DEBUG_WAITS) block_wait(Shape::read(turn), Shape::SUM_THREADS);
        block_wait(Shape::written(turn), Shape::SUM_THREADS);
#pragma unroll 1
        for (int w = thread >> log_samples; w < rows / PER_WORD; w += Shape::ADDERS >> log_samples) {
            unsigned sum[PER_WORD];
#pragma unroll
            for (int e = 0; e < PER_WORD; e++) {
                unsigned v[WARPS];
#pragma unroll
                for (int i = 0; i < WARPS; i++) v[i] = load_shared_4(base + (w * PER_WORD + e) * row_pitch + i * warp_pitch);
                const float x = added(v[0], v[1], v[2], v[3]) + added(v[4], v[5], v[6], v[7]);
                sum[e] = __float_as_uint(x) & ~1u | TeamSums<Shape>::use_of(at);
            }
            const int owner = w / (Shape::SUMS * Shape::BLOCK_WORDS), gate = w / Shape::BLOCK_WORDS % Shape::SUMS;
            store_relaxed(sums.at(at, first + owner, source, sample, w % Shape::BLOCK_WORDS) + gate * PER_WORD, sum);
        }
        if (!DEBUG_WAITS) block_arrive(Shape::read(turn), Shape::SUM_THREADS);
    }

    // Adds the block's partial sums, in a fixed order, and sends two utterances of a row at a time to the row's owner.
    __device__ void add_and_send(Turn at, int turn) const {
        unsigned from = pinned(partial + turn % 2 * Shape::PARTIAL_BYTES);
        const unsigned to = pinned(sent + buffer_of(at) * Shape::RECEIVED_BYTES);
        const unsigned barrier = pinned(barriers + 8 * buffer_of(at));
        const unsigned warp_pitch = pinned(Shape::M_TILES * MMA_ROWS * 8 << log_pairs);
        if (DEBUG_WAITS) block_wait(Shape::read(turn), Shape::SUM_THREADS);
        block_wait(Shape::written(turn), Shape::SUM_THREADS);
        if (arms) barrier_expect(barrier, Shape::CLUSTER * Shape::BLOCK_ROWS * 8 << log_pairs);
#pragma unroll 1
        for (int r = first_row; r < rows; r += Shape::ADDERS >> log_pairs, from += Shape::ADDERS * 8) {
            uint2 v[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w++) v[w] = load_shared_8(from + w * warp_pitch);
            const float x = added(v[0].x, v[1].x, v[2].x, v[3].x) + added(v[4].x, v[5].x, v[6].x, v[7].x);
            const float y = added(v[0].y, v[1].y, v[2].y, v[3].y) + added(v[4].y, v[5].y, v[6].y, v[7].y);
            const unsigned owner = r / Shape::BLOCK_ROWS;
            store_async(remote_address(to + (r % Shape::BLOCK_ROWS * 8 << log_pairs), owner), remote_address(barrier, owner),
                        __float_as_uint(x), __float_as_uint(y));
        }
        if (!DEBUG_WAITS) block_arrive(Shape::read(turn), Shape::SUM_THREADS);
    }
    static __device__ float added(unsigned a, unsigned b, unsigned c, unsigned d) {
        return (__uint_as_float(a) + __uint_as_float(b)) + (__uint_as_float(c) + __uint_as_float(d));
    }
};

template <class Shape>
struct GridFinisher {
    using Number = typename Shape::Number;
    using Team = TeamReader<Shape>;

    const Pass& pass;
    const int thread = threadIdx.x - THREADS - Shape::ADDERS;
    const int pairs = sample_pairs(pass);
    const int plane_words = state_units<Number>(pass) * pass.samples * 4;
    // This thread's word of one utterance of each group.
    const int local_word = thread % Shape::BLOCK_WORDS, sample = thread / Shape::BLOCK_WORDS;
    const int word = blockIdx.x * Shape::BLOCK_WORDS + local_word;
    const int valid = min(Shape::PER_WORD, pass.hidden - word * Shape::PER_WORD);  // its elements that exist
    unsigned* const mine;                                                          // in the first group's slot 0
    // Shared memory: mbarriers; sums that it adds up, in the first buffer; words of its own.
    const unsigned barriers, received, own;

    __device__ GridFinisher(const Pass& pass, unsigned* exchange, char* smem)
        : pass(pass),
          mine(exchange + (word / 4 * pass.samples + sample) * 4 + word % 4),
          barriers(smem_address(smem) + Shape::BARRIERS_AT),
          received(smem_address(smem) + (Shape::CLUSTER == 1 ? 0 : Shape::RECEIVED_AT) +
                   (local_word * Shape::PER_WORD * 2 * pairs + sample) * 4),
          own(smem_address(smem) + thread * 4) {}

    __device__ bool owns(const GridTile<Shape>& tile, int group) const {
        return sample < tile.live_of(group) && word < state_units<Number>(pass) * 4;
    }
    // This thread's word in frame t; with t = 0 also in (B, H) arrays.
    __device__ auto frame(const GridTile<Shape>& tile, int group, int t) const {
        const unsigned utterance = t * pass.batch + tile.first + group * pass.samples + sample;  // T B < 2^31
        return frame_at<Shape>(pass, utterance, [word = word] { return word * Shape::PER_WORD; });
    }
    __device__ unsigned load_state(const GridTile<Shape>& tile, int group) const {
        return pass.state ? load_word<Number>(pass.state, frame(tile, group, 0).element(), valid, pass.whole_words) : 0;
    }
    __device__ void store_state(const GridTile<Shape>& tile, int group, unsigned value) const {
        store_word<Number>(pass.last_state, frame(tile, group, 0).element(), value, valid, pass.whole_words);
    }
    __device__ unsigned* slot(int group, int epoch) const {
        return mine + (group * Shape::SLOTS + unsigned(epoch) % Shape::SLOTS) * (Shape::SENT * plane_words);
    }
    using Floats = float[Shape::PER_WORD];
    __device__ unsigned carry_at(int g) const { return own + Shape::CARRY_AT + g * Shape::CARRIED * Shape::FINISHERS * 4; }
    __device__ unsigned kept_at(int g, int word) const {
        return own + Shape::KEPT_AT + (g * Shape::KEPT + word) * Shape::FINISHERS * 4;
    }
    __device__ unsigned length_at(int group) const { return own + Shape::LENGTHS_AT + group * Shape::FINISHERS * 4; }
    __device__ unsigned input_at(int turn, int array) const {
        return own + Shape::INPUTS_AT + (turn % Shape::AHEAD * Shape::INPUTS + array) * Shape::FINISHERS * 4;
    }

    __device__ void run(TeamSums<Shape> sums) const {
        int epoch = 0, sums_turn = 0;
        if (Shape::CLUSTER == 1 && !DEBUG_WAITS) {
            block_arrive(Shape::read(0), Shape::SUM_THREADS);
            block_arrive(Shape::read(1), Shape::SUM_THREADS);
        }
        for (GridTile<Shape> tile(pass); tile.exists(); tile.next()) {
            const int iterations = tile.iterations(), turns = tile.turns();
            open(tile, epoch);
            Turn at{epoch, 0}, fetching{0, 0};
            for (int i = 0; i < Shape::AHEAD; i++, fetching.next(tile.groups)) fetch(tile, fetching, i);
            for (int i = 0; i < turns; i++, at.next(tile.groups), fetching.next(tile.groups), sums_turn++) {
                const int iteration = at.epoch - epoch;
                if (DEBUG_WAITS) {
                    block_wait(Shape::read(sums_turn), Shape::SUM_THREADS);
                    block_wait(Shape::written(sums_turn), Shape::SUM_THREADS);
                }
                const int step = iteration / Shape::PHASES;
                finish(tile, at, iteration % Shape::PHASES, Shape::BACKWARD ? tile.steps - 1 - step : step, i, sums_turn,
                       iteration + 1 < iterations, sums);
                if (Shape::CLUSTER == 1 && !DEBUG_WAITS) block_arrive(Shape::read(sums_turn), Shape::SUM_THREADS);
                fetch(tile, fetching, i + Shape::AHEAD);
            }
            copies_wait<0>();
            epoch += iterations;
            for (int g = 0; g < tile.groups; g++)
                for (int t = tile.steps; t < pass.frames && owns(tile, g); t++)  // padding
                    store_padding(tile, g, t);
            block_wait(Shape::TILE_DONE, Shape::FINISHERS);  // a warp without words in the next tile has seen all phases
        }
    }

    __device__ void store_padding(const GridTile<Shape>& tile, int group, int t) const {
        if constexpr (Shape::BACKWARD || Shape::PHASES == 1) {
            frame(tile, group, t).store_padding(valid, pass.whole_words);
        } else {  // who forms r h from what was saved does so of padding too
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) frame(tile, group, t).store_output(a, 0, valid, pass.whole_words);
        }
    }

    // Notes the utterances' frames and publishes their first state.
    __device__ void open(const GridTile<Shape>& tile, int epoch) const {
        for (int g = 0; g < tile.groups; g++) {
            const int length = owns(tile, g) ? length_of(pass, tile.first + g * pass.samples + sample) : 0;
            store_shared_4(length_at(g), length);
            if (!owns(tile, g)) continue;
            // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps at all.
            const bool ended = length == 0 && (!Shape::BACKWARD || tile.steps == 0);
            if (ended) store_state(tile, g, load_state(tile, g));
            if constexpr (Shape::GATED) {
                Floats carry;
                frame(tile, g, 0).load_carry(load_state(tile, g), valid, carry);
                keep_carry<Shape>(carry_at(g), carry);
                if (ended) frame(tile, g, 0).store_carry(valid, carry);
            }
            const unsigned first = publishable(Number::operand(Shape::BACKWARD ? 0 : load_state(tile, g)));
            for (int v = 0; v < Shape::SENT && tile.steps > 0; v++) store_relaxed(slot(g, epoch) + v * plane_words, first);
        }
        for (int g = 0; g < tile.groups && tile.steps > 0; g++) empty_slot(tile, g, epoch);
    }

    // Asks for what turn number `turn` of the tile consumes, iteration at.epoch of it. Each thread reads only what itself
    // has fetched.
    __device__ void fetch(const GridTile<Shape>& tile, Turn at, int turn) const {
        const int step = at.epoch / Shape::PHASES, t = Shape::BACKWARD ? tile.steps - 1 - step : step;
        const bool wanted = t >= 0 && t < int(load_shared_4(length_at(at.group))) && valid > 0;
        const size_t plain = wanted ? frame(tile, at.group, t).element() : 0;  // of arrays (T, B, H)
#pragma unroll
        for (int a = 0; a < Shape::INPUTS; a++) {
            const void* array = input_array<Shape>(pass, a);
            const size_t from = !Shape::GATED ? plain : wanted ? frame(tile, at.group, t).input_element(a) : 0;
            if (pass.whole_words)
                copy_async(input_at(turn, a), static_cast<const typename Number::Storage*>(array) + from, wanted);
            else  // rows that start between words cannot be copied behind the thread's back
                store_shared_4(input_at(turn, a), wanted ? load_word<Number>(array, from, valid, false) : 0);
        }
        copies_commit();  // one a turn: copies_wait counts them
    }

    // The pointwise end of one turn, a phase of frame t; t = -1 is the gradient of the first state. What can be done before the sums
    // are there, is.
    __device__ void finish(const GridTile<Shape>& tile, Turn at, int phase, int t, int turn, int sums_turn, bool more,
                           const TeamSums<Shape>& team_sums) const {
        const bool owner = owns(tile, at.group);
        const unsigned from = pinned(Shape::CLUSTER == 1 ? received + sums_turn % 2 * Shape::PARTIAL_BYTES
                                                         : received + buffer_of(at) * Shape::RECEIVED_BYTES);
        unsigned* const to = pinned(slot(at.group, at.epoch + 1));
        copies_wait<Shape::AHEAD - 1>();
        unsigned given[Shape::INPUTS], out[Shape::OUTPUTS];
#pragma unroll
        for (int a = 0; a < Shape::INPUTS; a++) given[a] = load_shared_4(input_at(turn, a));
        Floats in, y, last = {};
        const int length = load_shared_4(length_at(at.group));
        if (Shape::BACKWARD && t >= 0 && t == length - 1) Number::unpack(load_state(tile, at.group), last);
        float ready[Shape::READY][Shape::PER_WORD];
        if constexpr (Shape::GATED) {
            if (!Shape::BACKWARD) frame(tile, at.group, 0).load_bias(last, valid, pass.whole_words);
            prepare_gates<Shape>(given, last, ready);
        }
        Number::unpack(given[0], in), Number::unpack(given[Shape::INPUTS - 1], y);
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++) in[e] += last[e];
        typename Team::Sums sums;
        if constexpr (Shape::TEAM) {
            Team::await(team_sums, at, local_word, sample, owner, sums);
        } else if constexpr (Shape::PORTABLE) {
            if (!DEBUG_WAITS) block_wait(Shape::written(sums_turn), Shape::SUM_THREADS);
        } else if (__any_sync(0xffffffffu, owner)) {
            barrier_wait(barriers + 8 * buffer_of(at), at.epoch / 2 % 2, "its cluster's sums", at.epoch);
        }
        if (owner) {
            float value[Shape::SUMS][Shape::PER_WORD] = {};
#pragma unroll
            for (int source = 0; source < Shape::SOURCES; source++)
#pragma unroll
                for (int k = 0; k < Shape::SUMS; k++)
#pragma unroll
                    for (int e = 0; e < Shape::PER_WORD; e++)
                        value[k][e] += __uint_as_float(
                            Shape::TEAM ? sums.v[source % Team::SOURCES][k][e]
                                        : load_shared_4(from + (source * Shape::SOURCE_ROWS + k * Shape::BLOCK_UNITS + e) *
                                                                   8 * pairs));
            Floats carry;
            if constexpr (Shape::GATED) kept_carry<Shape>(carry_at(at.group), carry);
            if (Shape::BACKWARD && t < 0) {
                if constexpr (Shape::GATED) {
#pragma unroll
                    for (int e = 0; e < Shape::PER_WORD; e++) value[0][e] += Shape::Cell::CARRIES_H ? carry[e] : 0.f;
                    frame(tile, at.group, 0).store_carry(valid, carry);
                }
                store_state(tile, at.group, length == 0 ? load_state(tile, at.group) : Number::pack(value[0]));
                return;
            }
            if constexpr (Shape::PHASES == 2) {
                finish_phase(tile, at, phase, t, length, more, value, ready, carry);
                if (more) empty_slot(tile, at.group, at.epoch + 1);
                return;
            } else if constexpr (Shape::GATED) {
                apply_gates<Shape>(value, ready, carry, out);
                if (t < length) keep_carry<Shape>(carry_at(at.group), carry);
            } else {
#pragma unroll
                for (int e = 0; e < Shape::PER_WORD; e++) value[0][e] = apply_cell<Shape>(value[0][e] + in[e], y[e], pass.clip);
                out[0] = Number::pack(value[0]);
            }
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) out[a] = t < length ? out[a] : 0;
#pragma unroll
            for (int v = 0; v < Shape::SENT; v++)
                if (more)
                    store_relaxed(to + v * plane_words,
                                  publishable(Number::operand(out[v == Shape::SENT - 1 ? Shape::LAST_SENT : v])));
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) frame(tile, at.group, t).store_output(a, out[a], valid, pass.whole_words);
            if (!Shape::BACKWARD && t == length - 1) {
                store_state(tile, at.group, out[0]);
                if constexpr (Shape::GATED) frame(tile, at.group, 0).store_carry(valid, carry);
            }
        }
        if (more) empty_slot(tile, at.group, at.epoch + 1);
    }

    // Of a cell with two phases, from a phase's sums on: publishes the next state and stores what the phase has made.
    __device__ void finish_phase(const GridTile<Shape>& tile, Turn at, int phase, int t, int length, bool more,
                                 float (&value)[Shape::SUMS][Shape::PER_WORD],
                                 const float (&ready)[Shape::READY][Shape::PER_WORD], Floats& carry) const {
        using Cell = typename Shape::Cell;
        const bool exists = t < length;
        const auto here = frame(tile, at.group, t);
        unsigned out[Shape::OUTPUTS] = {}, sent[Shape::SENT] = {};
        if constexpr (Shape::BACKWARD) {
            if (phase == 0) {
                apply_gates<Shape>(value, ready, carry, out);
                if (!exists) out[1] = out[2] = 0;
                store_shared_4(kept_at(at.group, 0), out[1]);
                sent[2] = out[2];
                here.store_output(1, out[1], valid, pass.whole_words);
                here.store_output(2, out[2], valid, pass.whole_words);
            } else {
                Floats grad;
#pragma unroll
                for (int e = 0; e < Shape::PER_WORD; e++) {
                    float slope[Cell::SLOPES];
#pragma unroll
                    for (int a = 0; a < Cell::SLOPES; a++) slope[a] = ready[1 + a][e];
                    Cell::backward_reset(value[0][e], slope, carry[e], grad[e]);
                }
                sent[0] = exists ? Number::pack(grad) : 0;
                sent[1] = load_shared_4(kept_at(at.group, 0));
                here.store_output(0, sent[0], valid, pass.whole_words);
            }
            if (exists) keep_carry<Shape>(carry_at(at.group), carry);
        } else if (phase == 0) {
            Floats reset;
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++) {
                reset[e] = Cell::template reset<Number>(value[0][e], ready[1][e], carry[e]);
#pragma unroll
                for (int k = 0; k < 2; k++)
                    store_shared_4(kept_at(at.group, k * Shape::PER_WORD + e), __float_as_uint(value[k][e]));
            }
            sent[0] = exists ? Number::pack(reset) : 0;
        } else {
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    value[k][e] = __uint_as_float(load_shared_4(kept_at(at.group, k * Shape::PER_WORD + e)));
            apply_gates<Shape>(value, ready, carry, out);
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) out[a] = exists ? out[a] : 0;
            if (exists) keep_carry<Shape>(carry_at(at.group), carry);
            sent[0] = out[0];
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) here.store_output(a, out[a], valid, pass.whole_words);
            if (t == length - 1) store_state(tile, at.group, out[0]);
        }
        if (!more) return;
        unsigned* const to = slot(at.group, at.epoch + 1);
#pragma unroll
        for (int v = 0; v < Shape::SENT; v++) store_relaxed(to + v * plane_words, publishable(Number::operand(sent[v])));
    }

    // After publishing state `epoch` of a group: empties what this thread stored for the state two before.
    __device__ void empty_slot(const GridTile<Shape>& tile, int group, int epoch) const {
#pragma unroll
        for (int v = 0; v < Shape::SENT; v++)
            if (owns(tile, group)) store_relaxed(slot(group, epoch + Shape::SLOTS - 2) + v * plane_words, EMPTY);
        if (group == tile.groups - 1 && Shape::fences(epoch)) fence_stores();
    }
};

template <class Shape>
__device__ void grid_recurrence(const Pass& pass, unsigned* exchange, int exchange_words) {
    extern __shared__ __align__(128) char smem[];
    if constexpr (!Shape::PORTABLE) {
        if (threadIdx.x < 2 * Shape::GROUPS) barrier_init(smem_address(smem) + Shape::BARRIERS_AT + 8 * threadIdx.x, 1);
        barrier_init_fence();
        cluster_barrier();
    }
    // In each role's end: no block leaves while its last sums may be on their way to a peer.
    if (threadIdx.x < THREADS) {
        if constexpr (!Shape::PORTABLE) registers_up<Shape::MULTIPLY_REGISTERS>();
        GridMultiplier<Shape>(pass, exchange, smem).run();
        Shape::meet_cluster();
    } else if (threadIdx.x < THREADS + Shape::ADDERS) {
        if constexpr (!Shape::PORTABLE) {
            registers_down<Shape::ADD_REGISTERS>();
            await_empty<Shape>();  // whom the polling warps wait for, before their first turns
            GridAdder<Shape>(pass, smem).run();
            cluster_barrier();
        } else if constexpr (Shape::TEAM) {
            await_empty<Shape>();
            GridAdder<Shape>(pass, smem).run(TeamSums<Shape>(pass, exchange, exchange_words));
        }
    } else {
        if constexpr (!Shape::PORTABLE) registers_down<Shape::FINISH_REGISTERS>();
        empty_exchange<Shape>(exchange, exchange_words, threadIdx.x - THREADS - Shape::ADDERS);
        GridFinisher<Shape>(pass, exchange, smem).run(TeamSums<Shape>(pass, exchange, exchange_words));
        Shape::meet_cluster();
    }
}

}  // namespace ds2
