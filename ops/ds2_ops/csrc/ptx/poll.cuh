// Loads and stores of one or two words that other blocks poll.
#pragma once

#include "ptx/sync.cuh"

namespace ds2 {

// Loads if `wanted`, under a predicate: a branch would part the lanes of a warp.
__device__ inline void load_relaxed_if(bool wanted, unsigned (&v)[1], const unsigned* at) {
    asm volatile(
        "{.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted ld.relaxed.gpu.global.u32 %0, [%1];}"
        : "+r"(v[0])
        : "l"(at), "r"(unsigned(wanted))
        : "memory");
}
__device__ inline void load_relaxed_if(bool wanted, unsigned (&v)[2], const unsigned* at) {
    asm volatile(
        "{.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %3, 0;\n"
        "@wanted ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];}"
        : "+r"(v[0]), "+r"(v[1])
        : "l"(at), "r"(unsigned(wanted))
        : "memory");
}

__device__ inline void store_relaxed(unsigned* at, const unsigned (&v)[1]) { store_relaxed(at, v[0]); }
__device__ inline void store_relaxed(unsigned* at, const unsigned (&v)[2]) {
    rest_at_random();
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v[0]), "r"(v[1]) : "memory");
}

}  // namespace ds2
