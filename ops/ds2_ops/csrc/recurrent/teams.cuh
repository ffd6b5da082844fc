// Sums that the blocks of a team send each other through L2, without clusters: at the end of the exchange,
// [.. group 1, group 0][state's number % 2: 1, 0][owner][source][sample][word][gate].
//
// One thread writes a number and one reads it, again and again, so data is its own flag with nothing to empty: the last bit of a
// sum says whether it is of an even or an odd use of its place. At first there is EMPTY, as if of an odd one. A place is written
// again only after its last sum has been read, for the reason why two buffers are enough (grid_narrow.cuh); that follows from
// values alone, so no fence is needed. The bit costs 2^-23 of a sum.
#pragma once

#include "ptx/poll.cuh"
#include "recurrent/grid_narrow_shape.cuh"

namespace ds2 {

template <class Shape>
struct TeamSums {
    unsigned* const end;
    const int numbers;  // that one block sends one owner
    __device__ TeamSums(const Pass& pass, unsigned* exchange, int exchange_words)
        : end(exchange + exchange_words), numbers(2 * sample_pairs(pass) * Shape::BLOCK_ROWS) {}
    // What block `source` of a team sends its block `owner`, a number of the grid's, about a word of one utterance.
    __device__ unsigned* at(Turn turn, int owner, int source, int sample, int word) const {
        const int place = (owner * Shape::CLUSTER + source) * numbers + (sample * Shape::BLOCK_WORDS + word) * WORD_NUMBERS;
        return end - (buffer_of(turn) + 1) * int(gridDim.x) * Shape::CLUSTER * numbers + place;
    }
    static constexpr int WORD_NUMBERS = Shape::SUMS * Shape::PER_WORD;
    static __device__ unsigned use_of(Turn turn) { return turn.epoch / 2 % 2; }
};

// How a finishing thread takes its word's sums from its team.
template <class Shape>
struct TeamReader {
    static constexpr int SOURCES = Shape::TEAM ? Shape::CLUSTER : 1, PER_WORD = Shape::PER_WORD;
    struct Sums {
        unsigned v[SOURCES][Shape::SUMS][PER_WORD];
    };
    static __device__ bool missing(const unsigned (&v)[PER_WORD], unsigned use) {
        unsigned other = 0;
#pragma unroll
        for (int e = 0; e < PER_WORD; e++) other |= v[e] ^ use;
        return other & 1;
    }
    static __device__ void await(const TeamSums<Shape>& from, Turn at, int word, int sample, bool owner, Sums& sums) {
        const unsigned use = TeamSums<Shape>::use_of(at);
        const unsigned* const first = from.at(at, blockIdx.x, 0, owner ? sample : 0, word);
#pragma unroll
        for (int s = 0; s < SOURCES; s++)
#pragma unroll
            for (int k = 0; k < Shape::SUMS; k++)
#pragma unroll
                for (int e = 0; e < PER_WORD; e++) sums.v[s][k][e] = owner ? ~use : use;
        WaitLimit limit;
        for (bool waits = true; __any_sync(0xffffffffu, waits); limit.check(at.epoch)) {
            waits = false;
#pragma unroll
            for (int s = 0; s < SOURCES; s++)
#pragma unroll
                for (int k = 0; k < Shape::SUMS; k++)
                    load_relaxed_if(missing(sums.v[s][k], use), sums.v[s][k], first + s * from.numbers + k * PER_WORD);
#pragma unroll
            for (int s = 0; s < SOURCES; s++)
#pragma unroll
                for (int k = 0; k < Shape::SUMS; k++) waits |= missing(sums.v[s][k], use);
        }
#pragma unroll
        for (int s = 0; s < SOURCES; s++)
#pragma unroll
            for (int k = 0; k < Shape::SUMS; k++)
#pragma unroll
                for (int e = 0; e < PER_WORD; e++) sums.v[s][k][e] &= ~1u;  // else a frame's bits depend on its number
    }
};

}  // namespace ds2
