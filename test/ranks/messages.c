/* SPDX-License-Identifier: Apache-2.0 */
/* Odd ranks are killed while even ones exchange messages and wait for one from each of
 * them: nothing but the receives from the lost ranks fails. */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "rank.h"

enum { MAX_RANKS = 16, ROUNDS = 50, WITHIN_US = 20000, UNWRITTEN = -7 };

static struct rank self;
static struct hdl_op *lost[MAX_RANKS];
static int64_t never[MAX_RANKS];

_Noreturn static void die(void)
{
    unsigned seed = (unsigned)getpid() ^ (unsigned)(rank_now() * 1e6);
    usleep((useconds_t)(rand_r(&seed) % WITHIN_US));
    raise(SIGKILL);
    _exit(1);
}

static int64_t receive(int32_t from, int32_t tag)
{
    int64_t got = UNWRITTEN;
    CHECK_OK(hdl_recv(self.group, &got, 1, HDL_I64, from, tag, NULL, NULL));
    return got;
}

static void exchange(int32_t with, int64_t round)
{
    struct hdl_op *send;
    CHECK_OK(hdl_send(self.group, &round, 1, HDL_I64, with, 1, NULL, &send));
    int64_t got = receive(with, 1);
    CHECK(got == round, "round %ld brought %ld", (long)round, (long)got);
    CHECK_OK(hdl_op_wait(send, HDL_FOREVER));
    hdl_op_free(send);
}

static bool all_lost(void)
{
    for (int r = 1; r < self.size; r += 2)
        if (hdl_op_test(lost[r]) == HDL_PENDING)
            return false;
    return true;
}

/* The lower rank of a pair decides for both: they hear of a loss at different times. */
static bool agree(int32_t with, bool done)
{
    int64_t word = done;
    if (self.rank > with)
        return receive(with, 2);
    CHECK_OK(hdl_send(self.group, &word, 1, HDL_I64, with, 2, NULL, NULL));
    return done;
}

static void check_lost(int32_t rank)
{
    uint64_t failed = 0;
    CHECK_STATUS(hdl_op_wait(lost[rank], HDL_FOREVER), HDL_EPEER);
    hdl_op_failed(lost[rank], &failed, 1);
    CHECK(failed == UINT64_C(1) << rank, "failed set %#lx", (unsigned long)failed);
    CHECK(never[rank] == UNWRITTEN, "rank %d sent %ld", rank, (long)never[rank]);
    hdl_op_free(lost[rank]);
    CHECK_STATUS(hdl_send(self.group, never, 1, HDL_I64, rank, 5, NULL, NULL), HDL_EPEER);
}

int main(void)
{
    rank_join(&self);
    CHECK(self.size % 4 == 0 && self.size <= MAX_RANKS, "run it with 4, 8, 12 ranks");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank % 2)
        die();
    int32_t with = self.rank ^ 2;
    for (int32_t r = 1; r < self.size; r += 2) {
        never[r] = UNWRITTEN;
        CHECK_OK(hdl_recv(self.group, &never[r], 1, HDL_I64, r, 5, NULL, &lost[r]));
    }
    int64_t round = 0;
    do
        exchange(with, round++);
    while (!agree(with, round >= ROUNDS && all_lost()));
    for (int32_t r = 1; r < self.size; r += 2)
        check_lost(r);
    enum hdl_status status = hdl_barrier(self.group, NULL, NULL);
    CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    if (self.rank == 0)
        printf("%ld rounds\n", (long)round);
    rank_leave(&self);
    return 0;
}
