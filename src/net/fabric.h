/* SPDX-License-Identifier: Apache-2.0 */
/* What the rest of net asks of the fabric transport. */
#ifndef NET_FABRIC_H
#define NET_FABRIC_H

#include "net/internal.h"

struct net_fabric_counters {
    uint64_t reconnects;
    uint64_t refused;
    uint64_t resent;
    uint64_t stale; /* puts of writers that are not admitted any more */
    uint64_t bytes; /* payload put, without what was sent again */
};

/* Opens libfabric, chooses a provider, listens on the exchange's interface address only.
 */
enum hdl_status net_fabric_create(struct net *net, struct net_fabric **fabric);
void net_fabric_destroy(struct net_fabric *fabric);
const char *net_fabric_provider_name(const struct net_fabric *fabric);
const char *net_fabric_transport_name(const struct net_fabric *fabric);
struct net_fabric_counters net_fabric_counters(struct net_fabric *fabric);

/* Peers may put into the window; its id, key, data and bytes are set. */
void net_fabric_admit(struct net_fabric *fabric, struct hdl_window *window);
/* When it returns nobody is writing there. */
void net_fabric_dismiss(struct net_fabric *fabric, struct hdl_window *window);
/* The same for what the former writer put. */
void net_fabric_set_writer(struct net_fabric *fabric, _Atomic uint64_t *word,
                           uint64_t writer);
void net_fabric_fill_handle(const struct net_fabric *fabric, struct net_handle *handle);

/* Number of events; 0 too if another thread is polling. */
int net_fabric_poll(struct net_fabric *fabric);
bool net_fabric_in_use(const struct net_fabric *fabric);
/* Before poll(): the descriptor to wait for (-1 = none), and *timeout_ns (< 0 = none) cut
 * down to fabric's own timers. False: there is something to do, do not sleep. */
bool net_fabric_sleep_begin(struct net_fabric *fabric, int *fd, int64_t *timeout_ns);

#endif /* NET_FABRIC_H */
