/* SPDX-License-Identifier: Apache-2.0 */
/* Times of the mapped engine with forked ranks, without the layers below and above. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "harness.h"

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void once(struct hdl_group *g, const char *op, char *src, char *dst, size_t bytes)
{
    enum hdl_status status = HDL_OK;
    int32_t rank = hdl_group_rank(g), size = hdl_group_size(g);
    if (!strcmp(op, "allreduce"))
        status = hdl_allreduce(g, src, dst, bytes / 4, HDL_F32, HDL_SUM, NULL, NULL);
    else if (!strcmp(op, "inplace"))
        status = hdl_allreduce(g, dst, dst, bytes / 4, HDL_F32, HDL_SUM, NULL, NULL);
    else if (!strcmp(op, "barrier"))
        status = hdl_barrier(g, NULL, NULL);
    else if (!strcmp(op, "broadcast"))
        status = hdl_broadcast(g, src, dst, bytes, HDL_U8, 0, NULL, NULL);
    else if (!strcmp(op, "allgather"))
        status = hdl_allgather(g, src, dst, bytes / (size_t)size, HDL_U8, NULL, NULL);
    else if (!strcmp(op, "alltoall"))
        status = hdl_alltoall(g, src, dst, bytes / (size_t)size, HDL_U8, NULL, NULL);
    else if (!strcmp(op, "sendrecv")) {
        if (rank == 0) {
            CHECK(hdl_send(g, src, bytes, HDL_U8, 1, 7, NULL, NULL) == HDL_OK);
            status = hdl_recv(g, dst, bytes, HDL_U8, 1, 7, NULL, NULL);
        } else if (rank == 1) {
            CHECK(hdl_recv(g, dst, bytes, HDL_U8, 0, 7, NULL, NULL) == HDL_OK);
            status = hdl_send(g, src, bytes, HDL_U8, 0, 7, NULL, NULL);
        }
    }
    CHECK(status == HDL_OK);
}

static void measure(struct hdl_group *g, const char *op, size_t bytes, int iters)
{
    char *src = aligned_alloc(4096, bytes + 4096),
         *dst = aligned_alloc(4096, bytes + 4096);
    double *us = malloc(sizeof(double) * (size_t)iters);
    memset(src, 1, bytes + 4096);
    memset(dst, 0, bytes + 4096);
    int batch = bytes <= 4096 ? 100 : 1;
    for (int i = 0; i < 5; i++)
        once(g, op, src, dst, bytes);
    for (int i = 0; i < iters; i++) {
        int64_t t = base_now_ns();
        for (int k = 0; k < batch; k++)
            once(g, op, src, dst, bytes);
        us[i] = (double)(base_now_ns() - t) / 1e3 / batch;
        if (!strcmp(op, "sendrecv"))
            us[i] /= 2;
    }
    qsort(us, (size_t)iters, sizeof(double), compare);
    if (hdl_group_rank(g) == 0)
        printf("%-10s %2d ranks %9zu B  min %9.2f  p50 %9.2f  p99 %9.2f us\n", op,
               hdl_group_size(g), bytes, us[0], us[iters / 2], us[iters * 99 / 100]);
    fflush(stdout);
    free(src);
    free(dst);
    free(us);
}

int main(int argc, char **argv)
{
    uint32_t n = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    static struct harness h;
    harness_init(&h, n, n, 16, 256 * 1024);
    volatile int *flags = (volatile int *)(h.memory + 2048);
    for (uint32_t r = 0; r < n; r++) {
        if (fork() != 0)
            continue;
        harness_open_rank(&h, r);
        struct hdl_group *g = h.ranks[r].group;
        __atomic_fetch_add((int *)flags, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n((int *)flags, __ATOMIC_SEQ_CST) < (int)n)
            sched_yield();
        harness_connect_rank(&h, r);
        for (int a = 2; a + 2 < argc; a += 3)
            measure(g, argv[a], (size_t)atol(argv[a + 1]), atoi(argv[a + 2]));
        hdl_barrier(g, NULL, NULL) == HDL_OK ? (void)0 : abort();
        _exit(0);
    }
    int bad = 0, status;
    while (wait(&status) > 0)
        bad |= status;
    return bad != 0;
}
