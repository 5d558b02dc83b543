/* SPDX-License-Identifier: Apache-2.0 */
/* Creation of an exchange: a collective in which all ranks compare their options. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/option.h"
#include "base/rankset.h"
#include "group/engine.h"
#include "group/group.h"
#include "moe/gpu_link.h"

/* What a rank tells the others. */
struct note {
    int64_t there; /* 1; a lost rank leaves 0 */
    int64_t status;
    int64_t generation; /* of its exchange; 0 = it makes one */
    int64_t step;       /* highest of its lanes */
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

/* After the operation that filled `notes`. */
static void find_newest(const struct note *notes, uint32_t ranks, enum hdl_status status,
                        struct moe_newest *newest)
{
    *newest = (struct moe_newest){0};
    if (status == HDL_INCOMPLETE)
        hdl_last_failed(newest->members, MOE_MAX_RANKS / 64);
    for (uint32_t r = 0; r < ranks; r++) {
        if (notes[r].there && r < MOE_MAX_RANKS)
            base_mask_set(newest->members, r);
        uint64_t generation = (uint64_t)notes[r].generation;
        uint64_t step = (uint64_t)notes[r].step;
        newest->generation =
            generation > newest->generation ? generation : newest->generation;
        newest->step = step > newest->step ? step : newest->step;
    }
}

static void fill_note(struct note *note, enum hdl_status own,
                      const struct moe_config *config, const struct hdl_moe *old)
{
    struct moe_config_field fields[MOE_CONFIG_FIELDS];
    *note = (struct note){.there = 1, .status = own};
    for (uint32_t i = 0; old && i < old->config.shape.lanes; i++) {
        int64_t step = (int64_t)old->lanes[i].step;
        note->step = step > note->step ? step : note->step;
    }
    if (old && old->link)
        note->step = (int64_t)moe_gpu_link_step(old);
    note->generation = old ? (int64_t)old->generation : 0;
    if (own != HDL_OK)
        return;
    moe_config_fields(config, fields);
    for (int i = 0; i < MOE_CONFIG_FIELDS; i++)
        note->value[i] = fields[i].value;
}

/* All ranks get here, also those whose options are wrong: nobody is left waiting. */
static enum hdl_status agree_on_options(struct hdl_group *group, enum hdl_status own,
                                        const struct moe_config *config,
                                        const struct hdl_moe *old,
                                        struct moe_newest *newest)
{
    struct base_env *env = group->engine->env;
    uint32_t ranks = group_capacity(group);
    struct hdl_call call = {.size = sizeof(call)};
    char text[BASE_DETAIL_BYTES];
    struct note *notes = base_alloc(env, ranks + 1, sizeof(*notes));
    if (!notes)
        return group_decline(group, "exchange");
    snprintf(text, sizeof(text), "%s", base_detail());
    fill_note(&notes[ranks], own, config, old);
    if (own == HDL_OK)
        call.timeout_us = config->timeout_us;
    enum hdl_status status =
        hdl_allgather(group, &notes[ranks], notes, sizeof(*notes) / sizeof(int64_t),
                      HDL_I64, &call, NULL);
    find_newest(notes, ranks, status, newest);
    if (own != HDL_OK)
        status = base_fail(own, "%s", text);
    else
        status = status >= HDL_OK ? compare(notes, ranks) : group_told(status);
    base_free(env, notes);
    return status;
}

/* What creation and update begin with: the options, and that all ranks have the same. */
static enum hdl_status prepare(struct hdl_group *group, const struct hdl_moe_opts *opts,
                               const struct hdl_moe *old, struct moe_config *config,
                               struct moe_newest *newest)
{
    struct base_env *env = group->engine->env;
    enum hdl_status own =
        moe_config_init(env, config, opts, (int32_t)group_capacity(group));
    enum hdl_status status = agree_on_options(group, own, config, old, newest);
    if (status == HDL_OK && newest->generation >= UINT16_MAX)
        status = base_fail(HDL_ENOTSUP, "the exchange has had %llu updates",
                           (unsigned long long)newest->generation);
    if (status != HDL_OK && own == HDL_OK)
        moe_config_free(env, config);
    return status;
}

/* Makes an exchange in host memory, the successor of another or the first; the same
 * operations of the group in either case, so that a new member's creation meets the
 * others' update. */
static enum hdl_status make(struct hdl_group *group, struct moe_config *config,
                            const struct moe_newest *newest, struct hdl_moe **made)
{
    struct base_env *env = group->engine->env;
    struct moe_peers *peers;
    *made = NULL;
    enum hdl_status status =
        moe_peers_group(env, group, config->layout.total_bytes, newest->members, &peers);
    if (status != HDL_OK || !peers)
        moe_config_free(env, config);
    if (status != HDL_OK)
        return status;
    status = group_agree(
        group, peers ? moe_exchange_create(env, config, peers, made) : HDL_ENOMEM,
        "exchange"); /* it exists on all ranks or on none */
    if (status != HDL_OK) {
        hdl_moe_destroy(*made);
        return status;
    }
    (*made)->group = group;
    (*made)->generation = newest->generation + 1;
    moe_exchange_start_at(*made, newest->step + 1);
    return HDL_OK;
}

enum hdl_status hdl_moe_create(struct hdl_group *group, const struct hdl_moe_opts *opts,
                               struct hdl_moe **moe)
{
    struct hdl_moe *made;
    struct hdl_moe_opts copy;
    struct moe_config config;
    struct moe_newest newest;
    enum hdl_status status = group_check(group);
    if (status == HDL_OK && !moe)
        status = base_fail(HDL_EINVAL, "hdl_moe_create: moe is NULL");
    if (status == HDL_OK)
        status = prepare(group, opts, NULL, &config, &newest);
    if (status == HDL_OK) /* it was accepted, so it is a valid struct of some size */
        status = base_option_copy("hdl_moe_opts", opts, &copy, sizeof(copy));
    if (status == HDL_OK)
        status = config.shape.device
                     ? moe_gpu_link_create(group, &copy, &config, &newest, &made)
                     : make(group, &config, &newest, &made);
    if (status != HDL_OK)
        return status;
    made->opts = copy;
    made->opts.expert_counts = made->opts.expert_ids = NULL;
    *moe = made;
    return status;
}

/* The present map, as options give it; one block, freed by the caller. */
static int32_t *copy_map(struct base_env *env, const struct moe_map *map)
{
    uint32_t total = map->first[map->ranks];
    int32_t *copy = base_alloc(env, map->ranks + total, sizeof(int32_t));
    for (uint32_t r = 0; copy && r < map->ranks; r++)
        copy[r] = (int32_t)moe_map_local_experts(map, r);
    for (uint32_t i = 0; copy && i < total; i++)
        copy[map->ranks + i] = (int32_t)map->list[i];
    return copy;
}

enum hdl_status hdl_moe_update(struct hdl_moe *m, const int32_t *expert_counts,
                               const int32_t *expert_ids)
{
    struct hdl_moe *fresh;
    struct moe_config config;
    struct moe_newest newest;
    int32_t *map = NULL;
    enum hdl_status status = moe_exchange_check(m);
    if (status == HDL_OK)
        status = group_check(m->group);
    if (status != HDL_OK)
        return status;
    struct hdl_moe_opts opts = m->opts;
    opts.expert_counts = expert_counts;
    opts.expert_ids = expert_ids;
    if (!expert_counts && !expert_ids) {
        map = copy_map(m->env, &m->config.map);
        if (!map)
            return group_decline(m->group, "exchange");
        opts.expert_counts = map;
        opts.expert_ids = map + m->config.shape.ranks;
    }
    status = prepare(m->group, &opts, m, &config, &newest);
    base_free(m->env, map);
    if (status == HDL_OK && m->link)
        return moe_gpu_link_update(m, &config, &newest);
    if (status == HDL_OK)
        status = make(m->group, &config, &newest, &fresh);
    if (status != HDL_OK)
        return status;
    fresh->opts = m->opts;
    moe_exchange_replace(m, fresh);
    return HDL_OK;
}
