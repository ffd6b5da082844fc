// Cells: what happens to one unit of one utterance at one time step.
//
// A cell of one gate gives its pointwise forward, and its pointwise backward from the output alone. A cell with gates has
// GATES rows of the matrix a unit, in torch.nn's order, and a number that the unit carries from step to step, in fp32:
//   forward   from sum[k] = (W h)_k, x[k] and carry: the unit's new h, the next carry, and SAVED numbers for backward
//   slopes    from what was saved, all that backward needs of it: before the step's sums are there, so off the critical path
//   backward  from dh, which lacks what the carry adds, and the slopes: grad[k], the gradient of x[k], and last, that of
//             (W h)_k for the last gate; replaces the carry, which goes backward too
// CARRIES_H: the carry is h itself, as rounded as it is sent; else it is a state of its own, c, with an end of its own.
#pragma once

#include "ptx/number.cuh"

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

// Within 2e-7 of the truth everywhere, at any argument, without a branch.
constexpr float LOG2_E = 1.44269504f;
__device__ inline float sigmoid(float x) { return quick_reciprocal(1.f + quick_exp2(-LOG2_E * x)); }
__device__ inline float quick_tanh(float x) { return 1.f - 2.f * quick_reciprocal(1.f + quick_exp2(2 * LOG2_E * x)); }
// One slow instruction instead of two, where numbers are coarser than it errs. Not for a gate that a carry is multiplied by, or
// that lets something into it: over many steps its errors would add up.
template <class Number>
__device__ float tanh_as(float x) {
    if constexpr (Number::COARSE) return coarse_tanh(x);
    else return quick_tanh(x);
}
template <class Number>
__device__ float sigmoid_as(float x) {
    if constexpr (Number::COARSE) return 0.5f + 0.5f * coarse_tanh(0.5f * x);
    else return sigmoid(x);
}

// Gates i, f, g, o: c = f c + i g, h = o tanh(c).
struct Lstm {
    static constexpr int GATES = 4, SAVED = 5, SLOPES = 6, PHASES = 1;
    static constexpr bool CARRIES_H = false, LAST_APART = false;
    template <class Number>
    static __device__ float forward(const float (&sum)[4], const float (&x)[4], float, float& carry, float (&saved)[5]) {
        const float i = sigmoid(x[0] + sum[0]), f = sigmoid(x[1] + sum[1]);
        const float g = tanh_as<Number>(x[2] + sum[2]), o = sigmoid_as<Number>(x[3] + sum[3]);
        saved[0] = i, saved[1] = f, saved[2] = g, saved[3] = o, saved[4] = carry;
        carry = f * carry + i * g;
        return o * tanh_as<Number>(carry);
    }
    static __device__ void slopes(const float (&saved)[5], float (&slope)[6]) {
        const float i = saved[0], f = saved[1], g = saved[2], o = saved[3], before = saved[4];
        const float tanh_c = quick_tanh(f * before + i * g);
        slope[0] = g * i * (1.f - i);
        slope[1] = before * f * (1.f - f);
        slope[2] = i * (1.f - g * g);
        slope[3] = tanh_c * o * (1.f - o);
        slope[4] = o * (1.f - tanh_c * tanh_c);
        slope[5] = f;
    }
    static __device__ void backward(float dh, const float (&slope)[6], float& carry, float (&grad)[4], float&) {
        const float dc = carry + dh * slope[4];
        grad[0] = dc * slope[0], grad[1] = dc * slope[1], grad[2] = dc * slope[2], grad[3] = dh * slope[3];
        carry = dc * slope[5];
    }
};

// Gates r, z, n; the reset gate acts on the product: n = tanh(x_n + r ((W h)_n + bias)), h = n + z (h - n).
struct GruAfter {
    static constexpr int GATES = 3, SAVED = 5, SLOPES = 5, PHASES = 1;
    static constexpr bool CARRIES_H = true, LAST_APART = true;  // the gradients of x_n and of (W h)_n differ
    template <class Number>
    static __device__ float forward(const float (&sum)[3], const float (&x)[3], float bias, float& carry, float (&saved)[5]) {
        const float r = sigmoid_as<Number>(x[0] + sum[0]), z = sigmoid(x[1] + sum[1]), q = sum[2] + bias;
        const float n = tanh_as<Number>(x[2] + r * q);
        saved[0] = r, saved[1] = z, saved[2] = n, saved[3] = q, saved[4] = carry;
        return n + z * (carry - n);
    }
    static __device__ void slopes(const float (&saved)[5], float (&slope)[5]) {
        const float r = saved[0], z = saved[1], n = saved[2], q = saved[3], before = saved[4];
        slope[2] = (1.f - z) * (1.f - n * n);
        slope[1] = (before - n) * z * (1.f - z);
        slope[0] = slope[2] * q * r * (1.f - r);
        slope[3] = slope[2] * r;
        slope[4] = z;
    }
    static __device__ void backward(float dh, const float (&slope)[5], float& carry, float (&grad)[3], float& last) {
        dh += carry;
        grad[0] = dh * slope[0], grad[1] = dh * slope[1], grad[2] = dh * slope[2];
        last = dh * slope[3];
        carry = dh * slope[4];
    }
};

// Gates r, z, n; the reset gate acts before the product: n = tanh(x_n + (W (r h))_n + bias), h = n + z (h - n). So a step has a
// second phase: forward it gets the sum of n, for which the first one has made r h (reset); backward that of r's gradient
// (backward_reset), from q, the gradient of r h. What is saved has the layout of GruAfter's.
struct GruBefore {
    static constexpr int GATES = 3, SAVED = 5, SLOPES = 5, PHASES = 2;
    static constexpr bool CARRIES_H = true, LAST_APART = false;
    template <class Number>
    static __device__ float reset(float sum, float x, float carry) { return sigmoid_as<Number>(x + sum) * carry; }
    template <class Number>
    static __device__ float forward(const float (&sum)[3], const float (&x)[3], float bias, float& carry, float (&saved)[5]) {
        const float r = sigmoid_as<Number>(x[0] + sum[0]), z = sigmoid(x[1] + sum[1]);
        const float n = tanh_as<Number>(x[2] + bias + sum[2]);
        saved[0] = saved[3] = r, saved[1] = z, saved[2] = n, saved[4] = carry;
        return n + z * (carry - n);
    }
    static __device__ void slopes(const float (&saved)[5], float (&slope)[5]) {
        const float r = saved[0], z = saved[1], n = saved[2], before = saved[4];
        slope[0] = before * r * (1.f - r);
        slope[1] = (before - n) * z * (1.f - z);
        slope[2] = (1.f - z) * (1.f - n * n);
        slope[3] = r;
        slope[4] = z;
    }
    static __device__ void backward(float dh, const float (&slope)[5], float& carry, float (&grad)[3], float&) {
        dh += carry;
        grad[0] = 0.f, grad[1] = dh * slope[1], grad[2] = dh * slope[2];
        carry = dh * slope[4];
    }
    static __device__ void backward_reset(float q, const float (&slope)[5], float& carry, float& grad) {
        grad = q * slope[0];
        carry += q * slope[3];
    }
};

}  // namespace ds2
