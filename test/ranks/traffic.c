/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks of several hosts: what an operation puts on the network, counted. A payload goes
 * once to each other host that needs it, however many ranks there read it; of what is
 * reduced only a host's sum, except where that would be rounded.
 */
#include <stdlib.h>
#include <string.h>

#include "group/group.h"
#include "net/net.h"
#include "ranks/rank.h"

enum { BYTES = 1 << 20, SMALL = 4096 };

static struct rank self;
static int hosts;
static unsigned char *src, *dst;

/* Runs an operation; payload bytes that all ranks together put over fabric for it. */
static uint64_t cost(enum hdl_status (*operation)(void))
{
    const struct net *net = self.group->engine->net;
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    uint64_t before = net_fabric_bytes(net);
    CHECK_OK(operation());
    uint64_t bytes = net_fabric_bytes(net) - before;
    CHECK_OK(hdl_allreduce(self.group, &bytes, &bytes, 1, HDL_U64, HDL_SUM, NULL, NULL));
    return bytes;
}

/* `payload` and nothing beside it but headers and flags; of a last chunk of blocks that
 * are shorter than the others the space between them, too. */
static void check(const char *name, enum hdl_status (*operation)(void), uint64_t payload)
{
    uint64_t bytes = cost(operation);
    uint64_t most = payload + payload / 32 + (uint64_t)(self.size * hosts) * SMALL;
    CHECK(bytes >= payload && bytes <= most, "%s: %llu bytes, not %llu", name,
          (unsigned long long)bytes, (unsigned long long)payload);
}

static enum hdl_status barrier(void)
{
    return hdl_barrier(self.group, NULL, NULL);
}

static enum hdl_status broadcast(void)
{
    return hdl_broadcast(self.group, src, dst, BYTES, HDL_U8, 1, NULL, NULL);
}

static enum hdl_status all_gather(void)
{
    return hdl_allgather(self.group, src, dst, BYTES, HDL_U8, NULL, NULL);
}

static enum hdl_status all_to_all(void)
{
    return hdl_alltoall(self.group, src, dst, BYTES, HDL_U8, NULL, NULL);
}

static enum hdl_status gather(void)
{
    return hdl_gather(self.group, src, dst, BYTES, HDL_U8, 1, NULL, NULL);
}

static enum hdl_status scatter(void)
{
    return hdl_scatter(self.group, src, dst, BYTES, HDL_U8, 1, NULL, NULL);
}

static enum hdl_status reduce_scatter(void)
{
    return hdl_reduce_scatter(self.group, src, dst, BYTES, HDL_U8, HDL_MAX, NULL, NULL);
}

static enum hdl_status all_reduce(void)
{
    return hdl_allreduce(self.group, src, dst, BYTES / 4, HDL_F32, HDL_AVG, NULL, NULL);
}

static enum hdl_status reduce(void)
{
    return hdl_reduce(self.group, src, dst, BYTES / 4, HDL_I32, HDL_SUM, 1, NULL, NULL);
}

static enum hdl_status all_reduce_narrow(void)
{
    return hdl_allreduce(self.group, src, dst, BYTES / 2, HDL_BF16, HDL_SUM, NULL, NULL);
}

int main(int argc, char **argv)
{
    rank_join(&self);
    hosts = argc > 1 ? atoi(argv[1]) : 2;
    uint64_t ranks = (uint64_t)self.size, others = (uint64_t)hosts - 1;
    uint64_t each = ranks / (uint64_t)hosts;
    src = calloc(ranks, BYTES);
    dst = calloc(ranks, BYTES);
    CHECK(src && dst, "no memory");
    for (int round = 0; round < 2; round++) {
        check("barrier", barrier, 0);
        check("broadcast", broadcast, others * BYTES);
        check("all_gather", all_gather, ranks * others * BYTES);
        check("all_to_all", all_to_all, ranks * others * each * BYTES);
        check("gather", gather, others * each * BYTES);
        check("scatter", scatter, others * each * BYTES);
        check("reduce_scatter", reduce_scatter, ranks * others * BYTES);
        check("all_reduce", all_reduce, 2 * others * BYTES);
        check("reduce", reduce,
              others * BYTES + (hosts > 2 ? others * BYTES / hosts : 0));
        check("all_reduce of bf16", all_reduce_narrow, (each + 1) * others * BYTES);
    }
    free(src);
    free(dst);
    rank_leave(&self);
    return 0;
}
