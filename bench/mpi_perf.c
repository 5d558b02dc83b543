/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The measurements of `heddle perf` over MPI: same operations, sizes, buffers and timing.
 *
 *     mpi_perf SECONDS OP,OP,... BYTES,BYTES,...
 *     mpi_perf first                 time and private memory after the first all_reduce
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"

enum { ITERS_MIN = 5, ITERS_MAX = 20000, WARM_SMALL = 100, WARM_LARGE = 3 };

static int rank, ranks;
static char *src, *dst;
static int block;

static void call_allreduce(void)
{
    MPI_Allreduce(MPI_IN_PLACE, dst, block / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void call_broadcast(void)
{
    MPI_Bcast(dst, block, MPI_BYTE, 0, MPI_COMM_WORLD);
}

static void call_allgather(void)
{
    MPI_Allgather(src, block, MPI_BYTE, dst, block, MPI_BYTE, MPI_COMM_WORLD);
}

static void call_alltoall(void)
{
    MPI_Alltoall(src, block, MPI_BYTE, dst, block, MPI_BYTE, MPI_COMM_WORLD);
}

static void call_barrier(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

static void call_pingpong(void)
{
    if (rank == 0) {
        MPI_Send(src, block, MPI_BYTE, 1, 7, MPI_COMM_WORLD);
        MPI_Recv(dst, block, MPI_BYTE, 1, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(dst, block, MPI_BYTE, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(src, block, MPI_BYTE, 0, 7, MPI_COMM_WORLD);
    }
}

static const struct op {
    const char *name;
    void (*call)(void);
    int blocks; /* bytes are the sum of the ranks' blocks */
    double halves;
} ops[] = {
    {"allreduce", call_allreduce, 0, 1}, {"broadcast", call_broadcast, 0, 1},
    {"allgather", call_allgather, 1, 1}, {"alltoall", call_alltoall, 1, 1},
    {"barrier", call_barrier, 0, 1},     {"pingpong", call_pingpong, 0, 2},
};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void time_calls(const struct op *op, int iters, double *us)
{
    double before = now_us(CLOCK_MONOTONIC);
    for (int i = 0; i < iters; i++) {
        op->call();
        double now = now_us(CLOCK_MONOTONIC);
        us[i] = (now - before) / op->halves;
        before = now;
    }
}

static int choose_iters(const struct op *op, size_t bytes, double seconds)
{
    double us[WARM_SMALL], mean = 0;
    int warm = bytes >= 1 << 20 ? WARM_LARGE : WARM_SMALL;
    time_calls(op, warm, us);
    for (int i = warm / 2; i < warm; i++)
        mean += us[i] * op->halves / (warm - warm / 2);
    double wanted = seconds * 1e6 / (mean > 0.01 ? mean : 0.01);
    int iters = wanted > ITERS_MAX   ? ITERS_MAX
                : wanted < ITERS_MIN ? ITERS_MIN
                                     : (int)wanted;
    MPI_Bcast(&iters, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return iters;
}

static void measure(const struct op *op, size_t bytes, double seconds)
{
    block = (int)(op->blocks ? bytes / (size_t)ranks : bytes);
    if (op->call == call_barrier)
        bytes = 0;
    else if (block == 0)
        block = 1;
    int iters = choose_iters(op, bytes, seconds);
    double *us = calloc((size_t)iters, sizeof(*us));
    if (!us)
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    time_calls(op, iters, us);
    MPI_Allreduce(MPI_IN_PLACE, us, iters, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(us, (size_t)iters, sizeof(*us), compare);
    if (rank == 0)
        printf("{\"op\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"iters\": %d, "
               "\"min_us\": %.3f, \"p50_us\": %.3f, \"p99_us\": %.3f}\n",
               op->name, ranks, bytes, iters, us[0], us[(iters - 1) / 2],
               us[(int)((iters - 1) * 0.99)]);
    fflush(stdout);
    free(us);
}

static void first(void)
{
    float value = 1;
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    printf("{\"rank\": %d, \"done_us\": %.0f, \"private_kib\": %ld}\n", rank,
           now_us(CLOCK_REALTIME), private_kib());
    fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void run(double seconds, char *names, const char *sizes)
{
    for (char *name = strtok(names, ","); name; name = strtok(NULL, ",")) {
        const struct op *op = NULL;
        for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
            op = strcmp(ops[i].name, name) == 0 ? &ops[i] : op;
        if (!op)
            MPI_Abort(MPI_COMM_WORLD, 2);
        for (const char *at = sizes; *at;
             at += strcspn(at, ",") + (at[strcspn(at, ",")] != 0)) {
            measure(op, (size_t)atol(at), seconds);
            if (op->call == call_barrier)
                break;
        }
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc == 2) {
        first();
    } else if (argc == 4) {
        size_t most = 0;
        for (const char *at = argv[3]; *at;
             at += strcspn(at, ",") + (at[strcspn(at, ",")] != 0))
            most = (size_t)atol(at) > most ? (size_t)atol(at) : most;
        src = aligned_alloc(4096, (most + 8191) / 4096 * 4096);
        dst = aligned_alloc(4096, (most + 8191) / 4096 * 4096);
        if (!src || !dst)
            MPI_Abort(MPI_COMM_WORLD, 1);
        memset(src, 0, most);
        memset(dst, 0, most);
        run(atof(argv[1]), argv[2], argv[3]);
    }
    MPI_Finalize();
    return 0;
}
