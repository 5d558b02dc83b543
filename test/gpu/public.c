/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of an exchange through the public calls, a process for each: what their programs
 * share. */
#include "public.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "moe/gpu_link.h"

struct gpu_process self;

_Noreturn void public_fail(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: rank %u: %s: %s\n", file, line, self.rank, what,
            hdl_error_detail());
    _exit(1);
}

double public_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void public_say(const char *what)
{
    if (self.rank == 0)
        printf("  %s\n", what);
    fflush(stdout);
}

void public_meet(void)
{
    OK(hdl_barrier(self.group, NULL, NULL));
}

/* ----------------------------------------------------------------------------- steps */

void public_set_active(const int32_t *active)
{
    CHECK(!self.cu->copy_in(self.active, active, self.ranks * sizeof(int32_t)));
    CHECK(!self.cu->stream_sync(NULL));
}

void public_get_active(int32_t *active)
{
    CHECK(!self.cu->copy_out(active, self.active, self.ranks * sizeof(int32_t)));
}

struct public_arguments public_arguments_of(const struct gpu_case *c, int64_t timeout_us)
{
    struct moe_gpu_tokens t = gpu_tokens_of(self.r, c, self.rank);
    struct moe_gpu_received d = gpu_received_of(self.w, self.r);
    struct moe_gpu_result o = gpu_result_of(self.w, self.r, c);
    struct public_arguments a = {
        .tokens = {.size = sizeof(a.tokens),
                   .rows = t.rows,
                   .topk_ids = t.ids,
                   .weights = t.weights,
                   .num_tokens = t.num_tokens,
                   .num_tokens_at = t.num_tokens_at},
        .received = {.size = sizeof(a.received),
                     .rows = d.rows,
                     .scales = d.scales,
                     .counts = d.counts,
                     .source_token = d.source_token,
                     .ranges = d.ranges,
                     .source_counts = d.source_counts,
                     .totals = d.totals},
        .outputs = {.size = sizeof(a.outputs), .rows = o.expert_out},
        .result = {.size = sizeof(a.result), .rows = o.rows, .missing = o.missing},
        .call = {.size = sizeof(a.call),
                 .active = (int32_t *)self.active,
                 .timeout_us = timeout_us,
                 .stream = self.r->stream}};
    return a;
}

void public_step(const struct gpu_case *c, int64_t timeout_us)
{
    struct public_arguments a = public_arguments_of(c, timeout_us);
    struct hdl_moe_handle handle;
    OK(hdl_moe_dispatch(self.moe, &a.tokens, &a.received, &a.call, &handle));
    OK(hdl_moe_combine(self.moe, &handle, &a.outputs, &a.result, &a.call));
    CHECK(hdl_moe_combine(self.moe, &handle, &a.outputs, &a.result, &a.call) ==
          HDL_ESTALE);
}

struct gpu_graph_exec *public_capture(const struct gpu_case *c, int64_t timeout_us)
{
    struct gpu_graph *graph;
    struct gpu_graph_exec *exec;
    CHECK(!self.cu->capture_begin(self.r->stream, GPU_CAPTURE_THREAD));
    public_step(c, timeout_us);
    CHECK(!self.cu->capture_end(self.r->stream, &graph));
    CHECK(!self.cu->graph_instantiate(&exec, graph, 0));
    self.cu->graph_destroy(graph);
    return exec;
}

void public_fill(const struct gpu_case *c, uint32_t without)
{
    int32_t active[MOE_GPU_MAX_RANKS];
    for (uint32_t r = 0; r < self.ranks; r++)
        active[r] = r != without || r == self.rank;
    CHECK(gpu_world_fill(self.w, c));
    public_set_active(active);
}

void public_compare(const struct gpu_case *c, uint32_t without)
{
    for (uint32_t r = 0; r < self.ranks; r++)
        self.w->present[r] = r != without;
    CHECK(gpu_world_fetch(self.r));
    int bad = gpu_world_compare(self.w, c, OF_BOTH);
    if (bad)
        fprintf(stderr, "rank %u: %d buffers differ, seed %u\n", self.rank, bad, c->seed);
    self.bad += bad != 0;
}

/* ------------------------------------------------------------------------- processes */

void public_join(bool joins)
{
    struct hdl_group_opts g = {
        .size = sizeof(g), .join = joins, .rank = (int32_t)self.rank};
    OK(hdl_context_create(NULL, &self.context));
    OK(hdl_group_create(self.context, &g, &self.group));
    if (joins)
        OK(hdl_group_join(self.group, 60000000, NULL));
}

void public_open(const struct hdl_moe_opts *opts)
{
    OK(hdl_moe_create(self.group, opts, &self.moe));
    self.w = calloc(1, sizeof(*self.w));
    self.w->apart = true;
    self.w->only = self.rank;
    self.w->adopted = self.moe->link->gpu;
    CHECK(gpu_world_open(self.w, opts, self.ranks, 1, 0));
    self.r = &self.w->rank[self.rank];
    self.cu = self.r->gpu->device.driver;
    OK(gpu_alloc(&self.r->gpu->device, MOE_GPU_MAX_RANKS * 4, &self.active));
    OK(gpu_enter(&self.r->gpu->device)); /* for the programs' own calls */
}

int public_close(void)
{
    public_meet();
    gpu_leave(&self.r->gpu->device);
    gpu_free(&self.r->gpu->device, self.active);
    gpu_world_close(self.w);
    hdl_moe_destroy(self.moe);
    hdl_group_destroy(self.group);
    hdl_context_destroy(self.context);
    return self.bad != 0;
}

uint32_t public_job(int gpus)
{
    static int jobs;
    const uint32_t ranks = gpus < 2 ? 2 : gpus > 8 ? 8 : (uint32_t)gpus;
    char text[80];
    snprintf(text, sizeof(text), "%u", ranks);
    setenv("WORLD_SIZE", text, 1);
    snprintf(text, sizeof(text), "127.0.0.1:%d", 20000 + (getpid() + jobs++) % 20000);
    setenv("HEDDLE_COORDINATOR", text, 1);
    memset(text, '7', 64);
    text[64] = 0;
    setenv("HEDDLE_TOKEN", text, 1);
    setenv("HEDDLE_INTERFACE", "lo", 1);
    return ranks;
}

pid_t public_start(uint32_t rank, uint32_t ranks, int gpus, unsigned limit_s,
                   int (*run)(bool joins), bool joins)
{
    char text[16];
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    snprintf(text, sizeof(text), "%d", (gpus - 1) - (int)rank % gpus);
    setenv("CUDA_VISIBLE_DEVICES", text, 1);
    snprintf(text, sizeof(text), "%u", rank);
    setenv("RANK", text, 1);
    alarm(limit_s);
    self.rank = rank;
    self.ranks = ranks;
    self.last = ranks - 1;
    exit(run(joins));
}
