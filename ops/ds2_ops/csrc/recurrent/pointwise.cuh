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

// Rounds in which the blocks exchange something in a step.
template <class Cell>
__device__ constexpr int cell_phases() {
    if constexpr (Cell::GATES == 1) return 1;
    else return Cell::PHASES;
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

// Numbers of each hidden unit that a cell with gates has ready before the sums of a step are there: forward x of each gate and
// the bias; backward the gradient of h and the slopes.
template <class Cell, bool BACKWARD>
__device__ constexpr int pass_ready() {
    if constexpr (Cell::GATES == 1) return 1;
    else return 1 + (BACKWARD ? Cell::SLOPES : Cell::GATES);
}

// For the units of one word. Words of in: forward x of each gate; backward dy, then what was saved. `other`: forward the bias;
// backward the gradient of the last h, where this is it.
template <class Shape, int INPUTS, int READY, int N>
__device__ void prepare_gates(const unsigned (&in)[INPUTS], const float (&other)[N], float (&ready)[READY][N]) {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    float given[INPUTS][N];
#pragma unroll
    for (int a = 0; a < INPUTS; a++) Number::unpack(in[a], given[a]);
#pragma unroll
    for (int e = 0; e < N; e++) {
        if constexpr (Shape::BACKWARD) {
            float saved[Cell::SAVED], slope[Cell::SLOPES];
#pragma unroll
            for (int a = 0; a < Cell::SAVED; a++) saved[a] = given[1 + a][e];
            Cell::slopes(saved, slope);
            ready[0][e] = given[0][e] + other[e];
#pragma unroll
            for (int a = 0; a < Cell::SLOPES; a++) ready[1 + a][e] = slope[a];
        } else {
            ready[0][e] = other[e];
#pragma unroll
            for (int a = 0; a < INPUTS; a++) ready[1 + a][e] = given[a][e];
        }
    }
}

// Words of out: forward h, then what is saved; backward the gradients of x, then that of the last gate's W h if it is another.
template <class Shape, int SUMS, int READY, int OUTPUTS, int N>
__device__ void apply_gates(const float (&sum)[SUMS][N], const float (&ready)[READY][N], float (&carry)[N],
                            unsigned (&out)[OUTPUTS]) {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    float made[OUTPUTS][N];
#pragma unroll
    for (int e = 0; e < N; e++) {
        float gates[Cell::GATES], saved[Cell::SAVED], rest[READY - 1];
#pragma unroll
        for (int a = 0; a < READY - 1; a++) rest[a] = ready[1 + a][e];
        if constexpr (Shape::BACKWARD) {
            float apart;
            Cell::backward(sum[0][e] + ready[0][e], rest, carry[e], gates, apart);
#pragma unroll
            for (int a = 0; a < Cell::GATES; a++) made[a][e] = gates[a];
            if constexpr (Cell::LAST_APART) made[Cell::GATES][e] = apart;
        } else {
#pragma unroll
            for (int a = 0; a < Cell::GATES; a++) gates[a] = sum[a][e];
            made[0][e] = Cell::template forward<Number>(gates, rest, ready[0][e], carry[e], saved);
#pragma unroll
            for (int a = 0; a < Cell::SAVED; a++) made[1 + a][e] = saved[a];
        }
    }
#pragma unroll
    for (int a = 0; a < OUTPUTS; a++) out[a] = Number::pack(made[a]);
    if constexpr (!Shape::BACKWARD && Cell::CARRIES_H) Number::unpack(out[0], carry);
}

}  // namespace ds2
