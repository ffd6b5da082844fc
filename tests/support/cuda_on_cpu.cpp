// What cuda_on_cpu.h declares: the fibers and their barriers.
#include "cuda_on_cpu.h"

#include <vector>

#include "fiber_on_cpu.h"

Index threadIdx, blockIdx, blockDim;
alignas(16) unsigned char shared[1 << 18];

namespace fibers {

namespace {

struct Meeting {
    int arrived = 0, turn = 0;
};
struct Warp {
    Meeting meeting;
    unsigned long long values[32];
};
std::vector<fiber::Fiber> contexts;
std::vector<Warp> warps;
Meeting block;
void (*call_kernel)(const void*);
const void* kernel;
std::vector<char> done;

void meet(Meeting& meeting, int expected) {
    const int turn = meeting.turn;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        meeting.turn++;
        return;
    }
    while (meeting.turn == turn) pause();
}
void enter() {
    call_kernel(kernel);
    done[threadIdx.x] = 1;
    pause();
}

}  // namespace

void pause() { fiber::pause(contexts[threadIdx.x]); }
void meet_warp() { meet(warps[threadIdx.x / 32].meeting, 32); }
unsigned long long* values_of_warp() { return warps[threadIdx.x / 32].values; }

void launch(int blocks, int threads, bool backwards, void (*call)(const void*), const void* body) {
    fiber::Stacks stacks(threads);
    call_kernel = call, kernel = body;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        memset(shared, 0xff, sizeof shared);  // NaN, to whoever reads before writing
        contexts.assign(threads, {});
        warps.assign((threads + 31) / 32, {});
        done.assign(threads, 0);
        block = {};
        for (int i = 0; i < threads; i++) stacks.prepare(contexts[i], i, enter);
        for (bool busy = true; busy;) {
            busy = false;
            for (int i = 0; i < threads; i++) {
                threadIdx.x = backwards ? threads - 1 - i : i;
                if (done[threadIdx.x]) continue;
                busy = true;
                fiber::resume(contexts[threadIdx.x]);
            }
        }
    }
}

}  // namespace fibers

void __syncthreads() { fibers::meet(fibers::block, blockDim.x); }
