/* SPDX-License-Identifier: Apache-2.0 */
/* What transports this machine has, as JSON for `heddle info`. */
#include "net/fabric.h"
#include "net/fabric_lib.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

/* A reason comes from error texts: keep what JSON cannot hold out of it. */
static void json_text(const char *text, char *out, size_t room)
{
    size_t used = 0;
    for (; *text && used + 1 < room; text++)
        out[used++] = *text == '"'                                 ? '\''
                      : *text == '\\' || (unsigned char)*text < 32 ? ' '
                                                                   : *text;
    out[used] = 0;
}

/* The provider that would be used, or the reason why there is none. */
static size_t describe_fabric(struct base_env *env, char *json, size_t room)
{
    struct net_fabric_lib lib;
    struct fi_info *info = NULL;
    char reason[BASE_DETAIL_BYTES];
    enum hdl_status status = net_fabric_lib_open(env, &lib);
    if (status == HDL_OK)
        status = net_fabric_choose(env, &lib, NULL, &info);
    if (status != HDL_OK) {
        json_text(base_detail(), reason, sizeof(reason));
        return (size_t)snprintf(json, room, "{\"available\":false,\"reason\":\"%s\"}",
                                reason);
    }
    uint32_t version = lib.version();
    int length = snprintf(
        json, room, "{\"available\":true,\"provider\":\"%s\",\"libfabric\":\"%u.%u\"}",
        info->fabric_attr->prov_name, FI_MAJOR(version), FI_MINOR(version));
    lib.freeinfo(info);
    return (size_t)length;
}

size_t net_describe(struct base_env *env, char *json, size_t room)
{
    char fabric[BASE_DETAIL_BYTES + 64];
    describe_fabric(env, fabric, sizeof(fabric));
    const char *shm = "{\"available\":true}";
    int fd = memfd_create("heddle-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        shm = "{\"available\":false,\"reason\":\"this kernel has no memfd\"}";
    else
        close(fd);
    int length =
        snprintf(json, room, "{\"self\":{\"available\":true},\"shm\":%s,\"fabric\":%s}",
                 shm, fabric);
    return (size_t)length;
}
