// The part of CUDA that the whole-chip recurrences use, for a host compiler: every thread of every block is a fiber, so that
// their own source runs without a GPU, and at its worst. Warps run in random order, and some rest for long; stores to global
// memory are seen late and in any order, sums for other blocks land late, and so do copies into shared memory; every misuse of
// a barrier is an error. Written in place of all of csrc/ptx; of the number types, bf16 only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fiber_on_cpu.h"

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
inline Index threadIdx, blockIdx, gridDim;
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __uint_as_float(unsigned x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned x;
    std::memcpy(&x, &f, 4);
    return x;
}
template <class T>
T __ldg(const T* at) {
    return *at;
}

namespace chip {

constexpr int LONGEST_REST = 60, IDLE_PASSES = 1000;  // of the scheduler

struct Meeting {  // of lanes, or of threads at a named barrier, or of a cluster
    int arrived = 0, expected = 0;
    long turn = 0;
};
struct MBarrier {
    int arrivals = 0, pending = 0;  // arrivals 0: not initialised
    long phase = 0, bytes = 0;
};
struct Warp {
    Meeting meeting;
    const void* given[32];
    int resting = 0;
};
struct Block {
    std::vector<char> memory;
    Meeting named[16];
    std::map<unsigned, MBarrier> barriers;  // by address
    std::vector<Warp> warps;
};
struct Store {
    unsigned* at;
    unsigned word;
};
struct Copy {
    unsigned to;
    const void* from;
    int bytes;  // of a word; the others become 0
};
struct Fiber {
    fiber::Fiber context;
    bool done = false;
    const long* awaited = nullptr;  // a count that must move on from `seen` before this fiber does
    long seen = 0;
    std::deque<Store> stores;              // on their way
    std::deque<std::vector<Copy>> copies;  // committed
    std::vector<Copy> uncommitted;
};
struct Message {  // of st.async
    int block;
    unsigned to, barrier, words[4];
    int count;
};

inline int threads, cluster;
inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline std::vector<Meeting> clusters;
inline std::vector<Message> messages;
inline std::mt19937 random;
inline std::function<void()> kernel;
inline std::string error;
inline bool progress;  // anything that another warp could wait for

// Arrays that the kernel before reads or writes until every thread has waited for its end: their contents come then.
struct Held {
    char* at;
    std::vector<char> contents;
};
inline std::vector<Held> held;
inline Meeting everyone;
inline unsigned grid_word;  // of the barrier over the grid

inline Fiber& self() { return fibers[blockIdx.x * threads + threadIdx.x]; }
inline Block& block() { return blocks[blockIdx.x]; }
inline Warp& warp() { return block().warps[threadIdx.x / 32]; }
inline void pause() { fiber::pause(self().context); }
// Pauses while a count stays; no warp is resumed only to look at it.
inline void await_change(const long& count) {
    Fiber& own = self();
    own.awaited = &count, own.seen = count;
    while (count == own.seen) pause();
    own.awaited = nullptr;
}
inline void fail(const std::string& what) {
    error = what + " (block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ")";
    for (;;) pause();
}

inline void arrive(Meeting& meeting, int expected) {
    if (meeting.expected && meeting.expected != expected) fail("threads disagree on a barrier's count");
    meeting.expected = expected;
    if (++meeting.arrived < expected) return;
    meeting.arrived = meeting.expected = 0;
    meeting.turn++;
    progress |= &meeting != &warp().meeting;  // warps that poll meet for ever
}
inline void meet(Meeting& meeting, int expected) {
    const long turn = meeting.turn;
    arrive(meeting, expected);
    if (meeting.turn == turn) await_change(meeting.turn);
}
inline void meet_warp() { meet(warp().meeting, 32); }
// All lanes give something; the last one sees it all, before any goes on.
template <class T, class See>
void together(const T& mine, See see) {
    Warp& all = warp();
    all.given[threadIdx.x % 32] = &mine;
    if (all.meeting.arrived == 31) see([&](int lane) -> const T& { return *static_cast<const T*>(all.given[lane]); });
    meet_warp();
}

inline void await_kernel_before() {
    if (held.empty()) return;
    if (everyone.arrived + 1 == int(fibers.size()))
        for (Held& array : held) {
            for (size_t i = 0; i < array.contents.size(); i++)
                if (array.at[i] != char(0xff)) fail("a store before the end of the kernel before");
            std::memcpy(array.at, array.contents.data(), array.contents.size());
        }
    meet(everyone, int(fibers.size()));
}

inline char* shared_memory() { return block().memory.data(); }
// An address of shared memory is an offset, with 1 + the block's rank above it if the block is another one.
inline char* at(unsigned address, unsigned bytes) {
    const unsigned rank = address >> 24, offset = address & 0xffffff;
    Block& owner = rank ? blocks[blockIdx.x / cluster * cluster + rank - 1] : block();
    if (offset + bytes > owner.memory.size()) fail("shared memory out of range");
    if (offset % std::min(bytes, 16u)) fail("shared memory out of line");
    return owner.memory.data() + offset;
}
template <class T>
T load(unsigned address) {
    T v;
    std::memcpy(&v, at(address, sizeof v), sizeof v);
    return v;
}
template <class T>
void store(unsigned address, T v) {
    std::memcpy(at(address, sizeof v), &v, sizeof v);
}

inline MBarrier& barrier_at(Block& owner, unsigned address) {
    MBarrier& barrier = owner.barriers[address & 0xffffff];
    if (barrier.arrivals == 0) fail("mbarrier that nobody has initialised");
    return barrier;
}
inline void settle(MBarrier& barrier) {
    progress = true;
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
}
inline void count_arrival(MBarrier& barrier) {
    if (--barrier.pending < 0) fail("more arrivals at an mbarrier than its phase has");
    settle(barrier);
}

inline void land(const Message& message) {
    Block& owner = blocks[message.block];
    std::memcpy(owner.memory.data() + (message.to & 0xffffff), message.words, 4 * message.count);
    MBarrier& barrier = owner.barriers[message.barrier & 0xffffff];
    if (barrier.arrivals == 0) error = "a message to an mbarrier that nobody has initialised";
    barrier.bytes -= 4 * message.count;
    settle(barrier);
}
inline void send(unsigned to, unsigned barrier, std::initializer_list<unsigned> words) {
    if (to >> 24 != barrier >> 24) fail("a message's mbarrier is not its own block's");
    at(to, 4 * words.size());
    Message message{int(blockIdx.x / cluster * cluster + (to >> 24) - 1), to, barrier, {}, int(words.size())};
    std::copy(words.begin(), words.end(), message.words);
    messages.push_back(message);
}
// One store of a fiber, any, but those to one word in their order.
inline void drain_one(Fiber& fiber) {
    if (fiber.stores.empty()) return;
    unsigned* const at = fiber.stores[random() % fiber.stores.size()].at;
    const auto first = std::find_if(fiber.stores.begin(), fiber.stores.end(), [=](const Store& s) { return s.at == at; });
    *at = first->word;
    fiber.stores.erase(first);
    progress = true;
}

inline void enter() {
    kernel();
    self().done = true;
    pause();
}

// Lets every warp that does not rest run until it waits; true while any has work.
inline bool pass(const std::vector<int>& order) {
    bool busy = false;
    for (int w : order) {
        Warp& warp = blocks[w * 32 / threads].warps[w * 32 % threads / 32];
        const bool skipped = warp.resting > 0 ? warp.resting-- > 0 : random() % 3 == 0;
        if (random() % 400 == 0) warp.resting = random() % LONGEST_REST;
        for (int i = w * 32; i < w * 32 + 32; i++) {
            busy |= !fibers[i].done;
            if (skipped || fibers[i].done || !error.empty()) continue;
            if (fibers[i].awaited && *fibers[i].awaited == fibers[i].seen) continue;
            blockIdx.x = i / threads, threadIdx.x = i % threads;
            fiber::resume(fibers[i].context);
        }
    }
    for (Fiber& fiber : fibers)
        for (int i = random() % 4 ? 0 : 4; i > 0; i--) drain_one(fiber);
    for (size_t i = 0; i < messages.size();) {
        if (random() % 3) {
            i++;
            continue;
        }
        land(messages[i]);
        messages[i] = messages.back();
        messages.pop_back();
    }
    return busy;
}

// Of the next launch: `count` arrays that are not weights.
extern "C" __attribute__((used)) inline void hold(int count, char** arrays, const long* bytes) {
    held.clear();
    for (int i = 0; i < count; i++) {
        held.push_back({arrays[i], {arrays[i], arrays[i] + bytes[i]}});
        std::fill_n(arrays[i], bytes[i], char(0xff));
    }
}

// Returns what went wrong, or nothing.
inline const char* launch(int block_count, int block_threads, int cluster_blocks, int smem_bytes, unsigned seed,
                          std::function<void()> body) {
    threads = block_threads, cluster = cluster_blocks, kernel = std::move(body), gridDim.x = block_count;
    random.seed(seed);
    error.clear();
    messages.clear();
    everyone = {};
    grid_word = random() % 2 << 31;  // as the launch before has left it
    blocks.assign(block_count, {});
    clusters.assign(block_count / cluster, {});
    for (Block& b : blocks) {
        b.memory.assign(smem_bytes, char(0xff));  // NaN, to whoever reads before writing
        b.warps.assign(threads / 32, {});
    }
    for (int b = 0, rest = 0; b < block_count; b++) {  // some clusters start late
        if (b % cluster == 0) rest = random() % 2 ? LONGEST_REST : 0;
        for (Warp& w : blocks[b].warps) w.resting = rest;
    }
    fibers = std::vector<Fiber>(size_t(block_count) * threads);
    fiber::Stacks stacks(fibers.size());
    for (size_t i = 0; i < fibers.size(); i++) stacks.prepare(fibers[i].context, i, enter);
    std::vector<int> order(fibers.size() / 32);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    bool busy = true;
    for (int idle = 0; busy && error.empty(); idle = progress ? 0 : idle + 1) {
        if (idle > IDLE_PASSES) error = "all wait for each other";
        progress = false;
        std::shuffle(order.begin(), order.end(), random);
        busy = pass(order);
    }
    if (error.empty() && !messages.empty()) error = "sums under way when the kernel has ended";
    held.clear();
    return error.c_str();
}

// Matrix products, by all lanes of a warp together: c += a b^T for 16 rows of a; fragments as PTX lays them out.
inline float element(unsigned word, int i) { return __uint_as_float(i ? word & 0xffff0000u : word << 16); }
struct Fragments {
    float* c;
    const unsigned* a;
};
template <class Of, class B>
void multiply(Of lane_of, int columns, B b) {
    float a[16][16];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++)
            a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = element(lane_of(lane).a[i / 2], i % 2);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < columns / 2; i++) {
            const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; k++) lane_of(lane).c[i] += a[row][k] * b(column, k);
        }
}

}  // namespace chip

inline void __syncwarp() { chip::meet_warp(); }
inline void __syncthreads() { chip::meet(chip::block().named[0], chip::threads); }
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
inline unsigned clock() {
    static unsigned time;
    return time += 100;
}

namespace ds2 {

constexpr bool DEBUG_WAITS = false;

inline float quick_exp2(float x) { return std::exp2(x); }
inline float quick_reciprocal(float x) { return 1 / x; }
inline float coarse_tanh(float x) { return std::tanh(x) * (1 - std::exp2(-11.f)); }  // as wrong as it may be

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
inline void cluster_barrier() { chip::meet(chip::clusters[blockIdx.x / chip::cluster], chip::threads * chip::cluster); }
inline unsigned remote_address(unsigned local, unsigned rank) {
    if (rank >= unsigned(chip::cluster)) chip::fail("no such block in the cluster");
    return local | (rank + 1) << 24;
}
inline void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1) { chip::send(to, barrier, {w0, w1}); }
inline void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
    chip::send(to, barrier, {w0, w1, w2, w3});
}

inline void barrier_init(unsigned barrier, unsigned arrivals) {
    chip::block().barriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
inline uint4 load_early_16(const void* at) { return *static_cast<const uint4*>(at); }
inline uint2 load_early_8(const void* at) { return *static_cast<const uint2*>(at); }
inline void barrier_init_fence() {}
inline void await_kernel_before() { chip::await_kernel_before(); }
inline void release_kernel_behind() {}
inline void barrier_expect(unsigned barrier, unsigned bytes) {
    chip::MBarrier& own = chip::barrier_at(chip::block(), barrier);
    own.bytes += bytes;
    chip::count_arrival(own);
}
inline void barrier_arrive(unsigned barrier) { chip::count_arrival(chip::barrier_at(chip::block(), barrier)); }
template <bool SUSPEND = false>
void barrier_wait(unsigned barrier, unsigned parity, const char*, int) {
    const chip::MBarrier& own = chip::barrier_at(chip::block(), barrier);
    while (own.phase % 2 == long(parity)) chip::await_change(own.phase);
}
template <int REGISTERS>
void registers_down() {}
template <int REGISTERS>
void registers_up() {}
inline void block_arrive(int barrier, int threads) {
    chip::meet_warp();
    chip::arrive(chip::block().named[barrier], threads);
}
inline void block_wait(int barrier, int threads) {
    chip::meet_warp();
    chip::meet(chip::block().named[barrier], threads);
}
inline void block_arrive_or_wait(int barrier, int threads) { block_arrive(barrier, threads); }

inline void copy_async_part(unsigned to, const void* from, int bytes) {
    chip::self().uncommitted.push_back({to, from, bytes});
}
inline void copy_async(unsigned to, const void* from, bool wanted) { copy_async_part(to, from, wanted ? 4 : 0); }
inline void copy_async_16(unsigned to, const void* from, bool wanted) {
    for (int i = 0; i < 4; i++) copy_async(to + 4 * i, static_cast<const unsigned*>(from) + i, wanted);
}
inline void copies_commit() {
    chip::self().copies.push_back(std::move(chip::self().uncommitted));
    chip::self().uncommitted.clear();
}
// Copies write in any order: before they are waited for, too, and then count as under way.
template <int PENDING>
void copies_wait() {
    chip::pause();
    auto& copies = chip::self().copies;
    const size_t complete = copies.size() - std::min(copies.size(), size_t(PENDING));
    std::vector<size_t> order;
    for (size_t i = 0; i < copies.size(); i++)
        if (i < complete || chip::random() % 4 == 0) order.push_back(i);
    std::shuffle(order.begin(), order.end(), chip::random);
    for (const size_t i : order)
        for (const chip::Copy& copy : std::exchange(copies[i], {})) {
            unsigned word = 0;
            std::memcpy(&word, copy.from, copy.bytes);
            store_shared_4(copy.to, word);
        }
    copies.erase(copies.begin(), copies.begin() + complete);
}

inline void load_relaxed_if(bool wanted, uint4& v, const uint4* at) {
    chip::pause();
    if (wanted) v = *at;
}
template <class Storage>
void store_if(bool wanted, Storage* at, Storage value) {
    if (wanted) *at = value;
}
inline void store_relaxed(unsigned* at, unsigned word) { chip::self().stores.push_back({at, word}); }
inline void store_relaxed(unsigned* at, uint4 v) {
    store_relaxed(at, v.x), store_relaxed(at + 1, v.y), store_relaxed(at + 2, v.z), store_relaxed(at + 3, v.w);
}
template <int N>
void load_relaxed_if(bool wanted, unsigned (&v)[N], const unsigned* at) {
    chip::pause();
    if (wanted) std::copy_n(at, N, v);
}
template <int N>
void store_relaxed(unsigned* at, const unsigned (&v)[N]) {
    for (int i = 0; i < N; i++) store_relaxed(at + i, v[i]);
}
inline void fence_stores() {
    while (!chip::self().stores.empty()) chip::drain_one(chip::self());
}

inline void fence_loads() {}
// A release of what the block's threads have stored before a barrier of theirs.
inline unsigned grid_arrive() {
    const unsigned before = chip::grid_word;
    for (int i = 0; i < chip::threads; i++)
        for (chip::Fiber& fiber = chip::fibers[blockIdx.x * chip::threads + i]; !fiber.stores.empty();) chip::drain_one(fiber);
    chip::grid_word += blockIdx.x ? 1 : 0x80000001u - gridDim.x;
    chip::progress = true;
    return before;
}
inline bool grid_complete(unsigned before) {
    chip::pause();
    return (chip::grid_word ^ before) >> 31;
}

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
