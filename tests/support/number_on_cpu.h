// Number types for a host compiler: csrc/ptx/number.cuh without its matrix instructions, for kernels that only store and load.
#pragma once

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace ds2 {

struct Bf16 {
    using Storage = unsigned short;
    static constexpr int PER_WORD = 2;

    static void unpack(unsigned word, float (&v)[2]) {
        v[0] = same_bits<float>(word << 16);
        v[1] = same_bits<float>(word & 0xffff0000u);
    }
    static unsigned rounded(float f) {
        const unsigned bits = same_bits<unsigned>(f);
        return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    static unsigned pack(const float (&v)[2]) { return rounded(v[0]) | rounded(v[1]) << 16; }
};

struct Fp32 {
    using Storage = unsigned;
    static constexpr int PER_WORD = 1;

    static void unpack(unsigned word, float (&v)[1]) { v[0] = same_bits<float>(word); }
    static unsigned pack(const float (&v)[1]) { return same_bits<unsigned>(v[0]); }
};

}  // namespace ds2
