// How the whole-chip designs cut a batch: utterances into groups, groups that take turns into tiles.
//
// A Shape says how many GROUPS a tile has at most, how many STREAMS of blocks share the tiles out, each with all weights, and
// whether the pass is BACKWARD; pass.samples, how many utterances a group.
#pragma once

#include "recurrent/exchange.cuh"
#include "recurrent/pointwise.cuh"

namespace ds2 {

// 16-byte units of one utterance's state.
template <class Number>
__device__ int state_units(const Pass& pass) {
    return (pass.hidden + 4 * Number::PER_WORD - 1) / (4 * Number::PER_WORD);
}

// The utterances that run together: groups of pass.samples, the last maybe smaller.
template <class Shape>
struct GridTile {
    const Pass& pass;
    int first = 0;            // utterance
    int groups, live, steps;  // steps: frames of the longest utterance

    __device__ explicit GridTile(const Pass& pass, int stream = 0) : pass(pass) {
        if (Shape::STREAMS > 1) first = stream * full();
        open();
    }
    __device__ bool exists() const { return first < pass.batch; }
    __device__ void next() {
        first += Shape::STREAMS * full();
        open();
    }
    __device__ void open() {
        live = min(full(), pass.batch - first);
        groups = (live + pass.samples - 1) / pass.samples;
        steps = 0;
        for (int s = 0; s < live; s++) steps = max(steps, length_of(pass, first + s));
    }
    // Utterances of every tile but the last. Computed anew at each, as registers are scarce in between.
    __device__ int full() const {
        const int samples = pinned(pass.samples), all = (pass.batch + samples - 1) / samples;
        const int tiles = (all + Shape::GROUPS - 1) / Shape::GROUPS;
        return (all + tiles - 1) / tiles * samples;
    }
    __device__ int live_of(int group) const { return min(pass.samples, live - group * pass.samples); }  // <= 0: none
    // States that are read: one of each phase of a step, and backward one more for the gradient of the first state.
    __device__ int iterations() const {
        const int phases = cell_phases<typename Shape::Cell>() * steps;
        return Shape::BACKWARD && steps > 0 ? phases + 1 : phases;
    }
    __device__ int turns() const { return iterations() * groups; }
};

// Which group takes its turn, and with which state.
struct Turn {
    int epoch, group;
    __device__ void next(int groups) {
        if (++group == groups) group = 0, epoch++;
    }
};

// Which buffer, and which mbarrier, takes the sums that blocks of a cluster send each other: two for each group.
__device__ inline int buffer_of(Turn at) { return 2 * at.group + at.epoch % 2; }

}  // namespace ds2
