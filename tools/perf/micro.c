/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf --micro`: what the GPU kernels of an exchange stand on, each thing alone.
 */
#include "tools/perf/micro.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/commands.h"
#include "tools/options.h"
#include "tools/perf/micro_bench.h"

#ifdef MICRO_FATBIN
#include "tools/micro_stamp.h"
GPU_EMBED(micro_image, MICRO_FATBIN)
static const unsigned char *const kernels = micro_image;
#else
static const unsigned char *const kernels = NULL;
#endif

/* ----------------------------------------------------------------------- ranks' memory
 */

static enum hdl_status open_rank(struct micro *m, struct micro_rank *r)
{
    const struct gpu_driver *cu = m->cu;
    enum hdl_status s = gpu_enter(r->device);
    if (s)
        return s;
    s = gpu_check(cu->module_load(&r->module, kernels), "cuModuleLoadData");
    if (!s)
        s = gpu_check(cu->stream_create(&r->stream, GPU_STREAM_NON_BLOCKING, 0),
                      "cuStreamCreateWithPriority");
    if (!s)
        s = gpu_check(cu->event_create(&r->begin, GPU_EVENT_TIMED), "cuEventCreate");
    if (!s)
        s = gpu_check(cu->event_create(&r->end, GPU_EVENT_TIMED), "cuEventCreate");
    gpu_leave(r->device);
    if (!s)
        s = gpu_alloc(r->device, sizeof(struct micro_counters), &r->counters);
    return s ? s
             : gpu_block_create(r->device, MICRO_REGION * MICRO_MAX_RANKS,
                                &r->block[r - m->rank]);
}

/* The memory of rank `owner` at an address of rank `r`. */
static enum hdl_status map(struct micro *m, struct micro_rank *r, int owner)
{
    struct micro_rank *o = &m->rank[owner];
    const struct gpu_block *own = &o->block[owner];
    int fd;
    r->at[owner] = own->address;
    if (r->device == o->device)
        return HDL_OK;
    enum hdl_status s = gpu_block_reserve(r->device, own->bytes, &r->block[owner]);
    if (!s)
        s = gpu_block_export(o->device, own, &fd);
    if (s)
        return s;
    s = gpu_block_import(r->device, fd, &r->block[owner]);
    close(fd);
    r->at[owner] = r->block[owner].address;
    return s;
}

static enum hdl_status open_all(struct micro *m, int gpus)
{
    void *gate;
    enum hdl_status s = HDL_OK;
    for (; s == HDL_OK && m->gpus < gpus; m->gpus++)
        s = gpu_device_open(&m->env, m->gpus, &m->device[m->gpus]);
    if (s != HDL_OK) {
        m->gpus--; /* the last one did not open */
        return s;
    }
    m->cu = m->device[0].driver;
    m->ranks = gpus == 1 ? 2 : gpus;
    for (int r = 0; s == HDL_OK && r < m->ranks; r++) {
        m->rank[r].device = &m->device[r % gpus];
        s = open_rank(m, &m->rank[r]);
    }
    for (int r = 0; s == HDL_OK && r < m->ranks; r++)
        for (int owner = 0; s == HDL_OK && owner < m->ranks; owner++)
            s = map(m, &m->rank[r], owner);
    if (s == HDL_OK)
        s = gpu_enter(&m->device[0]);
    if (s != HDL_OK)
        return s;
    s = gpu_check(m->cu->host_alloc(&gate, sizeof(*m->gate), GPU_HOST_PORTABLE_MAPPED),
                  "cuMemHostAlloc");
    gpu_leave(&m->device[0]);
    if (s == HDL_OK) {
        m->gate = gate;
        *m->gate = 0;
    }
    return s;
}

static void close_rank(struct micro *m, struct micro_rank *r)
{
    for (int owner = 0; owner < m->ranks; owner++)
        gpu_block_free(r->device, &r->block[owner]);
    gpu_free(r->device, r->counters);
    if (gpu_enter(r->device))
        return;
    if (r->begin)
        m->cu->event_destroy(r->begin);
    if (r->end)
        m->cu->event_destroy(r->end);
    if (r->stream)
        m->cu->stream_destroy(r->stream);
    if (r->module)
        m->cu->module_unload(r->module);
    gpu_leave(r->device);
}

static void close_all(struct micro *m)
{
    for (int r = 0; r < m->ranks; r++)
        if (m->rank[r].device)
            close_rank(m, &m->rank[r]);
    if (m->gate && gpu_enter(&m->device[0]) == HDL_OK) {
        m->cu->host_free((void *)m->gate);
        gpu_leave(&m->device[0]);
    }
    for (int i = 0; i < m->gpus; i++)
        gpu_device_close(&m->device[i]);
}

/* ---------------------------------------------------------------------------- launches
 */

enum hdl_status micro_kernel(const struct micro *m, int rank, const char *name,
                             uint32_t shared_bytes, struct gpu_function **function)
{
    enum hdl_status s =
        gpu_check(m->cu->module_function(function, m->rank[rank].module, name), name);
    return s ? s
             : gpu_check(m->cu->function_attribute(*function, GPU_FUNCTION_SHARED_BYTES,
                                                   (int)shared_bytes),
                         name);
}

static enum hdl_status queue(struct micro *m, int rank, const struct micro_work *work)
{
    const struct micro_rank *r = &m->rank[rank];
    struct gpu_function *gate;
    uint32_t want = m->runs;
    void *params[] = {&m->gate, &want};
    enum hdl_status s = micro_kernel(m, rank, "micro_gate", 0, &gate);
    if (!s)
        s = gpu_check(m->cu->launch(gate, 1, 1, 1, 1, 1, 1, 0, r->stream, params, NULL),
                      "micro_gate");
    if (!s)
        s = gpu_check(m->cu->event_record(r->begin, r->stream), "cuEventRecord");
    if (!s)
        s = work->launch(m, rank, work);
    return s ? s : gpu_check(m->cu->event_record(r->end, r->stream), "cuEventRecord");
}

static enum hdl_status finish(struct micro *m, int rank, double *us)
{
    const struct micro_rank *r = &m->rank[rank];
    float ms = 0;
    enum hdl_status s = gpu_enter(r->device);
    if (s)
        return s;
    s = gpu_check(m->cu->stream_sync(r->stream), "a run of kernels");
    if (!s)
        s = gpu_check(m->cu->event_elapsed(&ms, r->begin, r->end), "cuEventElapsedTime");
    gpu_leave(r->device);
    *us = (double)ms * 1e3 > *us ? (double)ms * 1e3 : *us;
    return s;
}

/* All ranks' work begins at one moment; the slowest one's time. */
static enum hdl_status run_once(struct micro *m, const struct micro_work *work,
                                double *us)
{
    enum hdl_status s = HDL_OK;
    *us = 0;
    m->runs++;
    for (int r = 0; s == HDL_OK && r < work->ranks; r++) {
        s = gpu_enter(m->rank[r].device);
        if (s)
            break;
        s = queue(m, r, work);
        gpu_leave(m->rank[r].device);
    }
    *m->gate = m->runs;
    for (int r = 0; s == HDL_OK && r < work->ranks; r++)
        s = finish(m, r, us);
    return s;
}

enum hdl_status micro_time(struct micro *m, const struct micro_work *work, double *us)
{
    double times[MICRO_MAX_REPEATS];
    enum hdl_status s = run_once(m, work, us); /* warms up */
    for (int64_t i = 0; s == HDL_OK && i < m->repeats; i++)
        s = run_once(m, work, &times[i]);
    if (s != HDL_OK)
        return s;
    tool_sort(times, (size_t)m->repeats);
    *us = times[m->repeats / 2];
    return HDL_OK;
}

/* ----------------------------------------------------------------------------- command
 */

#define PARTS "store|scan|receive|launch"

static enum hdl_status (*const parts[])(struct micro *m) = {
    micro_bench_store, micro_bench_scan, micro_bench_receive, micro_bench_launch};

static void print_head(const struct micro *m)
{
    const struct gpu_info *gpu = &m->device[0].info;
    if (m->json)
        return;
    printf("# %d of %s, %d multiprocessors; stores go to %s; median of %lld runs\n",
           m->gpus, gpu->name, gpu->multiprocessors, micro_path(m),
           (long long)m->repeats);
}

static int run(struct micro *m, int64_t gpus, int count, char **names)
{
    /* A kernel that is loaded when it is launched would wait for the closed gate. */
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    const int present = gpu_count();
    if (present == 0)
        return tool_failed("--micro needs a GPU: %s", base_detail());
    if (!kernels)
        return tool_failed("--micro: this build has no GPU kernels");
    const int most = present < MICRO_MAX_RANKS ? present : MICRO_MAX_RANKS;
    if (gpus > most)
        return tool_failed("--gpus %lld, at most %d here", (long long)gpus, most);
    gpus = gpus ? gpus : most;
    enum hdl_status s = open_all(m, (int)gpus);
    if (s == HDL_OK)
        print_head(m);
    for (int i = 0; s == HDL_OK && i < (int)(sizeof(parts) / sizeof(*parts)); i++) {
        bool wanted = count == 0;
        for (int n = 0; n < count; n++)
            wanted = wanted || tool_choice(PARTS, names[n]) == i;
        if (wanted)
            s = parts[i](m);
    }
    if (s != HDL_OK)
        tool_failed("%s: %s", hdl_status_name(s), base_detail());
    close_all(m);
    return s == HDL_OK && m->good ? TOOL_OK : TOOL_FAILED;
}

static int check_and_run(struct micro *m, int64_t gpus, int count, char **names)
{
    for (int i = 0; i < count; i++)
        if (tool_choice(PARTS, names[i]) < 0)
            return tool_usage_error("perf --micro takes " PARTS ", got '%s'", names[i]);
    if (m->repeats > MICRO_MAX_REPEATS)
        return tool_usage_error("--repeats %lld is more than %d", (long long)m->repeats,
                                MICRO_MAX_REPEATS);
    return run(m, gpus, count, names);
}

int perf_micro(int argc, char **argv)
{
    bool micro;
    int64_t gpus = 0;
    struct micro *m = calloc(1, sizeof(*m));
    if (!m)
        return tool_failed("no memory");
    m->good = true;
    m->repeats = 5;
    const struct tool_option options[] = {
        {0, "micro", TOOL_FLAG, &micro, 0, NULL, "this command"},
        {0, "gpus", TOOL_INT, &gpus, 1, "N", "GPUs to use (default all, at most 8)"},
        {0, "repeats", TOOL_INT, &m->repeats, 1, "K",
         "measured runs of each line (default 5)"},
        {0, "json", TOOL_FLAG, &m->json, 0, NULL, "one JSON object a line"},
    };
    const struct tool_usage usage = {
        "heddle perf --micro [" PARTS "]... [options]",
        "Measures what the GPU kernels of an exchange stand on, in one process.",
        options,
        sizeof(options) / sizeof(options[0]),
        "store    GBps a GPU stores, by way (plain, of system scope, copy engine),\n"
        "         destinations, bytes of a row, blocks; with 3 GPUs also all to one\n"
        "scan     every block reads the entries of all tokens, as receivers do\n"
        "receive  rows as packets with tags, checked: by way, rows, blocks that poll\n"
        "         (nobody; the senders, who wait for the others each time; other\n"
        "         blocks, while senders wait for nobody), nanoseconds between polls\n"
        "launch   an empty kernel, by way of launch: its time on the device and the\n"
        "         host's for it; a barrier over all blocks\n"
        "\n"
        "With one GPU, two ranks share it, and stores meet its memory instead of a "
        "link:\n"
        "the first line says so, in JSON `path`. Wrong or late data end with code 1.\n"
        "\n"
        "  heddle perf --micro\n"
        "  heddle perf --micro store receive --gpus 2 --json",
    };
    int first, code;
    base_env_init(&m->env);
    if (tool_parse(&usage, true, argc, argv, &first, &code))
        code = check_and_run(m, gpus, argc - first, argv + first);
    free(m);
    return code;
}
