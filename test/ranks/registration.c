/* SPDX-License-Identifier: Apache-2.0 */
/* Creation: wrong places, different options, missing ranks, larger option structs. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

static enum hdl_status create(struct hdl_group_opts opts, struct hdl_group **group)
{
    opts.size = sizeof(opts);
    return hdl_group_create(self.context, &opts, group);
}

static void check_works(const char *name)
{
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == self.size, "sum %d after %s", one, name);
}

/* Ranks outside the capacity, and one that is another's. The members are not disturbed.
 */
static void test_places(void)
{
    struct hdl_group *group = NULL;
    int n = self.size;
    struct hdl_group_opts opts = {.name = "outside", .rank = n, .num_ranks = n};
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    opts.rank = -1;
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    opts.rank = self.rank;
    opts.capacity = n - 1;
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    opts.capacity = 0;
    opts.num_ranks = -3;
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    opts.num_ranks = 2;
    opts.rank = 0;
    opts.ranks = (const int32_t[]){self.rank, self.rank};
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    opts = (struct hdl_group_opts){.name = "two\nlines"};
    CHECK_STATUS(create(opts, &group), HDL_EINVAL);
    CHECK(group == NULL, "a failed creation wrote its output");
    check_works("places");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* One option differs on the last rank: HDL_ECONFIG on all, with field, values and ranks.
 */
static void test_options(void)
{
    struct hdl_group *group = NULL;
    bool odd = self.rank == self.size - 1;
    char first[16], last[16];
    snprintf(first, sizeof(first), "%d", 0);
    snprintf(last, sizeof(last), "%d", self.size - 1);
    double start = rank_now();
    struct hdl_group_opts chunks = {.name = "chunks", .window_chunks = odd ? 8 : 16};
    CHECK_STATUS(create(chunks, &group), HDL_ECONFIG);
    rank_check_text(hdl_error_detail(), "8", "16", last, NULL);
    struct hdl_group_opts bytes = {.name = "bytes", .chunk_bytes = odd ? 65536 : 131072};
    CHECK_STATUS(create(bytes, &group), HDL_ECONFIG);
    rank_check_text(hdl_error_detail(), "65536", "131072", last, NULL);
    struct hdl_group_opts local = {.name = "local", .completion_local = odd};
    CHECK_STATUS(create(local, &group), HDL_ECONFIG);
    CHECK(rank_now() - start < 5 * RANK_SLOW, "three refusals took %.1f s",
          rank_now() - start);
    check_works("different options");
    (void)first;
}

/* The last rank does not come: all the others say so, at their deadline. */
static void test_missing(void)
{
    struct hdl_group *group = NULL;
    struct hdl_group_opts opts = {.name = "missing", .timeout_us = 700000};
    char last[16];
    snprintf(last, sizeof(last), "%d", self.size - 1);
    double start = rank_now();
    if (self.rank != self.size - 1) {
        CHECK_STATUS(create(opts, &group), HDL_ETIMEDOUT);
        double seconds = rank_now() - start;
        CHECK(seconds > 0.6 && seconds < 2.0 * RANK_SLOW,
              "the deadline of 0.7 s passed after %.2f s", seconds);
        rank_check_text(hdl_error_detail(), last, NULL);
    }
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    /* The same name works afterwards. */
    opts.timeout_us = 0;
    CHECK_OK(create(opts, &group));
    CHECK_OK(hdl_barrier(group, NULL, NULL));
    hdl_group_destroy(group);
}

static void test_sizes_of_structs(void)
{
    struct {
        struct hdl_group_opts opts;
        int64_t tail[4];
    } larger = {.opts = {.size = sizeof(larger), .name = "larger"}};
    struct hdl_group *group = NULL;
    CHECK_OK(hdl_group_create(self.context, &larger.opts, &group));
    hdl_group_destroy(group);
    group = NULL;
    larger.tail[2] = 1;
    CHECK_STATUS(hdl_group_create(self.context, &larger.opts, &group), HDL_EINVAL);
    struct {
        struct hdl_context_opts opts;
        int64_t tail[4];
    } context = {.opts = {.size = sizeof(context)}};
    context.tail[1] = 5;
    struct hdl_context *second = NULL;
    CHECK_STATUS(hdl_context_create(&context.opts, &second), HDL_EINVAL);
    CHECK(!second && !group, "a failed creation wrote its output");
    /* A caller that was compiled with fewer fields. */
    struct hdl_group_opts smaller = {.size =
                                         offsetof(struct hdl_group_opts, window_chunks),
                                     .name = "smaller",
                                     .window_chunks = 12345};
    CHECK_OK(hdl_group_create(self.context, &smaller, &group));
    CHECK_OK(hdl_barrier(group, NULL, NULL));
    hdl_group_destroy(group);
}

/* A second process for a job rank that is alive, and one with another token. It was
 * forked before the first context of its parent, and waits for the parent's word. */
static pid_t child_pid;
static int go[2];

static void child_life(void)
{
    char word;
    if (read(go[0], &word, 1) != 1)
        _exit(0);
    struct hdl_context_opts opts = {.size = sizeof(opts), .timeout_us = 3000000};
    struct hdl_context *second = NULL;
    double start = rank_now();
    CHECK_STATUS(hdl_context_create(&opts, &second), HDL_EINVAL);
    CHECK(rank_now() - start < 2.5 * RANK_SLOW, "refused after %.2f s",
          rank_now() - start);
    rank_check_text(hdl_error_detail(), "1", "in use", NULL);
    opts.token = "short";
    CHECK_STATUS(hdl_context_create(&opts, &second), HDL_EINVAL);
    char address[160];
    snprintf(address, sizeof(address), "%s:%s", getenv("MASTER_ADDR"),
             getenv("MASTER_PORT"));
    opts.coordinator = address;
    opts.token = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    CHECK_STATUS(hdl_context_create(&opts, &second), HDL_ECONFIG);
    CHECK(second == NULL, "a failed creation wrote its output");
    _exit(0);
}

static void fork_child(void)
{
    CHECK(pipe(go) == 0, "no pipe");
    child_pid = fork();
    CHECK(child_pid >= 0, "no child");
    if (child_pid == 0) {
        close(go[1]);
        child_life();
    }
    close(go[0]);
}

static void test_in_use(void)
{
    int status = 0;
    if (self.rank == 1)
        CHECK(write(go[1], "x", 1) == 1, "no word");
    close(go[1]);
    CHECK(waitpid(child_pid, &status, 0) == child_pid && status == 0,
          "the child ended with %#x", status);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    check_works("a rank in use");
}

static void test_context_options(void)
{
    struct hdl_context *none = NULL;
    struct hdl_context_opts opts = {.size = sizeof(opts), .rank = 4, .num_ranks = 4};
    CHECK_STATUS(hdl_context_create(&opts, &none), HDL_EINVAL);
    opts.rank = 0;
    opts.transport = "pigeon";
    CHECK_STATUS(hdl_context_create(&opts, &none), HDL_EINVAL);
    rank_check_text(hdl_error_detail(), "pigeon", NULL);
    opts.transport = NULL;
    opts.dead_after_us = 1000;
    CHECK_STATUS(hdl_context_create(&opts, &none), HDL_EINVAL);
    opts.dead_after_us = 0;
    opts.coordinator = "nowhere";
    CHECK_STATUS(hdl_context_create(&opts, &none), HDL_EINVAL);
    opts.num_ranks = 1;
    CHECK_STATUS(hdl_context_create(&opts, &none), HDL_EINVAL);
    CHECK(none == NULL, "a failed creation wrote its output");
}

int main(void)
{
    fork_child();
    rank_join(&self);
    CHECK(self.size > 1, "run it with 2 ranks or more");
    test_context_options();
    test_places();
    test_options();
    test_missing();
    test_sizes_of_structs();
    test_in_use();
    rank_leave(&self);
    return 0;
}
