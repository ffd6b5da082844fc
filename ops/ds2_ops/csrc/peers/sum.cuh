// The sum of a few numbers over the GPUs of a host, in one launch: each writes its numbers into a mailbox of all others and adds
// up what came, from rank 0 to the last, so that all have the same bits. A number travels as two words of 8 bytes, half of
// it and the number of the sum in each: whoever reads sees by that whether it has come, and no other signal is needed.
#pragma once

#include "ptx/sync.cuh"
#include "ptx/system.cuh"

namespace ds2 {

constexpr int PEER_THREADS = 256;

// A block has its part of every mailbox to itself, and counts its sums: the numbers of sum n lie in half n % 2. Whoever writes
// sum n + 2 has read everybody's n + 1, which they sent after they had read all of n: so two halves are enough.
template <int RANKS>
struct Mailboxes {
    unsigned* sums;  // of this rank: one count a block
    int rank, most;  // numbers that a mailbox takes from a rank
    unsigned long long *own, *of[RANKS];

    __device__ unsigned long long* place(unsigned long long* mailbox, int from, unsigned sum, int i) const {
        return mailbox + 2 * (size_t(sum % 2 * RANKS + from) * most + i);
    }

    __device__ void send(double value, unsigned sum, int i) const {
        const unsigned long long bits = __double_as_longlong(value), label = sum;
#pragma unroll
        for (int to = 0; to < RANKS; to++)
            if (to != rank) store_system(place(of[to], rank, sum, i), bits << 32 | label, bits >> 32 << 32 | label);
    }

    __device__ double receive(int from, unsigned sum, int i) const {
        unsigned long long low, high;
#ifdef DS2_DEBUG_WAIT
        long long asked = 0;
#endif
        do {
            load_system(place(own, from, sum, i), low, high);
#ifdef DS2_DEBUG_WAIT
            if (++asked == 1ll << 28) {
                printf("rank %d waits in vain for number %d of sum %u of rank %d\n", rank, i, sum, from);
                __trap();
            }
#endif
        } while (unsigned(low) != sum || unsigned(high) != sum);
        return __longlong_as_double(high >> 32 << 32 | low >> 32);
    }
};

// The first row of chunks (rows, count) becomes the sum of all rows and ranks; `own`, unless null, that of this rank's rows.
template <int RANKS>
__device__ void sum_over_peers(const Mailboxes<RANKS>& mailboxes, double* chunks, int rows, int count, float* own) {
    const int i = blockIdx.x * PEER_THREADS + threadIdx.x;
    const unsigned sum = mailboxes.sums[blockIdx.x] + 1;
    if (i < count) {
        double mine = chunks[i];
#pragma unroll 8
        for (int row = 1; row < rows; row++) mine += chunks[size_t(row) * count + i];
        mailboxes.send(mine, sum, i);
        if (own != nullptr) own[i] = float(mine);
        double total = 0.0;
#pragma unroll
        for (int from = 0; from < RANKS; from++) {
            const double value = from == mailboxes.rank ? mine : mailboxes.receive(from, sum, i);
            total = from == 0 ? value : total + value;
        }
        chunks[i] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) mailboxes.sums[blockIdx.x] = sum;
}

}  // namespace ds2
