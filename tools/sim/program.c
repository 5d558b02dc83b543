/* SPDX-License-Identifier: Apache-2.0 */
/* The groups of a job: who founds them, the program that their members run. */
#include <stdlib.h>
#include <string.h>

#include "tools/sim/world.h"

#define SECOND INT64_C(1000000000)

static const char *const names[SIM_GROUPS_MAX] = {"world", "second", "third"};

/*
 * Group 0 has all ranks of the job, in order. The later ones have some of them, in
 * descending order, so that a process has different places in them.
 */
static bool belongs(uint32_t group, uint32_t rank, uint32_t num_ranks)
{
    return group == 0 || num_ranks <= 2 || rank % 3 != group % 3;
}

static void place_ranks(struct sim_world *w, struct sim_group *group)
{
    uint32_t last = w->num_ranks - 1;
    for (uint32_t i = 0; i < w->num_ranks; i++) {
        uint32_t rank = group->index == 0 ? i : last - i;
        group->slot_of[rank] = UINT32_MAX;
        bool founder = rank < w->options.ranks;
        if (!belongs(group->index, rank, w->options.ranks) ||
            (!founder && group->index > 0))
            continue;
        group->slot_of[rank] = group->capacity;
        group->rank_of[group->capacity++] = rank;
        group->num_founders += founder;
    }
}

/* Every third operation has a root; who that is does not touch the random numbers. */
static uint32_t root_of(const struct sim_world *w, uint32_t op)
{
    uint64_t state = w->options.seed * 1000003 + op;
    uint64_t number = base_splitmix_next(&state);
    if (!w->options.rooted || number % 3 != 0)
        return UINT32_MAX;
    return (uint32_t)(number / 3 % w->group->capacity);
}

static bool make(struct sim_world *w, struct sim_group *group)
{
    const struct sim_options *options = &w->options;
    size_t ops = options->ops, ranks = w->num_ranks;
    group->rank_of = calloc(ranks, sizeof(uint32_t));
    group->slot_of = calloc(ranks, sizeof(uint32_t));
    group->first_index = calloc(ops + 3, sizeof(uint64_t));
    group->root = calloc(ops + 2, sizeof(uint32_t));
    group->death_time = calloc(ranks, sizeof(int64_t));
    group->least = calloc(ranks, sizeof(uint64_t));
    group->dead_epoch = calloc(ranks, sizeof(uint64_t));
    group->num_resting = calloc(ranks, sizeof(uint32_t));
    group->resting = calloc(ranks / 64 + 1, sizeof(uint64_t));
    group->agreed_failed = calloc(ops + 2, sizeof(uint64_t));
    group->agreed_failed_by = calloc(ops + 2, sizeof(uint32_t));
    if (!group->rank_of || !group->slot_of || !group->first_index || !group->root ||
        !group->death_time || !group->least || !group->dead_epoch ||
        !group->num_resting || !group->resting || !group->agreed_failed ||
        !group->agreed_failed_by)
        return false;
    place_ranks(w, group);
    uint64_t chunks = 0;
    for (uint32_t op = 1; op <= ops + 1; op++) {
        group->first_index[op] = chunks;
        group->root[op] = op <= ops ? root_of(w, op) : UINT32_MAX;
        if (op <= ops)
            chunks += 1 + base_splitmix_below(&w->random, options->max_chunks);
    }
    group->first_index[ops + 2] = chunks;
    group->num_chunks = chunks;
    group->agreed = calloc(chunks + 1, sizeof(uint64_t));
    group->agreed_by = calloc(chunks + 1, sizeof(uint32_t));
    group->looks = calloc(2 * chunks + 2, sizeof(*group->looks));
    return group->agreed && group->agreed_by && group->looks;
}

bool sim_groups_make(struct sim_world *w)
{
    for (uint32_t g = 0; g < w->options.groups; g++) {
        w->groups[g].index = g;
        w->group = &w->groups[g];
        if (!make(w, w->group))
            return false;
    }
    w->group = &w->groups[0];
    return true;
}

void sim_groups_free(struct sim_world *w)
{
    for (uint32_t g = 0; g < SIM_GROUPS_MAX; g++) {
        struct sim_group *group = &w->groups[g];
        free(group->rank_of);
        free(group->slot_of);
        free(group->first_index);
        free(group->root);
        free(group->death_time);
        free(group->least);
        free(group->dead_epoch);
        free(group->num_resting);
        free(group->resting);
        free(group->looks);
        free(group->agreed);
        free(group->agreed_by);
        free(group->agreed_failed);
        free(group->agreed_failed_by);
        free(group->history);
    }
}

void sim_select(struct sim_world *w, uint32_t group)
{
    if (w->group->index == group)
        return;
    w->group = &w->groups[group];
    for (uint32_t i = 0; i < w->num_processes; i++)
        w->processes[i]->plane = &w->processes[i]->planes[group];
}

uint64_t sim_key(const struct sim_world *w)
{
    return w->group->index + 1;
}

bool sim_is_named(const struct sim_group *group, const char *name)
{
    return strcmp(names[group->index], name) == 0;
}

void sim_register(struct sim_world *w, struct sim_process *p)
{
    const struct sim_group *group = w->group;
    struct ctl_param param = {"chunk_bytes", "262144"};
    struct ctl_registration registration = {.name = names[group->index],
                                            .capacity = group->capacity,
                                            .slot = p->plane->slot,
                                            .num_founders = group->num_founders,
                                            .ranks = group->rank_of,
                                            .num_ranks = group->num_founders,
                                            .join = p->joiner,
                                            .auto_deactivate = !w->options.manual,
                                            .auto_sync = !w->options.manual,
                                            .timeout_ns = 60 * SECOND,
                                            .params = &param,
                                            .num_params = 1};
    sim_agent(w, p,
              &(struct ctl_agent_event){.kind = CTL_AGENT_REGISTER,
                                        .key = sim_key(w),
                                        .registration = &registration});
}
