// Cells: what happens to one unit of one utterance at one time step. A cell gives its gate count, its pointwise
// forward, and its pointwise backward from the output alone.
#pragma once

namespace ds2 {

struct Relu {
    static constexpr int GATES = 1;
    // max.NaN keeps a NaN visible, as torch does; fmaxf would turn it into 0.
    static __device__ float forward(float pre, float) {
        float y;
        asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(pre));
        return y;
    }
    static __device__ float backward(float grad, float y, float) { return y > 0.f ? grad : 0.f; }
};

struct ClippedRelu {
    static constexpr int GATES = 1;
    static __device__ float forward(float pre, float clip) {
        float y;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(Relu::forward(pre, clip)), "f"(clip));
        return y;
    }
    static __device__ float backward(float grad, float y, float clip) { return y > 0.f && y < clip ? grad : 0.f; }
};

struct Tanh {
    static constexpr int GATES = 1;
    static __device__ float forward(float pre, float) { return tanhf(pre); }
    static __device__ float backward(float grad, float y, float) { return grad * (1.f - y * y); }
};

}  // namespace ds2
