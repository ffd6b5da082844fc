// A product of few rows in one cluster of 16 blocks: Y (R, N) = X (R, K) W^T, X sent to all blocks at once by the copy engine.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <vector>
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
constexpr int K = 1152, N = 1152, C = 16, NC = N / C, KS = 64, SLABS = K / KS, STAGES = 6, ROWS = 192;
constexpr int A_BYTES = ROWS * KS * 2, B_BYTES = NC * KS * 2, SLICE = 8 * KS * 2;
struct Smem { alignas(1024) uint8_t a[STAGES][A_BYTES]; alignas(1024) uint8_t b[STAGES][B_BYTES]; uint64_t full[STAGES], empty[STAGES]; };
constexpr int MULTICAST = 1, MMA = 2, WEIGHTS = 4, ROWS_IN = 8, STORE = 16;
__device__ __forceinline__ uint32_t sm(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint32_t remote(uint32_t a, uint32_t rank) { uint32_t r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
__device__ __forceinline__ void init(uint64_t* b, uint32_t n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(sm(b)), "r"(n)); }
__device__ __forceinline__ void expect(uint64_t* b, uint32_t n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(sm(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive_at(uint64_t* b, uint32_t rank) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote(sm(b), rank)) : "memory"); }
__device__ __forceinline__ void await(uint64_t* b, uint32_t parity, bool cluster) {
  uint32_t done;
  do {
    if (cluster) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sm(b)), "r"(parity) : "memory");
    else asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sm(b)), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void load(void* dst, const CUtensorMap* map, int x, int y, uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" :: "r"(sm(dst)), "l"(map), "r"(sm(bar)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void load_all(void* dst, const CUtensorMap* map, int x, int y, uint64_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" :: "r"(sm(dst)), "l"(map), "r"(sm(bar)), "r"(x), "r"(y), "h"((uint16_t)0xffff) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(const void* p) { return (uint64_t)((sm(p) & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
__device__ __forceinline__ void wgmma(float (&d)[36], uint64_t a, uint64_t b, int scale) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %38, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}, %36, %37, p, 1, 1, 0, 0; }"
    : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),
      "+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35])
    : "l"(a), "l"(b), "r"(scale));
}
template <int MODE>
__global__ void __launch_bounds__(416, 1) product(const CUtensorMap* xmaps, const CUtensorMap* wmaps, int first_w, int n_w, __nv_bfloat16* y, int rows) {
  extern __shared__ uint8_t raw[];
  Smem& s = *(Smem*)(((uintptr_t)raw + 1023) & ~(uintptr_t)1023);
  uint32_t rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cluster = blockIdx.x / C, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const CUtensorMap *xm = xmaps + cluster, *wm = wmaps + (first_w + cluster) % n_w;
  const int slices = (rows + 7) / 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { init(&s.full[i], 1); init(&s.empty[i], 3 * (MODE & MULTICAST ? C : 1)); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (MODE == 0) return;
  const uint32_t bytes = (MODE & ROWS_IN ? slices * SLICE : 0) + (MODE & WEIGHTS ? B_BYTES : 0);
  if (warp == 12) {
    if (lane == 0)
      for (int i = 0; i < SLABS; i++) {
        const int st = i % STAGES;
        if (i >= STAGES) await(&s.empty[st], (i / STAGES - 1) & 1, MODE & MULTICAST);
        expect(&s.full[st], bytes);
        if (MODE & WEIGHTS) load(s.b[st], wm, i * KS, rank * NC, &s.full[st]);
        if (MODE & ROWS_IN) {
          if (MODE & MULTICAST) for (int q = rank; q < slices; q += C) load_all(s.a[st] + q * SLICE, xm, i * KS, q * 8, &s.full[st]);
          else for (int q = 0; q < slices; q++) load(s.a[st] + q * SLICE, xm, i * KS, q * 8, &s.full[st]);
        }
      }
  } else {
    const int wg = warp / 4; float d[36];
#pragma unroll
    for (int i = 0; i < 36; i++) d[i] = 0;
    auto release = [&](int st) {
      if (MODE & MULTICAST) { if (threadIdx.x % 128 < C) arrive_at(&s.empty[st], threadIdx.x % 128); }
      else if (threadIdx.x % 128 == 0) arrive_at(&s.empty[st], rank);
      __syncwarp();
    };
    for (int i = 0; i < SLABS; i++) {
      const int st = i % STAGES;
      await(&s.full[st], (i / STAGES) & 1, false);
      if (MODE & MMA) {
        uint64_t a = descriptor(s.a[st] + wg * 64 * KS * 2), b = descriptor(s.b[st]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(d, a + 2 * k, b + 2 * k, i + k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (i) { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); release((i - 1) % STAGES); }
      } else release(st);
    }
    if (MODE & MMA) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 36; i++) asm volatile("" : "+f"(d[i])::"memory");
    if (MODE & STORE) {
      __nv_bfloat16* out = y + (size_t)cluster * rows * N;
      const int r = wg * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < 9; j++) {
        const int c = rank * NC + j * 8 + lane % 4 * 2;
        if (r < rows) *(__nv_bfloat162*)(out + (size_t)r * N + c) = __floats2bfloat162_rn(d[4 * j], d[4 * j + 1]);
        if (r + 8 < rows) *(__nv_bfloat162*)(out + (size_t)(r + 8) * N + c) = __floats2bfloat162_rn(d[4 * j + 2], d[4 * j + 3]);
      }
    }
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__global__ void reference(const __nv_bfloat16* x, const __nv_bfloat16* w, float* y) {
  int n = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y; float v = 0;
  if (n >= N) return;
  for (int k = 0; k < K; k++) v += __bfloat162float(x[(size_t)r * K + k]) * __bfloat162float(w[(size_t)n * K + k]);
  y[(size_t)r * N + n] = v;
}
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode;
static CUtensorMap map_of(void* p, int rows, int box_rows) {
  CUtensorMap m; cuuint64_t dims[2] = {(cuuint64_t)K, (cuuint64_t)rows}, strides[1] = {K * 2}; cuuint32_t box[2] = {KS, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  CUresult e = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e) { printf("tensor map: %d\n", e); exit(1); }
  return m;
}
int main() {
  void* f = nullptr; cudaDriverEntryPointQueryResult q; CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q)); encode = (Encode)f;
  const int NW = 48, CL = 7;
  std::vector<__nv_bfloat16> hx((size_t)CL * ROWS * K), hw((size_t)NW * N * K);
  uint32_t g = 1; auto rnd = [&] { g = g * 1664525u + 1013904223u; return (float)(int)(g >> 8) / (1 << 23) - 1.f; };
  for (auto& v : hx) v = __float2bfloat16(rnd()); for (auto& v : hw) v = __float2bfloat16(rnd() / 32);
  __nv_bfloat16 *x, *w, *y; float* ref; CK(cudaMalloc(&x, hx.size() * 2)); CK(cudaMalloc(&w, hw.size() * 2)); CK(cudaMalloc(&y, (size_t)CL * ROWS * N * 2)); CK(cudaMalloc(&ref, ROWS * N * 4));
  CK(cudaMemcpy(x, hx.data(), hx.size() * 2, cudaMemcpyHostToDevice)); CK(cudaMemcpy(w, hw.data(), hw.size() * 2, cudaMemcpyHostToDevice));
  CUtensorMap *xm, *wm; CK(cudaMalloc(&xm, CL * sizeof(CUtensorMap))); CK(cudaMalloc(&wm, NW * sizeof(CUtensorMap)));
  cudaStream_t st; CK(cudaStreamCreate(&st)); cudaEvent_t e0, e1; CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
  struct Way { const char* name; void* kernel; };
#define W(n, m) {n, (void*)product<m>}
  Way ways[] = {W("nothing", 0), W("rows and weights, each block all rows", MMA | WEIGHTS | ROWS_IN | STORE), W("rows to all blocks at once", MULTICAST | MMA | WEIGHTS | ROWS_IN | STORE), W(" without products", MULTICAST | WEIGHTS | ROWS_IN),
                W(" weights only", MULTICAST | WEIGHTS), W(" rows only", MULTICAST | ROWS_IN), W(" rows only, products", MULTICAST | ROWS_IN | MMA | STORE), W(" no loads but one slice", 0)};
  for (int rows : {176, 44, 88, 192}) {
    std::vector<CUtensorMap> hxm(CL), hwm(NW);
    for (int i = 0; i < CL; i++) hxm[i] = map_of(x + (size_t)i * ROWS * K, rows, 8);
    for (int i = 0; i < NW; i++) hwm[i] = map_of(w + (size_t)i * N * K, N, NC);
    CK(cudaMemcpy(xm, hxm.data(), CL * sizeof(CUtensorMap), cudaMemcpyHostToDevice)); CK(cudaMemcpy(wm, hwm.data(), NW * sizeof(CUtensorMap), cudaMemcpyHostToDevice));
    for (auto& way : ways) {
      if (way.name[1] == 'n') continue;
      if (rows != 176 && way.name[0] == ' ') continue;
      CK(cudaFuncSetAttribute(way.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(Smem) + 1024)); CK(cudaFuncSetAttribute(way.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      printf("%3d rows %-40s", rows, way.name);
      for (int clusters : {1, 7}) for (int nw : {1, NW}) {
        auto launch = [&](int i) {
          cudaLaunchConfig_t c = {}; c.gridDim = clusters * C; c.blockDim = 416; c.dynamicSmemBytes = sizeof(Smem) + 1024; c.stream = st;
          cudaLaunchAttribute a[1]; a[0].id = cudaLaunchAttributeClusterDimension; a[0].val.clusterDim.x = C; a[0].val.clusterDim.y = a[0].val.clusterDim.z = 1; c.attrs = a; c.numAttrs = 1;
          int first = i * clusters % nw, n_w = nw, r = rows; void* args[] = {&xm, &wm, &first, &n_w, &y, &r}; CK(cudaLaunchKernelExC(&c, way.kernel, args));
        };
        CK(cudaMemset(y, 0, (size_t)CL * ROWS * N * 2)); launch(0); CK(cudaStreamSynchronize(st));
        if (clusters == 7 && nw == NW && way.name[0] == 'r') {
          double worst = 0;
          for (int cl = 0; cl < 7; cl++) {
            reference<<<dim3((N + 127) / 128, rows), 128, 0, st>>>(x + (size_t)cl * ROWS * K, w + (size_t)cl * N * K, ref); CK(cudaStreamSynchronize(st));
            std::vector<float> hr(rows * N); std::vector<__nv_bfloat16> hy(rows * N); CK(cudaMemcpy(hr.data(), ref, hr.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(hy.data(), y + (size_t)cl * rows * N, hy.size() * 2, cudaMemcpyDeviceToHost));
            double num = 0, den = 0; for (size_t i = 0; i < hr.size(); i++) { double v = __bfloat162float(hy[i]) - hr[i]; num += v * v; den += (double)hr[i] * hr[i]; }
            worst = fmax(worst, sqrt(num / den));
          }
          printf("  error %.1e", worst);
        }
        cudaGraph_t gr; cudaGraphExec_t ex; CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal)); for (int i = 0; i < 192; i++) launch(i); CK(cudaStreamEndCapture(st, &gr)); CK(cudaGraphInstantiate(&ex, gr, 0));
        float best = 1e9; for (int t = 0; t < 6; t++) { CK(cudaEventRecord(e0, st)); CK(cudaGraphLaunch(ex, st)); CK(cudaEventRecord(e1, st)); CK(cudaEventSynchronize(e1)); float ms; CK(cudaEventElapsedTime(&ms, e0, e1)); if (ms < best) best = ms; }
        printf("  %d cl %2d w %6.2f us", clusters, nw, best * 1e3 / 192); CK(cudaGraphExecDestroy(ex)); CK(cudaGraphDestroy(gr));
      }
      printf("\n"); fflush(stdout);
    }
  }
}
