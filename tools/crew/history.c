/* SPDX-License-Identifier: Apache-2.0 */
/* Intervals of all holders, and the results that follow from them. */
#include "tools/crew/history.h"

#include <stdio.h>

#include "ctl/view.h"
#include "heddle.h"

static struct crew_holder *find(struct crew_history *history, uint32_t slot,
                                uint64_t rank_epoch, uint64_t first)
{
    uint32_t count = history->count[slot];
    uint32_t oldest = count > CREW_HOLDERS ? count - CREW_HOLDERS : 0;
    for (uint32_t i = count; i > oldest; i--) {
        struct crew_holder *holder = &history->holder[slot][(i - 1) % CREW_HOLDERS];
        if (holder->rank_epoch == rank_epoch && holder->first == first)
            return holder;
    }
    return NULL;
}

/* In the order of the intervals, in which ranks do not tell them. */
static struct crew_holder *insert(struct crew_history *history, uint32_t slot,
                                  uint64_t rank_epoch, uint64_t first)
{
    uint32_t at = history->count[slot]++;
    uint32_t oldest = at >= CREW_HOLDERS ? at - CREW_HOLDERS + 1 : 0;
    struct crew_holder *holder = history->holder[slot];
    for (; at > oldest; at--) {
        const struct crew_holder *before = &holder[(at - 1) % CREW_HOLDERS];
        if (before->first < first ||
            (before->first == first && before->rank_epoch < rank_epoch))
            break;
        holder[at % CREW_HOLDERS] = *before;
    }
    return &holder[at % CREW_HOLDERS];
}

bool crew_history_add(struct crew_history *history, const struct crew_record *record,
                      char *text, size_t room)
{
    uint32_t slot = record->slot.slot;
    if (slot >= (uint32_t)history->ranks)
        return true;
    struct crew_holder *holder =
        find(history, slot, record->slot.rank_epoch, record->slot.first);
    if (!holder) {
        holder = insert(history, slot, record->slot.rank_epoch, record->slot.first);
        *holder = (struct crew_holder){.rank_epoch = record->slot.rank_epoch,
                                       .first = record->slot.first,
                                       .last = record->slot.last,
                                       .reported = record->slot.reported,
                                       .epoch = record->slot.epoch};
        return true;
    }
    bool newer = record->slot.epoch > holder->epoch;
    bool same =
        record->slot.last == holder->last && record->slot.reported == holder->reported;
    bool grows =
        newer ? record->slot.last > holder->last : record->slot.last < holder->last;
    if (grows || (record->slot.epoch == holder->epoch && !same)) {
        (void)snprintf(
            text, room, "slot %u ends at %lx in view %lx and at %lx in view %lx", slot,
            (unsigned long)holder->last, (unsigned long)holder->epoch,
            (unsigned long)record->slot.last, (unsigned long)record->slot.epoch);
        return false;
    }
    if (newer) {
        holder->last = record->slot.last;
        holder->reported = record->slot.reported;
        holder->epoch = record->slot.epoch;
    }
    return true;
}

struct crew_list crew_list(uint64_t mask)
{
    struct crew_list list = {"none"};
    size_t n = 0;
    for (int i = 0; i < CREW_RANKS_MAX; i++)
        if (mask >> i & 1)
            n += (size_t)snprintf(list.text + n, sizeof(list.text) - n, n ? ",%d" : "%d",
                                  i);
    return list;
}

const char *crew_kind_name(enum crew_kind kind)
{
    static const char *const names[CREW_KINDS] = {"allreduce 8 B",   "allreduce 4 KiB",
                                                  "allreduce 1 MiB", "broadcast",
                                                  "allgather",       "barrier"};
    return kind < CREW_KINDS ? names[kind] : "?";
}

/* Masks of slots for an operation. */
struct expected {
    uint64_t begin;  /* have data in the first chunk */
    uint64_t end;    /* and in the last one, */
    uint64_t either; /* or not: their interval ends within the operation */
    uint64_t failed; /* are reported if they lack in the last one */
    /* Of an interval whose end nobody told: another came before the next look. */
    uint64_t unknown;
};

static struct expected expect(const struct crew_history *history, uint64_t number)
{
    struct expected e = {0};
    for (int s = 0; s < history->ranks; s++) {
        uint64_t bit = UINT64_C(1) << s;
        uint32_t count = history->count[s];
        uint32_t oldest = count > CREW_HOLDERS ? count - CREW_HOLDERS : 0;
        for (uint32_t i = oldest; i < count; i++) {
            const struct crew_holder *h = &history->holder[s][i % CREW_HOLDERS];
            const struct crew_holder *next =
                i + 1 < count ? &history->holder[s][(i + 1) % CREW_HOLDERS] : NULL;
            bool over = next && number >= ctl_x_op(next->first);
            if (number < ctl_x_op(h->first) || (h->last == CTL_X_FOREVER && over))
                continue;
            if (h->last == CTL_X_FOREVER && next)
                e.unknown |= bit;
            /* A later holder ends what is reported of an earlier one. */
            e.failed &= ~bit;
            if (number <= h->reported)
                e.failed |= bit;
            if (ctl_x(number, 0) <= h->last)
                e.begin |= bit;
            if (ctl_x_end(number) <= h->last)
                e.end |= bit;
            else if (ctl_x_op(h->last) == number)
                e.either |= bit;
        }
    }
    return e;
}

/* Who called before it could know of an admission had room for fewer blocks. */
static bool gathered(uint64_t ranks, uint64_t all)
{
    for (uint64_t low = all;; low &= low >> 1) {
        if (ranks == (all & low))
            return true;
        if (low == 0)
            return false;
    }
}

bool crew_history_fits(const struct crew_history *history, const struct crew_record *r,
                       char *text, size_t room)
{
    struct expected e = expect(history, r->op.number);
    uint64_t begin = r->op.runs ? r->op.run[0].ranks : 0, end = crew_ranks(r);
    e.begin = (e.begin & ~e.unknown) | (begin & e.unknown);
    e.end &= ~e.unknown;
    e.either |= e.unknown;
    e.failed |= e.unknown;
    uint64_t lacking = e.failed & ~e.end & ~e.either;
    bool data = true, failed = ((r->op.failed ^ lacking) & ~(e.either & e.failed)) == 0;
    switch (r->op.kind) {
    case CREW_BARRIER:
        break;
    case CREW_BROADCAST:
        /* The failed set may differ for those who returned before a loss. */
        failed = (r->op.failed & ~(e.failed | UINT64_C(1) << r->op.root)) == 0;
        data = (r->status != HDL_EPEER || !(e.end >> r->op.root & 1)) &&
               (r->status == HDL_EPEER || ((e.end | e.either) >> r->op.root & 1));
        break;
    case CREW_ALLGATHER:
        data = gathered(begin, e.begin);
        break;
    default:
        data = begin == e.begin && ((end ^ e.end) & ~e.either) == 0;
    }
    if (data && failed)
        return true;
    (void)snprintf(
        text, room,
        "operation %lu, %s: rank %u has %s, data of ranks %s, at its end %s, "
        "failed %s; by the views: data of %s, at its end %s (perhaps %s), "
        "failed %s",
        (unsigned long)r->op.number, crew_kind_name((enum crew_kind)r->op.kind), r->rank,
        hdl_status_name((enum hdl_status)r->status), crew_list(begin).text,
        crew_list(end).text, crew_list(r->op.failed).text, crew_list(e.begin).text,
        crew_list(e.end).text, crew_list(e.either).text, crew_list(lacking).text);
    return false;
}
