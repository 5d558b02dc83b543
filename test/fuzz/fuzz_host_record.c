/* SPDX-License-Identifier: Apache-2.0 */
/* The record of a coordinator as a store or a file gives it: anybody may have written it.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host/boot.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct value {
    const uint8_t *data;
    size_t size;
};

static enum hdl_status get(void *user, const char *key, void *value, size_t *length,
                           int64_t timeout_us)
{
    const struct value *given = user;
    (void)key;
    (void)timeout_us;
    if (given->size > *length)
        return HDL_EINVAL;
    memcpy(value, given->data, given->size);
    *length = given->size;
    return HDL_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct value value = {data, size};
    struct hdl_bootstrap callbacks = {.user = &value, .get = get};
    struct base_env env;
    base_env_init(&env);
    struct host_boot boot = {.env = &env,
                             .mode = HOST_BOOT_CALLBACKS,
                             .rank = 1,
                             .num_ranks = 2,
                             .callbacks = &callbacks};
    struct host_addresses found;
    if (host_boot_lookup(&boot, 0, &found) != HDL_OK)
        return 0;
    if (found.count != 1 || !boot.has_token)
        abort();
    /* Loopback of another host must have been refused; the host's id follows two words.
     */
    bool same_host = memcmp(data + 8, boot.host_id, sizeof(boot.host_id)) == 0;
    if (host_address_is_loopback(&found.items[0]) && !same_host)
        abort();
    return 0;
}
