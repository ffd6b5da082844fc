// csrc/ptx/product.cuh for a host compiler, on the chip of chip_on_cpu.h: a product reads its operands when it is issued.
#pragma once

namespace ds2 {

inline void fence_shared_writes() {}
inline void products_fence() {}
inline void products_commit() {}
inline void products_wait() {}

inline unsigned long long operand_at(unsigned address, unsigned leading, unsigned stride) {
    return address / 16 | static_cast<unsigned long long>(leading / 16) << 16 |
           static_cast<unsigned long long>(stride / 16) << 32;
}

inline float operand(unsigned long long at, int row, int k, bool transposed) {
    const unsigned leading = (at >> 16 & 0x3fff) * 16, stride = (at >> 32 & 0x3fff) * 16;
    const unsigned within = transposed ? row % 8 * 2 + k % 8 * 16 : row % 8 * 16 + k % 8 * 2;
    unsigned short bits;
    memcpy(&bits, chip::at((at & 0x3fff) * 16 + row / 8 * stride + k / 8 * leading + within, 2), 2);
    return chip::element(bits, 0);
}

template <int N, bool TRANSPOSED>
struct Product {
    static void add(float (&c)[N / 2], unsigned long long a, unsigned long long b) {
        float* const mine = c;
        const int first = threadIdx.x % 128 / 32 * 16;
        chip::together(mine, [=](auto lane_of) {
            float rows[16][16], columns[N][16];
            for (int k = 0; k < 16; k++) {
                for (int m = 0; m < 16; m++) rows[m][k] = operand(a, first + m, k, TRANSPOSED);
                for (int n = 0; n < N; n++) columns[n][k] = operand(b, n, k, TRANSPOSED);
            }
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < N / 2; i++) {
                    const int m = lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    for (int k = 0; k < 16; k++) lane_of(lane)[i] += rows[m][k] * columns[n][k];
                }
        });
    }
};
#define DS2_PRODUCT(...)

}  // namespace ds2
