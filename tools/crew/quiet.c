/* SPDX-License-Identifier: Apache-2.0 */
/* What elasticity costs while nothing happens: operations, looking at the view, idling.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/crew/crew.h"

enum { BATCH = 20000, BATCH_FAR = 200, LOOKS = 1000000, IDLE_MS = 3000 };

static int64_t cpu_ns(void)
{
    struct timespec used;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec * BASE_NS_PER_S + used.tv_nsec;
}

/* Payload of the control connections so far, as the context describes itself. */
static int64_t control_bytes(struct hdl_context *context)
{
    char text[8192] = "";
    int fd = memfd_create("dump", MFD_CLOEXEC);
    if (fd < 0)
        return 0;
    bool good = hdl_context_dump(context, fd) == HDL_OK &&
                pread(fd, text, sizeof(text) - 1, 0) > 0;
    (void)close(fd);
    const char *found = good ? strstr(text, "control payload ") : NULL;
    return found ? strtoll(found + strlen("control payload "), NULL, 10) : 0;
}

enum hdl_status crew_batch(struct hdl_group *group, int64_t *ns_per_op)
{
    int64_t in = 1, out;
    bool near = true; /* milliseconds either way */
    for (int r = 0; r < hdl_group_size(group); r++)
        near &= strncmp(hdl_group_transport(group, r), "fabric", 6) != 0;
    int count = near ? BATCH : BATCH_FAR;
    enum hdl_status status = hdl_barrier(group, NULL, NULL);
    int64_t begin = base_now_ns();
    for (int i = 0; i < count && status == HDL_OK; i++)
        status = hdl_allreduce(group, &in, &out, 1, HDL_I64, HDL_SUM, NULL, NULL);
    *ns_per_op = (base_now_ns() - begin) / count;
    return status;
}

void crew_measure_quiet(struct hdl_context *context, struct hdl_group *group,
                        struct crew_quiet *quiet)
{
    uint64_t active = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active};
    int64_t begin = base_now_ns();
    for (int i = 0; i < LOOKS; i++)
        if (hdl_group_view(group, &view) != HDL_OK)
            return;
    quiet->view_ns = (double)(base_now_ns() - begin) / LOOKS;
    int64_t bytes = control_bytes(context), used = cpu_ns();
    begin = base_now_ns();
    usleep(IDLE_MS * 1000);
    double seconds = (double)(base_now_ns() - begin) / 1e9;
    quiet->cpu_ms = (double)(cpu_ns() - used) / 1e6 / seconds;
    quiet->control_kb = (double)(control_bytes(context) - bytes) / 1e3 / seconds;
}
