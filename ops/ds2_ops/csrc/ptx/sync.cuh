// Words that the compiler has no name for: cluster ranks and barriers, mbarriers, asynchronous remote stores.
#pragma once

namespace ds2 {

__device__ inline unsigned smem_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

#ifdef DS2_DEBUG_WAIT
constexpr bool DEBUG_WAITS = true;
#else
constexpr bool DEBUG_WAITS = false;
#endif

// For tests of the synchronisation: with DS2_JITTER a warp now and then rests, up to 16 us, before it tells or asks anything.
#ifdef DS2_JITTER
__device__ inline void rest_at_random() {
    const unsigned together = __activemask();
    unsigned hash = unsigned(clock() >> 3) ^ (threadIdx.x / 32 + 64 * blockIdx.x) * 2654435761u;
    hash = __shfl_sync(together, hash, __ffs(together) - 1) * 2246822519u;
    hash ^= hash >> 15, hash *= 3266489917u, hash ^= hash >> 13;
    if (hash % 8 == 0) __nanosleep(hash >> 8 & (hash & 0x80 ? 16383 : 1023));
}
#else
__device__ inline void rest_at_random() {}
#endif

// Keeps in its register what the compiler would rather compute anew, from slow special registers, at every step.
__device__ inline unsigned pinned(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ inline unsigned* pinned(unsigned* at) {
    asm volatile("" : "+l"(at));
    return at;
}

// Shared memory by address.
__device__ inline uint4 load_shared_16(unsigned address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ inline uint2 load_shared_8(unsigned address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ inline unsigned load_shared_4(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ inline void store_shared_16(unsigned address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void store_shared_8(unsigned address, unsigned w0, unsigned w1) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(w0), "r"(w1) : "memory");
}
__device__ inline void store_shared_4(unsigned address, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ inline void store_shared_2(unsigned address, unsigned value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(value)) : "memory");
}

__device__ inline unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block of the cluster arrives, then every one goes on.
__device__ inline void cluster_barrier() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address by which this block names the same shared-memory location of block `rank` of its cluster.
__device__ inline unsigned remote_address(unsigned local, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}

// 16 bytes to another block's shared memory; that block's mbarrier counts them when they have landed.
__device__ inline void store_async(unsigned remote, unsigned remote_barrier, unsigned w0, unsigned w1, unsigned w2,
                                   unsigned w3) {
    rest_at_random();
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2,%3,%4,%5}, [%1];"
                 :
                 : "r"(remote), "r"(remote_barrier), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
                 : "memory");
}

// 8 bytes to another block's shared memory; that block's mbarrier counts them when they have landed.
__device__ inline void store_async(unsigned remote, unsigned remote_barrier, unsigned w0, unsigned w1) {
    rest_at_random();
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2,%3}, [%1];"
                 :
                 : "r"(remote), "r"(remote_barrier), "r"(w0), "r"(w1)
                 : "memory");
}

__device__ inline void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits and before the cluster barrier that lets others use them.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The phase ends when `bytes` more have landed. Some may have landed already: the count goes below zero meanwhile.
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
    rest_at_random();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_arrive(unsigned barrier) {
    rest_at_random();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Block scope, as everybody waits for remote bytes: a wait or fence at cluster scope says the same on paper, but is compiled
// to an invalidation of the L1 cache or to a wait for all of the thread's loads, on the critical path of every step.
// SUSPEND: the hardware may take the warp off its scheduler for a while; it wakes up later, but disturbs the others less.
template <bool SUSPEND = false>
__device__ inline bool barrier_try(unsigned barrier, unsigned parity) {
    unsigned done;
    if constexpr (SUSPEND)
        asm volatile(
            "{.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    else
        asm volatile(
            "{.reg .pred p;\n"
            "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    return done != 0;
}

// A warpgroup (4 warps) gives registers back, or waits until it has more.
template <int REGISTERS>
__device__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers of one block: `threads` counts those that arrive without waiting and those that wait. Not bar.arrive and
// bar.sync, which promise that all threads of the block execute the same instruction: here each role has its own. A warp
// does it as one: its lanes come together first.
__device__ inline void block_arrive(int barrier, int threads) {
    rest_at_random();
    __syncwarp();
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void block_wait(int barrier, int threads) {
    rest_at_random();
    __syncwarp();
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives; in debug builds it waits too, because race checkers follow no barrier of a part of a block.
__device__ inline void block_arrive_or_wait(int barrier, int threads) {
    if (DEBUG_WAITS)
        block_wait(barrier, threads);
    else
        block_arrive(barrier, threads);
}

// Copies 4 or 16 bytes of global memory to shared memory, or zeros if not `wanted`, behind the thread's back.
__device__ inline void copy_async(unsigned shared, const void* global, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 4 : 0) : "memory");
}
// The first `bytes`, 0 to 4, of an aligned word of global memory, and zeros.
__device__ inline void copy_async_part(unsigned shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void copy_async_16(unsigned shared, const void* global, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 16 : 0) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last PENDING commits of this thread have landed.
template <int PENDING>
__device__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads that stay before a wait that follows; the assembler moves those through the read-only path (__ldg) behind it.
__device__ inline uint4 load_early_16(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ inline unsigned load_early_4(const void* at) {
    unsigned v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
__device__ inline uint2 load_early_8(const void* at) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

// Loads if `wanted`, under a predicate: a branch would part the lanes of a warp, which the matrix unit needs together.
__device__ inline void load_relaxed_if(bool wanted, uint4& v, const uint4* at) {
    asm volatile(
        "{.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(at), "r"(unsigned(wanted))
        : "memory");
}

// Stores if `wanted`, without a branch.
__device__ inline void store_if(bool wanted, unsigned* at, unsigned word) {
    asm volatile("{.reg .pred wanted;\nsetp.ne.u32 wanted, %0, 0;\n@wanted st.global.u32 [%1], %2;}"
                 ::"r"(unsigned(wanted)), "l"(at), "r"(word)
                 : "memory");
}
__device__ inline void store_if(bool wanted, unsigned short* at, unsigned short half) {
    asm volatile("{.reg .pred wanted;\nsetp.ne.u32 wanted, %0, 0;\n@wanted st.global.u16 [%1], %2;}"
                 ::"r"(unsigned(wanted)), "l"(at), "h"(half)
                 : "memory");
}

__device__ inline void store_relaxed(unsigned* at, unsigned word) {
    rest_at_random();
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ inline void store_relaxed(unsigned* at, uint4 v) {
    rest_at_random();
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Orders this thread's stores before those that follow. Cheaper than __threadfence(), which is sequentially consistent.
__device__ inline void fence_stores() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Orders this thread's loads before those that follow.
__device__ inline void fence_loads() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ inline unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// Kernels of one stream that overlap (programmatic dependent launch). A kernel launched so may start as soon as all blocks of
// the one before it have released it, or have ended. It must not touch what an earlier kernel writes, nor write what one
// reads, before it has waited: then the one before has ended, and its results are visible. Each kernel that releases another
// waits too, and ends after that, so by induction all earlier ones have ended. What may be read at once is what no kernel
// that releases writes: weights, which other kernels make, and these nobody overlaps. Launched plainly, both do nothing.
__device__ inline void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void release_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

constexpr unsigned long long MAX_WAIT_NS = 2000000000ull;

// Waits for the end of the phase of this parity. In debug builds a wait of more than MAX_WAIT_NS names itself and traps:
// `what` is awaited, `step` is the iteration.
template <bool SUSPEND = false>
__device__ inline void barrier_wait(unsigned barrier, unsigned parity, const char* what, int step) {
    rest_at_random();
    if (barrier_try<SUSPEND>(barrier, parity)) return;
#ifdef DS2_DEBUG_WAIT
    const unsigned long long start = now_ns();
    while (!barrier_try<SUSPEND>(barrier, parity)) {
        if (now_ns() - start > MAX_WAIT_NS) {
            printf("ds2: block %d (rank %u) warp %d waits for %s at step %d for more than 2 s\n", blockIdx.x, cluster_rank(),
                   threadIdx.x / 32, what, step);
            __trap();
        }
    }
#else
    while (!barrier_try<SUSPEND>(barrier, parity)) {
    }
#endif
}

}  // namespace ds2
