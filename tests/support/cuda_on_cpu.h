// The part of CUDA that csrc/ctc uses, for a host compiler: the threads of a block are fibers that take turns at
// barriers, so a kernel's own source runs without a GPU. Written in place of csrc/ptx/sync.cuh.
//
// Kernels include this file; cuda_on_cpu.cpp, which is compiled once for all of them, has the rest.
#pragma once

// Only what C declares: half of the time to compile a small kernel would go into the templates of <cmath>.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define __device__
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct Index {
    int x;
};
struct int2 {
    int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
extern Index threadIdx, blockIdx, blockDim;
alignas(16) extern unsigned char shared[1 << 18];

namespace fibers {

void pause();
void meet_warp();
unsigned long long* values_of_warp();  // of its lanes
// All lanes give a value and see those of all.
template <class Read>
auto exchange(unsigned long long mine, Read read) {
    unsigned long long* const values = values_of_warp();
    values[threadIdx.x % 32] = mine;
    meet_warp();
    const auto result = read(values);
    meet_warp();
    return result;
}

// Runs blocks one after another, `call(body)` in each thread; `backwards` lets the last thread go first, which no result may
// depend on.
void launch(int blocks, int threads, bool backwards, void (*call)(const void*), const void* body);
template <class Body>
void launch(int blocks, int threads, bool backwards, const Body& body) {
    launch(blocks, threads, backwards, [](const void* of) { (*static_cast<const Body*>(of))(); }, &body);
}

}  // namespace fibers

void __syncthreads();
inline void __threadfence() {}  // blocks run one after another
inline void __syncwarp() { fibers::meet_warp(); }
inline unsigned __ballot_sync(unsigned, bool mine) {
    return fibers::exchange(mine, [](const unsigned long long* v) {
        unsigned mask = 0;
        for (int i = 0; i < 32; i++) mask |= unsigned(v[i] != 0) << i;
        return mask;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned mine) {
    return fibers::exchange(mine, [](const unsigned long long* v) {
        unsigned most = 0;
        for (int i = 0; i < 32; i++) most = v[i] > most ? unsigned(v[i]) : most;
        return most;
    });
}
inline int __shfl_sync(unsigned, int mine, int from) {
    return fibers::exchange(unsigned(mine), [from](const unsigned long long* v) { return int(v[from]); });
}
inline int __shfl_up_sync(unsigned, int mine, int distance) {
    const int from = threadIdx.x % 32 - distance;
    return fibers::exchange(unsigned(mine), [=](const unsigned long long* v) { return from < 0 ? mine : int(v[from]); });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
    const unsigned old = *at;
    *at |= value;
    return old;
}
template <class To, class From>
To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __shfl_xor_sync(unsigned, float mine, int apart) {
    const int from = (threadIdx.x % 32) ^ apart;
    return fibers::exchange(same_bits<unsigned>(mine),
                            [=](const unsigned long long* v) { return same_bits<float>(unsigned(v[from])); });
}
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }

namespace ds2 {

inline unsigned load_early_4(const void* at) { return *static_cast<const unsigned*>(at); }
inline void await_kernel_before() {}
inline void release_kernel_behind() {}
inline float* smem_address(float* at) { return at; }
inline void copy_async(float* to, const float* from, bool) { *to = *from; }
inline void copies_commit() {}
template <int PENDING>
void copies_wait() {}

}  // namespace ds2
