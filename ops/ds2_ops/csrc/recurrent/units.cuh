// Persistent recurrence of small layers: a warp owns hidden units, with all rows of theirs and all of K, so that it finishes in
// registers what it has multiplied. No partial sums pass between warps, and one barrier of the block ends a step.
//
// One step of one warp, for up to 4 COLUMNS utterances:
//   1. It multiplies its rows by the whole state, which lies in shared memory. While the matrix unit works, it stores what the
//      step before has made and takes this step's inputs, fetched long ago.
//   2. A lane's sums are those of LANE_UNITS units of COLUMNS utterances, all gates of them: it applies the cell, and leaves
//      the new state in shared memory. Where a tile is one utterance, four lanes have the same sums, and a gate each (SPREAD).
//   3. Barrier of the block. In a cluster the block's part of the state goes to all peers by st.async, and each block waits at
//      an mbarrier for theirs.
// A GRU that resets before its last gate's product takes two such rounds a step: forward r h is exchanged, then h; backward the
// gradient of n, then those of r and z (GRNN, Holmes et al. 2019, section 5.1: two synchronisations).
//
// States are numbered by epochs, PHASES a step; epoch e lies in buffer e % 2. Two buffers are enough: who writes e + 2 has all of
// e + 1, to which every warp of every block gives a part after it has read e. And what a block sends of e lies untouched until
// e + 2 is made, which starts behind the block's barrier of e + 1, where all its warps arrive after they have sent e.
// An mbarrier is armed for e + 1 during e, after its phase of e - 1 has ended; bytes that land earlier are counted as negative.
// Nothing is sent in the last epoch, so no block leaves with stores under way.
#pragma once

#include "recurrent/units_shape.cuh"
#include "recurrent/units_spread.cuh"

namespace ds2 {

template <class Shape>
struct Units {
    using Number = typename Shape::Number;
    using Matrix = typename Shape::Matrix;
    using Cell = typename Shape::Cell;
    using Storage = typename Number::Storage;
    using Parts = float[Shape::CHAINS][Shape::PHASE_TILES][4];
    using Sums = float[Shape::PHASE_TILES][4];
    struct Unit {  // of one utterance
        float carry[1], given[1], ready[Shape::READY][1];  // given: forward the bias, backward the last state's gradient
        unsigned in[Shape::INPUTS], out[Shape::OUTPUTS], last;  // forward: the last h
    };

    const Pass& pass;
    Weights<Matrix, Shape::TILES, 2 * Shape::PAIRS * Shape::SENT> weights;
    Unit units[Shape::COLUMNS][Shape::LANE_UNITS];
    int frames[Shape::COLUMNS];  // 0 where there is no utterance
    int first, live, steps;      // of the tile: utterances, and frames of the longest
    unsigned smem, input, parity = 0;
    // Addresses in buffer 0: of this lane's operands, of what it makes, and in a cluster of the first 16 bytes that this thread
    // sends, here, at the peer (0: it sends nothing) and at the peer's mbarrier.
    unsigned state, own, sent, sent_to, sent_barrier;
    int rank, warp_unit;
    SpreadFrames<Shape> spread;

    __device__ Units(const Pass& pass, char* memory) : pass(pass) {
        rank = Shape::CLUSTER == 1 ? 0 : cluster_rank();
        warp_unit = rank * Shape::OWNED + int(threadIdx.x) / 32 * Shape::WARP_UNITS;
        smem = smem_address(memory);
        own = pinned(smem + rank * Shape::SOURCE_PITCH + sample(0) * Shape::SAMPLE_PITCH +
                     int(sizeof(Storage)) * (int(threadIdx.x) / 32 * Shape::WARP_UNITS + lane() / 4 * Shape::LANE_UNITS));
        input = pinned(smem + Shape::INPUT_AT + 4 * threadIdx.x);
        first = int(blockIdx.x) / Shape::CLUSTER * pass.samples;
        if (Shape::CLUSTER > 1 && threadIdx.x < 2) {
            barrier_init(smem + Shape::BARRIER_AT + 8 * threadIdx.x, 1);
            barrier_init_fence();
        }
        // Rows 8 k + g of a warp are gate k of its unit g; if a unit has one row, rows g and g + 8 are units 2 g and 2 g + 1.
        const auto word = [](int k, int q, int) { return MMA_WORDS * k + 4 * q; };
        weights.load_permuted(pass, word, [=, hidden = pass.hidden](int row, int word) -> Place {
            constexpr bool ONE = Shape::SUMS == 1;
            const int vector = word / (16 * Shape::PAIRS), within = word % (16 * Shape::PAIRS);
            const int unit = warp_unit + (ONE ? 2 * (row % 8) + row / 8 : row % 8), gate = ONE ? 0 : row / 8;
            const int column = within / Shape::OWN_WORDS * Shape::OWNED + within % Shape::OWN_WORDS * Matrix::PER_WORD;
            const size_t line = ONE ? size_t(unit) * Shape::SENT + vector : size_t(gate) * hidden + unit;
            return {line * hidden + column, column, unit < hidden && gate < Shape::SUMS};
        });
    }

    static __device__ int lane() { return threadIdx.x % 32; }
    // With one column a lane, odd columns of the product repeat even ones.
    static __device__ int sample(int n) { return Shape::SPREAD ? 0 : lane() % 4 * Shape::COLUMNS + n; }
    __device__ int unit(int e) const { return warp_unit + lane() / 4 * Shape::LANE_UNITS + e; }
    __device__ int valid(int n, int e) const { return sample(n) < live && unit(e) < pass.hidden; }
    __device__ int frame(int i) const { return Shape::BACKWARD ? steps - 1 - i : i; }
    __device__ auto at(int n, int e, int t) const {
        return frame_at<Shape>(pass, unsigned(t * pass.batch + first + sample(n)), [unit = unit(e)] { return unit; });
    }
    __device__ unsigned load_state(int n, int e) const {
        return pass.state ? load_word<Number>(pass.state, at(n, e, 0).element(), valid(n, e), false) : 0;
    }
    __device__ void store_state(int n, int e, unsigned value) const {
        store_word<Number>(pass.last_state, at(n, e, 0).element(), value, valid(n, e), false);
    }
    template <class Do>
    static __device__ void each(Do what) {
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n++)
#pragma unroll
            for (int e = 0; e < Shape::LANE_UNITS; e++) what(n, e);
    }

    __device__ void run() {
#pragma unroll 1
        for (; first < pass.batch; first += gridDim.x / Shape::CLUSTER * pass.samples) {
            open();
            const int iterations = Shape::BACKWARD ? steps + 1 : steps;
            const int epochs = Shape::PHASES * iterations - (Shape::BACKWARD ? Shape::PHASES - 1 : 0);
            if (Shape::IN_FLIGHT) between(0);
#pragma unroll 1
            for (int i = 0; i < iterations; i++) {
                step(i, epochs);
                if (Shape::IN_FLIGHT && i + 1 < iterations) between(i + 1);
            }
            if constexpr (!Shape::BACKWARD) {
                store_outputs(steps - 1);
                each([&](int n, int e) {
                    store_state(n, e, units[n][e].last);
                    if constexpr (Shape::GATED) at(n, e, 0).store_carry(valid(n, e), units[n][e].carry);
                });
            }
#pragma unroll 1
            for (int t = steps; t < pass.frames; t++)
                each([&](int n, int e) {
                    // Who forms r h from what was saved does so of padding too.
#pragma unroll
                    for (int a = 0; a < (Shape::BACKWARD || Shape::PHASES == 2 ? pass_outputs<Cell, Shape::BACKWARD>() : 1); a++)
                        at(n, e, t).store_output(a, 0, valid(n, e), false);
                });
        }
    }

    __device__ void open() {
        if constexpr (Shape::CLUSTER == 1)
            __syncthreads();
        else
            cluster_barrier();  // nobody uses the previous tile, and everybody's mbarriers are initialised
        live = min(pass.samples, pass.batch - first);
        steps = 0;
        for (int s = 0; s < live; s++) steps = max(steps, length_of(pass, first + s));
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n++) frames[n] = sample(n) < live ? length_of(pass, first + sample(n)) : 0;
        fill_states();
        const int column = Shape::COLUMNS == 1 ? lane() / 8 : lane() / 4;  // without an utterance: repeats the first
        state = pinned(smem + (column < live ? column : 0) * Shape::SAMPLE_PITCH + 16 * (lane() % 4));
        if constexpr (Shape::CLUSTER > 1) {
            const int peer = find_message(threadIdx.x, sent);
            sent_to = pinned(peer == rank ? 0 : remote_address(sent, peer));
            sent_barrier = pinned(remote_address(barrier(0), peer));
        }
        if constexpr (Shape::SPREAD) spread.open(pass, first, steps, unit(0), lane() % 4);
        each([&](int n, int e) {
            Unit& u = units[n][e];
            u.last = load_state(n, e);
            u.given[0] = 0.f;
            if constexpr (Shape::BACKWARD) Number::unpack(u.last, u.given);
            if constexpr (Shape::GATED) {
                at(n, e, 0).load_carry(u.last, valid(n, e), u.carry);
                if (!Shape::BACKWARD) at(n, e, 0).load_bias(u.given, valid(n, e), false);
            }
        });
        copies_wait<0>();  // the previous tile's last ones still write
#pragma unroll 1
        for (int i = 0; i < Shape::AHEAD - 1; i++) fetch_inputs(i);
        __syncthreads();
    }

    // The first state, of all blocks' units; zeros backward, and where no units are. The other buffer is the peers', if any.
    __device__ void fill_states() const {
        constexpr int WORDS = Shape::VECTORS * Shape::OWN_WORDS;
#pragma unroll 1
        for (int i = threadIdx.x; i < (Shape::CLUSTER == 1 ? 2 : Shape::CLUSTER) * Shape::SAMPLES * WORDS; i += Shape::ALL_THREADS) {
            const int word = i % WORDS, s = i / WORDS % Shape::SAMPLES, place = i / WORDS / Shape::SAMPLES;
            const int column = place * Shape::OWNED + word * Matrix::PER_WORD;
            unsigned value = 0;
            if (!Shape::BACKWARD && pass.state && s < live && place < Shape::CLUSTER)
                value = load_word<Matrix>(pass.state, size_t(first + s) * pass.hidden + column, pass.hidden - column, false);
            store_shared_4(smem + place * Shape::SOURCE_PITCH + s * Shape::SAMPLE_PITCH + 4 * word, Matrix::operand(value));
        }
    }

    __device__ unsigned input_at(int i, int n, int word, int a) const {
        return input + i % Shape::AHEAD * Shape::STEP_BYTES +
               ((n * Shape::LANE_WORDS + word) * Shape::INPUTS + a) * Shape::ALL_THREADS * 4;
    }
    // Asks for what iteration i consumes. Each thread reads only what itself has fetched.
    __device__ void fetch_inputs(int i) {
        const int t = frame(i);
        if constexpr (Shape::SPREAD) {
            spread.fetch(input_at(i, 0, 0, 0), t);
            return copies_commit();
        }
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n++)
#pragma unroll
            for (int w = 0; w < Shape::LANE_WORDS; w++) {
                const int e = w * Shape::WORD_UNITS;
                const bool wanted = t >= 0 && t < frames[n] && unit(e) < pass.hidden;
#pragma unroll
                for (int a = 0; a < Shape::INPUTS; a++) {
                    const size_t element = at(n, e, t).input_element(a);
                    const Storage* from = static_cast<const Storage*>(input_array<Shape>(pass, a)) + element;
                    if constexpr (!Shape::HALVES)
                        copy_async(input_at(i, n, w, a), from, wanted);
                    else if constexpr (Shape::WHOLE_WORDS)
                        copy_async(input_at(i, n, w, a), from - unit(e) % 2, wanted);
                    else  // the array may end with it
                        copy_async_part(input_at(i, n, w, a), from - element % 2, wanted ? 2 + 2 * int(element % 2) : 0);
                }
            }
        copies_commit();  // one an iteration: copies_wait counts them
    }
    // What of iteration i's end can be done before its sums are there.
    __device__ void prepare(int i) {
        const int t = frame(i);
        copies_wait<Shape::AHEAD - 2>();
        each([&](int n, int e) {
            Unit& u = units[n][e];
#pragma unroll
            for (int a = 0; a < Shape::INPUTS; a++) {
                u.in[a] = load_shared_4(input_at(i, n, e / Shape::WORD_UNITS, a));
                if constexpr (Shape::HALVES) {
                    const int plane = Shape::SPREAD ? min(lane() % 4, Cell::GATES - 1) : a;
                    u.in[a] >>= 16 * ((Shape::WHOLE_WORDS ? unsigned(unit(e)) : unsigned(at(n, e, t).input_element(plane))) % 2);
                }
            }
            const float given[1] = {!Shape::BACKWARD || t == frames[n] - 1 ? u.given[0] : 0.f};
            if constexpr (Shape::SPREAD)
                prepare_gates_spread<Shape>(u.in[0], given[0], u.ready);
            else if constexpr (Shape::GATED)
                prepare_gates<Shape>(u.in, given, u.ready);
            else
                u.ready[0][0] = given[0];
        });
    }

    // Without branches: products are under way.
    __device__ void store_outputs(int i) {
        const int t = frame(i);
        if constexpr (Shape::SPREAD) {
            spread.store(lane() % 4, i, units[0][0].out);
            units[0][0].last = i >= 0 ? units[0][0].out[0] : units[0][0].last;
            return;
        }
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n++)
#pragma unroll
            for (int w = 0; w < Shape::LANE_WORDS; w++) {
                const int e = w * Shape::WORD_UNITS;
                const bool exists = i >= 0 && valid(n, e);
#pragma unroll
                for (int a = 0; a < Shape::OUTPUTS; a++) {
                    Storage* to = output_at(n, e, t, a);
                    const unsigned value = units[n][e].out[a];
                    const bool wanted = exists && (Shape::BACKWARD || a == 0 || pass.saved);
                    if constexpr (Shape::WORD_UNITS == 2)
                        store_if(wanted, reinterpret_cast<unsigned*>(to), value | units[n][e + 1].out[a] << 16);
                    else
                        store_if(wanted, to, static_cast<Storage>(value));
                }
            }
        if (!Shape::BACKWARD)
            each([&](int n, int e) { units[n][e].last = t == frames[n] - 1 && i >= 0 ? units[n][e].out[0] : units[n][e].last; });
    }
    __device__ Storage* output_at(int n, int e, int t, int a) const {
        const auto frame = at(n, e, t);
        void* array = !Shape::BACKWARD ? (a == 0 ? pass.result : pass.saved) : a < Cell::GATES ? pass.result : pass.result_last;
        size_t element;
        if constexpr (!Shape::GATED)
            element = frame.element();
        else if constexpr (Shape::BACKWARD)
            element = a < Cell::GATES ? frame.template element<Cell::GATES>(a) : frame.element();
        else
            element = a == 0 ? frame.element() : frame.template element<Cell::SAVED>(a - 1);
        return static_cast<Storage*>(array) + element;
    }

    // part += row tiles TILE .. + PHASE_TILES - 1 of the weights, vectors FIRST .. + COUNT - 1 of K, times the vectors of a state.
    template <int TILE, int FIRST, int COUNT>
    __device__ void multiply(Parts& part, int epoch) const {
        const unsigned from = state + epoch % 2 * Shape::STATE_BYTES;
#pragma unroll
        for (int p = 0; p < COUNT * Shape::PAIRS; p++) {
            const int k = 2 * (FIRST * Shape::PAIRS + p);
            const uint4 b = load_shared_16(from + Shape::pair_at(p));
#pragma unroll
            for (int m = 0; m < Shape::PHASE_TILES; m++)
                Matrix::multiply_add(part[k % Shape::CHAINS][m], weights.a[TILE + m][k], b.x, b.y);
#pragma unroll
            for (int m = 0; m < Shape::PHASE_TILES; m++)
                Matrix::multiply_add(part[(k + 1) % Shape::CHAINS][m], weights.a[TILE + m][k + 1], b.z, b.w);
        }
    }
    static __device__ void add_up(const Parts& part, Sums& sums) {
#pragma unroll
        for (int m = 0; m < Shape::PHASE_TILES; m++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[m][j] = Shape::CHAINS == 2 ? part[0][m][j] + part[1][m][j]
                                                : (part[0][m][j] + part[1][m][j]) + (part[2 % Shape::CHAINS][m][j] +
                                                                                     part[3 % Shape::CHAINS][m][j]);
    }
    // A unit's sums of one utterance.
    static __device__ float sum_of(const Sums& sums, int k, int n, int e) {
        return Shape::SUMS == 1 ? sums[0][2 * e + n] : sums[k / 2][k % 2 * 2 + n];
    }

    // What nobody waits for, before step i: while the matrix unit works, or while the state travels.
    __device__ void between(int i) {
        store_outputs(i - 1);
        prepare(i);
        fetch_inputs(i + Shape::AHEAD - 1);
    }

    __device__ void step(int i, int epochs) {
        const int t = frame(i), epoch = Shape::PHASES * i;
        Parts part = {};
        Sums sums;
        await(epoch, epochs);
        multiply<0, 0, Shape::VECTORS>(part, epoch);
        if (!Shape::IN_FLIGHT) between(i);
        add_up(part, sums);
        if (Shape::BACKWARD && t < 0) {
            each([&](int n, int e) { finish_first_state(n, e, sum_of(sums, 0, n, e)); });
        } else if constexpr (Shape::PHASES == 1) {
            each([&](int n, int e) {
                float sum[Shape::SUMS][1];
#pragma unroll
                for (int k = 0; k < Shape::SUMS; k++) sum[k][0] = sum_of(sums, k, n, e);
                finish(units[n][e], sum, t < frames[n]);
            });
            if (epoch + 1 == epochs) return;
#pragma unroll
            for (int v = 0; v < Shape::SENT; v++)
                publish(epoch + 1, v, [&](int n, int e) { return units[n][e].out[v == Shape::SENT - 1 ? Shape::LAST_SENT : v]; });
            exchange<Shape::SENT>(epoch + 1);
        } else if constexpr (Shape::BACKWARD) {
            step_back_again(t, epoch + 1, epochs, sums);
        } else {
            step_again(t, epoch + 1, epochs, sums);
        }
    }

    // The second product of a step: all units' values travel as a state of their own, and are multiplied as by `multiply`.
    template <int TILE, int FIRST, int COUNT, class Value>
    __device__ void multiply_again(int epoch, int epochs, Sums& sums, Value value) {
        publish(epoch, 0, value);
        exchange<1>(epoch);
        await(epoch, epochs);
        Parts part = {};
        multiply<TILE, FIRST, COUNT>(part, epoch);
        add_up(part, sums);
    }

    // Forward, sums of r and z: the last gate multiplies r h.
    __device__ void step_again(int t, int epoch, int epochs, const Sums& sums) {
        Sums last;
        multiply_again<1, 0, 1>(epoch, epochs, last, [&](int n, int e) {
            const Unit& u = units[n][e];  // ready: bias, x of r, ...
            const float reset[1] = {Cell::template reset<Number>(sums[0][n], u.ready[1][0], u.carry[0])};
            return Number::pack(reset);
        });
        each([&](int n, int e) {
            const float sum[3][1] = {{sums[0][n]}, {sums[0][2 + n]}, {last[0][n]}};
            finish(units[n][e], sum, t < frames[n]);
        });
        if (epoch + 1 == epochs) return;
        publish(epoch + 1, 0, [&](int n, int e) { return units[n][e].out[0]; });
        exchange<1>(epoch + 1);
    }

    // Backward, the gradient of h: that of n, multiplied, gives that of r h, and so that of r.
    __device__ void step_back_again(int t, int epoch, int epochs, const Sums& sums) {
        each([&](int n, int e) {
            const float sum[1][1] = {{sum_of(sums, 0, n, e)}};
            finish(units[n][e], sum, t < frames[n]);
        });
        Sums resets;
        multiply_again<0, 2, 1>(epoch, epochs, resets, [&](int n, int e) { return units[n][e].out[2]; });
        each([&](int n, int e) {
            Unit& u = units[n][e];
            if (t >= frames[n]) return;
            float grad[1], slope[Cell::SLOPES];
#pragma unroll
            for (int a = 0; a < Cell::SLOPES; a++) slope[a] = u.ready[1 + a][0];
            Cell::backward_reset(sum_of(resets, 0, n, e), slope, u.carry[0], grad[0]);
            u.out[0] = Number::pack(grad);
        });
        publish(epoch + 1, 0, [&](int n, int e) { return units[n][e].out[0]; });
        publish(epoch + 1, 1, [&](int n, int e) { return units[n][e].out[1]; });
        exchange<2>(epoch + 1);
    }

    __device__ void finish(Unit& u, const float (&sum)[Shape::SUMS][1], bool exists) const {
        if constexpr (Shape::SPREAD) {  // all frames of a tile exist
            apply_gates_spread<Shape>(lane() % 4, sum, u.ready, u.carry, u.out);
        } else if constexpr (Shape::GATED) {
            float carry[1] = {u.carry[0]};
            apply_gates<Shape>(sum, u.ready, carry, u.out);
            if (exists) u.carry[0] = carry[0];
#pragma unroll
            for (int a = 0; a < Shape::OUTPUTS; a++) u.out[a] = exists ? u.out[a] : 0;
        } else {
            float x[1], y[1], value[1];
            Number::unpack(u.in[0], x);
            if (Shape::BACKWARD) Number::unpack(u.in[Shape::INPUTS - 1], y);
            value[0] = apply_cell<Shape>(Shape::BACKWARD ? sum[0][0] + x[0] + u.ready[0][0] : sum[0][0] + x[0], y[0], pass.clip);
            u.out[0] = exists ? Number::pack(value) : 0;
        }
    }
    // The gradient of the first state.
    __device__ void finish_first_state(int n, int e, float sum) const {
        const float value[1] = {sum + (carried_h() ? units[n][e].carry[0] : 0.f)};
        if constexpr (Shape::GATED) at(n, e, 0).store_carry(valid(n, e), units[n][e].carry);
        store_state(n, e, frames[n] ? Number::pack(value) : load_state(n, e));
    }
    static constexpr __device__ bool carried_h() {
        if constexpr (Shape::GATED) return Cell::CARRIES_H;
        return false;
    }

    __device__ unsigned barrier(int epoch) const { return smem + Shape::BARRIER_AT + epoch % 2 * 8; }

    // Vectors that a block sends of an epoch.
    static constexpr __device__ int vectors(int epoch) { return Shape::PHASES == 2 && epoch % 2 ? 1 : Shape::VECTORS; }
    // Waits until all of an epoch is there, and arms the next one's mbarrier.
    __device__ void await(int epoch, int epochs) {
        if constexpr (Shape::CLUSTER == 1) return;
        if (epoch > 0) {
            barrier_wait(barrier(epoch), parity >> epoch % 2 & 1, "its peers' state", epoch);
            parity ^= 1u << epoch % 2;
        }
        if (threadIdx.x == 0 && epoch + 1 < epochs)
            barrier_expect(barrier(epoch + 1), (Shape::CLUSTER - 1) * live * vectors(epoch + 1) * Shape::OWN_WORDS * 4);
    }
    // Leaves this lane's numbers of one vector where the block's part of an epoch lies.
    template <class Value>
    __device__ void publish(int epoch, int vector, Value value) const {
        const unsigned to = own + epoch % 2 * Shape::STATE_BYTES + 4 * vector * Shape::OWN_WORDS;
#pragma unroll
        for (int n = 0; n < Shape::COLUMNS; n++) {
            if (Shape::SPREAD ? lane() % 4 != 0 : sample(n) >= live) break;
            const unsigned sample_to = to + n * Shape::SAMPLE_PITCH;
            if constexpr (sizeof(Storage) == 4) {
#pragma unroll
                for (int e = 0; e < Shape::LANE_UNITS; e++) store_shared_4(sample_to + 4 * e, Matrix::operand(value(n, e)));
            } else if constexpr (Shape::LANE_UNITS == 2) {
                store_shared_4(sample_to, value(n, 0) | value(n, 1) << 16);
            } else {
                store_shared_2(sample_to, value(n, 0));
            }
        }
    }
    // Message j of an epoch: neighbouring threads send what is contiguous. Where its 16 bytes lie in buffer 0, and to whom they go;
    // of an utterance or a peer that does not exist, where no message is: to this block itself.
    static constexpr int CHUNKS = Shape::VECTORS * Shape::OWN_WORDS / 4;
    __device__ int rounded() const { return live > 4 ? 8 : live > 2 ? 4 : live; }
    __device__ int find_message(int j, unsigned& from) const {
        const int s = j / CHUNKS & (rounded() - 1), ahead = 1 + (j / CHUNKS >> (__ffs(rounded()) - 1));
        from = smem + rank * Shape::SOURCE_PITCH + s * Shape::SAMPLE_PITCH + 16 * (j % CHUNKS);
        return s < live && ahead < Shape::CLUSTER ? (rank + ahead) % Shape::CLUSTER : rank;
    }
    // When the block's part of an epoch is complete, it goes to the peers: the first SENT of its vectors.
    template <int SENT>
    __device__ void exchange(int epoch) const {
        block_wait(1, Shape::ALL_THREADS);
        if constexpr (Shape::CLUSTER > 1) {
            if (sent_to) send<SENT>(threadIdx.x, sent, sent_to, sent_barrier, epoch);
#pragma unroll 1
            for (int j = threadIdx.x + Shape::ALL_THREADS; j < (Shape::CLUSTER - 1) * rounded() * CHUNKS;
                 j += Shape::ALL_THREADS) {
                unsigned from;
                const int peer = find_message(j, from);
                if (peer != rank) send<SENT>(j, from, remote_address(from, peer), remote_address(barrier(0), peer), epoch);
            }
        }
    }
    template <int SENT>
    static __device__ void send(int j, unsigned from, unsigned to, unsigned to_barrier, int epoch) {
        if (SENT < Shape::VECTORS && j % CHUNKS >= SENT * Shape::OWN_WORDS / 4) return;
        const unsigned buffer = epoch % 2 * Shape::STATE_BYTES;
        const uint4 w = load_shared_16(from + buffer);
        store_async(to + buffer, to_barrier + epoch % 2 * 8, w.x, w.y, w.z, w.w);
    }
};

template <class Shape>
__device__ void units_recurrence(const Pass& pass) {
    extern __shared__ __align__(128) char smem[];
    Units<Shape>(pass, smem).run();
}

}  // namespace ds2
