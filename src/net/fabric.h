/* SPDX-License-Identifier: Apache-2.0 */
/* What the rest of net asks of the fabric transport. */
#ifndef NET_FABRIC_H
#define NET_FABRIC_H

#include "net/internal.h"

struct net_fabric_counters {
    uint64_t reconnects;
    uint64_t refused;
    uint64_t resent;
};

/* Opens libfabric, chooses a provider, listens on the exchange's interface address only.
 */
enum hdl_status net_fabric_create(struct net *net, struct net_fabric **fabric);
void net_fabric_destroy(struct net_fabric *fabric);
const char *net_fabric_provider_name(const struct net_fabric *fabric);
const char *net_fabric_transport_name(const struct net_fabric *fabric);
struct net_fabric_counters net_fabric_counters(const struct net_fabric *fabric);

enum hdl_status net_fabric_register(struct net_fabric *fabric, struct hdl_window *window);
void net_fabric_deregister(struct net_fabric *fabric, struct hdl_window *window);
void net_fabric_describe_window(const struct net_fabric *fabric,
                                const struct hdl_window *window,
                                struct net_handle *handle);

enum hdl_status net_fabric_expose(struct net_fabric *fabric, void *data, size_t bytes,
                                  struct net_exposed *exposed, void **registration);
void net_fabric_unexpose(struct net_fabric *fabric, void *registration);

/* Number of events; 0 too if another thread is polling. */
int net_fabric_poll(struct net_fabric *fabric);
bool net_fabric_in_use(const struct net_fabric *fabric);
/* Before poll(): the descriptor to wait for (-1 = none), and *timeout_ns (< 0 = none) cut
 * down to fabric's own timers. False: there is something to do, do not sleep. */
bool net_fabric_sleep_begin(struct net_fabric *fabric, int *fd, int64_t *timeout_ns);

/* The fabric part of net_describe: provider that would be used, or the reason. */
size_t net_fabric_describe(struct base_env *env, char *json, size_t room);

#endif /* NET_FABRIC_H */
