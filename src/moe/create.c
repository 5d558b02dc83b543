/* SPDX-License-Identifier: Apache-2.0 */
/* Creation of an exchange: a collective in which all ranks compare their options. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "group/engine.h"
#include "group/group.h"
#include "moe/exchange.h"

/* What a rank tells the others. */
struct note {
    int64_t there; /* 1; a lost rank leaves 0 */
    int64_t status;
    int64_t value[MOE_CONFIG_FIELDS];
};

static void format_value(const struct moe_config_field *field, int64_t value, char *text,
                         size_t size)
{
    if (strstr(field->name, "dtype"))
        snprintf(text, size, "%s", base_dtype_name((enum hdl_dtype)value));
    else if (strcmp(field->name, "expert map") == 0)
        snprintf(text, size, "%016" PRIx64, (uint64_t)value);
    else
        snprintf(text, size, "%" PRId64, value);
}

/* The first difference, seen in the same way by all ranks. */
static enum hdl_status compare(const struct note *notes, uint32_t ranks)
{
    struct moe_config_field fields[MOE_CONFIG_FIELDS];
    struct moe_config names = {.dtype = 0};
    const struct note *first = NULL;
    moe_config_fields(&names, fields);
    for (uint32_t r = 0; r < ranks; r++) {
        if (!notes[r].there)
            continue;
        if (notes[r].status != HDL_OK)
            return base_fail(HDL_EPEER, "rank %u refused its options of the exchange", r);
        first = first ? first : &notes[r];
        for (int i = 0; i < MOE_CONFIG_FIELDS; i++) {
            char a[32], b[32];
            if (notes[r].value[i] == first->value[i])
                continue;
            format_value(&fields[i], first->value[i], a, sizeof(a));
            format_value(&fields[i], notes[r].value[i], b, sizeof(b));
            return base_fail(HDL_ECONFIG, "%s is %s on rank %u and %s on rank %u",
                             fields[i].name, a, (uint32_t)(first - notes), b, r);
        }
    }
    return HDL_OK;
}

/* All ranks get here, also those whose options are wrong: nobody is left waiting. */
static enum hdl_status agree_on_options(struct hdl_group *group, struct base_env *env,
                                        enum hdl_status own,
                                        const struct moe_config *config,
                                        const struct hdl_call *call)
{
    uint32_t ranks = group_capacity(group);
    struct moe_config_field fields[MOE_CONFIG_FIELDS];
    char text[BASE_DETAIL_BYTES];
    struct note *notes = base_alloc(env, ranks + 1, sizeof(*notes));
    if (!notes)
        return HDL_ENOMEM;
    snprintf(text, sizeof(text), "%s", base_detail());
    notes[ranks] = (struct note){.there = 1, .status = own};
    if (own == HDL_OK) {
        moe_config_fields(config, fields);
        for (int i = 0; i < MOE_CONFIG_FIELDS; i++)
            notes[ranks].value[i] = fields[i].value;
    }
    enum hdl_status status =
        hdl_allgather(group, &notes[ranks], notes, sizeof(*notes) / sizeof(int64_t),
                      HDL_I64, call, NULL);
    if (own != HDL_OK)
        status = base_fail(own, "%s", text);
    else if (status >= HDL_OK)
        status = compare(notes, ranks);
    base_free(env, notes);
    return status;
}

/* An exchange exists on all ranks or on none. */
static enum hdl_status agree_on_end(struct hdl_group *group, enum hdl_status own)
{
    int32_t mine = own, all = HDL_OK;
    char text[BASE_DETAIL_BYTES];
    snprintf(text, sizeof(text), "%s", base_detail());
    enum hdl_status status =
        hdl_allreduce(group, &mine, &all, 1, HDL_I32, HDL_MIN, NULL, NULL);
    if (own != HDL_OK)
        return base_fail(own, "%s", text);
    if (status < HDL_OK)
        return status;
    return all == HDL_OK ? HDL_OK
                         : base_fail(HDL_EPEER, "creation failed on another rank with %s",
                                     base_status_name((enum hdl_status)all));
}

enum hdl_status hdl_moe_create(struct hdl_group *group, const struct hdl_moe_opts *opts,
                               struct hdl_moe **moe)
{
    struct moe_config config;
    struct moe_peers *peers;
    struct hdl_moe *made = NULL;
    enum hdl_status status = group_check(group);
    if (status == HDL_OK && !moe)
        status = base_fail(HDL_EINVAL, "hdl_moe_create: moe is NULL");
    if (status != HDL_OK)
        return status;
    struct base_env *env = group->engine->env;
    status = moe_config_init(env, &config, opts, (int32_t)group_capacity(group), false);
    bool have_config = status == HDL_OK;
    struct hdl_call call = {.size = sizeof(call)};
    if (have_config)
        call.timeout_us = config.timeout_us;
    status = agree_on_options(group, env, status, &config, &call);
    if (status == HDL_OK)
        status = moe_peers_group(env, group, config.layout.total_bytes, &peers);
    if (status != HDL_OK) {
        if (have_config)
            moe_config_free(env, &config);
        return status;
    }
    status = agree_on_end(group, moe_exchange_create(env, &config, peers, &made));
    if (status != HDL_OK) {
        hdl_moe_destroy(made);
        return status;
    }
    *moe = made;
    return HDL_OK;
}
