/* SPDX-License-Identifier: Apache-2.0 */
/* libfabric opened at run time: its few real symbols; the rest are inline calls. */
#ifndef NET_FABRIC_LIB_H
#define NET_FABRIC_LIB_H

#include "base/env.h"

/* libfabric's inline functions are not written for these warnings. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wshadow"
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#pragma GCC diagnostic pop

struct net_fabric_lib {
    void *handle;
    int (*getinfo)(uint32_t version, const char *node, const char *service,
                   uint64_t flags, const struct fi_info *hints, struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int error);
    uint32_t (*version)(void);
    int (*getparams)(struct fi_param **params, int *count);
    void (*freeparams)(struct fi_param *params);
};

/* The interface version asked for: everything used here is in it. */
#define NET_FABRIC_API FI_VERSION(1, 11)

/* HDL_ENOTSUP with the reason. It is never closed again: providers leave threads and exit
 * handlers behind. */
enum hdl_status net_fabric_lib_open(struct base_env *env, struct net_fabric_lib *lib);

/* Does a message of NET_LONG_BYTES go without round trips and buffers of its size? Not
 * where ofi_rxm has no dynamic receive buffers (any more): it would cut it into segments,
 * and crash should the peer die before the last (libfabric 2.1). Call it after choosing.
 */
bool net_fabric_takes_long(const struct net_fabric_lib *lib, const char *provider);

/*
 * The best provider that qualifies: reliable datagrams, messages and writes in order, on
 * `address` (numeric; NULL = any). The caller frees with lib->freeinfo.
 */
enum hdl_status net_fabric_choose(struct base_env *env, const struct net_fabric_lib *lib,
                                  const char *address, struct fi_info **info);

#endif /* NET_FABRIC_LIB_H */
