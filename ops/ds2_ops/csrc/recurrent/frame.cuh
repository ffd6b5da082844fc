// What a finishing thread reads and writes of one frame of one utterance, the same in every design.
//
// A Shape gives Number, Cell, BACKWARD, GATED, INPUTS and OUTPUTS; words are numbered as apply_cell and apply_gates take them.
#pragma once

#include "recurrent/pass.cuh"
#include "recurrent/pointwise.cuh"

namespace ds2 {

template <class Shape>
__device__ const void* input_array(const Pass& pass, int a) {
    return Shape::GATED ? (Shape::BACKWARD && a > 0 ? pass.saved : pass.input) : a == 0 ? pass.input : pass.output_y;
}

template <class Shape, class Column>
struct Frame {
    using Number = typename Shape::Number;
    using Cell = typename Shape::Cell;
    const Pass& pass;
    const unsigned row;  // t B + the utterance; of (B, H) arrays, the utterance
    const Column column; // gives the word's first hidden unit when it is wanted; `valid` of its elements exist

    // The word in a (.., H) array, or in a plane of (.., PLANES, H).
    template <int PLANES = 1>
    __device__ size_t element(int plane = 0) const {
        return size_t(row) * unsigned(PLANES * pass.hidden) + unsigned(plane * pass.hidden + column());
    }

    __device__ size_t input_element(int a) const {
        if constexpr (!Shape::GATED) return element();
        if constexpr (Shape::GATED && !Shape::BACKWARD) return element<Cell::GATES>(a);
        if constexpr (Shape::GATED && Shape::BACKWARD) return a == 0 ? element() : element<Cell::SAVED>(a - 1);
    }
    __device__ void* output_array(int a) const {  // null: nobody wants it
        if constexpr (!Shape::BACKWARD) return a == 0 ? pass.result : pass.saved;
        return a < Cell::GATES ? pass.result : pass.result_last;
    }
    __device__ size_t output_element(int a) const {
        if constexpr (!Shape::GATED) return element();
        if constexpr (Shape::GATED && !Shape::BACKWARD) return a == 0 ? element() : element<Cell::SAVED>(a - 1);
        if constexpr (Shape::GATED && Shape::BACKWARD) return a < Cell::GATES ? element<Cell::GATES>(a) : element();
    }
    __device__ void store_output(int a, unsigned word, int valid, bool whole_words) const {
        if (!Shape::BACKWARD && a > 0 && !pass.saved) return;
        store_word<Number>(output_array(a), output_element(a), word, valid, whole_words);
    }
    __device__ void store_padding(int valid, bool whole_words) const {
#pragma unroll
        for (int a = 0; a < (Shape::BACKWARD ? Shape::OUTPUTS : 1); a++) store_output(a, 0, valid, whole_words);
    }

    // Of an utterance: what a cell with gates carries at first, and at last if that is a state of its own.
    __device__ void load_carry(unsigned state, int valid, float (&carry)[Shape::PER_WORD]) const {
        if constexpr (Cell::CARRIES_H) {
            Number::unpack(Shape::BACKWARD ? 0 : state, carry);
        } else {
#pragma unroll
            for (int e = 0; e < Shape::PER_WORD; e++)
                carry[e] = pass.carry && e < valid ? pass.carry[element() + e] : 0.f;
        }
    }
    __device__ void store_carry(int valid, const float (&carry)[Shape::PER_WORD]) const {
#pragma unroll
        for (int e = 0; e < Shape::PER_WORD; e++)
            if (!Cell::CARRIES_H && e < valid) pass.last_carry[element() + e] = carry[e];
    }
    __device__ void load_bias(float (&bias)[Shape::PER_WORD], int valid, bool whole_words, int direction = 0) const {
        const bool there = Cell::CARRIES_H && !Shape::BACKWARD && pass.bias;
        Number::unpack(there ? load_word<Number>(pass.bias, direction * pass.hidden + column(), valid, whole_words) : 0, bias);
    }
};

template <class Shape, class Column>
__device__ Frame<Shape, Column> frame_at(const Pass& pass, unsigned row, Column column) {
    return {pass, row, column};
}

// What a thread carries of its word from step to step, in shared memory of its own: element after element, FINISHERS apart.
template <class Shape, int ROUNDS = 1>
__device__ void keep_carry(unsigned at, const float (&carry)[Shape::PER_WORD]) {
#pragma unroll
    for (int e = 0; e < Shape::PER_WORD; e++) store_shared_4(at + e * ROUNDS * Shape::FINISHERS * 4, __float_as_uint(carry[e]));
}
template <class Shape, int ROUNDS = 1>
__device__ void kept_carry(unsigned at, float (&carry)[Shape::PER_WORD]) {
#pragma unroll
    for (int e = 0; e < Shape::PER_WORD; e++) carry[e] = __uint_as_float(load_shared_4(at + e * ROUNDS * Shape::FINISHERS * 4));
}

}  // namespace ds2
