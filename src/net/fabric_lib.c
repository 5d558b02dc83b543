/* SPDX-License-Identifier: Apache-2.0 */
/* Opening libfabric and choosing a provider. */
#include "net/fabric_lib.h"

#include "base/log.h"
#include "net/fabric_wire.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* Libraries below libfabric catch signals when they are loaded or first looked at.
 * Signals belong to the application: what it had is put back. */
struct signals {
    struct sigaction before[32];
    bool saved[32];
};

static void signals_save(struct signals *signals)
{
    for (int i = 1; i < 32; i++)
        signals->saved[i] = sigaction(i, NULL, &signals->before[i]) == 0;
}

static void signals_restore(const struct signals *signals)
{
    for (int i = 1; i < 32; i++) {
        if (signals->saved[i])
            (void)sigaction(i, &signals->before[i], NULL);
    }
}

/* ofi_rxm's buffers are sized by its environment alone, and its defaults cost 70 MB a
 * process. It makes 2048 at once, so they are just large enough for NET_WIRE_MAX bytes.
 * Over tcp a message may be larger than they are: it is sent from where it lies and lands
 * in the buffer that was posted for it. What the user set stays. */
static void shrink_rxm(void)
{
    static_assert(NET_WIRE_MAX <= 4480 && NET_WIRE_LONG <= 70000, "they are so large");
    (void)setenv("FI_OFI_RXM_BUFFER_SIZE", "4480", 0);
    (void)setenv("FI_OFI_RXM_EAGER_LIMIT", "70000", 0);
    (void)setenv("FI_OFI_RXM_MSG_TX_SIZE", "128", 0);
    (void)setenv("FI_OFI_RXM_MSG_RX_SIZE", "128", 0);
}

/* Without these the EFA provider of libfabric 1.11 to 1.14 aborts the process when it
 * forks, even where there is no EFA device. */
static void allow_fork(void)
{
    (void)setenv("RDMAV_FORK_SAFE", "1", 0);
    (void)setenv("FI_EFA_FORK_SAFE", "1", 0);
}

enum hdl_status net_fabric_lib_open(struct base_env *env, struct net_fabric_lib *lib)
{
    const char *name = env->config.fabric_library.text;
    struct signals signals;
    signals_save(&signals);
    shrink_rxm();
    allow_fork();
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    signals_restore(&signals);
    if (!handle) {
        const char *why = dlerror();
        return base_fail(HDL_ENOTSUP, "libfabric cannot be opened: %s", why ? why : name);
    }
    struct {
        const char *name;
        void **slot;
    } symbols[] = {
        {"fi_getinfo", (void **)&lib->getinfo},
        {"fi_freeinfo", (void **)&lib->freeinfo},
        {"fi_dupinfo", (void **)&lib->dupinfo},
        {"fi_fabric", (void **)&lib->fabric},
        {"fi_strerror", (void **)&lib->strerror},
        {"fi_version", (void **)&lib->version},
        {"fi_getparams", (void **)&lib->getparams},
        {"fi_freeparams", (void **)&lib->freeparams},
    };
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        *symbols[i].slot = dlsym(handle, symbols[i].name);
        if (!*symbols[i].slot) {
            dlclose(handle);
            return base_fail(HDL_ENOTSUP, "%s has no %s", name, symbols[i].name);
        }
    }
    uint32_t version = lib->version();
    if (FI_VERSION_LT(version, NET_FABRIC_API)) {
        dlclose(handle);
        return base_fail(HDL_ENOTSUP, "%s is version %u.%u, at least %u.%u is needed",
                         name, FI_MAJOR(version), FI_MINOR(version),
                         FI_MAJOR(NET_FABRIC_API), FI_MINOR(NET_FABRIC_API));
    }
    lib->handle = handle;
    return HDL_OK;
}

bool net_fabric_takes_long(const struct net_fabric_lib *lib, const char *provider)
{
    if (strcmp(provider, "tcp;ofi_rxm") != 0 ||
        FI_VERSION_LT(lib->version(), FI_VERSION(1, 17)))
        return false;
    struct fi_param *params = NULL;
    int count = 0;
    if (lib->getparams(&params, &count) != 0)
        return false;
    bool takes = false;
    for (int i = 0; i < count; i++)
        takes = takes || strcmp(params[i].name, "FI_OFI_RXM_ENABLE_DYN_RBUF") == 0;
    lib->freeparams(params);
    return takes;
}

static enum hdl_status hints_address(struct fi_info *hints, const char *address)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    const void *source;
    size_t length;
    if (inet_pton(AF_INET, address, &v4.sin_addr) == 1) {
        hints->addr_format = FI_SOCKADDR_IN;
        source = &v4;
        length = sizeof(v4);
    } else if (inet_pton(AF_INET6, address, &v6.sin6_addr) == 1) {
        hints->addr_format = FI_SOCKADDR_IN6;
        source = &v6;
        length = sizeof(v6);
    } else {
        return base_fail(HDL_EINVAL, "\"%s\" is not a numeric address", address);
    }
    /* libfabric frees it. */
    hints->src_addr = malloc(length);
    if (!hints->src_addr)
        return base_fail(HDL_ENOMEM, "no memory for fabric's hints");
    memcpy(hints->src_addr, source, length);
    hints->src_addrlen = length;
    return HDL_OK;
}

static struct fi_info *make_hints(const struct net_fabric_lib *lib)
{
    struct fi_info *hints = lib->dupinfo(NULL);
    if (!hints)
        return NULL;
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA | FI_READ | FI_REMOTE_READ | FI_SEND | FI_RECV;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->tx_attr->size = 128;
    hints->rx_attr->size = 128;
    hints->tx_attr->msg_order = FI_ORDER_SAS;
    hints->rx_attr->msg_order = FI_ORDER_SAS;
    return hints;
}

/* Asks for one provider; NULL name = any. *info stays NULL if there is none. */
static enum hdl_status ask(const struct net_fabric_lib *lib, const char *address,
                           const char *provider, struct fi_info **info)
{
    struct fi_info *hints = make_hints(lib);
    if (!hints)
        return base_fail(HDL_ENOMEM, "no memory for fabric's hints");
    enum hdl_status status = HDL_OK;
    /* Only providers over IP can be held to an interface by its address. */
    bool over_ip = !provider || strncmp(provider, "efa", 3) != 0;
    if (address && over_ip)
        status = hints_address(hints, address);
    if (status == HDL_OK && provider) {
        hints->fabric_attr->prov_name = strdup(provider);
        if (!hints->fabric_attr->prov_name)
            status = base_fail(HDL_ENOMEM, "no memory for fabric's hints");
    }
    *info = NULL;
    struct signals signals;
    signals_save(&signals);
    if (status == HDL_OK && lib->getinfo(NET_FABRIC_API, NULL, NULL, 0, hints, info) != 0)
        *info = NULL;
    signals_restore(&signals);
    lib->freeinfo(hints);
    return status;
}

enum hdl_status net_fabric_choose(struct base_env *env, const struct net_fabric_lib *lib,
                                  const char *address, struct fi_info **info)
{
    static const char *const preferred[] = {"efa", "verbs;ofi_rxm", "tcp;ofi_rxm", NULL};
    const char *wish = env->config.fabric_provider.text;
    if (wish[0]) {
        enum hdl_status status = ask(lib, address, wish, info);
        if (status == HDL_OK && !*info)
            status = base_fail(HDL_ENOTSUP,
                               "libfabric has no provider \"%s\" that qualifies on %s",
                               wish, address ? address : "any address");
        return status;
    }
    for (size_t i = 0; i < sizeof(preferred) / sizeof(preferred[0]); i++) {
        enum hdl_status status = ask(lib, address, preferred[i], info);
        if (status != HDL_OK || *info)
            return status;
    }
    return base_fail(HDL_ENOTSUP, "libfabric has no provider that qualifies on %s",
                     address ? address : "any address");
}
