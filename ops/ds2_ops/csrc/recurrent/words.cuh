// Words of arrays in global memory whose rows may start between words.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

template <bool CONSTANT, class T>
__device__ T load_from(const T* at) {
    return CONSTANT ? __ldg(at) : *at;
}

// One word at `element` of a contiguous array; only its first `valid` elements exist, the others read as 0.
// `whole_words` promises that every row starts on a word boundary, CONSTANT that nothing writes the array while this kernel
// runs, so not the kernel before it either, where they overlap.
template <class Number, bool CONSTANT = true>
__device__ unsigned load_word(const void* array, size_t element, int valid, bool whole_words) {
    const auto* at = static_cast<const typename Number::Storage*>(array) + element;
    if (valid <= 0) return 0;
    if (sizeof(typename Number::Storage) == 4 || whole_words) return load_from<CONSTANT>(reinterpret_cast<const unsigned*>(at));
    return unsigned(load_from<CONSTANT>(at)) | (valid > 1 ? unsigned(load_from<CONSTANT>(at + 1)) << 16 : 0u);
}

template <class Number>
__device__ void store_word(void* array, size_t element, unsigned word, int valid, bool whole_words) {
    auto* at = static_cast<typename Number::Storage*>(array) + element;
    if (valid <= 0) return;
    if (sizeof(typename Number::Storage) == 4 || whole_words) {
        *reinterpret_cast<unsigned*>(at) = word;
        return;
    }
    at[0] = static_cast<typename Number::Storage>(word);
    if (valid > 1) at[1] = static_cast<typename Number::Storage>(word >> 16);
}

}  // namespace ds2
