// The end of a step: what a cell makes of a unit's sum, the same in every design.
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

}  // namespace ds2
