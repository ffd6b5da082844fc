// The wide whole-chip design's finishing warps (grid_wide.cuh).
#pragma once

#include "recurrent/grid_wide_shape.cuh"

namespace ds2 {

// WIDE_ROWS: rows of all arrays start on 16-byte boundaries (pass.wide_rows), so a unit is one load, copy or store. As an
// argument, because what the others need lies between the instructions of every turn otherwise.
template <class Shape, bool WIDE_ROWS>
struct WideFinisher : WideBlock<Shape> {
    using Number = typename Shape::Number;
    using Block = WideBlock<Shape>;
    using Block::lane, Block::pass, Block::rank, Block::smem;
    using Tile = GridTile<Shape>;
    static constexpr int WARP_PARCELS = Shape::WARP_PARCELS;
    static_assert(WARP_PARCELS <= (Shape::GATED ? 1 : 2), "a lane for every 16 bytes of a warp's parcels, or two arrays of one");

    // A lane computes one word of two utterances of each parcel: OWN words. In memory it has a unit instead, 4 words of one
    // utterance, 16 bytes: unit lane % 16 of parcel lane / 16. Words become units in shared memory. Where a cell has gates,
    // lanes share out the arrays of one parcel instead: odd ones are those of the second half of lanes.
    static constexpr int OWN = 2 * WARP_PARCELS;
    static constexpr int ARRAY_STEP = Shape::GATED ? 2 : 1;
    static constexpr int SUMS_AT_ONCE = 8;  // that are asked for before the first is added
    unsigned* const exchange;
    const int thread = threadIdx.x % Shape::FINISHERS, warp = thread / 32;
    const int plane_words = Block::state_words * Shape::SAMPLES, slot_words = Shape::SENT * plane_words;
    const int unit_parcel = Shape::GATED ? 0 : lane / 16, first_array = Shape::GATED ? lane / 16 : 0;
    const int sample = first_sample(unit_parcel) + lane / 2 % 8;  // of the unit, in its group
    const int word = parcel_word(unit_parcel) + lane % 2 * 4;     // of the unit, its first
    const unsigned place = pinned(unsigned(word / 4 * Shape::SAMPLES + sample) * 4);  // of the unit in a slot, in words
    const unsigned offset = pinned(unsigned(sample * this->pass.hidden + 2 * word));  // in a (B, H) array, from its group on
    // Shared memory: the unit and the first own word in the inputs, own part of received sums, frames of the unit's utterance.
    const unsigned base = pinned(smem_address(this->smem));
    const unsigned unit_at = pinned(base + Shape::INPUTS_AT + warp * Shape::WARP_INPUT_BYTES + (Shape::GATED ? lane % 16 : lane) * 16);
    const unsigned word_at = pinned(unit_at - (Shape::GATED ? lane % 16 : lane) * 16 + lane % 4 * 64 + lane / 4 * 4);
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
    __device__ auto frame(const Tile& tile, int group, int t) const {  // of the unit
        return frame_at<Shape>(pass, unsigned(t * pass.batch + tile.first + group * pass.samples + sample),
                               [word = word] { return 2 * word; });
    }
    // Where the unit of a group lies in a (T, B, H) array, and with t = 0 in a (B, H) array.
    __device__ size_t element(const Tile& tile, int group, int t) const {
        return size_t(unsigned(t * pass.batch + tile.first + group * pass.samples)) * unsigned(pass.hidden) + offset;
    }
    __device__ int valid() const { return pass.hidden - 2 * word; }  // elements from its start to the row's end
    __device__ uint4 load_unit(const void* array, size_t at) const {
        if constexpr (WIDE_ROWS)
            return *reinterpret_cast<const uint4*>(static_cast<const typename Number::Storage*>(array) + at);
        return make_uint4(load_word<Number>(array, at, valid(), pass.whole_words),
                          load_word<Number>(array, at + 2, valid() - 2, pass.whole_words),
                          load_word<Number>(array, at + 4, valid() - 4, pass.whole_words),
                          load_word<Number>(array, at + 6, valid() - 6, pass.whole_words));
    }
    __device__ void store_unit(void* array, size_t at, uint4 v) const {
        if constexpr (WIDE_ROWS) {
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
        return (group * Shape::SLOTS + unsigned(epoch) % Shape::SLOTS) * slot_words + place;
    }
    static __device__ unsigned input(int turn, int array, int n = 0) {  // from unit_at on, or from word_at to own word n
        return (turn % Shape::AHEAD * Shape::ARRAYS + array) * Shape::FINISHING_WARPS * Shape::WARP_INPUT_BYTES +
               n / 2 * Shape::PARCEL_INPUT_BYTES + n % 2 * 32;
    }

    // Of own word n: its utterance in the group, its first element, its frames, and what its lane carries of it.
    __device__ int sample_of(int n) const { return first_sample(n / 2) + lane % 4 * 2 + n % 2; }
    __device__ int element_of(int n) const { return 2 * (parcel_word(n / 2) + lane / 4); }
    __device__ int frames_of(int group, int n) const {
        return load_shared_4(frames_at + (group * Shape::SAMPLES + sample_of(n) - sample) * 4);
    }
    __device__ auto frame(const Tile& tile, int group, int t, int n) const {
        return frame_at<Shape>(pass, unsigned(t * pass.batch + tile.first + group * pass.samples + sample_of(n)),
                               [column = element_of(n)] { return column; });
    }
    __device__ unsigned carry_at(int group, int n) const {
        return base + Shape::CARRY_AT + group * Shape::CARRY_BYTES + (n * 2 * Shape::FINISHERS + thread) * 4;
    }
    // To every plane of a slot that this lane's unit has, value(the output that is sent there).
    static __device__ bool sent(int a) { return a == Shape::LAST_SENT || a < Shape::SENT - 1; }
    template <class Value>
    __device__ void publish(unsigned to, Value value) const {
#pragma unroll
        for (int i = 0; i < Shape::OUTPUTS; i += ARRAY_STEP) {
            const int a = i + first_array, plane = a == Shape::LAST_SENT ? Shape::SENT - 1 : a;
            if (sent(a)) store_relaxed(exchange + to + plane * plane_words, value(a));
        }
    }
    __device__ void store_padding(const Tile& tile, int group, int t) const {
        if constexpr (Shape::GATED)
            store_outputs(frame(tile, group, t), Shape::BACKWARD ? Shape::OUTPUTS : 1, [](int) { return uint4{}; });
        else
            store_unit(pass.result, element(tile, group, t), make_uint4(0, 0, 0, 0));
    }
    // All are read before the first is stored: a store keeps its registers until memory takes it.
    template <class Frame, class Value>
    __device__ void store_outputs(const Frame& at, int arrays, Value value) const {
        uint4 v[(Shape::OUTPUTS + ARRAY_STEP - 1) / ARRAY_STEP];
#pragma unroll
        for (int i = 0; i < arrays; i += ARRAY_STEP)
            if (i + first_array < arrays) v[i / ARRAY_STEP] = value(i + first_array);
#pragma unroll
        for (int i = 0; i < arrays; i += ARRAY_STEP) {
            const int a = i + first_array;
            if (a < arrays && at.output_array(a)) store_unit(at.output_array(a), at.output_element(a), v[i / ARRAY_STEP]);
        }
    }

    __device__ void run() {
        int epoch = 0;
        for (Tile tile(pass, this->stream); tile.exists(); tile.next()) {
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
                    store_padding(tile, g, t);
            block_wait(Shape::TILE_DONE, Shape::FINISHERS);  // a warp without words in the next tile has seen all phases
        }
    }

    // Notes what the thread owns and its warp's utterances' frames, and publishes their first state.
    __device__ void open(const Tile& tile, int epoch) {
        owned = 0;
        for (int g = 0; g < tile.groups; g++) {
            const int live = tile.live_of(g);
            owned += unsigned(this->parcels_of(live)) << (COUNTS + 8 * g);
            store_shared_4(frames_at + (g * Shape::SAMPLES + lane - sample) * 4,
                           lane < live ? length_of(pass, tile.first + g * pass.samples + lane) : 0);
            __syncwarp();
            if constexpr (Shape::GATED) open_carry(tile, g, live);
            if ((Shape::GATED || lane < 16 * WARP_PARCELS) && parcel(unit_parcel) < Shape::PARCELS && word < this->state_words &&
                sample < live) {
                owned |= 1u << g;
                const uint4 state = load_state(tile, g);
                // An utterance without frames: its last state is its first. Backward reaches that at t = -1, if it steps.
                if (frames_of(g) == 0 && (!Shape::BACKWARD || tile.steps == 0) && first_array == 0)
                    store_unit(pass.last_state, element(tile, g, 0), state);
                if (tile.steps > 0)
                    publish(slot(g, epoch), [=](int) { return Shape::BACKWARD ? make_uint4(0, 0, 0, 0) : publishable(state); });
            }
        }
        for (int g = 0; g < tile.groups && tile.steps > 0; g++) empty_slot(tile, g, epoch);
    }

    // What a lane carries of its own words at first, and at last where there are no frames.
    __device__ void open_carry(const Tile& tile, int group, int live) const {
#pragma unroll
        for (int n = 0; n < OWN && parcel(n / 2) < Shape::PARCELS; n++) {
            if (sample_of(n) >= live) continue;
            const auto at = frame(tile, group, 0, n);
            const int valid = pass.hidden - element_of(n);
            float carry[2];
            at.load_carry(pass.state ? load_word<Number>(pass.state, at.element(), valid, pass.whole_words) : 0, valid, carry);
            keep_carry<Shape>(carry_at(group, n), carry);
            if (frames_of(group, n) == 0 && (!Shape::BACKWARD || tile.steps == 0)) at.store_carry(valid, carry);
        }
    }

    // Asks for what turn number `turn` of the tile consumes: each lane its unit.
    __device__ void fetch(const Tile& tile, int group, int iteration, int turn) const {
        const int t = Shape::BACKWARD ? tile.steps - 1 - iteration : iteration;
        const bool wanted = owns(group) && t >= 0 && t < frames_of(group);
        const size_t plain = wanted ? element(tile, group, t) : 0;
#pragma unroll
        for (int i = 0; i < Shape::INPUTS && (Shape::GATED || lane < 16 * WARP_PARCELS); i += ARRAY_STEP) {
            const int a = i + first_array;
            if (ARRAY_STEP > 1 && a >= Shape::INPUTS) continue;
            const auto* array = static_cast<const typename Number::Storage*>(input_array<Shape>(pass, a));
            size_t from = plain;
            if constexpr (Shape::GATED) from = wanted ? frame(tile, group, t).input_element(a) : 0;
            const unsigned to = unit_at + input(turn, a);
            if constexpr (WIDE_ROWS)
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

    __device__ void await_sums(Turn at) const {
        const int parcels = owned >> (COUNTS + 8 * at.group) & 0xff;
        const unsigned barrier = base + Shape::BARRIERS_AT + 8 * buffer_of(at);
        if (thread == 0 && parcels > 0) barrier_expect(barrier, parcels * Shape::SOURCES * Shape::PARCEL_BYTES);
        if (warp == 0 ? parcels > 0 : __any_sync(0xffffffffu, owns(at.group)))
            barrier_wait<true>(barrier, at.epoch / 2 % 2, "its cluster's sums", at.epoch);
    }

    // The pointwise end of one turn at frame t; t = -1 is the gradient of the first state. First everything that other
    // blocks wait for, and as much of it as can be done before the wait.
    __device__ void finish(const Tile& tile, Turn at, int t, int turn, bool more) const {
        if constexpr (Shape::GATED)
            finish_gates(tile, at, t, turn, more);
        else
            finish_units(tile, at, t, turn, more);
    }

    __device__ void finish_units(const Tile& tile, Turn at, int t, int turn, bool more) const {
        const int frames = frames_of(at.group);
        const unsigned to = pinned(slot(at.group, at.epoch + 1));
        float sum[OWN][2];
        copies_wait<Shape::AHEAD - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < OWN; n++) Number::unpack(load_shared_4(word_at + input(turn, 0, n)), sum[n]);
        if (Shape::BACKWARD && pass.state && __any_sync(0xffffffffu, owns(at.group) && t >= 0 && t == frames - 1))
            add_last(tile, at.group, t, sum);
        await_sums(at);
        // A warp without a second parcel adds up its first again, and makes no use of it.
        const int step = parcel(1) < Shape::PARCELS ? Shape::FINISHING_WARPS * Shape::CLUSTER * Shape::PARCEL_BYTES : 0;
        const unsigned from = sums_at + buffer_of(at) * Shape::RECEIVED_BYTES;
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
        if (owns(at.group)) {
            uint4 unit = load_shared_16(unit_at + input(turn, 0));
            if (max(t, 0) >= frames) unit = make_uint4(0, 0, 0, 0);  // the utterance is over
            if (Shape::BACKWARD && t < 0) {
                store_unit(pass.last_state, element(tile, at.group, 0), frames > 0 ? unit : load_state(tile, at.group));
                return;
            }
            if (more) store_relaxed(exchange + to, publishable(unit));
            store_unit(pass.result, element(tile, at.group, t), unit);
            if (!Shape::BACKWARD && t == frames - 1) store_unit(pass.last_state, element(tile, at.group, 0), unit);
        }
        if (more) empty_slot(tile, at.group, at.epoch + 1);
    }

    // Of a cell with gates, what own word n has before the sums are there.
    __device__ void prepare(const Tile& tile, Turn at, int t, int turn, int n, float (&ready)[Shape::READY][2]) const {
        unsigned given[Shape::INPUTS];
#pragma unroll
        for (int a = 0; a < Shape::INPUTS; a++) given[a] = load_shared_4(word_at + input(turn, a, n));
        float other[2] = {};
        const int valid = pass.hidden - element_of(n);
        if constexpr (!Shape::BACKWARD)
            frame(tile, at.group, 0, n).load_bias(other, valid, pass.whole_words);
        else if (pass.state && t >= 0 && t == frames_of(at.group, n) - 1)
            Number::unpack(load_word<Number>(pass.state, frame(tile, at.group, 0, n).element(), valid, pass.whole_words), other);
        prepare_gates<Shape>(given, other, ready);
    }

    // Numbers of own word n that wait for its sums in shared memory.
    __device__ unsigned ready_at(int n, int i) const {
        return base + Shape::READY_AT + ((n * 4 + i / 4) * Shape::FINISHERS + thread) * 16 + i % 4 * 4;
    }
    __device__ void keep_ready(int n, const float (&ready)[Shape::READY][2]) const {
        constexpr int COUNT = Shape::READY * 2;
        const float* flat = &ready[0][0];
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            store_shared_16(ready_at(n, i), make_uint4(__float_as_uint(flat[i]), __float_as_uint(flat[i + 1]),
                                                       __float_as_uint(flat[min(i + 2, COUNT - 1)]),
                                                       __float_as_uint(flat[min(i + 3, COUNT - 1)])));
    }
    __device__ void kept_ready(int n, float (&ready)[Shape::READY][2]) const {
        constexpr int COUNT = Shape::READY * 2;
        float* flat = &ready[0][0];
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 v = load_shared_16(ready_at(n, i));
            flat[i] = __uint_as_float(v.x), flat[i + 1] = __uint_as_float(v.y);
            if (i + 2 < COUNT) flat[i + 2] = __uint_as_float(v.z), flat[i + 3] = __uint_as_float(v.w);
        }
    }

    // Puts what own words became in the place of what was read: of the outputs that the others wait for, or of the rest.
    template <bool SENT>
    __device__ void keep_outputs(int turn, const unsigned (&out)[OWN][Shape::OUTPUTS]) const {
#pragma unroll
        for (int a = 0; a < Shape::OUTPUTS; a++)
#pragma unroll
            for (int n = 0; n < OWN; n++)
                if (sent(a) == SENT) store_shared_4(word_at + input(turn, a, n), out[n][a]);
        __syncwarp();
    }

    __device__ void finish_gates(const Tile& tile, Turn at, int t, int turn, bool more) const {
        copies_wait<Shape::AHEAD - 1>();  // of zeros, too, before they are copied again
        if (parcel(0) >= Shape::PARCELS) return;
        __syncwarp();
        const int frames = frames_of(at.group);
        const unsigned to = pinned(slot(at.group, at.epoch + 1));
        float ready[OWN][Shape::READY][2], sum[OWN][Shape::SUMS][2] = {}, carry[OWN][2];
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            prepare(tile, at, t, turn, n, ready[n]);
            if constexpr (Shape::READY_APART)
                keep_ready(n, ready[n]);
            else
                kept_carry<Shape>(carry_at(at.group, n), carry[n]);
        }
        await_sums(at);
        const unsigned from = sums_at + buffer_of(at) * Shape::RECEIVED_BYTES;
#pragma unroll
        for (int k = 0; k < Shape::SUMS; k++)
#pragma unroll
            for (int first = 0; first < Shape::CLUSTER; first += SUMS_AT_ONCE) {
                uint4 v[SUMS_AT_ONCE];
#pragma unroll
                for (int i = 0; i < min(SUMS_AT_ONCE, Shape::CLUSTER - first); i++)
                    v[i] = load_shared_16(from + (k * Shape::CLUSTER + first + i) * Shape::SUM_BYTES);
#pragma unroll
                for (int i = 0; i < min(SUMS_AT_ONCE, Shape::CLUSTER - first); i++) {
                    sum[0][k][0] += __uint_as_float(v[i].x), sum[1][k][0] += __uint_as_float(v[i].y);
                    sum[0][k][1] += __uint_as_float(v[i].z), sum[1][k][1] += __uint_as_float(v[i].w);
                }
            }
#pragma unroll
        for (int n = 0; n < OWN && Shape::READY_APART; n++) {
            kept_ready(n, ready[n]);
            kept_carry<Shape>(carry_at(at.group, n), carry[n]);
        }
        if (Shape::BACKWARD && t < 0) {
            finish_first(tile, at.group, turn, sum, carry);
            return;
        }
        unsigned out[OWN][Shape::OUTPUTS];
#pragma unroll
        for (int n = 0; n < OWN; n++) apply_gates<Shape>(sum[n], ready[n], carry[n], out[n]);
        const auto unit = [=](int a) {
            const uint4 made = load_shared_16(unit_at + input(turn, a));
            return t < frames ? made : make_uint4(0, 0, 0, 0);  // the utterance is over
        };
        keep_outputs<true>(turn, out);
        if (more && owns(at.group)) publish(to, [=](int a) { return publishable(unit(a)); });
        keep_outputs<false>(turn, out);
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int last = frames_of(at.group, n) - 1;
            if (t <= last) keep_carry<Shape>(carry_at(at.group, n), carry[n]);
            if (!Shape::BACKWARD && t == last)
                frame(tile, at.group, 0, n).store_carry(pass.hidden - element_of(n), carry[n]);
        }
        if (owns(at.group)) {
            store_outputs(frame(tile, at.group, t), Shape::OUTPUTS, unit);
            if (!Shape::BACKWARD && t == frames - 1 && first_array == 0)
                store_unit(pass.last_state, element(tile, at.group, 0), unit(0));
        }
        if (more) empty_slot(tile, at.group, at.epoch + 1);
    }

    // The gradient of the first state, and of what was carried then.
    __device__ void finish_first(const Tile& tile, int group, int turn, float (&sum)[OWN][Shape::SUMS][2],
                                 const float (&carry)[OWN][2]) const {
#pragma unroll
        for (int n = 0; n < OWN; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) sum[n][0][e] += Shape::Cell::CARRIES_H ? carry[n][e] : 0.f;
            store_shared_4(word_at + input(turn, 0, n), Number::pack(sum[n][0]));
            if (sample_of(n) < tile.live_of(group))
                frame(tile, group, 0, n).store_carry(pass.hidden - element_of(n), carry[n]);
        }
        __syncwarp();
        if (owns(group) && first_array == 0)
            store_unit(pass.last_state, element(tile, group, 0),
                       frames_of(group) > 0 ? load_shared_16(unit_at + input(turn, 0)) : load_state(tile, group));
    }

    // After publishing state `epoch` of a group: empties what this thread stored for the state two before.
    __device__ void empty_slot(const Tile& tile, int group, int epoch) const {
        if (owns(group)) publish(slot(group, epoch + Shape::SLOTS - 2), [](int) { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); });
        if (group == tile.groups - 1 && Shape::fences(epoch)) fence_stores();  // of this group's words or another's
    }
};

}  // namespace ds2
