/* SPDX-License-Identifier: Apache-2.0 */
/* An example of a kernel that uses heddle_device.cuh: sums that go round a ring of GPUs.
 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "heddle.h"
#include "heddle_device.cuh"

/*
 * Every rank has a vector. In round n a rank puts what came in round n - 1 to the next
 * one and adds what comes from the one before: after R - 1 rounds all have the sum. Two
 * places alternate: who waits for round n knows that its neighbour has read round n - 2,
 * since that sent round n - 1 on only then. With one GPU, ranks are blocks of it. Under a
 * launcher each rank is a process, and gets the others' addresses from the library.
 */
enum { MOST = 8, COUNT = 5000, THREADS = 256, TURNS = 200 };

struct rank_memory {
    uint32_t place[2][COUNT];
    uint32_t sum[COUNT];
    uint64_t flag; /* rounds that came */
    uint64_t read; /* rounds that the next rank has read */
};

struct ring {
    rank_memory *rank[MOST];
    int ranks, first; /* of the block 0 of this launch */
};

static __global__ void sum_ring(ring r, uint32_t *bad)
{
    const int me = r.first + (int)blockIdx.x;
    const int before = (me + r.ranks - 1) % r.ranks, after = (me + 1) % r.ranks;
    rank_memory *own = r.rank[me];
    uint64_t round = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = threadIdx.x; i < COUNT; i += THREADS)
            own->sum[i] = (uint32_t)(me * 1000 + i + turn);
        __syncthreads();
        for (int step = 1; step < r.ranks; step++) {
            const uint32_t *from = step == 1 ? own->sum : own->place[round & 1];
            round++;
            /* The next rank is done with this place. */
            if (round > 2 && !hdl_device_wait(&own->read, round - 2, 1000000000))
                goto late;
            hdl_device_put(r.rank[after]->place[round & 1], from, COUNT * 4);
            hdl_device_signal(&r.rank[after]->flag, round);
            if (!hdl_device_wait(&own->flag, round, 1000000000))
                goto late;
            for (int i = threadIdx.x; i < COUNT; i += THREADS)
                own->sum[i] += own->place[round & 1][i];
            /* What is passed on is read in the next round; then it may be written over.
             */
            if (round > 1)
                hdl_device_signal(&r.rank[before]->read, round - 1);
        }
        for (int i = threadIdx.x; i < COUNT; i += THREADS) {
            uint32_t want =
                (uint32_t)(r.ranks * (r.ranks - 1) / 2 * 1000 + r.ranks * (i + turn));
            if (own->sum[i] != want)
                atomicAdd(bad, 1);
        }
        __syncthreads();
    }
    return;
late:
    if (threadIdx.x == 0)
        atomicAdd(bad, 1u << 30);
}

#define CHECK(x)                                                                         \
    do {                                                                                 \
        cudaError_t e_ = (x);                                                            \
        if (e_ != cudaSuccess) {                                                         \
            fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #x,                    \
                    cudaGetErrorString(e_));                                             \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

/* Ranks of this process: one on each GPU, or four blocks of the only one. */
static uint32_t run_alone(int gpus, int *ranks)
{
    uint32_t *bad[MOST], all = 0;
    ring r = {};
    gpus = gpus < MOST ? gpus : MOST;
    r.ranks = *ranks = gpus > 1 ? gpus : 4;
    for (int i = 0; i < r.ranks; i++) {
        CHECK(cudaSetDevice(i % gpus));
        for (int j = 0; j < gpus; j++)
            if (i < gpus && j != i)
                CHECK(cudaDeviceEnablePeerAccess(j, 0));
        CHECK(cudaMalloc((void **)&r.rank[i], sizeof(rank_memory)));
        CHECK(cudaMemset(r.rank[i], 0, sizeof(rank_memory)));
        CHECK(cudaMalloc((void **)&bad[i], sizeof(uint32_t)));
        CHECK(cudaMemset(bad[i], 0, sizeof(uint32_t)));
        CHECK(cudaDeviceSynchronize());
    }
    const int launches = gpus > 1 ? gpus : 1, blocks = r.ranks / launches;
    for (int i = 0; i < launches; i++) {
        CHECK(cudaSetDevice(i));
        r.first = i * blocks;
        sum_ring<<<blocks, THREADS>>>(r, bad[i]);
        CHECK(cudaGetLastError());
    }
    for (int i = 0; i < launches; i++) {
        uint32_t n;
        CHECK(cudaSetDevice(i));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(&n, bad[i], sizeof(n), cudaMemcpyDeviceToHost));
        all += n;
    }
    return all;
}

#define NEED(x)                                                                          \
    do {                                                                                 \
        if ((x) != HDL_OK) {                                                             \
            fprintf(stderr, "%s: %s\n", #x, hdl_error_detail());                         \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

/* The memory of each rank is a window that the others open. */
static uint32_t run_as_rank(hdl_context *context, hdl_group *group, ring r)
{
    static char packed[MOST][HDL_WINDOW_HANDLE_BYTES];
    char own[HDL_WINDOW_HANDLE_BYTES] = {};
    size_t length = sizeof(own);
    hdl_window *window;
    hdl_peer_window *peer[MOST];
    uint32_t *bad, n;
    CHECK(cudaMalloc((void **)&bad, sizeof(*bad)));
    CHECK(cudaMemset(bad, 0, sizeof(*bad)));
    CHECK(cudaMalloc((void **)&r.rank[r.first], sizeof(rank_memory)));
    CHECK(cudaMemset(r.rank[r.first], 0, sizeof(rank_memory)));
    CHECK(cudaDeviceSynchronize());
    NEED(hdl_window_adopt(context, r.rank[r.first], sizeof(rank_memory), &window));
    NEED(hdl_window_pack(window, own, &length));
    NEED(hdl_allgather(group, own, packed, sizeof(own), HDL_U8, NULL, NULL));
    for (int i = 0; i < r.ranks; i++) {
        NEED(hdl_window_open(context, packed[i], sizeof(own), &peer[i]));
        r.rank[i] = (rank_memory *)hdl_peer_window_map(peer[i]);
    }
    sum_ring<<<1, THREADS>>>(r, bad);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&n, bad, sizeof(n), cudaMemcpyDeviceToHost));
    for (int i = 0; i < r.ranks; i++)
        hdl_window_close(peer[i]);
    /* The memory must stay until all have closed it. */
    NEED(hdl_barrier(group, NULL, NULL));
    hdl_window_destroy(window);
    CHECK(cudaFree(bad));
    CHECK(cudaFree(r.rank[r.first]));
    return n;
}

/* A process for each rank, as `heddle run` starts them. */
static uint32_t run_processes(int gpus, int *ranks)
{
    hdl_context *context;
    hdl_group *group;
    NEED(hdl_context_create(NULL, &context));
    NEED(hdl_group_create(context, NULL, &group));
    ring r = {};
    r.first = hdl_group_rank(group);
    r.ranks = *ranks = hdl_group_size(group);
    if (r.ranks > MOST) {
        fprintf(stderr, "%d ranks, at most %d\n", r.ranks, MOST);
        exit(1);
    }
    CHECK(cudaSetDevice(r.first % gpus));
    const uint32_t wrong = run_as_rank(context, group, r);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return wrong;
}

int main(void)
{
    const bool processes = getenv("RANK") != NULL;
    int gpus = 0, ranks;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    const uint32_t wrong =
        processes ? run_processes(gpus, &ranks) : run_alone(gpus, &ranks);
    printf("ring of %d ranks %son %d GPUs: %d sums, %u wrong\n", ranks,
           processes ? "and processes " : "", gpus, TURNS, wrong);
    return wrong != 0;
}
