// Small layers with gates where a tile is one utterance: four lanes share a unit. All four have its sums, its bias and its carry,
// and find h and the next carry; but a lane reads x of one gate and writes one plane of what is saved. Forward only.
#pragma once

#include "recurrent/frame.cuh"

namespace ds2 {

__device__ inline float of_lane(float mine, int q) {  // of the four
    return __uint_as_float(__shfl_sync(0xffffffffu, __float_as_uint(mine), q, 4));
}
__device__ inline float of_gate(int q, float a, float b, float c, float d) { return q < 2 ? (q == 0 ? a : b) : q == 2 ? c : d; }

// The cell in lane q: as Cell::forward, but of what is saved plane q alone. The last plane, the carry before, is the caller's.
template <class Cell, bool ALONE>  // without a cluster
struct Spread {
    static_assert(Cell::SAVED == 5, "what a cell with gates saves is four numbers and the state before the step");
    // What a lane needs of x, while products are under way; its own is of gate q, or of the last gate.
    static __device__ void share(float mine, float (&x)[Cell::GATES]) {
#pragma unroll
        for (int k = 0; k < Cell::GATES; k++) x[k] = of_lane(mine, k);
    }
    template <class Number>
    static __device__ float forward(int q, const float (&sum)[Cell::GATES], const float (&x)[Cell::GATES], float bias, float& carry,
                                    float& saved) {
        float planes[Cell::SAVED];
        const float h = Cell::template forward<Number>(sum, x, bias, carry, planes);
        saved = of_gate(q, planes[0], planes[1], planes[2], planes[3]);
        return h;
    }
};

// A lane a gate: three slow instructions, not seven. On one multiprocessor, where two warps and more share a scheduler's slow unit;
// in a cluster one has it, and a step waits for the shuffles.
template <>
struct Spread<Lstm, true> {
    static __device__ void share(float mine, float (&x)[4]) { x[0] = x[1] = x[2] = x[3] = mine; }
    template <class Number>
    static __device__ float forward(int q, const float (&sum)[4], const float (&x)[4], float, float& carry, float& saved) {
        const float scale = q == 2 ? 2.f : 1.f;  // tanh(x) = 2 sigmoid(2 x) - 1
        const float pre = x[0] + of_gate(q, sum[0], sum[1], sum[2], sum[3]);
        saved = scale * quick_reciprocal(1.f + quick_exp2(-LOG2_E * scale * pre)) - (scale - 1.f);
        carry = of_lane(saved, 1) * carry + of_lane(saved, 0) * of_lane(saved, 2);
        return of_lane(saved, 3) * tanh_as<Number>(carry);
    }
};

// As prepare_gates.
template <class Shape, int READY>
__device__ void prepare_gates_spread(unsigned in, float bias, float (&ready)[READY][1]) {
    float mine[1], x[READY - 1];
    Shape::Number::unpack(in, mine);
    Spread<typename Shape::Cell, Shape::CLUSTER == 1>::share(mine[0], x);
    ready[0][0] = bias;
#pragma unroll
    for (int k = 0; k < READY - 1; k++) ready[1 + k][0] = x[k];
}

// As apply_gates. Ready: the bias, then x; out: h, what is saved as plane q, and the carry before the frame.
template <class Shape, int SUMS, int READY>
__device__ void apply_gates_spread(int q, const float (&sum)[SUMS][1], const float (&ready)[READY][1], float (&carry)[1],
                                   unsigned (&out)[3]) {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    float sums[SUMS], x[SUMS], h[1], saved[1];
    out[2] = Number::pack(carry);
#pragma unroll
    for (int k = 0; k < SUMS; k++) sums[k] = sum[k][0], x[k] = ready[1 + k][0];
    h[0] = Spread<Cell, Shape::CLUSTER == 1>::template forward<Number>(q, sums, x, ready[0][0], carry[0], saved[0]);
    out[0] = Number::pack(h), out[1] = Number::pack(saved);
    if constexpr (Cell::CARRIES_H) Number::unpack(out[0], carry);
}

// What a lane of gate q reads and writes, frame after frame, each once: addresses that advance, not such as are found anew.
template <class Shape>
class SpreadFrames {
    using Cell = typename Shape::Cell;
    using Storage = typename Shape::Number::Storage;
    static constexpr int NEVER = 0x7fffffff;
    const Storage* from;     // x of its gate
    Storage *plane, *other;  // of what is saved; first lane: h, second lane: the last plane
    size_t from_step, plane_step, other_step;
    int end, plane_from, other_from;  // of frames: fetched before, stored from

  public:
    __device__ void open(const Pass& pass, int utterance, int frames, int unit, int q) {
        const auto first = frame_at<Shape>(pass, unsigned(utterance), [=] { return unit; });
        const size_t row = size_t(pass.batch) * pass.hidden;
        Storage* const saved = static_cast<Storage*>(pass.saved);
        from = static_cast<const Storage*>(pass.input) + first.template element<Cell::GATES>(min(q, Cell::GATES - 1));
        if (Shape::HALVES && Shape::WHOLE_WORDS) from -= unit % 2;
        plane = saved + first.template element<Cell::SAVED>(q);
        other = q == 0 ? static_cast<Storage*>(pass.result) + first.element()
                       : saved + first.template element<Cell::SAVED>(Cell::SAVED - 1);
        from_step = row * Cell::GATES, plane_step = row * Cell::SAVED, other_step = q == 0 ? row : plane_step;
        plane -= plane_step, other -= other_step;
        const bool exists = unit < pass.hidden, kept = exists && saved;
        end = pinned(exists ? frames : 0);
        plane_from = pinned(kept ? 0 : NEVER), other_from = pinned(exists && q == 0 || kept && q == 1 ? 0 : NEVER);
    }
    __device__ void fetch(unsigned to, int i) {
        const bool wanted = i < end;
        if constexpr (!Shape::HALVES || Shape::WHOLE_WORDS) {
            copy_async(to, from, wanted);
        } else {  // the array may end with it
            const int odd = reinterpret_cast<size_t>(from) / 2 % 2;
            copy_async_part(to, from - odd, wanted ? 2 + 2 * odd : 0);
        }
        from += from_step;
    }
    // First of the frame before the first one, which does not exist: a step has no branch.
    __device__ void store(int q, int i, const unsigned (&out)[3]) {
        store_if(i >= plane_from, plane, Storage(out[1]));
        store_if(i >= other_from, other, Storage(q == 0 ? out[0] : out[2]));
        plane += plane_step, other += other_step;
    }
};

}  // namespace ds2
