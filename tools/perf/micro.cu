/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of `heddle perf --micro`: what those of an exchange stand on, each alone. */
#include <cooperative_groups.h>
#include <stdint.h>

#include "tools/perf/micro.h"

extern __shared__ __align__(128) uint4 stage[];

static __device__ uint64_t now_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ void store_sys(uint4 *p, uint4 v)
{
    asm volatile(
        "{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t; }" ::
            "l"(p),
        "l"((uint64_t)v.y << 32 | v.x), "l"((uint64_t)v.w << 32 | v.z)
        : "memory");
}

static __device__ uint4 load_sys(const uint4 *p)
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

static __device__ void store_bulk(void *to, const void *shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}

static __device__ void bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* What threads wrote to shared memory is there for the copy engine after the barrier. */
static __device__ void bulk_staged(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

/* Begins only when all ranks may: the host opens the gate once everything is queued. */
extern "C" __global__ void micro_gate(const volatile uint32_t *gate, uint32_t want)
{
    const uint64_t start = now_ns();
    while (*gate < want && now_ns() - start < 2000000000ull)
        ;
}

/* ----------------------------------------------------------------------------- stores */

static __device__ void store_row(const struct micro_store &a, uint32_t row)
{
    const uint32_t lane = threadIdx.x & 31;
    const size_t place = (size_t)row * a.vectors;
    if (a.way == MICRO_BULK) {
        if (lane)
            return;
        for (uint32_t d = 0; d < a.num_to; d++)
            store_bulk((uint4 *)a.to[d] + place, stage, a.vectors * 16);
        bulk_commit();
        asm volatile("cp.async.bulk.wait_group 4;" ::: "memory");
        return;
    }
#pragma unroll 4
    for (uint32_t i = lane; i < a.vectors; i += 32)
        for (uint32_t d = 0; d < a.num_to; d++) {
            uint4 *to = (uint4 *)a.to[d] + place + i;
            const uint4 v = make_uint4(i, 1, 2, 3);
            if (a.way == MICRO_WEAK)
                *to = v;
            else
                store_sys(to, v);
        }
}

extern "C" __global__ void __launch_bounds__(MICRO_THREADS, 1)
    micro_store(const __grid_constant__ struct micro_store a)
{
    const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32;
    for (uint32_t i = threadIdx.x; i < a.vectors; i += blockDim.x)
        stage[i] = make_uint4(i, 1, 2, 3);
    bulk_staged();
    for (uint32_t r = blockIdx.x * warps + warp; r < a.rows; r += gridDim.x * warps)
        store_row(a, r);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* --------------------------------------------------------------------------- exchange */

/*
 *   LL16   packet of 16 B: 12 B data, 4 B tag       (one tag for each 16 B)
 *   LL128  line of 128 B: 120 B data, 8 B tag        (one tag for each 128 B)
 */
template <bool LINES>
static __device__ uint4 make_packet(uint32_t tag, uint32_t source, uint32_t index)
{
    const uint32_t h = (tag * 2654435761u) ^ (index * 40503u) ^ (source << 28);
    return make_uint4(h, h + 1, h + 2, LINES && (index & 7) != 7 ? h + 3 : tag);
}

/* One row to all peers, by the threads of a block. */
template <bool LINES, bool BULK>
static __device__ void send_row(const struct micro_exchange &a, size_t place,
                                uint32_t tag, uint32_t number)
{
    if (BULK) {
        if (threadIdx.x == 0)
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < a.packets; i += blockDim.x) {
        const uint4 v = make_packet<LINES>(tag, a.me, number + i);
        if (BULK)
            stage[i] = v;
        for (uint32_t d = 1; !BULK && d < a.ranks; d++)
            store_sys((uint4 *)a.base[(a.me + d) % a.ranks] + place + i, v);
    }
    if (!BULK)
        return;
    bulk_staged();
    if (threadIdx.x == 0) {
        for (uint32_t d = 1; d < a.ranks; d++)
            store_bulk((uint4 *)a.base[(a.me + d) % a.ranks] + place, stage,
                       a.packets * 16);
        bulk_commit();
    }
}

/* Waits for a packet of each lane of a warp; false = the time is over. */
template <bool LINES>
static __device__ bool await_packet(const uint4 *slot, uint32_t tag, uint64_t until,
                                    uint32_t backoff, uint32_t *polls, uint4 *v)
{
    for (uint32_t n = 1;; n++) {
        *v = load_sys(slot);
        uint32_t got = v->w;
        if (LINES)
            got = __shfl_sync(0xffffffffu, v->w, (threadIdx.x & 31) | 7);
        *polls += 1;
        if (__all_sync(0xffffffffu, got == tag))
            return true;
        if (backoff)
            __nanosleep(backoff);
        if ((n & 1023) == 0 && __any_sync(0xffffffffu, now_ns() > until))
            return false;
    }
}

/* Row `row` of all others; false = the time is over. */
template <bool LINES>
static __device__ bool receive_row(const struct micro_exchange &a, size_t half,
                                   uint32_t row, uint32_t tag, uint64_t until,
                                   uint32_t *polls)
{
    struct micro_counters *counters = (struct micro_counters *)a.counters;
    for (uint32_t i = threadIdx.x; i < a.packets * (a.ranks - 1); i += blockDim.x) {
        const uint32_t source = (a.me + 1 + i / a.packets) % a.ranks, j = i % a.packets;
        const size_t place = half + ((size_t)source * a.rows + row) * a.packets + j;
        const uint4 want = make_packet<LINES>(tag, source, row * a.packets + j);
        uint4 v;
        if (!await_packet<LINES>((const uint4 *)a.base[a.me] + place, tag, until,
                                 a.backoff, polls, &v)) {
            atomicAdd((unsigned long long *)&counters->late, 1ull);
            return false;
        }
        if (v.x != want.x || v.y != want.y || v.z != want.z || v.w != want.w)
            atomicAdd((unsigned long long *)&counters->torn, 1ull);
    }
    return true;
}

/* The rows of a block of senders, time after time. */
template <bool LINES, bool BULK>
static __device__ void send_rows(const struct micro_exchange &a, size_t half,
                                 uint64_t until, uint32_t *polls)
{
    bool in_time = true;
    for (uint32_t n = 0; in_time && n < a.iterations; n++) {
        const uint32_t tag = a.first_tag + n;
        const size_t at = (tag & 1) * half;
        for (uint32_t r = blockIdx.x; r < a.rows; r += a.senders)
            send_row<LINES, BULK>(a, at + ((size_t)a.me * a.rows + r) * a.packets, tag,
                                  r * a.packets);
        for (uint32_t r = blockIdx.x; a.waits && r < a.rows; r += a.senders)
            in_time = in_time && receive_row<LINES>(a, at, r, tag, until, polls);
        in_time = __syncthreads_and(in_time);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <bool LINES, bool BULK>
static __device__ void exchange(const struct micro_exchange &a)
{
    const size_t half = (size_t)a.ranks * a.rows * a.packets;
    const uint64_t until = now_ns() + a.deadline_ns;
    const uint32_t last = a.first_tag + a.iterations - 1;
    uint32_t polls = 0;
    bool in_time = true;
    if (blockIdx.x < a.senders)
        send_rows<LINES, BULK>(a, half, until, &polls);
    else
        for (uint32_t r = blockIdx.x - a.senders; r < a.rows; r += gridDim.x - a.senders)
            in_time = in_time &&
                      receive_row<LINES>(a, (last & 1) * half, r, last, until, &polls);
    atomicAdd((unsigned long long *)&((struct micro_counters *)a.counters)->polls,
              (unsigned long long)polls);
}

#define EXCHANGE(name, LINES, BULK)                                                      \
    extern "C" __global__ void __launch_bounds__(MICRO_THREADS, 1)                       \
        name(const __grid_constant__ struct micro_exchange a)                            \
    {                                                                                    \
        exchange<LINES, BULK>(a);                                                        \
    }
EXCHANGE(micro_exchange_ll16, false, false)
EXCHANGE(micro_exchange_ll128, true, false)
EXCHANGE(micro_exchange_ll16_bulk, false, true)
EXCHANGE(micro_exchange_ll128_bulk, true, true)

/* ------------------------------------------------------------------------------- scan */

/* Every block reads the entries of all tokens, makes a set of tokens for each own expert,
 * and counts them. */
extern "C" __global__ void __launch_bounds__(MICRO_SCAN_THREADS)
    micro_scan(struct micro_scan a)
{
    uint32_t *sets = (uint32_t *)stage; /* [MICRO_EXPERTS][words] */
    const uint32_t words = (a.tokens + 31) / 32, warps = blockDim.x / 32;
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t i = threadIdx.x; i < words * MICRO_EXPERTS; i += blockDim.x)
        sets[i] = 0;
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < a.tokens; t += blockDim.x) {
        const uint4 v = ((const uint4 *)a.ids)[t];
        const uint32_t pairs[] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < MICRO_TOP_K; i++) {
            const uint32_t expert = (pairs[i / 2] >> i % 2 * 16 & 0xffff) - a.first;
            if (expert < MICRO_EXPERTS)
                atomicOr(&sets[expert * words + t / 32], 1u << (t & 31));
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x / 32; e < MICRO_EXPERTS; e += warps) {
        uint32_t count = 0;
        for (uint32_t i = lane; i < words; i += 32)
            count += __popc(sets[e * words + i]);
        count = __reduce_add_sync(0xffffffffu, count);
        if (lane == 0)
            ((uint32_t *)a.counts)[blockIdx.x * MICRO_EXPERTS + e] = count;
    }
}

/* ----------------------------------------------------------------------------- launch */

/* Does nothing; the next one may be launched as soon as this has begun, if its launch
 * says so. */
extern "C" __global__ void micro_empty(void)
{
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

extern "C" __global__ void micro_sync(uint32_t rounds)
{
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    for (uint32_t i = 0; i < rounds; i++)
        grid.sync();
}
