// Persistent recurrence over the whole chip for batches that fill the warp-group matrix unit: groups of 32 utterances, two
// of which take turns, so that one's messages travel while the other's products run. All blocks must run at the same time.
//
// A cluster owns 128 or 192 rows of the matrix; its blocks split K between them, so that a block reads only its part of the
// state. Of a cell with gates these are all gates' rows of its units; backward the state is the gradients of all gates.
// The weights are the instruction's first operand and lie in registers, 64 rows a warp group; the state is its second and
// lies in shared memory.
//
// Two streams of blocks halve the chip: each has all weights, and tiles of one group of its own, which nothing of the other
// delays. They share the launch and its first barrier alone.
//
// One turn of one block:
//   1. 4 polling warps, each with a quarter of the block's K. A warp polls its words of all utterances (exchange.cuh), lays
//      them into shared memory as they are, and tells the multiplying warps, piece by piece.
//   2. 2 or 3 multiplying warp groups. When the last piece is multiplied, they send their sums, in parcels of 8 words x 8
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

#include "recurrent/grid_wide_finish.cuh"

namespace ds2 {

template <class Shape>
struct WidePoller : WideBlock<Shape> {
    using Block = WideBlock<Shape>;
    using Block::lane;
    static constexpr int LOADS = 2 * Shape::PART_TILES, PIECE_LOADS = 2 * Shape::PIECE_TILES;
    const uint4* const exchange;  // [group][slot][4 words of K][utterance]
    const int part = pinned(threadIdx.x / 32 % Shape::PARTS);
    const int first_unit = Block::slice_word / 4 + part * LOADS;
    const int own = 2 * Shape::K_TILES - part * LOADS;  // loads of this warp, if less than LOADS
    int pause = 0;  // before the first poll of a turn

    __device__ WidePoller(const Pass& pass, const unsigned* exchange, char* smem)
        : Block(pass, smem), exchange(reinterpret_cast<const uint4*>(exchange)) {}

    __device__ void run() {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(this->pass, this->stream); tile.exists(); tile.next())
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) {
                receive(at, turn, tile.live_of(at.group));
                if (at.group == tile.groups - 1) order_polls<Shape>(at.epoch);
            }
    }

    // A lane has one utterance: units of 4 words of it.
    __device__ void receive(Turn at, int turn, int live) {
        const unsigned began = clock();
        bool early = false;
        const int units = Shape::SENT * this->state_words / 4;
        const uint4* from =
            exchange + ((at.group * Shape::SLOTS + unsigned(at.epoch) % Shape::SLOTS) * units + first_unit) * Shape::SAMPLES + lane;
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
    using Block::lane, Block::pass;
    static constexpr int K_TILES = Shape::K_TILES, COLUMNS = Shape::SAMPLES / 8;  // of parcels
    const int warp = threadIdx.x / 32, set = warp / Shape::SUMS, gate = warp % Shape::SUMS;
    unsigned weights[Shape::REGISTER_TILES][4];
    unsigned to[COLUMNS];  // shared memory of the blocks that this warp's parcels go to

    __device__ WideMultiplier(const Pass& pass, char* smem) : Block(pass, smem) {
        const int row = 2 * (this->first_word + 8 * set + lane / 4);  // and row + 1, 8 further down in the instruction
#pragma unroll
        for (int k = 0; k < K_TILES; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned word = weight(row + i % 2, this->slice_word + MMA_WORDS * k + i / 2 * 4 + lane % 4);
                if (k < Shape::REGISTER_TILES)
                    weights[min(k, Shape::REGISTER_TILES - 1)][i] = word;
                else
                    store_shared_4(group_weights() + (k - Shape::REGISTER_TILES) * WGMMA_WEIGHT_BYTES +
                                       weight_place(warp % 4, lane, i), word);
            }
        if (Shape::SMEM_TILES > 0) {
            fence_async_shared();
            block_wait(Shape::WEIGHTS_THERE, Shape::MULTIPLIERS);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) to[j] = remote_address(smem_address(smem), (set * COLUMNS + j) % Shape::CLUSTER);
    }

    __device__ unsigned group_weights() const {  // in shared memory
        return smem_address(this->smem) + Shape::WEIGHTS_AT + warp / 4 * Shape::GROUP_WEIGHT_BYTES;
    }
    __device__ bool idle() const { return Shape::MULTIPLYING_WARPS % Shape::SUMS > 0 && set >= Shape::SETS; }
    // The word of K that comes to this warp's gate of unit `row`, or from whose gate it goes backward.
    __device__ unsigned weight(int row, int word) const {
        if (row >= pass.hidden || idle() || (Shape::SENT > 1 && word >= Shape::SENT * this->state_words)) return 0;
        const int plane = Shape::SENT > 1 ? word / this->state_words : 0, column = 2 * (word - plane * this->state_words);
        size_t vector = row;
        if (Shape::SUMS > 1) vector += size_t(gate) * pass.hidden;
        if (Shape::SENT > 1) vector = vector * Shape::SENT + plane;
        return load_word<Number>(pass.matrix, vector * pass.hidden + column, pass.hidden - column, pass.whole_words);
    }

    __device__ void run() const {
        int turn = 0;
        Turn at{0, 0};
        for (GridTile<Shape> tile(this->pass, this->stream); tile.exists(); tile.next()) {
            unsigned finishes = 0;  // bit g: this block waits for sums of group g
            for (int g = 0; g < tile.groups; g++) finishes |= unsigned(this->parcels_of(tile.live_of(g)) > 0) << g;
            for (int left = tile.turns(); left > 0; left--, turn++, at.next(tile.groups)) {
                float c[Shape::SAMPLES / 2];
                multiply(c, turn, at.epoch);
                send(c, buffer_of(at), tile.live_of(at.group));
                if (lane == 0 && finishes >> at.group & 1) barrier_arrive(this->barrier(buffer_of(at)));
            }
        }
    }

    __device__ void multiply(float (&c)[Shape::SAMPLES / 2], int turn, int epoch) const {
#pragma unroll
        for (int i = 0; i < Shape::SAMPLES / 2; i++) c[i] = 0.f;
        const unsigned state = smem_address(this->smem) + turn % 2 * Shape::STATE_BYTES;
        const unsigned long long descriptor = state_descriptor(__shfl_sync(0xffffffffu, state, 0));
        const unsigned long long in_memory =
            Shape::SMEM_TILES > 0 ? weights_descriptor(__shfl_sync(0xffffffffu, group_weights(), 0)) : 0;
#pragma unroll
        for (int piece = 0; piece < Shape::PIECES; piece++) {
            barrier_wait<true>(this->barrier(Shape::full(turn, piece)), turn / 2 % 2, "its part of the state", epoch);
            wgmma_fence();
#pragma unroll
            for (int part = 0; part < Shape::PARTS; part++)
#pragma unroll
                for (int i = piece * Shape::PIECE_TILES; i < min((piece + 1) * Shape::PIECE_TILES, Shape::PART_TILES); i++)
                    if (const int k = part * Shape::PART_TILES + i; k < Shape::REGISTER_TILES)
                        wgmma<Number>(c, weights[k], descriptor + k * (WGMMA_STATE_BYTES / 16));
                    else if (k < K_TILES)
                        wgmma<Number>(c, in_memory + (k - Shape::REGISTER_TILES) * (WGMMA_WEIGHT_BYTES / 16),
                                      descriptor + k * (WGMMA_STATE_BYTES / 16));
            wgmma_commit();
        }
        wgmma_wait();
        __syncwarp();
        if (lane == 0) barrier_arrive(this->barrier(Shape::read(turn)));
    }

    // Parcels for this block itself need no network: each warp arrives at its mbarrier when its own are stored, and
    // st.async tells those of the others. Not in debug builds, as race checkers do not know that this orders anything.
    __device__ void send(const float (&c)[Shape::SAMPLES / 2], int buffer, int live) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const int parcel = set * COLUMNS + j;
            if (idle() || !this->alive(parcel, live)) continue;
            const uint4 v = make_uint4(__float_as_uint(c[4 * j]), __float_as_uint(c[4 * j + 1]), __float_as_uint(c[4 * j + 2]),
                                       __float_as_uint(c[4 * j + 3]));
            const int place = Shape::RECEIVED_AT + buffer * Shape::RECEIVED_BYTES + lane * 16 +
                              ((parcel / Shape::CLUSTER * Shape::SUMS + gate) * Shape::CLUSTER + this->rank) * Shape::SUM_BYTES;
            if (!DEBUG_WAITS && parcel % Shape::CLUSTER == this->rank) {
                store_shared_16(smem_address(this->smem) + place, v);
            } else {
                store_async(to[j] + place, to[j] + Shape::BARRIERS_AT + 8 * buffer, v.x, v.y, v.z, v.w);
            }
        }
        __syncwarp();
    }
};

template <class Shape>
__device__ void wide_recurrence(const Pass& pass, unsigned* exchange, int exchange_words) {
    extern __shared__ __align__(128) char wide_smem[];
    unsigned* const own = exchange + WideBlock<Shape>(pass, wide_smem).stream * (exchange_words / Shape::STREAMS);
    if (threadIdx.x < Shape::BARRIERS)
        barrier_init(smem_address(wide_smem) + Shape::BARRIERS_AT + 8 * threadIdx.x, Shape::arrivals(threadIdx.x));
    barrier_init_fence();
    cluster_barrier();
    // In each role's end: no block leaves while its last sums may be on their way to a peer.
    if (threadIdx.x < Shape::MULTIPLIERS) {
        registers_up<Shape::MULTIPLY_REGISTERS>();
        WideMultiplier<Shape>(pass, wide_smem).run();
        cluster_barrier();
    } else if (threadIdx.x < Shape::MULTIPLIERS + Shape::POLLERS) {
        registers_down<Shape::POLL_REGISTERS>();
        await_empty<Shape>();
        WidePoller<Shape>(pass, own, wide_smem).run();
        cluster_barrier();
    } else {
        registers_down<Shape::FINISH_REGISTERS>();
        empty_exchange<Shape>(exchange, exchange_words, threadIdx.x - Shape::MULTIPLIERS - Shape::POLLERS);
        if (pass.wide_rows)
            WideFinisher<Shape, true>(pass, own, wide_smem).run();
        else
            WideFinisher<Shape, false>(pass, own, wide_smem).run();
        cluster_barrier();
    }
}

}  // namespace ds2
