// The part of CUDA that the whole-chip recurrences use, for a host compiler: every thread of every block is a fiber, so that
// their own source runs without a GPU, and at its worst. Warps run in random order, and some rest for long; stores to global
// memory are seen late and in any order, sums for other blocks land late, and so do copies into shared memory; every misuse of
// a barrier is an error. Written in place of all of csrc/ptx; of the number types, bf16 only.
//
// Kernels include this file; chip_on_cpu.cpp, which is compiled once for all of them, has the rest.
#pragma once

// Only what C declares: half of the time to compile a small kernel would go into the templates of <cmath>.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define __device__
#define __global__
#define __launch_bounds__(...)

struct Index {
    int x;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
extern Index threadIdx, blockIdx, gridDim;
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned x;
    memcpy(&x, &f, 4);
    return x;
}
template <class T>
T __ldg(const T* at) {
    return *at;
}

namespace chip {

extern int threads, cluster;  // of a block, blocks of a cluster

void pause();
[[noreturn]] void fail(const char* what);
void meet_warp();
// Takes what a lane gives; returns what all lanes have given if this is the last one, else null.
const void* const* give(const void* mine);
// All lanes give something; the last one sees it all, before any goes on.
template <class T, class See>
void together(const T& mine, See see) {
    if (const void* const* all = give(&mine)) see([&](int lane) -> const T& { return *static_cast<const T*>(all[lane]); });
    meet_warp();
}

char* shared_memory();
// An address of shared memory is an offset, with 1 + the block's rank above it if the block is another one.
char* at(unsigned address, unsigned bytes);
template <class T>
T load(unsigned address) {
    T v;
    memcpy(&v, at(address, sizeof v), sizeof v);
    return v;
}
template <class T>
void store(unsigned address, T v) {
    memcpy(at(address, sizeof v), &v, sizeof v);
}

void barrier_wait(unsigned barrier, unsigned parity);
void copies_wait(int pending);

// Runs a kernel: `call(body)` in each thread. Returns what went wrong, or nothing.
const char* launch(int block_count, int block_threads, int cluster_blocks, int smem_bytes, unsigned seed,
                   void (*call)(const void*), const void* body);
template <class Body>
const char* launch(int block_count, int block_threads, int cluster_blocks, int smem_bytes, unsigned seed, const Body& body) {
    const auto call = [](const void* of) { (*static_cast<const Body*>(of))(); };
    return launch(block_count, block_threads, cluster_blocks, smem_bytes, seed, call, &body);
}

// Matrix products, by all lanes of a warp together: c += a b^T for 16 rows of a; fragments as PTX lays them out.
inline float element(unsigned word, int i) { return __uint_as_float(i ? word & 0xffff0000u : word << 16); }
struct Fragments {
    float* c;
    const unsigned* a;
};
template <class Of, class B>
void multiply(Of lane_of, int columns, B b) {
    float a[16][16], column[16];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++)
            a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = element(lane_of(lane).a[i / 2], i % 2);
    for (int n = 0; n < columns; n++) {
        for (int k = 0; k < 16; k++) column[k] = b(n, k);
        for (int row = 0; row < 16; row++) {
            float& c = lane_of(row % 8 * 4 + n % 8 / 2).c[n / 8 * 4 + row / 8 * 2 + n % 2];
            float sum = c;
            for (int k = 0; k < 16; k++) sum += a[row][k] * column[k];
            c = sum;
        }
    }
}

}  // namespace chip

inline void __syncwarp() { chip::meet_warp(); }
void __syncthreads();
inline bool __any_sync(unsigned, bool mine) {
    bool* const answer = &mine;
    chip::together(answer, [](auto lane_of) {
        bool any = false;
        for (int lane = 0; lane < 32; lane++) any |= *lane_of(lane);
        for (int lane = 0; lane < 32; lane++) *lane_of(lane) = any;
    });
    return mine;
}
inline unsigned __shfl_sync(unsigned, unsigned mine, int from, int width = 32) {
    unsigned* const answer = &mine;
    chip::together(answer, [=](auto lane_of) {
        unsigned given[32];
        for (int lane = 0; lane < 32; lane++) given[lane] = *lane_of(lane / width * width + from);
        for (int lane = 0; lane < 32; lane++) *lane_of(lane) = given[lane];
    });
    return mine;
}
inline int __ffs(int mask) { return __builtin_ffs(mask); }
unsigned clock();

namespace ds2 {

constexpr bool DEBUG_WAITS = false;

inline float quick_exp2(float x) { return exp2f(x); }
inline float quick_reciprocal(float x) { return 1 / x; }
inline float coarse_tanh(float x) { return tanhf(x) * (1 - exp2f(-11.f)); }  // as wrong as it may be

inline void rest_at_random() {}
inline unsigned pinned(unsigned value) { return value; }
inline unsigned* pinned(unsigned* at) { return at; }
inline unsigned smem_address(const void* p) { return unsigned(static_cast<const char*>(p) - chip::shared_memory()); }
inline uint4 load_shared_16(unsigned address) { return chip::load<uint4>(address); }
inline uint2 load_shared_8(unsigned address) { return chip::load<uint2>(address); }
inline unsigned load_shared_4(unsigned address) { return chip::load<unsigned>(address); }
inline void store_shared_16(unsigned address, uint4 v) { chip::store(address, v); }
inline void store_shared_8(unsigned address, unsigned w0, unsigned w1) { chip::store(address, uint2{w0, w1}); }
inline void store_shared_4(unsigned address, unsigned value) { chip::store(address, value); }
inline void store_shared_2(unsigned address, unsigned value) { chip::store(address, static_cast<unsigned short>(value)); }

inline unsigned cluster_rank() { return blockIdx.x % chip::cluster; }
void cluster_barrier();
unsigned remote_address(unsigned local, unsigned rank);
void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1);
void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1, unsigned w2, unsigned w3);

void barrier_init(unsigned barrier, unsigned arrivals);
inline uint4 load_early_16(const void* at) { return *static_cast<const uint4*>(at); }
inline uint2 load_early_8(const void* at) { return *static_cast<const uint2*>(at); }
inline void barrier_init_fence() {}
void await_kernel_before();
inline void release_kernel_behind() {}
void barrier_expect(unsigned barrier, unsigned bytes);
void barrier_arrive(unsigned barrier);
template <bool SUSPEND = false>
void barrier_wait(unsigned barrier, unsigned parity, const char*, int) {
    chip::barrier_wait(barrier, parity);
}
template <int REGISTERS>
void registers_down() {}
template <int REGISTERS>
void registers_up() {}
void block_arrive(int barrier, int threads);
void block_wait(int barrier, int threads);
inline void block_arrive_or_wait(int barrier, int threads) { block_arrive(barrier, threads); }

void copy_async_part(unsigned to, const void* from, int bytes);
inline void copy_async(unsigned to, const void* from, bool wanted) { copy_async_part(to, from, wanted ? 4 : 0); }
inline void copy_async_16(unsigned to, const void* from, bool wanted) {
    for (int i = 0; i < 4; i++) copy_async(to + 4 * i, static_cast<const unsigned*>(from) + i, wanted);
}
void copies_commit();
template <int PENDING>
void copies_wait() {
    chip::copies_wait(PENDING);
}

inline void load_relaxed_if(bool wanted, uint4& v, const uint4* at) {
    chip::pause();
    if (wanted) v = *at;
}
template <class Storage>
void store_if(bool wanted, Storage* at, Storage value) {
    if (wanted) *at = value;
}
void store_relaxed(unsigned* at, unsigned word);
inline void store_relaxed(unsigned* at, uint4 v) {
    store_relaxed(at, v.x), store_relaxed(at + 1, v.y), store_relaxed(at + 2, v.z), store_relaxed(at + 3, v.w);
}
template <int N>
void load_relaxed_if(bool wanted, unsigned (&v)[N], const unsigned* at) {
    chip::pause();
    if (wanted) memcpy(v, at, sizeof v);
}
template <int N>
void store_relaxed(unsigned* at, const unsigned (&v)[N]) {
    for (int i = 0; i < N; i++) store_relaxed(at + i, v[i]);
}
void fence_stores();

inline void fence_loads() {}
unsigned grid_arrive();
bool grid_complete(unsigned before);

struct Bf16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;
    static constexpr bool COARSE = true;
    static void unpack(unsigned word, float (&v)[2]) { v[0] = chip::element(word, 0), v[1] = chip::element(word, 1); }
    static unsigned rounded(float f) {
        const unsigned bits = __float_as_uint(f);
        return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    static unsigned pack(const float (&v)[2]) { return rounded(v[0]) | rounded(v[1]) << 16; }
    static unsigned operand(unsigned word) { return word; }
    static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        struct Mine : chip::Fragments {
            unsigned b[2];
        };
        chip::together(Mine{{c, a}, {b0, b1}}, [](auto lane_of) {
            chip::multiply(lane_of, 8, [&](int column, int k) {
                return chip::element(lane_of(column * 4 + k % 8 / 2).b[k / 8], k % 2);
            });
        });
    }
};

constexpr int WGMMA_SAMPLES = 32, WGMMA_STATE_BYTES = 2 * WGMMA_SAMPLES * 16;
inline void fence_async_shared() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
inline void wgmma_wait() {}
inline unsigned long long state_descriptor(unsigned address) { return address / 16; }
template <class Number>
void wgmma(float (&c)[WGMMA_SAMPLES / 2], const unsigned (&a)[4], unsigned long long state) {
    chip::together(chip::Fragments{c, a}, [&](auto lane_of) {
        chip::multiply(lane_of, WGMMA_SAMPLES, [&](int column, int k) {
            return chip::element(load_shared_4(unsigned(16 * state) + k / 8 * WGMMA_SAMPLES * 16 + column * 16 + k % 8 / 2 * 4), k % 2);
        });
    });
}
constexpr int WGMMA_WEIGHT_BYTES = 2048;
inline unsigned weight_place(int warp, int lane, int i) {
    return i / 2 * 1024 + (warp * 2 + i % 2) * 128 + lane / 4 * 16 + lane % 4 * 4;
}
inline unsigned long long weights_descriptor(unsigned address) { return address / 16; }
template <class Number>
void wgmma(float (&c)[WGMMA_SAMPLES / 2], unsigned long long weights, unsigned long long state) {
    unsigned a[4];
    for (int i = 0; i < 4; i++)
        a[i] = load_shared_4(unsigned(16 * weights) + weight_place(threadIdx.x / 32 % 4, threadIdx.x % 32, i));
    wgmma<Number>(c, a, state);
}

}  // namespace ds2
