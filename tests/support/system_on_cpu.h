// Words that processes write into one another's memory, in place of csrc/ptx/system.cuh.
#pragma once

#include <sched.h>

#include "sync.cuh"

namespace ds2 {

inline void store_system(void* to, unsigned long long first, unsigned long long second) {
    auto words = static_cast<unsigned long long*>(to);
    __atomic_store_n(words + 1, second, __ATOMIC_RELAXED);
    __atomic_store_n(words, first, __ATOMIC_RELAXED);
}
inline void load_system(const void* from, unsigned long long& first, unsigned long long& second) {
    auto words = static_cast<const unsigned long long*>(from);
    first = __atomic_load_n(words, __ATOMIC_RELAXED);
    second = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
    fibers::pause();  // other threads of the block send meanwhile
    static unsigned looked = 0;
    if (++looked % 256 == 0) sched_yield();  // there may be fewer cores than ranks; beside others each yield is long
}
inline void signal_system(unsigned* to, unsigned word) { __atomic_store_n(to, word, __ATOMIC_RELEASE); }
inline void await_system(const unsigned* from, unsigned word) {
    while (__atomic_load_n(from, __ATOMIC_ACQUIRE) != word) sched_yield();
}

}  // namespace ds2
