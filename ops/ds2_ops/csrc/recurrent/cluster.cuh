// Persistent recurrence inside one thread-block cluster: every block keeps ROWS rows of the matrix in registers for all
// time steps and gets the whole state of its utterances from its peers through distributed shared memory at every step.
// Clusters are independent of one another (each has its own utterances), so they need not run at the same time.
//
// One step of one block, for one group of up to 8 utterances:
//   1. 8 multiplying warps. Warp w owns K slice w, which 2 peers (cluster of 16) or 1 (cluster of 8) produced. It waits for
//      these alone, multiplies all ROWS rows by its slice, leaves partial sums in shared memory and goes on. Where a cell's
//      gates make many rows, M_SPLIT warps share M_SPLIT slices, each for a part of the rows.
//   2. 4 finishing warps a unit, which hold no weights. When all 8 partial sums of their unit are there, a quad of lanes
//      takes 16 bytes of one utterance's new state: adds up, applies the cell, sends them to all blocks; then stores y
//      and fetches x.
// A cell with G gates has G rows a hidden unit, all in one block; forward a block sends one vector of its hidden units, h, and
// backward G, the gradients of its gates, whose chunks one quad finishes together. What a hidden unit carries from step to
// step besides stays with the thread that finishes it.
//
// Backward of a cell with gates pushes instead where a block owns 32 hidden units: a block multiplies its own gates' gradients,
// its part of K, by all rows, and sends finished sums in fp32 to the blocks whose units they are (PushMultiplier). Step i of it:
//   1. Finishing warps wait at an mbarrier for the sums that all blocks sent at i - 1, add them up, apply the cell, leave the
//      gradients in shared memory. 2. Multiplying warps wait for these, multiply and send, one destination after the other.
//   Two buffers of each suffice: gradients of i are overwritten at i + 2, by whom received all blocks' sums of i + 1; to make
//   those, each block had finished i + 1, so had received sums of i from all warps of mine, which had read their gradients.
//   And a peer sends sums of i + 1 into the buffer of i - 1 after it has finished i + 1, so after it has received mine of i,
//   which were multiplied after all my finishing warps had handed over gradients of i, made from what lay in that buffer.
//
// Two directions in one launch: a cluster for each tile, of the first direction and then of the second; a cluster keeps the
// weights of its tile's direction. Nothing else of a step knows of it: only where its frame lies.
//
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
//
// Launched so (Launch.early), a kernel starts while the one before it on the stream still runs, and loads its weights
// meanwhile. Everything else it reads or writes after that one has ended, and all before it: ptx/sync.cuh.
#pragma once

#include "recurrent/cluster_multiply.cuh"

namespace ds2 {

template <class Shape>
struct Finisher {
    using Number = typename Shape::Number;
    static constexpr int PEERS = Shape::CLUSTER / 4;  // that one lane of a quad sends to

    const Pass& pass;
    // This thread finishes one word of utterances sample(), sample() + ROUND_SAMPLES, ... of one unit.
    unsigned place;  // row(), sample() and first_peer() in 16, 8, 8 bits: registers are scarce
    // Addresses of stage 0.
    unsigned chunk, barrier;  // at the peers, for what this quad sends of sample 0
    unsigned partial;         // here, for this thread's word of sample 0: sums
    unsigned operand;         // and, pushing, where its own warps multiply it
    unsigned input;           // here, for what this thread reads of x, dy and y
    unsigned parity = 0;      // pushing, bit s: of the phase that stage s's mbarrier is in

    __device__ Finisher(const Pass& pass, char* smem) : pass(pass) {
        // Neighbours stay together: one instruction sends 128 bytes to each of 4 peers.
        const int unit = Tile<Shape>::own_unit(), group = unit / Shape::PARTS, part = unit % Shape::PARTS;
        const int rank = cluster_rank(), thread = threadIdx.x % Shape::FINISHERS, quad = thread / 4, lane = thread % 4;
        const int part_chunk = quad % Shape::QUAD_CHUNKS, own_chunk = part * Shape::QUAD_CHUNKS + part_chunk;
        // A quad too many never has an utterance; each block begins to send to another one, so that none is flooded.
        const bool needed = quad / Shape::QUAD_CHUNKS < Shape::ROUND_SAMPLES && own_chunk < Shape::OWN_WORDS / 4;
        const int sample = needed ? quad / Shape::QUAD_CHUNKS : MMA_SAMPLES;
        const int word = 4 * (needed ? own_chunk : 0) + lane;
        place = pinned(rank * Shape::OWNED + word * Shape::PER_WORD | sample << 16 | rank + 1 + lane << 24);
        chunk = pinned(smem_address(smem) + Shape::state_at(0, group) + rank * Shape::SOURCE_PITCH + 16 * own_chunk);
        barrier = pinned(smem_address(smem + Shape::barrier_at(0, unit, rank / Shape::SOURCES)));
        partial = pinned(smem_address(smem + (Shape::PUSH ? Shape::state_at(0, group) : Shape::partial_at(0, group))) +
                         4 * word * Shape::PER_WORD);
        if constexpr (Shape::PUSH) {
            operand = pinned(smem_address(smem + Shape::partial_at(0, group)) + 4 * word);
            barrier = pinned(smem_address(smem + Shape::barrier_at(0, unit, 0)));
        }
        input = pinned(smem_address(smem + Shape::INPUT_AT) + unit * Shape::INPUT_BYTES + 4 * thread);
    }

    static __device__ int row(unsigned place) { return pinned(place) & 0xffff; }  // the word's first element in a row of H
    __device__ int row() const { return row(place); }
    __device__ int sample() const { return pinned(place) >> 16 & 0xff; }    // in the first round
    __device__ unsigned first_peer() const { return pinned(place) >> 24; }  // of the blocks that this lane sends to
    __device__ int valid() const { return min(Shape::PER_WORD, pass.hidden - row()); }  // elements of the word that exist
    // This thread's own place for its word of round r of array a of iteration i.
    __device__ unsigned input_at(int i, int r, int a) const {
        return input + ((i % Shape::AHEAD * Shape::SLOTS + a) * Shape::ROUNDS + r) * Shape::FINISHERS * 4;
    }
    // And for the frames of its utterance of round r.
    __device__ unsigned length_at(int r) const {
        return input + (Shape::AHEAD * Shape::SLOTS * Shape::ROUNDS + r) * Shape::FINISHERS * 4;
    }
    // And for what is carried of it.
    __device__ unsigned carry_at(int r) const {
        return input + ((Shape::AHEAD * Shape::SLOTS + 1) * Shape::ROUNDS + r) * Shape::FINISHERS * 4;
    }
    // This thread's word of sample s in frame t; with t = 0 also in (B, H) arrays.
    __device__ auto at(const Tile<Shape>& tile, int s, int t) const {
        return frame_at<Shape>(pass, tile.row(tile.first, s, t), [place = place] { return row(place); });
    }
    // And in step t of its utterance of round r.
    __device__ auto at_step(const Tile<Shape>& tile, int s, int t, int r) const {
        if constexpr (Shape::DIRECTIONS > 1)
            return at(tile, s, tile.frame_of(t, load_shared_4(length_at(r))));
        else
            return at(tile, s, t);
    }
    __device__ unsigned load_state(const Tile<Shape>& tile, int s) const {
        return pass.state ? load_word<Number, false>(pass.state, at(tile, s, 0).element(), valid(), Shape::WHOLE_WORDS) : 0;
    }
    __device__ void store_state(const Tile<Shape>& tile, int s, unsigned value) const {
        store_word<Number>(pass.last_state, at(tile, s, 0).element(), value, valid(), Shape::WHOLE_WORDS);
    }
    static __device__ int frame(const Tile<Shape>& tile, int i) { return Shape::BACKWARD ? tile.steps - 1 - i : i; }

    __device__ void run(const Tile<Shape>& tile) {
        copies_wait<0>();  // the previous tile's last ones still write
        const int live = tile.live(tile.own_group());
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const int frames = tile.length(tile.first + s);
            store_shared_4(length_at(r), frames);
            if constexpr (Shape::GATED) load_carry(tile, s, r);
            if (!Shape::BACKWARD && frames == 0) store_state(tile, s, load_state(tile, s));
            if constexpr (Shape::GATED && !Shape::BACKWARD)
                if (frames == 0) store_carry(tile, s, r);
        }
#pragma unroll 1
        for (int i = 0; i < Shape::AHEAD - 1; i++) fetch_inputs(tile, i, live);
#pragma unroll 1
        for (int i = 0; i < (live || (DEBUG_WAITS && !Shape::PUSH) ? tile.iterations() : 0); i++) {
            finish(tile, i, live);
            fetch_inputs(tile, i + Shape::AHEAD - 1, live);
        }
#pragma unroll 1
        for (int s = sample(); s < live; s += Shape::ROUND_SAMPLES)
#pragma unroll 1
            for (int t = tile.steps; t < pass.frames; t++) at(tile, s, t).store_padding(valid(), Shape::WHOLE_WORDS);
    }

    using Floats = float[Shape::PER_WORD];
    __device__ void load_carry(const Tile<Shape>& tile, int s, int r) const {
        Floats carry;
        at(tile, s, 0).load_carry(load_state(tile, s), valid(), carry);
        keep_carry<Shape, Shape::ROUNDS>(carry_at(r), carry);
    }
    __device__ void store_carry(const Tile<Shape>& tile, int s, int r) const {
        Floats carry;
        kept_carry<Shape, Shape::ROUNDS>(carry_at(r), carry);
        at(tile, s, 0).store_carry(valid(), carry);
    }

    // Asks for what iteration i consumes. Each thread reads only what itself has fetched.
    __device__ void fetch_inputs(const Tile<Shape>& tile, int i, int live) {
        const int t = frame(tile, i);
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const bool wanted = t >= 0 && t < int(load_shared_4(length_at(r))) && valid() > 0;
            const size_t plain = wanted ? at_step(tile, s, t, r).element() : 0;  // of arrays (T, B, H)
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) {
                const void* array = input_array<Shape>(pass, a);
                const size_t from = !Shape::GATED ? plain : wanted ? at_step(tile, s, t, r).input_element(a) : 0;
                const unsigned to = input_at(i, r, a);
                if constexpr (Shape::WHOLE_WORDS)
                    copy_async(to, static_cast<const typename Number::Storage*>(array) + from, wanted);
                else  // rows that start between words cannot be copied behind the thread's back
                    store_shared_4(to, wanted ? load_word<Number, false>(array, from, valid(), false) : 0);
            }
        }
        copies_commit();  // one an iteration: copies_wait counts them
    }

    // The matrix times the state, for this thread's word. The order of the sum is fixed.
    static constexpr int PARTS = Shape::PUSH ? Shape::CLUSTER : Shape::K_SPLIT;
    static constexpr int PART_PITCH = 4 * MMA_SAMPLES * (Shape::PUSH ? Shape::OWNED : Shape::PARTIAL_STRIDE);
    static __device__ void sum_partials(float (&sum)[Shape::PER_WORD], unsigned from) {
        float part[PARTS][Shape::PER_WORD];
#pragma unroll
        for (int w = 0; w < PARTS; w++) load_floats(part[w], from + w * PART_PITCH);
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++) sum[e] = added<0, PARTS>(part, e);
    }
    template <int FIRST, int N>
    static __device__ float added(const float (&part)[PARTS][Shape::PER_WORD], int e) {
        if constexpr (N == 1)
            return part[FIRST][e];
        else
            return added<FIRST, N / 2>(part, e) + added<FIRST + N / 2, N / 2>(part, e);
    }
    static __device__ void load_floats(float (&v)[2], unsigned from) {
        const uint2 pair = load_shared_8(from);
        v[0] = __uint_as_float(pair.x), v[1] = __uint_as_float(pair.y);
    }
    static __device__ void load_floats(float (&v)[1], unsigned from) { v[0] = __uint_as_float(load_shared_4(from)); }

    // A quad holds 16 bytes of each vector of the new state: each of its lanes sends them to a quarter of the blocks.
    __device__ void send(const unsigned (&value)[Shape::SENT], int stage, int s, bool mine) {
        unsigned w[Shape::SENT][4];
#pragma unroll
        for (int v = 0; v < Shape::SENT; v++) {
            const unsigned operand = Number::operand(value[v]);
#pragma unroll
            for (int j = 0; j < 4; j++) w[v][j] = __shfl_sync(0xffffffffu, operand, j, 4);
        }
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
        for (int v = 0; v < Shape::SENT; v++)
#pragma unroll
            for (int j = 0; j < PEERS; j++)
                store_async(address[j][0] + 4 * v * Shape::OWN_WORDS, address[j][1], w[v][0], w[v][1], w[v][2], w[v][3]);
    }

    // Pushing: this thread's word of each vector, for the block's own multiplying warps.
    __device__ void hand_over(const unsigned (&value)[Shape::SENT], int stage, int s) const {
        const unsigned to = operand + stage * Shape::GROUPS * Shape::PARTIAL_BYTES + s * Shape::OPERAND_PITCH;
#pragma unroll
        for (int v = 0; v < Shape::SENT; v++) store_shared_4(to + 4 * v * Shape::OWN_WORDS, Number::operand(value[v]));
    }
    // Pushing: arms the next step's mbarrier, and waits until all blocks' sums of this one are there.
    __device__ void await_sums(const Tile<Shape>& tile, int i, int live) {
        const int stage = i & 1;
        if (i + 1 < tile.iterations() && threadIdx.x % Shape::FINISHERS == 0)
            barrier_expect(barrier + (stage ^ 1) * Shape::UNITS * 8 * WARPS, live * Shape::CLUSTER * Shape::OWNED * 4);
        if (i == 0) return;
        barrier_wait(barrier + stage * Shape::UNITS * 8 * WARPS, parity >> stage & 1, "its peers' sums", i);
        parity ^= 1u << stage;
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
            const unsigned from = pinned(Shape::PUSH ? partial + stage * Shape::GROUPS * Shape::STATE_BYTES + 4 * s * Shape::OWNED
                                                     : partial + stage * Shape::GROUPS * Shape::PARTIAL_BYTES +
                                                           4 * s * Shape::PARTIAL_STRIDE);
            unsigned in[Shape::INPUTS], out[Shape::OUTPUTS], sent[Shape::SENT];
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) in[a] = load_shared_4(input_at(i, r, a));
            const int frames = mine ? int(load_shared_4(length_at(r))) : 0;
            float ready[Shape::READY][Shape::PER_WORD], carry[Shape::PER_WORD];
            if constexpr (Shape::GATED) {
                kept_carry<Shape, Shape::ROUNDS>(carry_at(r), carry);
                prepare(tile, in, s, t, frames, ready);
            }
            if constexpr (Shape::PUSH) {
                if (first == 0) await_sums(tile, i, live);
            } else {
                if (DEBUG_WAITS && first == 0) wait_with_units(stage, 0, tile.own_unit());
                if (first == 0) block_wait(Shape::partials_ready(stage, tile.own_unit()), Shape::PARTIALS_THREADS);
            }
            const auto handed_over = [&] {  // a warp without utterances says so too
                if (Shape::PUSH && t >= 0 && first + Shape::ROUND_SAMPLES >= live)
                    block_arrive(Shape::partials_ready(stage, tile.own_unit()), Shape::PUSH_THREADS);
            };
            if (!__any_sync(0xffffffffu, mine)) {
                handed_over();
                continue;
            }
            float sum[Shape::SUMS][Shape::PER_WORD], last[Shape::PER_WORD] = {};
#pragma unroll
            for (int k = 0; k < Shape::SUMS; k++) sum_partials(sum[k], from + 4 * k * Shape::OWNED);
            if (Shape::PUSH && i == 0)
#pragma unroll
                for (int e = 0; e < Shape::PER_WORD; e++) sum[0][e] = 0.f;
            if (Shape::BACKWARD && t < 0) {
                if (mine) finish_first_state(tile, s, r, sum[0], frames);
                continue;
            }
            if (!Shape::GATED && Shape::BACKWARD && pass.state && t == frames - 1) Number::unpack(load_state(tile, s), last);
            if constexpr (Shape::GATED) {
                apply_gates<Shape>(sum, ready, carry, out);
#pragma unroll
                for (int a = 0; a < Shape::OUTPUTS; a++) out[a] = t < frames ? out[a] : 0;
            } else {
                out[0] = take_cell(sum[0], in, last, t < frames);
            }
#pragma unroll
            for (int v = 0; v < Shape::SENT; v++) sent[v] = out[v == Shape::SENT - 1 ? Shape::LAST_SENT : v];
            if constexpr (Shape::PUSH) {
                if (mine) hand_over(sent, stage, s);
                handed_over();
            } else {
                if (i + 1 < tile.iterations()) send(sent, stage ^ 1, s, mine);
            }
            if constexpr (Shape::GATED)
                if (t < frames) keep_carry<Shape, Shape::ROUNDS>(carry_at(r), carry);
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) store_shared_4(input_at(i, r, a), out[a]);
        }
        if (DEBUG_WAITS && !Shape::PUSH) wait_with_units(stage, tile.own_unit() + 1, Shape::UNITS);
        if (Shape::BACKWARD && t < 0) return;
#pragma unroll 1
        for (int r = 0, s = sample(); s < live; r++, s += Shape::ROUND_SAMPLES) {
            const unsigned result = load_shared_4(input_at(i, r, 0));
            at_step(tile, s, t, r).store_output(0, result, valid(), Shape::WHOLE_WORDS);
#pragma unroll
            for (int a = 1; a < Shape::OUTPUTS; a++)
                at_step(tile, s, t, r).store_output(a, load_shared_4(input_at(i, r, a)), valid(), Shape::WHOLE_WORDS);
            if (!Shape::BACKWARD && t == int(load_shared_4(length_at(r))) - 1) {
                store_state(tile, s, result);
                if constexpr (Shape::GATED) store_carry(tile, s, r);
            }
        }
    }

    // The gradient of the first state.
    __device__ void finish_first_state(const Tile<Shape>& tile, int s, int r, float (&sum)[Shape::PER_WORD], int frames) const {
        if constexpr (Shape::GATED) {
            Floats carry;
            kept_carry<Shape, Shape::ROUNDS>(carry_at(r), carry);
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++) sum[e] += Shape::Cell::CARRIES_H ? carry[e] : 0.f;
            at(tile, s, 0).store_carry(valid(), carry);
        }
        store_state(tile, s, frames ? Number::pack(sum) : load_state(tile, s));
    }

    __device__ unsigned take_cell(const float (&sum)[Shape::PER_WORD], const unsigned (&in)[Shape::INPUTS],
                                  const float (&last)[Shape::PER_WORD], bool valid_frame) const {
        float value[Shape::PER_WORD], x[Shape::PER_WORD], y[Shape::PER_WORD];
        Number::unpack(in[0], x);
        if (Shape::BACKWARD) Number::unpack(in[Shape::INPUTS - 1], y);
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            value[e] = apply_cell<Shape>(Shape::BACKWARD ? sum[e] + x[e] + last[e] : sum[e] + x[e], y[e], pass.clip);
        return valid_frame ? Number::pack(value) : 0;
    }

    // What a cell with gates has ready before the sums are there.
    __device__ void prepare(const Tile<Shape>& tile, const unsigned (&in)[Shape::INPUTS], int s, int t, int frames,
                            float (&ready)[Shape::READY][Shape::PER_WORD]) const {
        Floats other = {};
        if (!Shape::BACKWARD)
            at(tile, s, 0).load_bias(other, valid(), Shape::WHOLE_WORDS, tile.direction);
        else if (pass.state && t >= 0 && t == frames - 1)
            Number::unpack(load_state(tile, s), other);
        prepare_gates<Shape>(in, other, ready);
    }
};

template <class Shape>
__device__ void cluster_recurrence(const Pass& pass) {
    extern __shared__ __align__(128) char smem[];
    if (threadIdx.x < 2 * Shape::UNITS * WARPS) barrier_init(smem_address(smem + Shape::barrier_at(0, 0, threadIdx.x)), 1);
    barrier_init_fence();
    if (threadIdx.x < THREADS) {
        registers_up<Shape::MULTIPLY_REGISTERS>();
        typename IfPush<Shape::PUSH, Shape>::Multiplier multiplier;
        multiplier.load_weights(pass, Tile<Shape>(pass).first_element());
        cluster_barrier();  // all blocks are there, and their mbarriers
        await_kernel_before();
        release_kernel_behind();
#pragma unroll 1
        for (Tile<Shape> tile(pass); tile.exists(); tile.next()) {
            tile.open();
            multiplier.run(tile, smem);
            if (Shape::DIRECTIONS > 1) break;
        }
    } else {
        registers_down<Shape::FINISH_REGISTERS>();
        Finisher<Shape> finisher(pass, smem);
        cluster_barrier();
        await_kernel_before();
#pragma unroll 1
        for (Tile<Shape> tile(pass); tile.exists(); tile.next()) {
            tile.open();
            finisher.run(tile);
            if (Shape::DIRECTIONS > 1) break;
        }
    }
    __syncthreads();  // nobody leaves while others wait where it has arrived
}

}  // namespace ds2
