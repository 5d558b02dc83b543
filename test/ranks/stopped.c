/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 2 is stopped in the middle of something, removed, and continued when the others
 * have gone on: it is told HDL_EFENCED, and nothing that it still sends is ever read.
 *
 *     stopped rejoin     in a large send; the same process joins again
 *     stopped send       in a large send; its replacement is at work when it wakes up
 *     stopped moe        in a step of an exchange; likewise
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "member.h"

enum {
    STOPPED = 2,
    DEAD_AFTER_MS = 500,
    LARGE = 64 << 20,
    PART = 1 << 20,
    ROUNDS = 30,
    AFTER = 50,
    HIDDEN = 4096,
    TOKENS = 32,
    STEPS = 20
};

static unsigned char *large;
static _Atomic int dispatching; /* the number of this step's call, 0 = in none */

static void *stop_soon(void *within_us)
{
    unsigned seed = (unsigned)getpid() ^ (unsigned)(rank_now() * 1e6);
    usleep((useconds_t)(rand_r(&seed) % *(const int *)within_us));
    int before = dispatching;
    kill(getpid(), SIGSTOP);
    if (before && before == dispatching)
        rank_say("stopped in a dispatch");
    return NULL;
}

static void start_stopping(const int *within_us)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, stop_soon, (void *)(uintptr_t)within_us) == 0,
          "no thread");
    CHECK(pthread_detach(thread) == 0, "no thread");
}

static void check_fenced(void)
{
    enum hdl_status status = HDL_OK;
    for (double start = rank_now(); status >= 0 && rank_now() - start < 5 * RANK_SLOW;)
        (void)member_sum(&status);
    CHECK_STATUS(status, HDL_EFENCED);
    CHECK_STATUS(hdl_barrier(self.group, NULL, NULL), HDL_EFENCED);
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
}

/* The members see the end of the stopped one soon after its silence began. */
static void await_removal(double start)
{
    member_sum_until(3, 1 << STOPPED);
    double seconds = rank_now() - start;
    CHECK(seconds < 1e-3 * DEAD_AFTER_MS * RANK_SLOW + 1.5 * RANK_SLOW,
          "removed after %.2f s", seconds);
    CHECK(member_active() == 3, "active %#x", member_active());
}

static void exchange_parts(int rounds, const char *hint)
{
    int other = self.rank == 0 ? STOPPED : 0;
    unsigned char *part = malloc(2 * PART);
    CHECK(part, "no memory");
    for (int i = 0; i < rounds; i++) {
        struct hdl_op *op;
        int mine = 16 * self.rank + i, theirs = 16 * other + i;
        if (i == 3 && hint)
            rank_say("%s", hint);
        memset(part, mine, PART);
        CHECK_OK(hdl_send(self.group, part, PART, HDL_U8, other, 7, NULL, &op));
        CHECK_OK(hdl_recv(self.group, part + PART, PART, HDL_U8, other, 7, NULL, NULL));
        CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
        hdl_op_free(op);
        for (int k = 0; k < PART; k++)
            CHECK(part[PART + k] == theirs, "byte %d of message %d is %d, not %d", k, i,
                  part[PART + k], theirs);
        if (i > 3 && hint)
            rank_sleep_ms(10); /* long enough for the other to wake up and send */
    }
    free(part);
}

/* After the change all three work; ranks 0 and 2 also send to each other. */
static void whole_again(const char *hint)
{
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 7, "not whole");
    if (self.rank != 1)
        exchange_parts(ROUNDS, hint);
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 7, "not whole");
}

static void say_drops(void)
{
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    rank_say("%lu stale messages dropped", (unsigned long)stats.stale_drops);
}

/* ---------------------------------------------------------------------------- send */

/* True if the large message was cut in the middle. */
static bool receive_cut(void)
{
    memset(large, 0, LARGE);
    double start = rank_now();
    enum hdl_status status =
        hdl_recv(self.group, large, LARGE, HDL_U8, STOPPED, 3, NULL, NULL);
    CHECK(status == HDL_OK || status == HDL_EPEER, "%s: %s", hdl_status_name(status),
          hdl_error_detail());
    if (status == HDL_EPEER)
        rank_check_failed(STOPPED);
    await_removal(start);
    if (status == HDL_OK)
        return false;
    bool some = false, all = true;
    for (int i = 0; i < LARGE; i += 4096)
        *(large[i] ? &some : &all) = large[i] != 0;
    if (some && !all)
        rank_say("stopped in the middle");
    memset(large, 0x11, LARGE); /* nobody writes here any more */
    return true;
}

static void send_large(void)
{
    static const int within_us = 25000;
    struct hdl_op *op;
    memset(large, 0xaa, LARGE);
    start_stopping(&within_us);
    CHECK_OK(hdl_send(self.group, large, LARGE, HDL_U8, 0, 3, NULL, &op));
    enum hdl_status status = hdl_op_wait(op, HDL_FOREVER);
    CHECK(status == HDL_OK || status == HDL_EFENCED, "%s: %s", hdl_status_name(status),
          hdl_op_detail(op));
    hdl_op_free(op);
    check_fenced();
}

static void members(bool replace)
{
    bool cut = self.rank == 0 && receive_cut();
    pid_t child = 0;
    if (self.rank == 1)
        await_removal(rank_now());
    if (self.rank == 0 && replace)
        child = member_spawn(STOPPED, "send_replacement");
    else if (self.rank == 0)
        rank_say("go on");
    member_admit(STOPPED);
    whole_again(replace && self.rank == 0 ? "go on" : NULL);
    for (int i = 0; cut && i < LARGE; i++)
        CHECK(large[i] == 0x11, "byte %d was written by a fenced rank", i);
    if (self.rank == 0)
        say_drops();
    if (child)
        member_reap(child);
}

static void send_mode(bool replace)
{
    member_found(3, 3, false);
    CHECK(member_sum_ok() == 7, "three");
    if (self.rank != STOPPED) {
        members(replace);
        return;
    }
    send_large();
    if (replace)
        return;
    CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    whole_again(NULL);
}

/* ----------------------------------------------------------------------------- moe */

static struct hdl_moe *moe;
static float rows[TOKENS * HIDDEN], received_rows[3 * TOKENS * HIDDEN],
    sums[TOKENS * HIDDEN];

static void moe_make(void)
{
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = 3,
                                      .top_k = 2,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_F32};
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
}

/* Expert r lives on rank r and adds r; token t goes to experts t and t + 1, modulo 3.
 * Returns what the step ended with; an incomplete one is not looked at. */
static enum hdl_status moe_step(void)
{
    struct hdl_moe_handle handle;
    int32_t ids[TOKENS * 2], counts[1];
    float weights[TOKENS * 2];
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            rows[t * HIDDEN + h] = (float)(100 * self.rank + t);
        for (int k = 0; k < 2; k++) {
            ids[2 * t + k] = (t + k) % 3;
            weights[2 * t + k] = 1;
        }
    }
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = rows,
                                          .topk_ids = ids,
                                          .weights = weights,
                                          .num_tokens = TOKENS};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = received_rows, .counts = counts};
    static int calls;
    dispatching = ++calls;
    enum hdl_status first = hdl_moe_dispatch(moe, &tokens, &received, NULL, &handle);
    dispatching = 0;
    if (first < 0)
        return first;
    for (int i = 0; i < counts[0] * HIDDEN; i++)
        received_rows[i] += (float)self.rank;
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs),
                                            .rows = received_rows};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = sums};
    enum hdl_status second = hdl_moe_combine(moe, &handle, &outputs, &result, NULL);
    for (int i = 0; first == HDL_OK && second == HDL_OK && i < TOKENS * HIDDEN; i++) {
        int t = i / HIDDEN;
        float wanted = (float)(2 * (100 * self.rank + t) + t % 3 + (t + 1) % 3);
        CHECK(sums[i] == wanted, "token %d is %g, not %g", t, (double)sums[i],
              (double)wanted);
    }
    return first != HDL_OK ? first : second;
}

static void moe_members(void)
{
    pid_t child = 0;
    double start = rank_now();
    /* Steps need no agreement: the sum says after which one both stop. */
    for (int all = 7; all != 3;) {
        enum hdl_status status = moe_step();
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        all = member_sum(&status);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
    }
    CHECK(rank_now() - start < 1e-3 * DEAD_AFTER_MS * RANK_SLOW + 1.5 * RANK_SLOW,
          "a step without the stopped rank ended after %.2f s", rank_now() - start);
    member_await(STOPPED, false);
    if (self.rank == 0)
        child = member_spawn(STOPPED, "moe_replacement");
    member_admit(STOPPED);
    CHECK_OK(hdl_moe_update(moe, NULL, NULL));
    for (int i = 0; i < STEPS; i++) {
        if (i == 3 && self.rank == 0)
            rank_say("go on");
        CHECK_OK(moe_step());
        if (i > 3)
            rank_sleep_ms(10);
    }
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    hdl_moe_destroy(moe);
    if (child)
        member_reap(child);
}

static void moe_stopped(void)
{
    static const int within_us = 15000;
    enum hdl_status status = HDL_OK;
    start_stopping(&within_us);
    while (status >= 0) {
        status = moe_step();
        if (status >= 0)
            (void)member_sum(&status);
    }
    CHECK_STATUS(status, HDL_EFENCED);
    hdl_moe_destroy(moe);
    check_fenced();
}

static void moe_mode(bool replacement)
{
    member_found(3, 3, replacement);
    if (replacement)
        CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    moe_make();
    if (replacement) {
        for (int i = 0; i < STEPS; i++)
            CHECK_OK(moe_step());
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        hdl_moe_destroy(moe);
        return;
    }
    for (int i = 0; i < 3; i++)
        CHECK_OK(moe_step());
    /* What the others need of these steps has gone when the second one is over. */
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    CHECK(hdl_barrier(self.group, NULL, NULL) >= 0, "%s", hdl_error_detail());
    if (self.rank == STOPPED)
        moe_stopped();
    else
        moe_members();
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "send";
    const struct hdl_context_opts opts = {
        .size = sizeof(opts), .dead_after_us = DEAD_AFTER_MS * 1000 * RANK_SLOW};
    large = malloc(LARGE);
    CHECK(large, "no memory");
    member_begin(&opts, strstr(mode, "replacement"));
    if (strcmp(mode, "moe") == 0) {
        moe_mode(false);
    } else if (strcmp(mode, "moe_replacement") == 0) {
        moe_mode(true);
    } else if (strcmp(mode, "send_replacement") == 0) {
        member_found(3, 3, true);
        CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
        whole_again(NULL);
    } else {
        send_mode(strcmp(mode, "send") == 0);
    }
    member_end();
    free(large);
    return 0;
}
