/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are killed or stopped inside their kernels, by each protocol, and as an
 * exchange is made and updated: moe_lost [protocol]. */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "public.h"

/*
 * Few blocks move many rows, so a step takes milliseconds: the last rank asks its parent
 * for SIGKILL at some point of it, in dispatch while others have not come yet, then while
 * both send, then in combine. The others' step ends in time, and what it delivered of the
 * lost rank is whole or said to be missing; a step without it is right, a new process
 * takes its place, and the others' graphs go on. In the end the last rank is stopped: its
 * kernels go on, the next step's others pass it over at their deadline, and take it back.
 *
 * In a second job one block sends rows for longer than a process takes to die: the last
 * rank is killed until some of its rows have come and some have not, each time earlier
 * or later in its step as the time before showed.
 *
 * In the last job it is killed before its part in the creation, which the others have
 * begun, and after its part in an update's first half: the others count on it in their
 * next step, which says so and waits for nothing. Graphs that were captured when it had
 * no memory yet take the new process.
 */
enum { KILLS = 3, TRIES = 8, LIMIT_S = 120, TIMEOUT_US = 300000, SLACK_US = 300000 };
enum { EARLIER_US = 2000, DEATH_US = 20000 };
static const double kill_at[KILLS] = {0.5, 0, 0.08}; /* of a step; death takes ms */

/* What a rank asks of the parent. */
static struct shared {
    _Atomic int signal; /* for the last rank, 0 = none */
    int delay_us;
    _Atomic int kills;    /* done */
    _Atomic bool release; /* what was stopped may go on */
    _Atomic bool released;
    _Atomic int after_us; /* with slow rows: from the launch on, may be before it */
    _Atomic bool parted;  /* some rows came, some did not */
} * shared;

static enum hdl_moe_protocol protocol;
static bool slow; /* the second job */
static struct gpu_graph_exec *graph;
static double step_s; /* what a step takes */

static struct gpu_case case_of(uint32_t number)
{
    struct gpu_case c;
    gpu_case_defaults(&c);
    c.ranks = self.ranks;
    c.seed = number * 2 + 1; /* odd: T comes from the device, as graphs need it */
    for (uint32_t r = 0; r < self.ranks; r++)
        c.tokens[r] = slow ? 4096 : 2048;
    c.opts.format = HDL_MOE_PLAIN;
    c.opts.hidden = slow ? 16384 : 4096;
    c.opts.max_tokens = (int32_t)c.tokens[0];
    c.opts.num_experts = (int32_t)self.ranks;
    c.opts.top_k = 2;
    c.opts.memory = HDL_MOE_CUDA;
    c.opts.cuda_blocks = slow ? 1 : 3;
    c.opts.protocol = protocol;
    return c;
}

/* Outputs of an expert are the same for all rows, so that sums do not depend on where a
 * row lies: each rank has one expert here. */
static void fill(const struct gpu_case *c, uint32_t without)
{
    public_fill(c, without);
    const size_t row = (size_t)c->opts.hidden * 2;
    for (uint32_t r = 0; r < self.ranks; r++) {
        struct gpu_buffer *b = &self.w->rank[r].buffer[BUF_EXPERT_OUT];
        for (size_t at = row; at < b->bytes; at += row)
            memcpy(b->host + at, b->host, row);
    }
    CHECK(gpu_world_put(self.r));
}

/* Runs the graph; seconds that it took. */
static double launch(void)
{
    const double start = public_now();
    CHECK(!self.cu->graph_launch(graph, self.r->stream));
    CHECK(!self.cu->stream_sync(self.r->stream));
    return public_now() - start;
}

static void whole(uint32_t number)
{
    struct gpu_case c = case_of(number);
    fill(&c, self.ranks);
    public_meet();
    step_s = launch();
    public_compare(&c, self.ranks);
}

static void ask_after(int signal, int delay_us)
{
    shared->delay_us = delay_us;
    atomic_store(&shared->signal, signal);
}

static void ask(int signal, double at)
{
    ask_after(signal, (int)(step_s * at * 1e6));
}

/* As long after the launch as asked for, or before it. */
static void ask_to_be_killed(void)
{
    const int after = atomic_load(&shared->after_us);
    ask_after(SIGKILL, after > 0 ? after : 0);
    if (after < 0)
        usleep((useconds_t)-after);
}

/* What a kill has met says when the next is to come; by rank 0. */
static void aim(uint32_t lost, uint32_t rows)
{
    if (lost && lost < rows)
        atomic_store(&shared->parted, true);
    else
        atomic_fetch_add(&shared->after_us, lost || !rows ? EARLIER_US : -EARLIER_US);
}

/* ---------------------------------------------------------------- what was delivered */

/* Rows of the lost rank that are missing; all else is as if it had lived. */
static uint32_t lost_rows(const struct gpu_case *c)
{
    struct gpu_buffer *b = self.r->buffer;
    const int32_t *token = (const int32_t *)b[BUF_SOURCE_TOKEN].host,
                  *want = (const int32_t *)b[BUF_SOURCE_TOKEN].want;
    const size_t row = (size_t)c->opts.hidden * 2, rows = b[BUF_OUT_ROWS].bytes / row;
    const int64_t range = ((const int64_t *)b[BUF_RANGES].host)[self.last];
    const size_t first = (size_t)(range >> 32), end = first + (uint32_t)range;
    uint32_t lost = 0;
    for (size_t i = 0; i < rows; i++) {
        const unsigned char *here = b[BUF_OUT_ROWS].host + i * row;
        if (token[i] == want[i]) {
            CHECK(memcmp(here, b[BUF_OUT_ROWS].want + i * row, row) == 0);
            continue;
        }
        CHECK(token[i] == -1 && i >= first && i < end);
        CHECK(here[0] == 0 && memcmp(here, here + 1, row - 1) == 0);
        lost++;
    }
    return lost;
}

/* Sums that lack the lost rank's part; all others have it. */
static uint32_t lost_sums(const struct gpu_case *c)
{
    struct gpu_buffer *b = self.r->buffer;
    const size_t row = (size_t)c->opts.hidden * 2;
    uint32_t lost = 0;
    for (int without = 0; without < 2; without++) {
        self.w->present[self.last] = !without;
        gpu_world_expect(self.w, c, self.rank);
        for (size_t t = 0; t < c->tokens[self.rank]; t++) {
            if (b[BUF_MISSING].host[t] != without)
                continue;
            CHECK(b[BUF_MISSING].want[t] == without);
            CHECK(memcmp(b[BUF_RESULT].host + t * row, b[BUF_RESULT].want + t * row,
                         row) == 0);
            lost += (uint32_t)without;
        }
    }
    return lost;
}

/* A step in which the last rank was lost at some point. */
static void check_lost(const struct gpu_case *c, double took)
{
    int32_t active[MOE_GPU_MAX_RANKS];
    const int32_t *from = (const int32_t *)self.r->buffer[BUF_SOURCE_COUNTS].host;
    uint32_t rows = 0;
    CHECK(took * 1e6 < 2 * TIMEOUT_US + SLACK_US);
    CHECK(gpu_world_fetch(self.r));
    public_get_active(active);
    const bool came = from[self.last] != 0;
    for (uint32_t r = 0; r < self.ranks; r++)
        self.w->present[r] = came || r != self.last;
    if (came) {
        gpu_world_expect(self.w, c, self.rank);
        rows = lost_rows(c);
    } else {
        CHECK(gpu_world_compare(self.w, c, OF_DISPATCH) == 0);
    }
    const uint32_t sums = lost_sums(c);
    CHECK((active[self.last] == 0) == (!came || rows || sums));
    if (self.rank == 0 && slow)
        aim(rows, (uint32_t)from[self.last]);
    if (self.rank == 0)
        printf(
            "  killed after %.1f of %.1f ms; ended after %.1f: header %s, %u of its %d "
            "rows lost, %u of %u sums lack it\n",
            shared->delay_us * 1e-3, step_s * 1e3, took * 1e3, came ? "came" : "lost",
            rows, from[self.last], sums, c->tokens[0]);
}

/* ------------------------------------------------------------------------------ lives */

static void replaced(void)
{
    const int32_t last = (int32_t)self.last;
    OK(hdl_group_admit(self.group, &last, 1, 60000000, NULL));
    OK(hdl_moe_update(self.moe, NULL, NULL));
}

static void killed(int number)
{
    struct gpu_case c = case_of((uint32_t)number * 100 + 50);
    fill(&c, self.ranks);
    public_meet();
    if (self.rank == self.last) {
        if (slow)
            ask_to_be_killed();
        else
            ask(SIGKILL, kill_at[number]);
        (void)launch();
        for (;;)
            pause();
    }
    if (number == 0 && !slow) /* it waits inside dispatch */
        usleep(TIMEOUT_US / 3);
    check_lost(&c, launch());
    c = case_of((uint32_t)number * 100 + 51);
    fill(&c, self.last);
    CHECK(launch() * 1e6 < 2 * TIMEOUT_US + SLACK_US);
    public_compare(&c, self.last);
    replaced();
}

static void stopped(void)
{
    struct gpu_case c = case_of(9000);
    int32_t active[MOE_GPU_MAX_RANKS];
    fill(&c, self.ranks);
    public_meet();
    if (self.rank == self.last)
        ask(SIGSTOP, 0.5);
    (void)launch();
    public_compare(&c, self.ranks);
    c = case_of(9001);
    fill(&c, self.ranks);
    if (self.rank == self.last) {
        while (!atomic_load(&shared->released))
            usleep(1000);
        (void)launch(); /* the others have gone on */
        return;
    }
    usleep(TIMEOUT_US / 3);
    const double took = launch();
    CHECK(took * 1e6 > TIMEOUT_US && took * 1e6 < 2 * TIMEOUT_US + SLACK_US);
    public_get_active(active);
    CHECK(active[self.last] == 0);
    public_compare(&c, self.last);
    if (self.rank == 0) {
        printf("  stopped: passed over after %.1f ms\n", took * 1e3);
        atomic_store(&shared->release, true);
    }
}

/* All ranks see the same: rank 0 has said so before they met last. */
static bool enough(int kills)
{
    return slow ? atomic_load(&shared->parted) || kills == TRIES : kills == KILLS;
}

static int run(bool joins)
{
    const struct gpu_case first = case_of(0);
    int kills = joins ? atomic_load(&shared->kills) : 0;
    public_join(joins);
    public_open(&first.opts);
    graph = public_capture(&first, TIMEOUT_US);
    for (;; kills++) {
        for (uint32_t i = 0; i < (slow ? 1 : 2); i++)
            whole((uint32_t)kills * 100 + i);
        if (enough(kills))
            break;
        killed(kills);
    }
    if (!slow) {
        stopped();
        whole(9002);
    }
    self.cu->graph_exec_destroy(graph);
    return public_close();
}

/* ---------------------------------------------------------------- creation and update */

/* The last rank was lost in the creation or update that the others come from. */
static void counted_on(uint32_t number)
{
    struct gpu_case c = case_of(number);
    struct hdl_moe_state before = {.size = sizeof(before)},
                         after = {.size = sizeof(after)};
    int32_t active[MOE_GPU_MAX_RANKS];
    fill(&c, self.ranks);
    OK(hdl_moe_status(self.moe, &before));
    public_meet();
    CHECK(launch() * 1e6 < TIMEOUT_US);
    public_get_active(active);
    CHECK(active[self.last] == 0);
    OK(hdl_moe_status(self.moe, &after));
    CHECK(after.incomplete_calls == before.incomplete_calls + 2);
    public_compare(&c, self.last);
}

/* Its kernels wait for the others, and its update for these before it offers memory. */
static void die_in_update(void)
{
    struct gpu_case c = case_of(150);
    fill(&c, self.ranks);
    CHECK(!self.cu->graph_launch(graph, self.r->stream));
    ask_after(SIGKILL, TIMEOUT_US / 3);
    OK(hdl_moe_update(self.moe, NULL, NULL));
    public_fail(__FILE__, __LINE__, "the update went on");
}

static int run_linked(bool joins)
{
    const struct gpu_case first = case_of(0);
    const int kills = joins ? atomic_load(&shared->kills) : 0;
    public_join(joins);
    if (kills == 0)
        public_meet();
    if (kills == 0 && self.rank == self.last) {
        ask_after(SIGKILL, DEATH_US);
        for (;;)
            pause();
    }
    public_open(&first.opts);
    graph = public_capture(&first, TIMEOUT_US);
    if (kills == 0) {
        counted_on(50);
        replaced();
    }
    if (kills <= 1) {
        whole(100);
        if (self.rank == self.last)
            die_in_update();
        OK(hdl_moe_update(self.moe, NULL, NULL));
        counted_on(151);
        replaced();
    }
    whole(200);
    self.cu->graph_exec_destroy(graph);
    return public_close();
}

/* ----------------------------------------------------------------------------- parent */

/* Does what the last rank has asked for; true = it is killed. */
static bool serve(pid_t last)
{
    const int signal = atomic_exchange(&shared->signal, 0);
    if (!signal)
        return false;
    usleep((useconds_t)shared->delay_us);
    if (signal == SIGKILL)
        atomic_fetch_add(&shared->kills, 1);
    (void)kill(last, signal);
    if (signal == SIGKILL)
        return true;
    for (int i = 0; i < 5000 && !atomic_load(&shared->release); i++)
        usleep(1000);
    (void)kill(last, SIGCONT);
    atomic_store(&shared->released, true);
    return false;
}

/* Ranks that were wrong. */
static int run_job(int gpus, int (*run_rank)(bool joins))
{
    const uint32_t ranks = public_job(gpus), last = ranks - 1;
    pid_t children[8];
    uint32_t ended = 0;
    int bad = 0, status;
    memset(shared, 0, sizeof(*shared));
    for (uint32_t r = 0; r < ranks; r++)
        children[r] = public_start(r, ranks, gpus, LIMIT_S, run_rank, false);
    while (ended < ranks) {
        if (serve(children[last])) {
            waitpid(children[last], &status, 0);
            children[last] = public_start(last, ranks, gpus, LIMIT_S, run_rank, true);
        }
        if (waitpid(-1, &status, WNOHANG) > 0) {
            ended++;
            bad += status != 0;
            for (uint32_t r = 0; status && r < ranks; r++) /* nothing to wait for */
                (void)kill(children[r], SIGKILL);
        }
        usleep(100);
    }
    return bad;
}

int main(int argc, char **argv)
{
    const int gpus = gpu_count_apart(), only = argc > 1 ? atoi(argv[1]) : HDL_MOE_AUTO;
    int bad = 0;
    if (gpus == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    for (protocol = HDL_MOE_LL; protocol <= HDL_MOE_BULK; protocol++) {
        if (only != HDL_MOE_AUTO && only != (int)protocol)
            continue;
        for (int i = 0; i < 2; i++) {
            slow = i;
            const int wrong = run_job(gpus, run);
            printf("lost inside kernels, protocol %d: %d ranks wrong%s\n", (int)protocol,
                   wrong, slow && !shared->parted ? ", no rows were parted" : "");
            fflush(stdout);
            bad += wrong || (slow && !shared->parted);
        }
    }
    slow = false;
    protocol = only;
    const int wrong = run_job(gpus, run_linked);
    printf("lost in creation and update: %d ranks wrong\n", wrong);
    return bad || wrong;
}
