// Numbers from an array of any strides to another one, as they are, or added to what is there.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

struct Strides {
    long long first, second, third;  // in elements
};

// to = from + beta to, for count_0 x count_1 x count_2 numbers; with beta 0 whatever is there is not read.
template <class Number>
__device__ void move_numbers(const void* from, Strides of_from, void* to, Strides of_to, int count_0, int count_1, int count_2,
                             float beta) {
    using Storage = typename Number::Storage;
    const long long count = (long long)count_0 * count_1 * count_2;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        const long long k = i % count_2, j = i / count_2 % count_1, h = i / count_2 / count_1;
        const Storage value =
            static_cast<const Storage*>(from)[h * of_from.first + j * of_from.second + k * of_from.third];
        Storage& place = static_cast<Storage*>(to)[h * of_to.first + j * of_to.second + k * of_to.third];
        if (beta == 0.f) {
            place = value;
            continue;
        }
        float added[Number::PER_WORD], before[Number::PER_WORD];
        Number::unpack(value, added);
        Number::unpack(place, before);
        added[0] += beta * before[0];
        place = static_cast<Storage>(Number::pack(added));
    }
}

}  // namespace ds2
