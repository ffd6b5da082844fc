// Fibers for the emulators beside this file: one started function each, on a stack of its own, resumed and paused by hand.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace fiber {

// Entered once through a ucontext_t, then left and resumed through the compiler's own setjmp and longjmp: emulated warps
// switch some hundred million times. swapcontext saves a signal mask by a system call, and those of libc more than is used.
struct Fiber {
    ucontext_t start;
    void* here[5];
    bool started = false;
};

inline void* resumer[5];
inline ucontext_t origin;

// A function of its own, as the compiler demands.
[[gnu::noinline, noreturn]] inline void jump(void** to) { __builtin_longjmp(to, 1); }
[[gnu::noinline]] inline void pause(Fiber& fiber) {
    if (__builtin_setjmp(fiber.here) == 0) jump(resumer);
}
[[gnu::noinline]] inline void resume(Fiber& fiber) {
    if (__builtin_setjmp(resumer) != 0) return;
    if (fiber.started) jump(fiber.here);
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
