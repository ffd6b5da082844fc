// A step of the optimizer over all parameters in one launch, and the norm of all gradients in another. A block takes a piece
// of a tensor from a table that is made once: nothing is copied together for it. No atomics: the same bits on every run.
#pragma once

#include "ptx/number.cuh"

namespace ds2 {

constexpr int UPDATE_THREADS = 256;
constexpr float LARGEST = 3.402823466e38f; // finite float32

// A piece of a parameter and all that belongs to it; addresses of float32, aligned to 16 bytes.
struct Piece {
    float* parameter;
    const float* gradient;
    float* first;            // Nesterov's velocity, or Adam's mean gradient
    float* second;           // Adam's mean square
    unsigned short* rounded; // the parameter in bfloat16, or null
    const float* rate;       // the learning rate, one number
    const float* steps;      // Adam's count of steps, this one included
    float decay;             // of the weight
    int length;
};
static_assert(sizeof(Piece) == 64, "the table has 8 columns of 8 bytes");

// partial[block]: the sum of squares of a piece of the gradients, float64 of sums of four in float32.
__device__ inline void sum_squares(const Piece* pieces, double* partial, double* memory) {
    const Piece& piece = pieces[blockIdx.x];
    double total = 0.0;
    for (int i = threadIdx.x * 4; i < piece.length; i += UPDATE_THREADS * 4) {
        float sum = 0.0f;
        if (i + 4 <= piece.length) {
            const float4 g = *reinterpret_cast<const float4*>(piece.gradient + i);
            sum = fmaf(g.w, g.w, fmaf(g.z, g.z, fmaf(g.y, g.y, g.x * g.x)));
        } else {
            for (int j = i; j < piece.length; j++) sum = fmaf(piece.gradient[j], piece.gradient[j], sum);
        }
        total += sum;
    }
    memory[threadIdx.x] = total;
    for (int half = UPDATE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) memory[threadIdx.x] += memory[threadIdx.x + half];
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = memory[0];
}

// What the update does to one number, in float64 as torch's fused optimizers do.
struct Nesterov {
    double momentum, rate, decay;

    __device__ void operator()(float& p, float g, float& velocity, float&) const {
        if (decay != 0.0) g = float(g + decay * p);
        velocity = float(momentum * velocity + g);
        g = float(g + momentum * velocity);
        p = float(p - rate * g);
    }
};

struct AdamW {
    double beta1, beta2, eps, rate, decay, step_size, root_correction;

    __device__ void operator()(float& p, float g, float& mean, float& square) const {
        if (decay != 0.0) p = float(p - rate * decay * p);
        mean = float(beta1 * mean + (1.0 - beta1) * g);
        square = float(beta2 * square + (1.0 - beta2) * g * g);
        const double denominator = sqrtf(square) / root_correction + eps;
        p = float(p - step_size * mean / denominator);
    }
};

// Clips by the norm of all gradients where `most` > 0, then updates. A norm that is not finite leaves everything as it is.
template <bool HAS_SECOND, class Rule>
__device__ void update_piece(const Piece& piece, const Rule& rule, const float* norm, float most) {
    if (!(*norm <= LARGEST)) return;
    const float factor = most > 0.0f ? fminf(most / (*norm + 1e-6f), 1.0f) : 1.0f;
    for (int i = threadIdx.x * 4; i < piece.length; i += UPDATE_THREADS * 4) {
        if (i + 4 <= piece.length) {
            float4 p = *reinterpret_cast<float4*>(piece.parameter + i);
            const float4 g = *reinterpret_cast<const float4*>(piece.gradient + i);
            float4 first = *reinterpret_cast<float4*>(piece.first + i), second = {};
            if constexpr (HAS_SECOND) second = *reinterpret_cast<float4*>(piece.second + i);
            rule(p.x, g.x * factor, first.x, second.x);
            rule(p.y, g.y * factor, first.y, second.y);
            rule(p.z, g.z * factor, first.z, second.z);
            rule(p.w, g.w * factor, first.w, second.w);
            *reinterpret_cast<float4*>(piece.parameter + i) = p;
            *reinterpret_cast<float4*>(piece.first + i) = first;
            if constexpr (HAS_SECOND) *reinterpret_cast<float4*>(piece.second + i) = second;
            if (piece.rounded != nullptr)
                *reinterpret_cast<uint2*>(piece.rounded + i) = make_uint2(Bf16::pack({p.x, p.y}), Bf16::pack({p.z, p.w}));
        } else {
            for (int j = i; j < piece.length; j++) {
                float none = 0.0f;
                rule(piece.parameter[j], piece.gradient[j] * factor, piece.first[j], HAS_SECOND ? piece.second[j] : none);
                if (piece.rounded != nullptr)
                    piece.rounded[j] = static_cast<unsigned short>(Bf16::pack({piece.parameter[j], 0.0f}));
            }
        }
    }
}

__device__ inline void nesterov(const Piece* pieces, const float* norm, float most, double momentum) {
    const Piece& piece = pieces[blockIdx.x];
    update_piece<false>(piece, Nesterov{momentum, *piece.rate, piece.decay}, norm, most);
}

__device__ inline void adamw(const Piece* pieces, const float* norm, float most, double beta1, double beta2, double eps) {
    const Piece& piece = pieces[blockIdx.x];
    const double steps = *piece.steps, rate = *piece.rate;
    const double correction1 = 1.0 - pow(beta1, steps), correction2 = 1.0 - pow(beta2, steps);
    update_piece<true>(piece, AdamW{beta1, beta2, eps, rate, piece.decay, rate / correction1, sqrt(correction2)}, norm, most);
}

}  // namespace ds2
