// What chip_on_cpu.h declares: the fibers, their barriers, and the scheduler.
#include "chip_on_cpu.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fiber_on_cpu.h"

Index threadIdx, blockIdx, gridDim;

namespace chip {

int threads, cluster;

namespace {

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

std::vector<Fiber> fibers;
std::vector<Block> blocks;
std::vector<Meeting> clusters;
std::vector<Message> messages;
std::mt19937 random;
void (*call_kernel)(const void*);
const void* kernel;
std::string error;
bool progress;  // anything that another warp could wait for

// Arrays that the kernel before reads or writes until every thread has waited for its end: their contents come then.
struct Held {
    char* at;
    std::vector<char> contents;
};
std::vector<Held> held;
Meeting everyone;
unsigned grid_word;  // of the barrier over the grid

Fiber& self() { return fibers[blockIdx.x * threads + threadIdx.x]; }
Block& block() { return blocks[blockIdx.x]; }
Warp& warp() { return block().warps[threadIdx.x / 32]; }

}  // namespace

void pause() { fiber::pause(self().context); }
void fail(const char* what) {
    error = what;
    error += " (block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ")";
    for (;;) pause();
}

namespace {

// Pauses while a count stays; no warp is resumed only to look at it.
void await_change(const long& count) {
    Fiber& own = self();
    own.awaited = &count, own.seen = count;
    while (count == own.seen) pause();
    own.awaited = nullptr;
}

void arrive(Meeting& meeting, int expected) {
    if (meeting.expected && meeting.expected != expected) fail("threads disagree on a barrier's count");
    meeting.expected = expected;
    if (++meeting.arrived < expected) return;
    meeting.arrived = meeting.expected = 0;
    meeting.turn++;
    progress |= &meeting != &warp().meeting;  // warps that poll meet for ever
}
void meet(Meeting& meeting, int expected) {
    const long turn = meeting.turn;
    arrive(meeting, expected);
    if (meeting.turn == turn) await_change(meeting.turn);
}

}  // namespace

void meet_warp() { meet(warp().meeting, 32); }
const void* const* give(const void* mine) {
    Warp& all = warp();
    all.given[threadIdx.x % 32] = mine;
    return all.meeting.arrived == 31 ? all.given : nullptr;
}

char* shared_memory() { return block().memory.data(); }
char* at(unsigned address, unsigned bytes) {
    const unsigned rank = address >> 24, offset = address & 0xffffff;
    Block& owner = rank ? blocks[blockIdx.x / cluster * cluster + rank - 1] : block();
    if (offset + bytes > owner.memory.size()) fail("shared memory out of range");
    if (offset % std::min(bytes, 16u)) fail("shared memory out of line");
    return owner.memory.data() + offset;
}

namespace {

MBarrier& barrier_at(Block& owner, unsigned address) {
    MBarrier& barrier = owner.barriers[address & 0xffffff];
    if (barrier.arrivals == 0) fail("mbarrier that nobody has initialised");
    return barrier;
}
void settle(MBarrier& barrier) {
    progress = true;
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
}
void count_arrival(MBarrier& barrier) {
    if (--barrier.pending < 0) fail("more arrivals at an mbarrier than its phase has");
    settle(barrier);
}

void land(const Message& message) {
    Block& owner = blocks[message.block];
    memcpy(owner.memory.data() + (message.to & 0xffffff), message.words, 4 * message.count);
    MBarrier& barrier = owner.barriers[message.barrier & 0xffffff];
    if (barrier.arrivals == 0) error = "a message to an mbarrier that nobody has initialised";
    barrier.bytes -= 4 * message.count;
    settle(barrier);
}
void send(unsigned to, unsigned barrier, std::initializer_list<unsigned> words) {
    if (to >> 24 != barrier >> 24) fail("a message's mbarrier is not its own block's");
    at(to, 4 * words.size());
    Message message{int(blockIdx.x / cluster * cluster + (to >> 24) - 1), to, barrier, {}, int(words.size())};
    std::copy(words.begin(), words.end(), message.words);
    messages.push_back(message);
}
// One store of a fiber, any, but those to one word in their order.
void drain_one(Fiber& fiber) {
    if (fiber.stores.empty()) return;
    unsigned* const at = fiber.stores[random() % fiber.stores.size()].at;
    const auto first = std::find_if(fiber.stores.begin(), fiber.stores.end(), [=](const Store& s) { return s.at == at; });
    *at = first->word;
    fiber.stores.erase(first);
    progress = true;
}

void enter() {
    call_kernel(kernel);
    self().done = true;
    pause();
}

// Lets every warp that does not rest run until it waits; true while any has work.
bool pass(const std::vector<int>& order) {
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
        for (int i = fiber.stores.empty() || random() % 4 ? 0 : 4; i > 0; i--) drain_one(fiber);
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

}  // namespace

void barrier_wait(unsigned barrier, unsigned parity) {
    const MBarrier& own = barrier_at(block(), barrier);
    while (own.phase % 2 == long(parity)) await_change(own.phase);
}

// Copies write in any order: before they are waited for, too, and then count as under way.
void copies_wait(int pending) {
    pause();
    auto& copies = self().copies;
    const size_t complete = copies.size() - std::min(copies.size(), size_t(pending));
    std::vector<size_t> order;
    for (size_t i = 0; i < copies.size(); i++)
        if (i < complete || random() % 4 == 0) order.push_back(i);
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order)
        for (const Copy& copy : std::exchange(copies[i], {})) {
            unsigned word = 0;
            memcpy(&word, copy.from, copy.bytes);
            store(copy.to, word);
        }
    copies.erase(copies.begin(), copies.begin() + complete);
}

// Of the next launch: `count` arrays that are not weights.
extern "C" void hold(int count, char** arrays, const long* bytes) {
    held.clear();
    for (int i = 0; i < count; i++) {
        held.push_back({arrays[i], {arrays[i], arrays[i] + bytes[i]}});
        std::fill_n(arrays[i], bytes[i], char(0xff));
    }
}

const char* launch(int block_count, int block_threads, int cluster_blocks, int smem_bytes, unsigned seed,
                   void (*call)(const void*), const void* body) {
    threads = block_threads, cluster = cluster_blocks, call_kernel = call, kernel = body, gridDim.x = block_count;
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

}  // namespace chip

void __syncthreads() { chip::meet(chip::block().named[0], chip::threads); }
unsigned clock() {
    static unsigned time;
    return time += 100;
}

namespace ds2 {

void cluster_barrier() { chip::meet(chip::clusters[blockIdx.x / chip::cluster], chip::threads * chip::cluster); }
unsigned remote_address(unsigned local, unsigned rank) {
    if (rank >= unsigned(chip::cluster)) chip::fail("no such block in the cluster");
    return local | (rank + 1) << 24;
}
void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1) { chip::send(to, barrier, {w0, w1}); }
void store_async(unsigned to, unsigned barrier, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
    chip::send(to, barrier, {w0, w1, w2, w3});
}

void barrier_init(unsigned barrier, unsigned arrivals) {
    chip::block().barriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
void await_kernel_before() {
    if (chip::held.empty()) return;
    if (chip::everyone.arrived + 1 == int(chip::fibers.size()))
        for (chip::Held& array : chip::held) {
            for (size_t i = 0; i < array.contents.size(); i++)
                if (array.at[i] != char(0xff)) chip::fail("a store before the end of the kernel before");
            memcpy(array.at, array.contents.data(), array.contents.size());
        }
    chip::meet(chip::everyone, int(chip::fibers.size()));
}

void barrier_expect(unsigned barrier, unsigned bytes) {
    chip::MBarrier& own = chip::barrier_at(chip::block(), barrier);
    own.bytes += bytes;
    chip::count_arrival(own);
}
void barrier_arrive(unsigned barrier) { chip::count_arrival(chip::barrier_at(chip::block(), barrier)); }
void block_arrive(int barrier, int threads) {
    chip::meet_warp();
    chip::arrive(chip::block().named[barrier], threads);
}
void block_wait(int barrier, int threads) {
    chip::meet_warp();
    chip::meet(chip::block().named[barrier], threads);
}
void copy_async_part(unsigned to, const void* from, int bytes) {
    chip::self().uncommitted.push_back({to, from, bytes});
}
void copies_commit() {
    chip::self().copies.push_back(std::move(chip::self().uncommitted));
    chip::self().uncommitted.clear();
}
void store_relaxed(unsigned* at, unsigned word) { chip::self().stores.push_back({at, word}); }
void fence_stores() {
    while (!chip::self().stores.empty()) chip::drain_one(chip::self());
}

// A release of what the block's threads have stored before a barrier of theirs.
unsigned grid_arrive() {
    const unsigned before = chip::grid_word;
    for (int i = 0; i < chip::threads; i++)
        for (chip::Fiber& fiber = chip::fibers[blockIdx.x * chip::threads + i]; !fiber.stores.empty();) chip::drain_one(fiber);
    chip::grid_word += blockIdx.x ? 1 : 0x80000001u - gridDim.x;
    chip::progress = true;
    return before;
}
bool grid_complete(unsigned before) {
    chip::pause();
    return (chip::grid_word ^ before) >> 31;
}

}  // namespace ds2
