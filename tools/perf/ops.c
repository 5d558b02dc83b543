/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes, calls, data patterns and checks of the measured operations. */
#include "tools/perf/ops.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PERF_ROOT = 0, PERF_TAG = 7, PERF_ALIGN = 4096 };

/* ------------------------------------------------------------------------ patterns */

static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    return value ^ (value >> 29);
}

/* Eight bytes at place `word` of a rank's input. */
static uint64_t pattern_word(int rank, size_t word)
{
    return mix(word + 1 + ((uint64_t)(rank + 1) << 44));
}

static unsigned char pattern_byte(int rank, size_t place)
{
    return (unsigned char)(pattern_word(rank, place / 8) >> (8 * (place % 8)));
}

static size_t wrong_bytes(const unsigned char *got, size_t bytes, int rank, size_t place)
{
    size_t wrong = 0;
    for (size_t i = 0; i < bytes;) {
        size_t at = place + i;
        if (at % 8 == 0 && bytes - i >= 8) {
            uint64_t word;
            memcpy(&word, got + i, 8);
            wrong += word == pattern_word(rank, at / 8) ? 0 : 8;
            i += 8;
        } else {
            wrong += got[i] == pattern_byte(rank, at) ? 0 : 1;
            i++;
        }
    }
    return wrong;
}

/* Small whole numbers: their sums are exact in f32 for thousands of ranks. */
static float sum_term(size_t place)
{
    return (float)(mix(place + 1) % 1021);
}

static size_t wrong_sums(const unsigned char *got, size_t count, int ranks, size_t place)
{
    size_t wrong = 0;
    float tail = (float)(ranks * (ranks - 1) / 2);
    for (size_t i = 0; i < count; i++) {
        float value;
        memcpy(&value, got + 4 * i, 4);
        wrong += value == (float)ranks * sum_term(place + i) + tail ? 0 : 1;
    }
    return wrong;
}

/* -------------------------------------------------------------------------- calls */

static enum hdl_status call_allreduce(struct perf_run *run)
{
    return hdl_allreduce(run->group, run->src, run->dst, run->count, run->dtype, HDL_SUM,
                         NULL, run->handle);
}

static enum hdl_status call_broadcast(struct perf_run *run)
{
    return hdl_broadcast(run->group, run->src, run->dst, run->count, run->dtype,
                         PERF_ROOT, NULL, run->handle);
}

static enum hdl_status call_reduce(struct perf_run *run)
{
    return hdl_reduce(run->group, run->src, run->dst, run->count, run->dtype, HDL_SUM,
                      PERF_ROOT, NULL, run->handle);
}

static enum hdl_status call_allgather(struct perf_run *run)
{
    return hdl_allgather(run->group, run->src, run->dst, run->count, run->dtype, NULL,
                         run->handle);
}

static enum hdl_status call_reducescatter(struct perf_run *run)
{
    return hdl_reduce_scatter(run->group, run->src, run->dst, run->count, run->dtype,
                              HDL_SUM, NULL, run->handle);
}

static enum hdl_status call_alltoall(struct perf_run *run)
{
    return hdl_alltoall(run->group, run->src, run->dst, run->count, run->dtype, NULL,
                        run->handle);
}

static enum hdl_status call_gather(struct perf_run *run)
{
    return hdl_gather(run->group, run->src, run->dst, run->count, run->dtype, PERF_ROOT,
                      NULL, run->handle);
}

static enum hdl_status call_scatter(struct perf_run *run)
{
    return hdl_scatter(run->group, run->src, run->dst, run->count, run->dtype, PERF_ROOT,
                       NULL, run->handle);
}

static enum hdl_status call_barrier(struct perf_run *run)
{
    return hdl_barrier(run->group, NULL, run->handle);
}

/* Every rank sends to the next and receives from the one before, both at once. */
static enum hdl_status call_sendrecv(struct perf_run *run)
{
    int next = (run->rank + 1) % run->ranks;
    int before = (run->rank + run->ranks - 1) % run->ranks;
    struct hdl_op *op;
    enum hdl_status status = hdl_recv(run->group, run->dst, run->count, run->dtype,
                                      before, PERF_TAG, NULL, &op);
    if (status != HDL_OK)
        return status;
    enum hdl_status sent = hdl_send(run->group, run->src, run->count, run->dtype, next,
                                    PERF_TAG, NULL, NULL);
    status = hdl_op_wait(op, HDL_FOREVER);
    hdl_op_free(op);
    return sent != HDL_OK ? sent : status;
}

/* There and back between ranks 0 and 1; the others look on. */
static enum hdl_status call_pingpong(struct perf_run *run)
{
    if (run->rank > 1 || run->ranks < 2)
        return HDL_OK;
    enum hdl_status status = HDL_OK;
    if (run->rank == 0)
        status = hdl_send(run->group, run->src, run->count, run->dtype, 1, PERF_TAG, NULL,
                          NULL);
    if (status == HDL_OK)
        status = hdl_recv(run->group, run->dst, run->count, run->dtype, !run->rank,
                          PERF_TAG, NULL, NULL);
    if (status == HDL_OK && run->rank == 1)
        status = hdl_send(run->group, run->src, run->count, run->dtype, 0, PERF_TAG, NULL,
                          NULL);
    return status;
}

/* ------------------------------------------------------------------------- checks */

static size_t check_allreduce(const struct perf_run *run)
{
    return wrong_sums(run->dst, run->count, run->ranks, 0);
}

static size_t check_reduce(const struct perf_run *run)
{
    return run->rank == PERF_ROOT ? check_allreduce(run) : 0;
}

static size_t check_reducescatter(const struct perf_run *run)
{
    return wrong_sums(run->dst, run->count, run->ranks, run->count * (size_t)run->rank);
}

static size_t check_broadcast(const struct perf_run *run)
{
    return wrong_bytes(run->dst, run->block, PERF_ROOT, 0);
}

static size_t check_allgather(const struct perf_run *run)
{
    size_t wrong = 0;
    for (int rank = 0; rank < run->ranks; rank++)
        wrong += wrong_bytes(run->dst + run->block * (size_t)rank, run->block, rank, 0);
    return wrong;
}

static size_t check_gather(const struct perf_run *run)
{
    return run->rank == PERF_ROOT ? check_allgather(run) : 0;
}

static size_t check_alltoall(const struct perf_run *run)
{
    size_t wrong = 0;
    for (int rank = 0; rank < run->ranks; rank++)
        wrong += wrong_bytes(run->dst + run->block * (size_t)rank, run->block, rank,
                             run->block * (size_t)run->rank);
    return wrong;
}

static size_t check_scatter(const struct perf_run *run)
{
    return wrong_bytes(run->dst, run->block, PERF_ROOT, run->block * (size_t)run->rank);
}

static size_t check_sendrecv(const struct perf_run *run)
{
    return wrong_bytes(run->dst, run->block, (run->rank + run->ranks - 1) % run->ranks,
                       0);
}

static size_t check_pingpong(const struct perf_run *run)
{
    return run->rank > 1 || run->ranks < 2
               ? 0
               : wrong_bytes(run->dst, run->block, !run->rank, 0);
}

static size_t check_nothing(const struct perf_run *run)
{
    (void)run;
    return 0;
}

/* ------------------------------------------------------------------------- table */

static double factor_allreduce(int ranks)
{
    return 2.0 * (ranks - 1) / ranks;
}

static double factor_others(int ranks)
{
    return (double)(ranks - 1) / ranks;
}

static double factor_one(int ranks)
{
    (void)ranks;
    return 1;
}

static const struct perf_op ops[] = {
    {"allreduce", "all_reduce", false, true, true, 1, factor_allreduce, call_allreduce,
     check_allreduce},
    {"broadcast", "broadcast", false, false, true, 1, factor_one, call_broadcast,
     check_broadcast},
    {"reduce", "reduce", false, true, true, 1, factor_one, call_reduce, check_reduce},
    {"allgather", "all_gather", true, false, true, 1, factor_others, call_allgather,
     check_allgather},
    {"reducescatter", "reduce_scatter", true, true, true, 1, factor_others,
     call_reducescatter, check_reducescatter},
    {"alltoall", "all_to_all", true, false, true, 1, factor_others, call_alltoall,
     check_alltoall},
    {"gather", "gather", true, false, true, 1, factor_others, call_gather, check_gather},
    {"scatter", "scatter", true, false, true, 1, factor_others, call_scatter,
     check_scatter},
    {"barrier", "barrier", false, false, false, 1, factor_one, call_barrier,
     check_nothing},
    {"sendrecv", NULL, false, false, true, 1, factor_one, call_sendrecv, check_sendrecv},
    {"pingpong", NULL, false, false, true, 2, factor_one, call_pingpong, check_pingpong},
};

const struct perf_op *perf_op_find(const char *name)
{
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
        if (strcmp(ops[i].name, name) == 0)
            return &ops[i];
    return NULL;
}

void perf_op_names(char *room, size_t length)
{
    size_t used = 0;
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]) && used < length; i++)
        used += (size_t)snprintf(room + used, length - used, "%s%s", i ? ", " : "",
                                 ops[i].name);
}

/* ------------------------------------------------------------------------ buffers */

static void shape(struct perf_run *run, size_t bytes)
{
    const struct perf_op *op = run->op;
    size_t ranks = (size_t)run->ranks;
    size_t unit = op->reduces ? 4 : 1;
    size_t share = op->blocks ? bytes / ranks : bytes;
    if (!op->has_data)
        share = 0;
    else if (bytes > 0 && share < unit)
        share = unit;
    run->count = share / unit;
    run->block = run->count * unit;
    run->bytes = op->blocks ? run->block * ranks : run->block;
    run->dtype = op->reduces ? HDL_F32 : HDL_U8;
    run->src_bytes = run->dst_bytes = run->block;
    if (op->call == call_allgather || op->call == call_gather)
        run->dst_bytes *= ranks;
    if (op->call == call_reducescatter || op->call == call_scatter)
        run->src_bytes *= ranks;
    if (op->call == call_alltoall) {
        run->src_bytes *= ranks;
        run->dst_bytes *= ranks;
    }
}

static void place_buffers(struct perf_run *run)
{
    size_t own = run->block * (size_t)run->rank;
    size_t room = (run->src_bytes + PERF_ALIGN - 1) / PERF_ALIGN * PERF_ALIGN;
    run->src = run->memory;
    run->dst = run->memory + room;
    if (!run->in_place)
        return;
    if (run->op->call == call_allreduce || run->op->call == call_reduce ||
        run->op->call == call_broadcast || run->op->call == call_alltoall)
        run->dst = run->src;
    else if (run->op->call == call_allgather)
        run->src = run->dst + own;
    else if (run->op->call == call_reducescatter)
        run->dst = run->src + own;
}

bool perf_run_open(struct perf_run *run, size_t bytes)
{
    /* So that no sum of blocks wraps. */
    if (bytes > PTRDIFF_MAX / 4 / (size_t)run->ranks)
        return false;
    shape(run, bytes);
    size_t total =
        (run->src_bytes + run->dst_bytes + 4 * PERF_ALIGN) / PERF_ALIGN * PERF_ALIGN;
    run->memory = aligned_alloc(PERF_ALIGN, total);
    if (!run->memory)
        return false;
    memset(run->memory, 0, total);
    place_buffers(run);
    return true;
}

void perf_run_close(struct perf_run *run)
{
    free(run->memory);
    run->memory = NULL;
}

void perf_run_fill(struct perf_run *run)
{
    memset(run->dst, 0xa5, run->dst_bytes);
    if (run->op->reduces) {
        for (size_t i = 0; i < run->src_bytes / 4; i++) {
            float value = sum_term(i) + (float)run->rank;
            memcpy(run->src + 4 * i, &value, 4);
        }
        return;
    }
    for (size_t i = 0; i < run->src_bytes; i += 8) {
        uint64_t word = pattern_word(run->rank, i / 8);
        memcpy(run->src + i, &word, run->src_bytes - i < 8 ? run->src_bytes - i : 8);
    }
}

size_t perf_run_check(const struct perf_run *run)
{
    return run->op->check(run);
}

void perf_run_quiet(struct perf_run *run)
{
    memset(run->src, 0, run->src_bytes);
}
