/* SPDX-License-Identifier: Apache-2.0 */
/* The algorithm table of mapped groups, its overrides, chunk sizes. */
#include "group/table.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "group/mapped.h"

/* First fit, per kind. Shares are as direct where all ranks are on one host. Pieces pay
 * off when reading every slot costs more than a second round: from 3 ranks and some tens
 * of KiB on. */
static const struct group_rule rules[] = {
    {GROUP_BARRIER, 0, 0, &group_barrier_flat},
    {GROUP_BROADCAST, 0, 0, &group_broadcast_pull},
    {GROUP_REDUCE, 64 * 1024, 3, &group_reduce_pieces},
    {GROUP_REDUCE, 0, 0, &group_reduce_direct},
    {GROUP_ALLREDUCE, 64 * 1024, 3, &group_allreduce_pieces},
    {GROUP_ALLREDUCE, 0, 0, &group_allreduce_direct},
    {GROUP_ALLGATHER, 0, 0, &group_allgather_pull},
    {GROUP_ALLGATHERV, 0, 0, &group_allgatherv_pull},
    {GROUP_REDUCE_SCATTER, 64 * 1024, 3, &group_reduce_scatter_shares},
    {GROUP_REDUCE_SCATTER, 0, 0, &group_reduce_scatter_direct},
    {GROUP_REDUCE_SCATTERV, 64 * 1024, 3, &group_reduce_scatterv_shares},
    {GROUP_REDUCE_SCATTERV, 0, 0, &group_reduce_scatterv_direct},
    {GROUP_ALLTOALL, 0, 0, &group_alltoall_pull},
    {GROUP_ALLTOALLV, 0, 0, &group_alltoallv_pull},
    {GROUP_GATHER, 0, 0, &group_gather_pull},
    {GROUP_GATHERV, 0, 0, &group_gatherv_pull},
    {GROUP_SCATTER, 0, 0, &group_scatter_pull},
    {GROUP_SCATTERV, 0, 0, &group_scatterv_pull},
    {GROUP_REFUSED, 0, 0, &group_refused},
};

enum { NUM_RULES = sizeof(rules) / sizeof(rules[0]) };

/* An operation with at most this many bytes is one chunk; a large one uses chunks that
 * stay in the first caches while they pass through. */
#define SINGLE_BYTES ((size_t)32 * 1024)
#define MEDIUM_BYTES ((size_t)64 * 1024)
#define MEDIUM_LIMIT ((size_t)4 * 1024 * 1024)

size_t group_table_size(void)
{
    return NUM_RULES;
}

const struct group_rule *group_table_rule(size_t index)
{
    return index < NUM_RULES ? &rules[index] : NULL;
}

/* Length of the part up to the next comma. */
static size_t part_length(const char *text)
{
    return strcspn(text, ",");
}

static bool part_names(const char *part, size_t length, const struct group_rule *rule)
{
    const char *kind = group_kind_name((uint8_t)rule->kind);
    size_t n = strlen(kind), m = strlen(rule->algorithm->name);
    return length == n + 1 + m && strncmp(part, kind, n) == 0 && part[n] == '=' &&
           strncmp(part + n + 1, rule->algorithm->name, m) == 0;
}

static enum hdl_status unknown_part(const char *part, size_t length)
{
    char names[128] = "";
    for (size_t i = 0; i < NUM_RULES; i++) {
        const char *kind = group_kind_name((uint8_t)rules[i].kind);
        size_t n = strlen(kind), used = strlen(names);
        if (length > n && strncmp(part, kind, n) == 0 && part[n] == '=')
            (void)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "",
                           rules[i].algorithm->name);
    }
    int shown = (int)length, kind_length = (int)strcspn(part, "=,");
    if (!names[0])
        return base_fail(HDL_EINVAL,
                         "HEDDLE_ALGORITHM: unknown \"%.*s\": it is op=name, with "
                         "both from heddle info",
                         shown, part);
    return base_fail(HDL_EINVAL, "HEDDLE_ALGORITHM: unknown \"%.*s\": %.*s has %s", shown,
                     part, kind_length, part, names);
}

enum hdl_status group_table_check(const char *overrides)
{
    for (const char *part = overrides; *part;) {
        size_t length = part_length(part);
        bool known = length == 0;
        for (size_t i = 0; !known && i < NUM_RULES; i++)
            known = part_names(part, length, &rules[i]);
        if (!known)
            return unknown_part(part, length);
        part += length + (part[length] == ',');
    }
    return HDL_OK;
}

/* The override for the rule's kind names the rule's algorithm, or there is none. */
static bool rule_wanted(const char *overrides, const struct group_rule *rule)
{
    const char *kind = group_kind_name((uint8_t)rule->kind);
    size_t n = strlen(kind);
    for (const char *part = overrides; *part;) {
        size_t length = part_length(part);
        if (length > n && strncmp(part, kind, n) == 0 && part[n] == '=')
            return part_names(part, length, rule);
        part += length + (part[length] == ',');
    }
    return false;
}

static const struct group_algorithm *overridden(const char *overrides,
                                                enum group_kind kind)
{
    for (size_t i = 0; i < NUM_RULES; i++)
        if (rules[i].kind == kind && rule_wanted(overrides, &rules[i]))
            return rules[i].algorithm;
    return NULL;
}

const struct group_algorithm *group_table_choose(struct hdl_group *group,
                                                 struct hdl_op *op)
{
    size_t bytes;
    if (!base_mul_size(op->desc.count, op->elem, &bytes))
        bytes = SIZE_MAX;
    enum group_kind kind = (enum group_kind)op->desc.kind;
    op->stream = bytes >= group->stream_bytes;
    op->ahead = bytes <= SINGLE_BYTES ? group->shape.window_chunks : group->ahead;
    const char *overrides = group->engine->env->config.algorithm.text;
    if (overrides[0]) {
        const struct group_algorithm *chosen = overridden(overrides, kind);
        if (chosen)
            return chosen;
    }
    for (size_t i = 0; i < NUM_RULES; i++)
        if (rules[i].kind == kind && bytes >= rules[i].min_bytes &&
            group->capacity >= rules[i].min_ranks)
            return rules[i].algorithm;
    return &group_refused;
}

size_t group_table_chunk_bytes(const struct hdl_op *op, size_t blocks, size_t count)
{
    size_t slot = op->group->shape.chunk_bytes, bytes;
    if (!base_mul_size(count, op->elem, &bytes) || !base_mul_size(bytes, blocks, &bytes))
        return slot;
    if (bytes <= SINGLE_BYTES)
        return slot;
    /* Where ranks share cores, fewer chunks are fewer switches. All ranks must choose
     * alike, and their cores may differ. */
    size_t parts = op->group->capacity > 2 ? base_max_size(blocks, 2) : blocks;
    /* With pieces a rank's slots hold twice as much, and more ranks share the cache. */
    if (bytes <= MEDIUM_LIMIT || op->algorithm->make_piece)
        return base_min_size(slot, parts * MEDIUM_BYTES);
    return slot;
}
