/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator's rank is lost: HDL_ECOORD on all survivors within 2 s, idle, in an
 * operation, or while a rank waits for its admission; a group without that rank goes on
 * if its ranks live on one host.
 *
 *     coordinator idle|busy|joining
 */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

/* Ranks 0 to 2 are members, rank 3 waits to become one, rank 1 waits to admit it: nobody
 * hears of it any more. */
static int joining(void)
{
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .rank = rank_env("RANK"),
                                  .num_ranks = 3,
                                  .capacity = 5,
                                  .join = rank_env("RANK") == 3};
    const int32_t both[] = {3, 4};
    CHECK_OK(hdl_context_create(NULL, &self.context));
    CHECK_OK(hdl_group_create(self.context, &opts, &self.group));
    enum hdl_status status = HDL_OK;
    if (opts.rank == 0) {
        rank_sleep_ms(200);
        raise(SIGKILL);
    } else if (opts.rank == 3) {
        status = hdl_group_join(self.group, 0, NULL);
    } else if (opts.rank == 1) {
        status = hdl_group_admit(self.group, both, 2, 0, NULL);
    } else {
        while (status == HDL_OK)
            status = hdl_barrier(self.group, NULL, NULL);
    }
    CHECK_STATUS(status, HDL_ECOORD);
    CHECK_STATUS(hdl_group_join(self.group, 0, NULL), HDL_ECOORD);
    rank_leave(&self);
    return 0;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "busy";
    if (strcmp(mode, "joining") == 0) {
        double start = rank_now();
        int code = joining();
        CHECK(rank_now() - start < 4.0 * RANK_SLOW, "the end came after %.2f s",
              rank_now() - start);
        return code;
    }
    static const int32_t others[] = {1, 2, 3};
    struct hdl_group *apart = NULL;
    rank_join(&self);
    CHECK(self.size == 4, "run it with 4 ranks");
    if (self.rank > 0) {
        struct hdl_group_opts opts = {.size = sizeof(opts),
                                      .name = "apart",
                                      .rank = self.rank - 1,
                                      .num_ranks = 3,
                                      .ranks = others};
        CHECK_OK(hdl_group_create(self.context, &opts, &apart));
    }
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 0) {
        rank_sleep_ms(strcmp(mode, "idle") == 0 ? 50 : 100);
        raise(SIGKILL);
    }
    if (strcmp(mode, "idle") == 0)
        rank_sleep_ms(500);
    double start = rank_now();
    enum hdl_status status = HDL_OK;
    static float data[1 << 16];
    while (status == HDL_OK && rank_now() < start + 10) {
        start = rank_now();
        status =
            hdl_allreduce(self.group, data, data, 1 << 16, HDL_F32, HDL_SUM, NULL, NULL);
    }
    CHECK_STATUS(status, HDL_ECOORD);
    CHECK(rank_now() - start < 2.0 * RANK_SLOW, "told after %.2f s", rank_now() - start);
    CHECK_STATUS(hdl_barrier(self.group, NULL, NULL), HDL_ECOORD);
    rank_check_text(hdl_error_detail(), "the coordinator is lost: job rank 0 at ",
                    "heddle coordinator", NULL);
    /* Ranks of one host watch each other; deaths elsewhere only a coordinator tells. */
    bool watched = strcmp(hdl_group_transport(apart, self.rank % 3), "shm") == 0 &&
                   strcmp(hdl_group_transport(apart, (self.rank + 1) % 3), "shm") == 0;
    for (int i = 0; i < 100; i++) {
        int32_t one = 1;
        status = hdl_allreduce(apart, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL);
        if (status == HDL_ECOORD && !watched)
            break;
        CHECK(status == HDL_OK && one == 3, "%s, sum %d: %s", hdl_status_name(status),
              one, hdl_error_detail());
    }
    /* Without a coordinator nobody can tell the end of a rank from its loss. */
    rank_sleep_ms(500 * RANK_SLOW);
    start = rank_now();
    hdl_group_destroy(apart);
    rank_leave(&self);
    CHECK(rank_now() - start < 7.0 * RANK_SLOW, "leaving took %.2f s",
          rank_now() - start);
    return 0;
}
