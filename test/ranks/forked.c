/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fork without exec is harmless: the child cannot use the library, and does not keep
 * its dead parent's connections open: a rank that is killed and leaves two workers behind
 * is noticed as fast as any other, on one host and between hosts.
 */
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

enum { PARENT = 1, CHILD_MS = 1500 };

static struct rank self;

static void child(int ms)
{
    int32_t one = 1;
    struct hdl_group *group = NULL;
    struct hdl_group_opts opts = {.size = sizeof(opts), .name = "child"};
    enum hdl_status status =
        hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL);
    if (status != HDL_ENOTSUP || strlen(hdl_error_detail()) < 10 ||
        hdl_group_create(self.context, &opts, &group) != HDL_ENOTSUP)
        _exit(3);
    rank_sleep_ms(ms);
    _exit(0);
}

static void test_sum(void)
{
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == self.size, "sum %d", one);
}

/* A process without standard descriptors, or with hardly any more, is not ended. */
static void bare(rlim_t files, enum hdl_status wanted)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        struct hdl_context_opts opts = {.size = sizeof(opts), .num_ranks = 1};
        struct hdl_context *context = NULL;
        struct rlimit limit = {files, files};
        close(STDIN_FILENO);
        close(STDOUT_FILENO);
        close(STDERR_FILENO);
        setrlimit(RLIMIT_NOFILE, &limit);
        bool right = hdl_context_create(&opts, &context) == wanted;
        hdl_context_destroy(context);
        _exit(!right);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%d files: ended with %#x",
          (int)files, status);
}

int main(void)
{
    bare(512, HDL_OK);
    for (rlim_t files = 3; files < 8; files++)
        bare(files, HDL_ESYSTEM);
    rank_join(&self);
    test_sum();
    /* Every rank forks, and goes on. */
    pid_t pid = fork();
    int status;
    if (pid == 0)
        child(100);
    for (int i = 0; i < 1000; i++)
        test_sum();
    CHECK(waitpid(pid, &status, 0) == pid && status == 0, "the child ended with %#x",
          status);
    test_sum();
    /* A rank dies, and its child lives on. */
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    double start = rank_now();
    if (self.rank == PARENT) {
        for (int i = 0; i < 2; i++)
            if (fork() == 0)
                child(CHILD_MS);
        raise(SIGKILL);
    }
    enum hdl_status last = HDL_OK;
    while (last == HDL_OK)
        last = hdl_barrier(self.group, NULL, NULL);
    CHECK_STATUS(last, HDL_INCOMPLETE);
    rank_check_failed(PARENT);
    CHECK(rank_now() - start < 1.0 * RANK_SLOW,
          "the death of a rank with a child took %.2f s to show", rank_now() - start);
    rank_leave(&self);
    rank_sleep_ms(CHILD_MS + 300);
    return 0;
}
