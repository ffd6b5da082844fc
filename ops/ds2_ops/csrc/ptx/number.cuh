// Number types: how elements are stored, packed into 32-bit words for the matrix unit, and multiplied.
//
// Everything downstream counts in words. A word holds PER_WORD consecutive elements of the hidden dimension, and one
// matrix instruction consumes 8 words of K, whatever the type: m16n8k16 for 16-bit types, m16n8k8 for TF32.
//
// A type gives its elements' Storage, PER_WORD, unpack and pack, the word as the matrix unit takes it (operand), the product
// (multiply_add), and whether it is COARSE: rounds by four times as much as coarse_tanh errs.
#pragma once

namespace ds2 {

// One matrix instruction, c += a * b: 16 rows by 8 columns, and as much of K as 8 words hold.
#define DS2_MMA(SHAPE, TYPE)                                                                                          \
    asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                              \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                         \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

struct Bf16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;
    static constexpr bool COARSE = true;

    static __device__ void unpack(unsigned word, float (&v)[2]) {
        v[0] = __uint_as_float(word << 16);
        v[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ unsigned pack(const float (&v)[2]) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(v[1]), "f"(v[0]));
        return word;
    }
    static __device__ unsigned operand(unsigned word) { return word; }
    static __device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        DS2_MMA("m16n8k16", "bf16");
    }
};

struct Fp16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;
    static constexpr bool COARSE = false;

    static __device__ void unpack(unsigned word, float (&v)[2]) {
        asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
            : "=f"(v[0]), "=f"(v[1])
            : "r"(word));
    }
    static __device__ unsigned pack(const float (&v)[2]) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(v[1]), "f"(v[0]));
        return word;
    }
    static __device__ unsigned operand(unsigned word) { return word; }
    static __device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        DS2_MMA("m16n8k16", "f16");
    }
};

// 2^x and 1 / x, within 2 units in the last place, each one instruction.
__device__ inline float quick_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float quick_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// tanh within 2^-11 of its value, one instruction.
__device__ inline float coarse_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// fp32 in memory; products through TF32 (10 explicit mantissa bits), sums in fp32.
struct Fp32 {
    using Storage = unsigned;
    static constexpr int PER_WORD = 1;
    static constexpr bool COARSE = false;

    static __device__ void unpack(unsigned word, float (&v)[1]) { v[0] = __uint_as_float(word); }
    static __device__ unsigned pack(const float (&v)[1]) { return __float_as_uint(v[0]); }
    // The matrix unit would truncate: round to nearest instead.
    static __device__ unsigned operand(unsigned word) {
        unsigned rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
        return rounded;
    }
    static __device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        DS2_MMA("m16n8k8", "tf32");
    }
};

#undef DS2_MMA

}  // namespace ds2
