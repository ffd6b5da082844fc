// The end of a step: what a cell makes of a unit's sums, the same in every design.
#pragma once

#include "recurrent/cells.cuh"

namespace ds2 {

// Forward: y, from x + W h. Backward: the gradient of x + W h, from that of y, and from y itself, which is read backward only.
template <class Shape>
__device__ float apply_cell(float sum, const float& y, float clip) {
    using Cell = typename Shape::Cell;
    static_assert(Cell::GATES == 1, "a row is a unit: a cell with gates needs all rows of a unit in one thread");
    return Shape::BACKWARD ? Cell::backward(sum, y, clip) : Cell::forward(sum, clip);
}

// Words of each hidden unit that a pass reads and writes every step.
template <class Cell, bool BACKWARD>
__device__ constexpr int pass_inputs() {
    if constexpr (Cell::GATES == 1) return BACKWARD ? 2 : 1;
    else return BACKWARD ? 1 + Cell::SAVED : Cell::GATES;
}
template <class Cell, bool BACKWARD>
__device__ constexpr int pass_outputs() {
    if constexpr (Cell::GATES == 1) return 1;
    else return BACKWARD ? Cell::GATES + Cell::LAST_APART : 1 + Cell::SAVED;
}

// Cells with gates, for the units of one word. Words of in: forward x of each gate; backward dy, then what was saved. Words of
// out: forward h, then what is saved; backward the gradients of x, then that of the last gate's W h if it is another one.
template <class Shape, int SUMS, int INPUTS, int OUTPUTS, int N>
__device__ void apply_gates(const float (&sum)[SUMS][N], const unsigned (&in)[INPUTS], const float (&bias)[N],
                            const float (&last)[N], float (&carry)[N], unsigned (&out)[OUTPUTS]) {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    float given[INPUTS][N], made[OUTPUTS][N];
#pragma unroll
    for (int a = 0; a < INPUTS; a++) Number::unpack(in[a], given[a]);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float gates[Cell::GATES], saved[Cell::SAVED];
        if constexpr (Shape::BACKWARD) {
            float apart;
#pragma unroll
            for (int a = 0; a < Cell::SAVED; a++) saved[a] = given[1 + a][e];
            Cell::backward(sum[0][e] + given[0][e] + last[e], saved, carry[e], gates, apart);
#pragma unroll
            for (int a = 0; a < Cell::GATES; a++) made[a][e] = gates[a];
            if constexpr (Cell::LAST_APART) made[Cell::GATES][e] = apart;
        } else {
            float x[Cell::GATES];
#pragma unroll
            for (int a = 0; a < Cell::GATES; a++) gates[a] = sum[a][e], x[a] = given[a][e];
            made[0][e] = Cell::forward(gates, x, bias[e], carry[e], saved);
#pragma unroll
            for (int a = 0; a < Cell::SAVED; a++) made[1 + a][e] = saved[a];
        }
    }
#pragma unroll
    for (int a = 0; a < OUTPUTS; a++) out[a] = Number::pack(made[a]);
    if constexpr (!Shape::BACKWARD && Cell::CARRIES_H) Number::unpack(out[0], carry);
}

}  // namespace ds2
