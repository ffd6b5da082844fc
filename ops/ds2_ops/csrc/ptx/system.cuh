// Words that GPUs of one host write into one another's memory. Pairs: 16 bytes at a time, each half of 8 whole or not there yet.
#pragma once

namespace ds2 {

__device__ inline void store_system(void* to, unsigned long long first, unsigned long long second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ inline void load_system(const void* from, unsigned long long& first, unsigned long long& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
// A word that says of everything written before it that it is there.
__device__ inline void signal_system(unsigned* to, unsigned word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ inline void await_system(const unsigned* from, unsigned word) {
    unsigned seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
    while (seen != word);
}

}  // namespace ds2
