/* SPDX-License-Identifier: Apache-2.0 */
/* Micro-benchmarks of what the MoE kernels stand on: stores to peers, whole packets,
 * polling. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * "exchange": every GPU writes `rows` rows to every peer and waits for the rows of every
 * peer, `iterations` times inside one kernel, with two halves and tags that grow. This is
 * the skeleton of the low-latency protocol, so its time is the floor of a step, and the
 * content of every packet is checked, so that a torn packet is counted.
 *
 *   LL16   packet of 16 B: 12 B data, 4 B tag         (one tag for each 16 B)
 *   LL128  line of 128 B: 120 B data, 8 B tag          (one tag for each 128 B)
 *   ...T   the same bytes, but written by the bulk copy engine out of shared memory
 */
enum proto { LL16, LL128, LL16T, LL128T };
enum { MAX_GPUS = 8, THREADS = 1024 };

#define CHECK(x)                                                                         \
    do {                                                                                 \
        cudaError_t e_ = (x);                                                            \
        if (e_ != cudaSuccess) {                                                         \
            fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #x,                    \
                    cudaGetErrorString(e_));                                             \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

struct peers {
    uint4 *base[MAX_GPUS];
    int me, n;
};

static __device__ uint64_t now_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ void st_sys(uint4 *p, uint4 v)
{
    asm volatile(
        "{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t; }" ::
            "l"(p),
        "l"((uint64_t)v.y << 32 | v.x), "l"((uint64_t)v.w << 32 | v.z)
        : "memory");
}

static __device__ uint4 ld_sys(const uint4 *p)
{
    uint64_t lo, hi;
    asm volatile(
        "{ .reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
        : "=l"(lo), "=l"(hi)
        : "l"(p)
        : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi,
                      (uint32_t)(hi >> 32));
}

static __device__ void bulk_store(void *dst, const void *smem, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"((uint32_t)__cvta_generic_to_shared(smem)), "r"(bytes)
                 : "memory");
}

static __device__ uint4 make_packet(int proto, uint32_t tag, uint32_t src, uint32_t index)
{
    uint32_t h = (tag * 2654435761u) ^ (index * 40503u) ^ (src << 28);
    uint4 v = make_uint4(h, h + 1, h + 2, tag);
    if ((proto == LL128 || proto == LL128T) && (index & 7) != 7)
        v.w = h + 3;
    return v;
}

/* One row to all peers, by the threads of a block. */
template <int PROTO>
static __device__ void send_row(const peers &p, size_t place, int packets, uint32_t tag,
                                uint32_t number)
{
    extern __shared__ __align__(128) uint4 stage[];
    if (PROTO == LL16 || PROTO == LL128) {
        for (int i = threadIdx.x; i < packets; i += blockDim.x) {
            uint4 v = make_packet(PROTO, tag, p.me, number + i);
            for (int d = 1; d < p.n; d++)
                st_sys(p.base[(p.me + d) % p.n] + place + i, v);
        }
        return;
    }
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncthreads();
    for (int i = threadIdx.x; i < packets; i += blockDim.x)
        stage[i] = make_packet(PROTO, tag, p.me, number + i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int d = 1; d < p.n; d++)
            bulk_store(p.base[(p.me + d) % p.n] + place, stage, packets * 16);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}

/* Waits for a packet of each lane of a warp; false = the time is over. */
template <int PROTO>
static __device__ bool await_packet(const uint4 *slot, uint32_t tag, uint64_t until,
                                    uint32_t backoff, uint4 *v)
{
    for (uint32_t n = 1;; n++) {
        *v = ld_sys(slot);
        uint32_t got = v->w;
        if (PROTO == LL128 || PROTO == LL128T)
            got = __shfl_sync(0xffffffffu, v->w, (threadIdx.x & 31) | 7);
        if (__all_sync(0xffffffffu, got == tag))
            return true;
        if (backoff)
            __nanosleep(backoff);
        if ((n & 1023) == 0 && __any_sync(0xffffffffu, now_ns() > until))
            return false;
    }
}

template <int PROTO>
static __device__ void exchange(const peers &p, int rows, int packets, int iterations,
                                uint64_t deadline_ns, uint32_t backoff,
                                unsigned long long *torn, uint32_t first_tag)
{
    const size_t half = (size_t)p.n * rows * packets;
    const uint64_t until = now_ns() + deadline_ns;
    for (int it = 0; it < iterations; it++) {
        const uint32_t tag = first_tag + (uint32_t)it;
        const size_t off = (tag & 1) * half;
        for (int r = blockIdx.x; r < rows; r += gridDim.x)
            send_row<PROTO>(p, off + ((size_t)p.me * rows + r) * packets, packets, tag,
                            r * packets);
        for (int r = blockIdx.x; r < rows; r += gridDim.x) {
            for (int i = threadIdx.x; i < packets * (p.n - 1); i += blockDim.x) {
                int s = (p.me + 1 + i / packets) % p.n, j = i % packets;
                uint4 v, w = make_packet(PROTO, tag, s, r * packets + j);
                if (!await_packet<PROTO>(p.base[p.me] + off +
                                             ((size_t)s * rows + r) * packets + j,
                                         tag, until, backoff, &v)) {
                    atomicAdd(torn + 1, 1ull);
                    return;
                }
                if (v.x != w.x || v.y != w.y || v.z != w.z || v.w != w.w)
                    atomicAdd(torn, 1ull);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#define EXCHANGE(name, PROTO)                                                            \
    __global__ void __launch_bounds__(THREADS, 1)                                        \
        name(peers p, int rows, int packets, int iterations, uint64_t deadline_ns,       \
             uint32_t backoff, unsigned long long *torn, uint32_t first_tag)             \
    {                                                                                    \
        exchange<PROTO>(p, rows, packets, iterations, deadline_ns, backoff, torn,        \
                        first_tag);                                                      \
    }
EXCHANGE(exchange_ll16, LL16)
EXCHANGE(exchange_ll128, LL128)
EXCHANGE(exchange_ll16t, LL16T)
EXCHANGE(exchange_ll128t, LL128T)

/* Stores only: mode 0 weak 16 B, 1 relaxed.sys 16 B, 2 bulk; every row goes to all peers.
 */
__global__ void __launch_bounds__(THREADS, 1)
    store_only(peers p, int mode, int rows, int row_vec, int repeat)
{
    extern __shared__ __align__(128) uint4 stage[];
    for (int i = threadIdx.x; i < row_vec; i += blockDim.x)
        stage[i] = make_uint4(i, 1, 2, 3);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    for (int k = 0; k < repeat; k++) {
        for (int r = blockIdx.x; r < rows; r += gridDim.x) {
            if (mode == 2) {
                if (threadIdx.x == 0) {
                    for (int d = 1; d < p.n; d++) {
                        int q = (p.me + d) % p.n;
                        bulk_store(p.base[q] + ((size_t)p.me * rows + r) * row_vec, stage,
                                   row_vec * 16);
                    }
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                    asm volatile("cp.async.bulk.wait_group 4;" ::: "memory");
                }
                continue;
            }
            for (int i = threadIdx.x; i < row_vec; i += blockDim.x) {
                uint4 v = make_uint4(i, r, k, p.me);
                for (int d = 1; d < p.n; d++) {
                    int q = (p.me + d) % p.n;
                    uint4 *dst = p.base[q] + ((size_t)p.me * rows + r) * row_vec + i;
                    if (mode == 0)
                        *dst = v;
                    else
                        st_sys(dst, v);
                }
            }
        }
    }
    if (mode == 2 && threadIdx.x == 0)
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Holds a stream until the host opens the gate, so that all GPUs start together. */
__global__ void gate_kernel(volatile uint32_t *gate, uint32_t want)
{
    uint64_t start = now_ns();
    while (*gate < want && now_ns() - start < 2000000000ull)
        ;
}

static int num_gpus;
static uint4 *arena[MAX_GPUS];
static cudaStream_t stream[MAX_GPUS];
static cudaEvent_t ev0[MAX_GPUS], ev1[MAX_GPUS];
static unsigned long long *torn[MAX_GPUS];
static uint32_t *gate_host, gate_value, next_tag = 1;
static const size_t arena_bytes = 512u << 20;

static void open_gate(void)
{
    *(volatile uint32_t *)gate_host = ++gate_value;
}

static float run_all(void (*launch)(int gpu, void *arg), void *arg)
{
    for (int g = 0; g < num_gpus; g++) {
        CHECK(cudaSetDevice(g));
        gate_kernel<<<1, 1, 0, stream[g]>>>(gate_host, gate_value + 1);
        CHECK(cudaEventRecord(ev0[g], stream[g]));
        launch(g, arg);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(ev1[g], stream[g]));
    }
    open_gate();
    float worst = 0;
    for (int g = 0; g < num_gpus; g++) {
        float ms;
        CHECK(cudaSetDevice(g));
        CHECK(cudaStreamSynchronize(stream[g]));
        CHECK(cudaEventElapsedTime(&ms, ev0[g], ev1[g]));
        worst = ms > worst ? ms : worst;
    }
    return worst;
}

struct exchange_arg {
    int proto, rows, packets, iterations, ctas;
    uint32_t backoff, tag;
};

static peers peers_of(int g)
{
    peers p;
    memset(&p, 0, sizeof p);
    for (int i = 0; i < num_gpus; i++)
        p.base[i] = arena[i];
    p.me = g;
    p.n = num_gpus;
    return p;
}

static void launch_exchange(int g, void *arg)
{
    struct exchange_arg *a = (struct exchange_arg *)arg;
    void (*kernel)(peers, int, int, int, uint64_t, uint32_t, unsigned long long *,
                   uint32_t) = a->proto == LL16    ? exchange_ll16
                               : a->proto == LL128 ? exchange_ll128
                               : a->proto == LL16T ? exchange_ll16t
                                                   : exchange_ll128t;
    kernel<<<a->ctas, THREADS, a->packets * 16, stream[g]>>>(
        peers_of(g), a->rows, a->packets, a->iterations, 8000000000ull, a->backoff,
        torn[g], a->tag);
}

struct store_arg {
    int mode, rows, row_vec, repeat, ctas, threads;
};

static void launch_store(int g, void *arg)
{
    struct store_arg *a = (struct store_arg *)arg;
    store_only<<<a->ctas, a->threads, a->row_vec * 16, stream[g]>>>(
        peers_of(g), a->mode, a->rows, a->row_vec, a->repeat);
}

static const char *proto_name[] = {"LL16", "LL128", "LL16T", "LL128T"};

static void bench_exchange(int proto, int rows, int packets, int iterations,
                           uint32_t backoff)
{
    struct exchange_arg a = {
        proto, rows, packets, iterations, rows < 132 ? rows : 132, backoff, next_tag};
    float ms = run_all(launch_exchange, &a);
    next_tag += (uint32_t)iterations + 2;
    unsigned long long bad[2] = {0, 0}, sum[2] = {0, 0};
    for (int g = 0; g < num_gpus; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaMemcpy(bad, torn[g], sizeof bad, cudaMemcpyDeviceToHost));
        CHECK(cudaMemset(torn[g], 0, sizeof bad));
        CHECK(cudaDeviceSynchronize());
        sum[0] += bad[0];
        sum[1] += bad[1];
    }
    double bytes = (double)rows * packets * 16 * (num_gpus - 1);
    printf("exchange %-6s rows %4d packets %4d backoff %3u: %8.2f us/iteration %6.1f "
           "GB/s torn %llu timeouts %llu (%g packets)\n",
           proto_name[proto], rows, packets, backoff, ms * 1e3 / iterations,
           bytes / (ms * 1e6 / iterations), sum[0], sum[1],
           (double)rows * packets * (num_gpus - 1) * num_gpus * iterations);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    int soak = argc > 1 ? atoi(argv[1]) : 20000;
    CHECK(cudaGetDeviceCount(&num_gpus));
    if (num_gpus > MAX_GPUS)
        num_gpus = MAX_GPUS;
    if (num_gpus < 2) {
        printf("skipped: %d GPUs\n", num_gpus);
        return 77;
    }
    CHECK(cudaHostAlloc(&gate_host, 4, cudaHostAllocPortable | cudaHostAllocMapped));
    *gate_host = 0;
    for (int g = 0; g < num_gpus; g++) {
        CHECK(cudaSetDevice(g));
        for (int q = 0; q < num_gpus; q++)
            if (q != g)
                CHECK(cudaDeviceEnablePeerAccess(q, 0));
        CHECK(cudaMalloc(&arena[g], arena_bytes));
        CHECK(cudaMemset(arena[g], 0, arena_bytes));
        CHECK(cudaMalloc(&torn[g], 16));
        CHECK(cudaMemset(torn[g], 0, 16));
        CHECK(cudaStreamCreateWithFlags(&stream[g], cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&ev0[g]));
        CHECK(cudaEventCreate(&ev1[g]));
        CHECK(cudaFuncSetAttribute(store_only,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
        CHECK(cudaDeviceSynchronize());
    }
    static const char *mode_name[] = {"weak", "sys", "bulk"};
    for (int mode = 0; mode < 3; mode++)
        for (int row = 528; row <= 1024; row += 496)
            for (int c = 0; c < 5; c++) {
                static const int ctas[] = {8, 16, 32, 64, 132};
                struct store_arg a = {mode, 1056, row, 8, ctas[c], 1024};
                run_all(launch_store, &a);
                float ms = run_all(launch_store, &a);
                double bytes = (double)a.rows * row * 16 * a.repeat * (num_gpus - 1);
                printf("store %-5s row %5d B ctas %3d: %6.1f GB/s a GPU\n",
                       mode_name[mode], row * 16, ctas[c], bytes / (ms * 1e6));
            }
    for (int proto = 0; proto < 4; proto++) {
        static const int rows[] = {1, 8, 32, 64, 115, 128, 230};
        for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++)
            bench_exchange(proto, rows[i], 512, 500, 0);
        for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++)
            bench_exchange(proto, rows[i], 1024, 500, 0);
    }
    for (int proto = 0; proto < 2; proto++)
        for (uint32_t b = 20; b <= 200; b *= 3)
            bench_exchange(proto, 115, 1024, 500, b);
    for (int proto = 0; proto < 4; proto++)
        bench_exchange(proto, 115, 512, soak, 0);
    return 0;
}
