// Fibers for the emulators beside this file: one started function each, on a stack of its own, resumed and paused by hand.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>

namespace fiber {

// Entered once through a ucontext_t, then left and resumed through _setjmp and _longjmp, which unlike swapcontext save no
// signal mask and thus need no system call: emulated warps switch some hundred million times.
struct Fiber {
    ucontext_t start;
    std::jmp_buf here;
    bool started = false;
};

inline std::jmp_buf resumer;
inline ucontext_t origin;

inline void pause(Fiber& fiber) {
    if (_setjmp(fiber.here) == 0) _longjmp(resumer, 1);
}
inline void resume(Fiber& fiber) {
    if (_setjmp(resumer) != 0) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    swapcontext(&origin, &fiber.start);
}

// Stacks of many fibers; their pages come from the system as they are touched.
class Stacks {
   public:
    explicit Stacks(size_t count) : bytes_(new char[BYTES * count]) {}
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks() { delete[] bytes_; }
    // `run` must not return.
    void prepare(Fiber& fiber, size_t index, void (*run)()) {
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = bytes_ + BYTES * index;
        fiber.start.uc_stack.ss_size = BYTES;
        makecontext(&fiber.start, run, 0);
        fiber.started = false;
    }

   private:
    static constexpr size_t BYTES = 1 << 16;
    char* const bytes_;
};

}  // namespace fiber
