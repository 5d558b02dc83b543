/* SPDX-License-Identifier: Apache-2.0 */
/* Opens NCCL, measures its sends and receives in graphs. */
#include "tools/perf/nccl.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/memory.h"

/* Calls in a graph, and the warming ones. */
enum { CALLS = 20, WARM = 2, INT8 = 0 };

struct nccl_id {
    char bytes[128];
};

struct perf_nccl {
    const struct perf_job *job;
    const struct gpu_device *device;
    const struct gpu_driver *cu;
    struct gpu_stream *stream;
    void *library, *comm;
    int (*get_id)(struct nccl_id *id);
    int (*init)(void **comm, int ranks, struct nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *from, size_t count, int type, int peer, void *comm,
                struct gpu_stream *stream);
    int (*receive)(void *to, size_t count, int type, int peer, void *comm,
                   struct gpu_stream *stream);
    const char *(*text)(int error);
};

static enum hdl_status check(const struct perf_nccl *n, int error, const char *what)
{
    return error ? base_fail(HDL_EGPU, "%s: %s", what, n->text(error)) : HDL_OK;
}

static bool find(struct perf_nccl *n)
{
    const struct {
        const char *name;
        void *to;
    } calls[] = {
        {"ncclGetUniqueId", &n->get_id},  {"ncclCommInitRank", &n->init},
        {"ncclCommDestroy", &n->destroy}, {"ncclGroupStart", &n->group_start},
        {"ncclGroupEnd", &n->group_end},  {"ncclSend", &n->send},
        {"ncclRecv", &n->receive},        {"ncclGetErrorString", &n->text},
    };
    n->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; n->library && i < sizeof(calls) / sizeof(*calls); i++) {
        void *function = dlsym(n->library, calls[i].name);
        if (!function)
            return false;
        memcpy(calls[i].to, &function, sizeof(function));
    }
    return n->library != NULL;
}

enum hdl_status perf_nccl_open(const struct perf_job *job,
                               const struct gpu_device *device, struct gpu_stream *stream,
                               struct perf_nccl **nccl)
{
    struct nccl_id id = {{0}};
    struct perf_nccl *n = calloc(1, sizeof(*n));
    int64_t found = n && find(n);
    enum hdl_status s = perf_agree(job, &found, HDL_MIN);
    if (s == HDL_OK && !found)
        s = base_fail(HDL_ENOTSUP, "no libnccl.so.2");
    if (s != HDL_OK)
        goto fail;
    n->job = job;
    n->device = device;
    n->cu = device->driver;
    n->stream = stream;
    if (job->rank == 0)
        s = check(n, n->get_id(&id), "ncclGetUniqueId");
    if (s == HDL_OK)
        s = hdl_broadcast(job->group, &id, &id, sizeof(id), HDL_U8, 0, NULL, NULL);
    if (s == HDL_OK)
        s = check(n, n->init(&n->comm, job->num_ranks, id, job->rank),
                  "ncclCommInitRank");
    if (s != HDL_OK)
        goto fail;
    *nccl = n;
    return HDL_OK;
fail:
    perf_nccl_close(n);
    return s;
}

void perf_nccl_close(struct perf_nccl *n)
{
    if (n && n->comm)
        n->destroy(n->comm);
    if (n && n->library)
        dlclose(n->library);
    free(n);
}

static enum hdl_status all_to_all(struct perf_nccl *n, uint64_t from, uint64_t to,
                                  size_t bytes)
{
    enum hdl_status s = check(n, n->group_start(), "ncclGroupStart");
    for (int r = 0; s == HDL_OK && r < n->job->num_ranks; r++) {
        const size_t at = (size_t)r * bytes;
        s = check(n, n->send((void *)(from + at), bytes, INT8, r, n->comm, n->stream),
                  "ncclSend");
        if (s == HDL_OK)
            s = check(n,
                      n->receive((void *)(to + at), bytes, INT8, r, n->comm, n->stream),
                      "ncclRecv");
    }
    return s == HDL_OK ? check(n, n->group_end(), "ncclGroupEnd") : s;
}

static enum hdl_status capture(struct perf_nccl *n, uint64_t from, uint64_t to,
                               size_t bytes, struct gpu_graph_exec **exec)
{
    struct gpu_graph *graph;
    /* Connections are made by the first call, which cannot be captured. */
    enum hdl_status s = all_to_all(n, from, to, bytes);
    if (s == HDL_OK)
        s = gpu_check(n->cu->stream_sync(n->stream), "all_to_all");
    if (s == HDL_OK)
        s = gpu_check(n->cu->capture_begin(n->stream, GPU_CAPTURE_THREAD), "capture");
    for (int i = 0; s == HDL_OK && i < CALLS; i++)
        s = all_to_all(n, from, to, bytes);
    if (s == HDL_OK)
        s = gpu_check(n->cu->capture_end(n->stream, &graph), "capture");
    if (s == HDL_OK)
        s = gpu_check(n->cu->graph_instantiate(exec, graph, 0), "cuGraphInstantiate");
    if (s == HDL_OK)
        n->cu->graph_destroy(graph);
    return s;
}

static enum hdl_status replay(struct perf_nccl *n, struct gpu_graph_exec *exec,
                              struct gpu_event *const event[2], double *us)
{
    float ms = 0;
    enum hdl_status s = hdl_barrier(n->job->group, NULL, NULL);
    if (s == HDL_OK)
        s = gpu_check(n->cu->event_record(event[0], n->stream), "event");
    if (s == HDL_OK)
        s = gpu_check(n->cu->graph_launch(exec, n->stream), "cuGraphLaunch");
    if (s == HDL_OK)
        s = gpu_check(n->cu->event_record(event[1], n->stream), "event");
    if (s == HDL_OK)
        s = gpu_check(n->cu->stream_sync(n->stream), "replay");
    if (s == HDL_OK)
        s = gpu_check(n->cu->event_elapsed(&ms, event[0], event[1]), "event");
    *us = (double)ms * 1e3 / CALLS;
    return s;
}

enum hdl_status perf_nccl_measure(struct perf_nccl *n, size_t bytes, int64_t replays,
                                  struct perf_times *times)
{
    const size_t all = bytes * (size_t)n->job->num_ranks;
    uint64_t memory[2] = {0, 0};
    struct gpu_event *event[2] = {NULL, NULL};
    struct gpu_graph_exec *exec = NULL;
    double *us = calloc((size_t)replays + WARM, sizeof(*us));
    enum hdl_status s = us ? HDL_OK : base_fail(HDL_ENOMEM, "times");
    for (int i = 0; s == HDL_OK && i < 2; i++) {
        s = gpu_alloc(n->device, all, &memory[i]);
        if (s == HDL_OK)
            s = gpu_check(n->cu->event_create(&event[i], GPU_EVENT_TIMED), "event");
    }
    if (s == HDL_OK)
        s = capture(n, memory[0], memory[1], bytes, &exec);
    for (int64_t i = 0; s == HDL_OK && i < replays + WARM; i++)
        s = replay(n, exec, event, &us[i]);
    if (s == HDL_OK)
        s = perf_agree_times(n->job, us + WARM, replays, times);
    if (exec)
        n->cu->graph_exec_destroy(exec);
    for (int i = 0; i < 2; i++) {
        if (event[i])
            n->cu->event_destroy(event[i]);
        if (memory[i])
            gpu_free(n->device, memory[i]);
    }
    free(us);
    return s;
}
