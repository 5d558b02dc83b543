/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of last(d): walks the open operations in order of x. */
#include "ctl/boundary.h"

static const struct ctl_open_op *find_open(const struct ctl_answer *answer, uint64_t op)
{
    for (uint32_t i = 0; i < answer->num_open; i++) {
        if (answer->open[i].op == op)
            return &answer->open[i];
    }
    return NULL;
}

static uint64_t whole(const struct ctl_answer *answer, uint64_t x)
{
    const struct ctl_open_op *open = find_open(answer, ctl_x_op(x));
    if (open && open->num_chunks > 0 && ctl_x_chunk(x) + 1 >= open->num_chunks)
        return ctl_x_end(ctl_x_op(x));
    return x;
}

void ctl_boundary_normalise(struct ctl_answer *answer, uint64_t own_last)
{
    answer->ready = whole(answer, answer->ready);
    answer->done = whole(answer, answer->done);
    for (uint32_t i = 0; i < answer->num_dead; i++)
        answer->published[i] = whole(answer, answer->published[i]);
    if (own_last != CTL_X_FOREVER && answer->ready >= own_last)
        answer->ready = CTL_X_FOREVER;
}

uint64_t ctl_boundary_ready(const struct ctl_answers *answers)
{
    uint64_t least = answers->count > 0 ? CTL_X_FOREVER : 0;
    for (uint32_t i = 0; i < answers->count; i++) {
        if (answers->items[i]->ready < least)
            least = answers->items[i]->ready;
    }
    return least;
}

uint64_t ctl_boundary_next(const struct ctl_answers *answers)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < answers->count; i++) {
        if (answers->items[i]->next > most)
            most = answers->items[i]->next;
    }
    return most;
}

static uint64_t most_published(const struct ctl_answers *answers, uint32_t dead)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < answers->count; i++) {
        if (answers->items[i]->published[dead] > most)
            most = answers->items[i]->published[dead];
    }
    return most;
}

/* What is known of an operation from all answers together. */
static struct ctl_open_op describe(const struct ctl_answers *answers, uint64_t op)
{
    struct ctl_open_op all = {.op = op};
    bool listed = false;
    for (uint32_t i = 0; i < answers->count; i++) {
        const struct ctl_open_op *open = find_open(answers->items[i], op);
        if (!open)
            continue;
        listed = true;
        all.messaged |= open->messaged;
        if (open->num_chunks > all.num_chunks)
            all.num_chunks = open->num_chunks;
    }
    for (uint32_t i = 0; !listed && i < answers->count; i++)
        all.messaged |= answers->items[i]->messaged;
    return all;
}

/* Whether every operation that the answers speak of is of one kind. */
static bool one_kind(const struct ctl_answers *answers, bool messaged)
{
    for (uint32_t i = 0; i < answers->count; i++) {
        if (answers->items[i]->messaged != messaged)
            return false;
        for (uint32_t k = 0; k < answers->items[i]->num_open; k++) {
            if (answers->items[i]->open[k].messaged != messaged)
                return false;
        }
    }
    return true;
}

uint64_t ctl_boundary_last(const struct ctl_answers *answers, uint32_t dead)
{
    uint64_t ready = ctl_boundary_ready(answers);
    uint64_t published = most_published(answers, dead);
    if (one_kind(answers, true))
        return ready;
    if (one_kind(answers, false))
        return published;
    /* Both kinds: operation by operation, no further than the windows reach. */
    uint64_t last = ready < published ? ready : published;
    for (uint64_t op = ctl_x_op(last), steps = 0; steps < 2 * CTL_OPEN_MAX;
         op++, steps++) {
        struct ctl_open_op open = describe(answers, op);
        uint64_t limit = open.messaged ? ready : published;
        if (limit > ctl_x_end(op))
            limit = ctl_x_end(op);
        if (limit > last)
            last = limit;
        bool all = open.num_chunks > 0 && ctl_x_op(limit) == op &&
                   ctl_x_chunk(limit) + 1 >= open.num_chunks;
        if (limit < ctl_x_end(op) && !all)
            break;
    }
    return last;
}

uint64_t ctl_boundary_first_lacking(const struct ctl_answers *answers, uint64_t last)
{
    uint64_t op = ctl_x_op(last);
    struct ctl_open_op open = describe(answers, op);
    bool more = open.num_chunks > 0 && ctl_x_chunk(last) + 1 < open.num_chunks;
    return more ? op : op + 1;
}
