/* SPDX-License-Identifier: Apache-2.0 */
/* Several "hosts" on one machine: network namespaces joined by a bridge, for tests. */
#ifndef TOOLS_NETNS_H
#define TOOLS_NETNS_H

#include "heddle.h"

struct netns;

/*
 * Makes one namespace that holds a bridge and `num_hosts` namespaces with one interface
 * "heddle0" each, 10.77.0.1 and up, all without names: they end with the last process in
 * them or the descriptor. The ranks are spread over them in blocks. Nothing of the
 * machine's own network is touched. HDL_EINVAL, HDL_ENOMEM; HDL_ENOTSUP without the right
 * to make namespaces or the `ip` command; HDL_ESYSTEM.
 */
enum hdl_status netns_create(int num_hosts, int num_ranks, struct netns **out);

/* For struct procs_spec; they live as long as the netns. */
const int *netns_rank_fds(const struct netns *netns);
const char *const *netns_rank_addrs(const struct netns *netns);

void netns_destroy(struct netns *netns);

#endif
