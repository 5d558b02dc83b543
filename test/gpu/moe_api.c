/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls on GPUs, a process for each rank: graphs, masks, errors, a late rank,
 * one that is killed and replaced. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "public.h"

/*
 * Most steps are replays of one captured graph. In the end the last rank is killed while
 * the others' kernels wait for it; a new process takes its place, and the old graphs of
 * the others go on.
 */
enum { LIMIT_S = 100, SLEEP_US = 400000 };

static uint32_t seed; /* of the next step, equal on all ranks */

/* ----------------------------------------------------------------------------- steps */

/* Maps of the experts: at first rank 0 has two more and the last rank two fewer, then as
 * many each but in turn, then the other way round. */
enum { MAPS = 3 };
static int32_t map_counts[MAPS][MOE_GPU_MAX_RANKS], map_ids[MAPS][MOE_GPU_MAX_RANKS * 8];

static void make_maps(void)
{
    const int32_t ranks = (int32_t)self.ranks;
    for (int32_t r = 0, at[MAPS] = {0}; r < ranks; r++) {
        const int32_t more = r == 0 ? 2 : r == ranks - 1 ? -2 : 0;
        map_counts[0][r] = 8 + more;
        map_counts[1][r] = 8;
        map_counts[2][r] = 8 - more;
        for (int32_t i = 0; i < 8; i++)
            map_ids[1][at[1]++] = r + i * ranks;
    }
    for (int32_t e = 0; e < ranks * 8; e++)
        map_ids[0][e] = map_ids[2][e] = e;
}

static struct gpu_case options(void)
{
    struct gpu_case c;
    gpu_case_defaults(&c);
    c.ranks = self.ranks;
    c.opts.hidden = 512;
    c.opts.max_tokens = 32;
    c.opts.num_experts = (int32_t)self.ranks * 8;
    c.opts.lanes = 2;
    c.opts.memory = HDL_MOE_CUDA;
    c.opts.expert_counts = map_counts[0];
    c.opts.expert_ids = map_ids[0];
    return c;
}

/* Odd seeds take T from the device, as graphs need it. */
static struct gpu_case next_case(void)
{
    struct gpu_case c = options();
    uint64_t random = seed;
    c.seed = seed * 2 + 1;
    seed++;
    c.routing = (int)(seed % ROUTE_KINDS);
    for (uint32_t r = 0; r < self.ranks; r++)
        c.tokens[r] = (uint32_t)(gpu_random(&random) % 33);
    return c;
}

static void split(const struct gpu_case *c)
{
    struct public_arguments a = public_arguments_of(c, 0);
    struct hdl_moe_handle handle;
    OK(hdl_moe_dispatch_send(self.moe, &a.tokens, &a.call, &handle));
    CHECK(hdl_moe_combine(self.moe, &handle, &a.outputs, &a.result, &a.call) ==
          HDL_EINVAL);
    OK(hdl_moe_dispatch_recv(self.moe, &handle, &a.received, &a.call));
    OK(hdl_moe_combine_send(self.moe, &handle, &a.outputs, &a.call));
    OK(hdl_moe_combine_recv(self.moe, &handle, &a.result, &a.call));
}

static struct gpu_graph_exec *capture(void)
{
    struct gpu_case c = next_case();
    return public_capture(&c, 0);
}

static void begin(const struct gpu_case *c, uint32_t without)
{
    public_fill(c, without);
    public_meet();
}

static void replay(struct gpu_graph_exec *exec, uint32_t without)
{
    struct gpu_case c = next_case();
    begin(&c, without);
    CHECK(!self.cu->graph_launch(exec, self.r->stream));
    if (self.rank == without)
        CHECK(gpu_world_fetch(self.r)); /* others masked it: its sums lack theirs */
    else
        public_compare(&c, without);
}

/* ----------------------------------------------------------------------------- parts */

static void plain_steps(int count)
{
    for (int i = 0; i < count; i++) {
        struct gpu_case c = next_case();
        begin(&c, self.ranks);
        if (i % 2)
            split(&c);
        else
            public_step(&c, 0);
        public_compare(&c, self.ranks);
    }
}

/* An expert that does not exist counts as none; the next dispatch tells of it once. */
static void wrong_id(void)
{
    struct gpu_case c = next_case();
    struct hdl_moe_state state = {.size = sizeof(state)};
    c.seed &= ~1u;
    c.ids_are_64 = false;
    c.tokens[0] = 8;
    int32_t wrong = c.opts.num_experts + 5;
    begin(&c, self.ranks);
    if (self.rank == 0) {
        self.r->ids64[5 * 8 + 2] = -1;
        CHECK(!self.cu->copy_in(self.r->buffer[BUF_IDS].device + (5 * 8 + 2) * 4, &wrong,
                                sizeof(wrong)));
        CHECK(!self.cu->stream_sync(NULL));
    }
    self.w->rank[0].ids64[5 * 8 + 2] = -1;
    public_step(&c, 0);
    public_compare(&c, self.ranks);
    c = next_case();
    begin(&c, self.ranks);
    if (self.rank == 0) {
        struct public_arguments a = public_arguments_of(&c, 0);
        struct hdl_moe_handle handle;
        CHECK(hdl_moe_dispatch(self.moe, &a.tokens, &a.received, &a.call, &handle) ==
              HDL_EINVAL);
        CHECK(strstr(hdl_error_detail(), "token 5 position 2"));
        OK(hdl_moe_status(self.moe, &state));
        CHECK(state.error_token == 5 && state.error_position == 2 &&
              state.error_value == wrong && state.last_error == HDL_EINVAL);
    }
    public_step(&c, 0);
    public_compare(&c, self.ranks);
}

/*
 * Rank 0 is asked to send more tokens than there may be: the host sees it (its step fails
 * at once, others lack what it would give), or the device does (it has none).
 */
static void too_many(bool host)
{
    struct gpu_case c = next_case();
    struct hdl_moe_state state = {.size = sizeof(state)};
    const int64_t asked = c.opts.max_tokens + 9;
    char text[80];
    c.seed = host ? c.seed & ~1u : c.seed | 1;
    c.tokens[0] = 0;
    begin(&c, self.ranks);
    struct public_arguments a = public_arguments_of(&c, 0);
    struct hdl_moe_handle handle;
    if (self.rank == 0 && host) {
        a.tokens.num_tokens = asked;
        CHECK(hdl_moe_dispatch(self.moe, &a.tokens, &a.received, &a.call, &handle) ==
              HDL_EINVAL);
        snprintf(text, sizeof(text), "%lld tokens, max_tokens %d", (long long)asked,
                 c.opts.max_tokens);
        CHECK(strstr(hdl_error_detail(), text));
        CHECK(!self.cu->stream_sync(self.r->stream));
    } else {
        const int32_t tokens = (int32_t)asked;
        if (self.rank == 0)
            CHECK(!self.cu->copy_in((uint64_t)(uintptr_t)a.tokens.num_tokens_at, &tokens,
                                    sizeof(tokens)) &&
                  !self.cu->stream_sync(NULL));
        public_step(&c, 0);
        public_compare(&c, host ? 0 : self.ranks);
    }
    public_meet();
    c = next_case();
    begin(&c, self.ranks);
    OK(hdl_moe_status(self.moe, &state));
    CHECK(state.last_error == (self.rank == 0 ? HDL_EINVAL : HDL_EPEER));
    CHECK(state.error_value == (self.rank || host ? -1 : asked));
    if (self.rank != 0) {
        snprintf(text, sizeof(text),
                 "rank 0 refused an earlier dispatch: num_tokens %lld exceeds",
                 (long long)asked);
        CHECK(strstr(hdl_error_detail(), text));
    }
    public_step(&c, 0);
    public_compare(&c, self.ranks);
}

/* The last rank comes too late for the others, which go on; then all are right again. */
static void late_rank(void)
{
    struct gpu_case c = next_case();
    struct hdl_moe_state state = {.size = sizeof(state)};
    int32_t active[MOE_GPU_MAX_RANKS];
    begin(&c, self.ranks);
    if (self.rank == self.last)
        usleep(SLEEP_US);
    public_step(&c, self.rank == self.last ? 0 : SLEEP_US / 4);
    if (self.rank != self.last) {
        public_compare(&c, self.last);
        public_get_active(active);
        CHECK(active[self.last] == 0 && active[0] == 1);
        OK(hdl_moe_status(self.moe, &state));
        CHECK(state.incomplete_calls >= 1);
    } else {
        CHECK(gpu_world_fetch(self.r));
    }
}

/* The last rank dies while the others wait for it without a deadline, in a graph. */
static void killed(struct gpu_graph_exec *exec)
{
    struct gpu_case c = next_case();
    int32_t active[MOE_GPU_MAX_RANKS];
    begin(&c, self.ranks);
    if (self.rank == self.last)
        kill(getpid(), SIGKILL);
    double start = public_now();
    CHECK(!self.cu->graph_launch(exec, self.r->stream));
    public_compare(&c, self.last);
    double took = public_now() - start;
    public_get_active(active);
    CHECK(active[self.last] == 0);
    if (self.rank == 0)
        printf("  step ended %.1f ms after it began, with rank %u killed\n", took * 1e3,
               self.last);
}

static void replaced(void)
{
    const int32_t last = (int32_t)self.last;
    OK(hdl_group_admit(self.group, &last, 1, 60000000, NULL));
    OK(hdl_moe_update(self.moe, NULL, NULL));
}

/* Captured graphs follow another map: of the oracle, too. */
static void move_experts(int map)
{
    struct gpu_case c = options();
    c.opts.expert_counts = map_counts[map];
    c.opts.expert_ids = map_ids[map];
    OK(hdl_moe_update(self.moe, map_counts[map], map_ids[map]));
    moe_config_free(&self.w->env, &self.w->config);
    OK(moe_config_init(&self.w->env, &self.w->config, &c.opts, (int32_t)self.ranks));
    CHECK(hdl_moe_local_experts(self.moe) == map_counts[map][self.rank]);
}

/* What hdl_moe_status counts of one step against what its routing says. */
static void counted(void)
{
    enum { MOST = 16 };
    uint64_t rows[2][MOST], sent[2][MOE_GPU_MAX_RANKS], received[2][MOE_GPU_MAX_RANKS];
    struct gpu_case c = next_case();
    const struct moe_gpu_geometry *g = &self.r->gpu->geo;
    const struct moe_map *m = &self.w->config.map;
    begin(&c, self.ranks);
    for (int i = 0; i < 2; i++) {
        struct hdl_moe_state state = {.size = sizeof(state),
                                      .expert_rows = rows[i],
                                      .bytes_sent = sent[i],
                                      .bytes_received = received[i]};
        if (i)
            public_step(&c, 0);
        if (i)
            public_compare(&c, self.ranks);
        OK(hdl_moe_status(self.moe, &state));
        CHECK(state.dispatch_protocol != HDL_MOE_AUTO &&
              state.combine_protocol != HDL_MOE_AUTO);
    }
    const int32_t *counts = (const int32_t *)self.r->buffer[BUF_COUNTS].host;
    const int32_t *from = (const int32_t *)self.r->buffer[BUF_SOURCE_COUNTS].host;
    for (int32_t e = 0; e < hdl_moe_local_experts(self.moe); e++)
        CHECK(rows[1][e] - rows[0][e] == (uint64_t)counts[e]);
    for (uint32_t p = 0; p < self.ranks; p++) {
        uint64_t to = 0, header = (uint64_t)g->packets * MOE_GPU_PACKET;
        for (uint32_t t = 0; t < c.tokens[self.rank]; t++) {
            bool chose = false;
            for (uint32_t j = 0; j < g->top_k; j++) {
                const int64_t id = self.r->ids64[t * g->top_k + j];
                chose |= id >= 0 && m->holder[m->begin[id]] == p;
            }
            to += chose;
        }
        if (p == self.rank)
            continue;
        CHECK(sent[1][p] - sent[0][p] == c.tokens[self.rank] * header +
                                             to * g->row.stride +
                                             (uint64_t)from[p] * g->give.stride);
        CHECK(received[1][p] - received[0][p] == c.tokens[p] * header +
                                                     (uint64_t)from[p] * g->row.stride +
                                                     to * g->give.stride);
    }
}

/* ------------------------------------------------------------------------------ ranks */

static int run(bool joins)
{
    make_maps();
    const struct gpu_case first = options();
    struct hdl_moe_state state = {.size = sizeof(state)};
    public_join(joins);
    public_open(&first.opts);
    struct gpu_graph_exec *old = joins ? NULL : capture(), *fresh;
    if (!joins) {
        public_say("captured");
        for (int i = 0; i < 20; i++)
            replay(old, i % 5 == 3 ? self.last : self.ranks);
        public_say("replayed with changing routing, tokens and masks");
        plain_steps(8);
        public_say("whole and in phases, on both lanes");
        for (int i = 0; i < 4; i++)
            counted();
        public_say("rows, contributions and bytes counted");
        wrong_id();
        too_many(true);
        too_many(false);
        public_say("a wrong id and too many tokens told");
        late_rank();
        plain_steps(4);
        OK(hdl_moe_status(self.moe, &state));
        CHECK(state.stale_drops == (self.rank != self.last)); /* its header */
        public_say("a late rank passed over and taken back");
        killed(old);
        replaced();
        public_say("replaced");
    }
    seed = 1000;
    fresh = capture();
    for (int i = 0; i < 10; i++)
        replay(old && i % 2 ? old : fresh, self.ranks);
    public_say("graphs from before and after, with the new process");
    for (int map = 1; map < MAPS; map++) {
        move_experts(map);
        for (int i = 0; i < 6; i++)
            replay(old && i % 2 ? old : fresh, self.ranks);
        counted();
    }
    public_say("the same graphs with other maps of the experts");
    plain_steps(8);
    self.cu->graph_exec_destroy(fresh);
    if (old)
        self.cu->graph_exec_destroy(old);
    OK(hdl_moe_status(self.moe, &state));
    CHECK(state.generation == 4 && state.failed_steps <= 3);
    return public_close();
}

int main(void)
{
    int gpus = gpu_count_apart(), bad = 0;
    if (gpus == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    const uint32_t ranks = public_job(gpus);
    pid_t children[8];
    for (uint32_t r = 0; r < ranks; r++)
        children[r] = public_start(r, ranks, gpus, LIMIT_S, run, false);
    int status = 0;
    waitpid(children[ranks - 1], &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        children[ranks - 1] = public_start(ranks - 1, ranks, gpus, LIMIT_S, run, true);
    else
        bad = 1;
    for (uint32_t r = 0; r < ranks; r++) {
        status = 1;
        waitpid(children[r], &status, 0);
        bad += status != 0;
    }
    printf("public calls, %u processes on %d GPUs: %d ranks wrong\n", ranks, gpus, bad);
    return bad != 0;
}
