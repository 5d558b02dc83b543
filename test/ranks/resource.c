/* SPDX-License-Identifier: Apache-2.0 */
/* A life of a job in which any call may fail for want of memory or descriptors: it ends
 * with a status, nothing is leaked, and the other ranks are not left waiting. */
#include <dirent.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "heddle.h"

enum { COUNT = 100000 };

static atomic_long live_blocks;
static bool whole_life; /* every call was a success */

static void *counted_alloc(void *user, size_t bytes)
{
    (void)user;
    void *ptr = malloc(bytes);
    if (ptr)
        atomic_fetch_add(&live_blocks, 1);
    return ptr;
}

static void counted_release(void *user, void *ptr)
{
    (void)user;
    if (ptr)
        atomic_fetch_sub(&live_blocks, 1);
    free(ptr);
}

static int count_descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    if (!dir)
        return -1;
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static void say(const char *call, enum hdl_status status)
{
    fprintf(stderr, "%s: %s (%s)\n", call, hdl_status_name(status), hdl_error_detail());
}

/* Sums 1 over the two ranks; a wrong sum that is called a success is the only error here.
 */
static int use_group(struct hdl_group *group)
{
    static float in[COUNT];
    static float out[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        in[i] = 1.0f;
    struct hdl_call call = {.size = sizeof(call), .timeout_us = 2500000};
    for (int round = 0; round < 3; round++) {
        enum hdl_status status =
            hdl_allreduce(group, in, out, COUNT, HDL_F32, HDL_SUM, &call, NULL);
        if (status != HDL_OK) {
            say("allreduce", status);
            whole_life = false;
            return 0;
        }
        for (size_t i = 0; i < COUNT; i++) {
            if (out[i] != 2.0f) {
                fprintf(stderr, "element %zu is %g, not 2\n", i, out[i]);
                return 1;
            }
        }
    }
    return 0;
}

static int live_once(void)
{
    const struct hdl_allocator allocator = {NULL, counted_alloc, counted_release};
    const struct hdl_context_opts context_opts = {
        .size = sizeof(context_opts), .timeout_us = 250000, .allocator = &allocator};
    const struct hdl_group_opts group_opts = {.size = sizeof(group_opts),
                                              .timeout_us = 250000};
    struct hdl_context *context = NULL;
    struct hdl_group *group = NULL;
    enum hdl_status status = hdl_context_create(&context_opts, &context);
    if (status != HDL_OK) {
        say("context", status);
        whole_life = false;
        return context != NULL;
    }
    int code = 0;
    status = hdl_group_create(context, &group_opts, &group);
    whole_life = status == HDL_OK;
    if (status == HDL_OK)
        code = use_group(group);
    else
        say("group", status);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return code;
}

/* Starts to count calls, if fault_preload.c is there. */
static void arm(void)
{
    union {
        void *symbol;
        void (*call)(void);
    } fault = {dlsym(RTLD_DEFAULT, "fault_arm")};
    if (fault.symbol)
        fault.call();
}

/* The first life opens what libraries keep for the whole process; the second must add
 * nothing. */
int main(void)
{
    int code = live_once();
    int before = count_descriptors();
    arm();
    code |= live_once();
    int after = count_descriptors();
    const char *rank = getenv("RANK");
    const char *fault = getenv("HEDDLE_TEST_FAULT");
    if (whole_life && rank && fault && atoi(rank) == atoi(fault))
        fprintf(stderr, "[life] whole\n");
    if (before >= 0 && after >= 0 && after > before) {
        fprintf(stderr, "%d descriptors before, %d after\n", before, after);
        code = 1;
    }
    if (atomic_load(&live_blocks) != 0) {
        fprintf(stderr, "%ld blocks were not released\n", atomic_load(&live_blocks));
        code = 1;
    }
    return code;
}
