/* SPDX-License-Identifier: Apache-2.0 */
/* What goes wrong: picks a fault and a victim for a schedule. */
#include "tools/sim/world.h"

#define SECOND INT64_C(1000000000)

static struct sim_process *pick_process(struct sim_world *w)
{
    for (int tries = 0; tries < 64; tries++) {
        uint32_t i = (uint32_t)base_splitmix_below(&w->random, w->num_processes);
        struct sim_process *p = w->processes[i];
        if (p->alive && !p->left)
            return p;
    }
    return NULL;
}

static uint32_t num_alive(const struct sim_world *w)
{
    uint32_t alive = 0;
    for (uint32_t i = 0; i < w->num_processes; i++)
        alive += w->processes[i]->alive && !w->processes[i]->plane->over;
    return alive;
}

static void faults_last_until(struct sim_world *w, int64_t time)
{
    if (time > w->faults_end)
        w->faults_end = time;
}

static void stop_coordinator(struct sim_world *w, int64_t until)
{
    if (until > w->coord_stopped_until)
        w->coord_stopped_until = until;
    faults_last_until(w, until);
}

static void stop(struct sim_world *w, struct sim_process *p)
{
    if (p->stopped)
        return;
    int64_t length = (int64_t)base_splitmix_below(
        &w->random, (uint64_t)(2 * w->options.dead_after_ns));
    if (base_splitmix_below(&w->random, 2) == 0)
        length /= 50;
    if (w->options.standalone && base_splitmix_below(&w->random, 8) == 0) {
        sim_trace(w, "the coordinator stops for %.3f ms", (double)length / 1e6);
        stop_coordinator(w, w->now + length);
        return;
    }
    sim_trace(w, "process %u of rank %u stops for %.3f ms", p->index, p->job_rank,
              (double)length / 1e6);
    if (!w->options.standalone && p->job_rank == 0)
        stop_coordinator(w, w->now + length);
    p->stopped = true;
    p->continue_at = w->now + length;
    faults_last_until(w, p->continue_at);
    sim_push(w, p->continue_at,
             &(struct sim_event){.kind = EV_CONTINUE, .process = p->index});
}

/* The connection to the coordinator is held up, in one direction or both, or broken. */
static void cut(struct sim_world *w, struct sim_process *p, int64_t until, bool up,
                bool down)
{
    if (up)
        p->cut_up = until;
    if (down)
        p->cut_down = until;
    faults_last_until(w, until);
    bool broken = base_splitmix_below(&w->random, 2) == 0;
    sim_trace(w, "the connection of process %u is %s %s for %.3f ms", p->index,
              broken ? "broken" : "held up",
              up && down ? "both ways"
              : up       ? "to the coordinator"
                         : "from the coordinator",
              (double)(until - w->now) / 1e6);
    if (!broken || p->conn == 0)
        return;
    struct sim_conn *conn = &w->conns[p->conn - 1];
    sim_push(w, w->now + sim_delay(w),
             &(struct sim_event){
                 .kind = EV_DISCONNECTED, .process = p->index, .conn = conn->id});
    sim_push(w, w->now + sim_delay(w),
             &(struct sim_event){.kind = EV_COORD_CLOSED, .conn = conn->id});
}

static void report_link(struct sim_world *w, const struct sim_process *p,
                        const struct sim_process *peer, int64_t time, bool up)
{
    sim_push(w, time + sim_delay(w),
             &(struct sim_event){.kind = EV_LINK,
                                 .process = p->index,
                                 .x = peer->plane->rank_epoch,
                                 .conn = up});
}

/* Both ends notice it, one of them perhaps not; later it works again. */
static void take_down(struct sim_world *w, const struct sim_process *p,
                      const struct sim_process *q, int64_t until, bool both)
{
    if (w->num_links == SIM_LINKS_MAX || !w->options.messaged)
        return;
    sim_trace(w, "the link between ranks %u and %u is down for %.3f ms", p->job_rank,
              q->job_rank, (double)(until - w->now) / 1e6);
    w->links[w->num_links++] = (struct sim_link){{p, q}, until};
    faults_last_until(w, until);
    uint32_t selected = w->group->index;
    for (uint32_t g = 0; g < w->options.groups; g++) {
        sim_select(w, g);
        if (p->plane->rank_epoch == 0 || q->plane->rank_epoch == 0)
            continue;
        report_link(w, p, q, w->now, false);
        report_link(w, p, q, until, true);
        if (!both)
            continue;
        report_link(w, q, p, w->now, false);
        report_link(w, q, p, until, true);
    }
    sim_select(w, selected);
}

/* Some ranks, perhaps most, lose the coordinator's side and the ranks there. */
static void partition(struct sim_world *w, int64_t until)
{
    uint64_t far = base_splitmix_next(&w->random);
    if (!w->options.standalone)
        far &= ~UINT64_C(1); /* the coordinator's */
    for (uint32_t i = 0; i < w->num_processes; i++) {
        struct sim_process *p = w->processes[i];
        if (!p->alive || !(far >> (p->job_rank % 64) & 1))
            continue;
        cut(w, p, until, true, true);
        for (uint32_t k = 0; k < w->num_processes; k++) {
            const struct sim_process *q = w->processes[k];
            if (q->alive && !(far >> (q->job_rank % 64) & 1))
                take_down(w, p, q, until, true);
        }
    }
}

static void cut_somehow(struct sim_world *w, struct sim_process *p)
{
    int64_t length = (int64_t)base_splitmix_below(
        &w->random, (uint64_t)(2 * w->options.dead_after_ns));
    uint64_t way = base_splitmix_below(&w->random, 8);
    if (base_splitmix_below(&w->random, 2) == 0)
        length /= 20;
    if (way == 0)
        partition(w, w->now + length);
    else
        cut(w, p, w->now + length, way != 1, way != 2);
}

/* ---------------------------------------------------------------- joining and leaving */

void sim_propose(struct sim_world *w, struct sim_process *p, enum ctl_proposal_kind kind,
                 uint32_t slot)
{
    if (p->plane->over || (!p->plane->running && kind != CTL_PROPOSE_JOIN) ||
        p->plane->left_sent)
        return;
    struct ctl_proposal proposal = {.id = ++w->num_proposals << 32 | (uint64_t)slot << 8 |
                                          (uint64_t)kind,
                                    .kind = kind,
                                    .num_slots = 1,
                                    .slots = &slot,
                                    .timeout_ns = SECOND / 2};
    if (!p->plane->member)
        return;
    sim_trace(w, "rank %u proposes %d of slot %u", p->plane->slot, (int)kind, slot);
    p->plane->proposals++;
    sim_agent(w, p,
              &(struct ctl_agent_event){
                  .kind = CTL_AGENT_PROPOSE, .key = sim_key(w), .proposal = &proposal});
}

static bool is_member(const struct sim_process *p)
{
    return p->alive && p->plane->running && !p->plane->over && !p->plane->left_sent &&
           p->plane->view->slots[p->plane->slot].last == CTL_X_FOREVER;
}

void sim_join(struct sim_world *w, struct sim_process *p)
{
    if (p->plane->over || p->plane->left_sent || is_member(p))
        return;
    p->plane->joins_tried++;
    p->plane->joining = true;
    sim_propose(w, p, CTL_PROPOSE_JOIN, p->plane->slot);
    uint32_t asked = 0;
    uint64_t from = base_splitmix_below(&w->random, w->num_processes);
    for (uint32_t i = 0; i < w->num_processes && asked < 2; i++) {
        struct sim_process *q = w->processes[(from + i) % w->num_processes];
        if (!is_member(q) || q == p)
            continue;
        asked++;
        sim_push(w, w->now + sim_delay(w),
                 &(struct sim_event){
                     .kind = EV_ADMIT, .process = q->index, .x = p->plane->slot});
    }
}

void sim_proposed(struct sim_world *w, struct sim_process *p,
                  const struct ctl_action *action)
{
    uint32_t kind = action->proposal & 0xff;
    sim_trace(w, "rank %u: proposal %u: %d %s", p->plane->slot, kind, action->status,
              action->text);
    if (p->plane->proposals > 0)
        p->plane->proposals--;
    sim_check_proposal(w, p, action);
    if (kind == CTL_PROPOSE_DEACTIVATE && action->status == HDL_OK)
        w->result->removals++;
    if (kind != CTL_PROPOSE_JOIN)
        return;
    p->plane->joining =
        action->status != HDL_OK && p->plane->joins_tried < 40 && !p->plane->over;
    if (action->status == HDL_OK)
        w->result->joins++;
    else if (p->plane->joining)
        sim_push(w, w->now + SECOND / 10,
                 &(struct sim_event){.kind = EV_JOIN, .process = p->index});
}

/* Leaves for good once what it has issued is done. */
void sim_leave(struct sim_world *w, struct sim_process *p)
{
    const struct sim_plane *plane = p->plane;
    if (p->plane->left_sent || plane->over)
        return;
    p->plane->leaving = true;
    if (!plane->running || (plane->done < plane->issued && !sim_plane_finished(w, p)))
        return;
    p->plane->leaving = false;
    p->plane->left_sent = true;
    sim_agent(w, p,
              &(struct ctl_agent_event){.kind = CTL_AGENT_LEAVE, .key = sim_key(w)});
}

static void leave_somehow(struct sim_world *w, struct sim_process *p)
{
    struct sim_process *other = pick_process(w);
    uint64_t way = base_splitmix_below(&w->random, 4);
    if (!is_member(p) || num_alive(w) <= 2)
        return;
    if (way <= 1 && other) {
        sim_propose(w, p, CTL_PROPOSE_DEACTIVATE, other->plane->slot);
    } else if (way == 2) {
        sim_trace(w, "rank %u leaves", p->plane->slot);
        sim_leave(w, p);
    } else {
        sim_trace(w, "rank %u aborts", p->plane->slot);
        p->plane->over = true;
        p->plane->left_sent = true;
        sim_agent(w, p,
                  &(struct ctl_agent_event){.kind = CTL_AGENT_ABORT, .key = sim_key(w)});
    }
}

/* A removed process asks to come back, or a new one is started for a vacant slot. */
static void join_somehow(struct sim_world *w)
{
    uint32_t from = (uint32_t)base_splitmix_below(&w->random, w->group->capacity);
    for (uint32_t i = 0; i < w->group->capacity; i++) {
        uint32_t slot = (from + i) % w->group->capacity;
        uint32_t rank = w->group->rank_of[slot];
        struct sim_process *p =
            w->by_rank[rank] != UINT32_MAX ? w->processes[w->by_rank[rank]] : NULL;
        /* One that stands still may wake up and be one too many. */
        bool gone = !p || !p->alive || (p->stopped && w->options.standalone);
        if (p && p->alive && p->plane->running && !p->plane->over && !is_member(p) &&
            !p->plane->left_sent && !p->plane->joining) {
            sim_join(w, p);
            return;
        }
        if (gone && sim_slot_is_open(w, slot)) {
            sim_trace(w, "a new process for rank %u", rank);
            (void)sim_spawn(w, rank, true);
            return;
        }
    }
}

static void break_link(struct sim_world *w, struct sim_process *p)
{
    struct sim_process *q = pick_process(w);
    if (!q || q == p || !is_member(p) || !is_member(q))
        return;
    int64_t length = (int64_t)base_splitmix_below(
        &w->random, (uint64_t)(3 * w->options.dead_after_ns));
    take_down(w, p, q, w->now + length, base_splitmix_below(&w->random, 4) != 0);
}

static void suspect(struct sim_world *w, struct sim_process *p)
{
    const struct sim_process *q = pick_process(w);
    if (!q || q == p || num_alive(w) <= 2)
        return;
    sim_trace(w, "rank %u is taken for dead", p->plane->slot);
    sim_push(
        w, w->now + sim_delay(w),
        &(struct sim_event){.kind = EV_EXITED, .process = q->index, .x = p->rank_epoch});
}

void sim_restart_coordinator(struct sim_world *w, int64_t away)
{
    if (!w->coordinator || !w->options.standalone)
        return;
    sim_kill_coordinator(w);
    w->result->restarts++;
    faults_last_until(w, w->now + away);
    sim_push(w, w->now + away, &(struct sim_event){.kind = EV_RESTART});
}

static void restart_somehow(struct sim_world *w)
{
    int64_t away = (int64_t)base_splitmix_below(&w->random, (uint64_t)(SECOND / 2));
    if (base_splitmix_below(&w->random, 2) == 0)
        away /= 100;
    sim_restart_coordinator(w, away);
}

static void inflict(struct sim_world *w, unsigned faults, struct sim_process *p)
{
    if (w->faults_left > 0)
        w->faults_left--;
    if (!p)
        return;
    if (w->options.groups > 1)
        sim_select(w, (uint32_t)base_splitmix_below(&w->random, w->options.groups));
    enum sim_fault kinds[10];
    uint32_t count = 0;
    for (unsigned bit = 0; bit < 10; bit++) {
        unsigned kind = 1u << bit;
        if ((faults & kind) && kind != SIM_DELAY && kind != SIM_REORDER)
            kinds[count++] = (enum sim_fault)kind;
    }
    if (count == 0)
        return;
    switch (kinds[base_splitmix_below(&w->random, count)]) {
    case SIM_KILL:
        if (num_alive(w) > 1)
            sim_kill(w, p);
        break;
    case SIM_STOP:
        stop(w, p);
        break;
    case SIM_CUT:
        cut_somehow(w, p);
        break;
    case SIM_JOIN:
        join_somehow(w);
        break;
    case SIM_LEAVE:
        leave_somehow(w, p);
        break;
    case SIM_RESTART:
        restart_somehow(w);
        break;
    case SIM_LINK:
        break_link(w, p);
        break;
    case SIM_SUSPECT:
        suspect(w, p);
        break;
    default:
        break;
    }
}

void sim_fault(struct sim_world *w)
{
    inflict(w, w->options.faults, pick_process(w));
}

void sim_fault_at(struct sim_world *w, unsigned kinds, uint32_t rank)
{
    struct sim_process *p = w->processes[w->by_rank[rank]];
    inflict(w, kinds, p->alive && !p->left ? p : NULL);
}

const char *sim_defect_name(enum sim_defect defect)
{
    static const char *const names[SIM_DEFECTS] = {
        [SIM_NO_DEFECT] = "none",
        [SIM_LAST_LOW] = "last-low",
        [SIM_LAST_HIGH] = "last-high",
        [SIM_NO_FREEZE] = "no-freeze",
        [SIM_SAMPLE_FIRST] = "sample-first",
        [SIM_PER_OPERATION] = "per-operation",
        [SIM_STALE_READY] = "stale-ready",
        [SIM_DROP_NEWER] = "drop-newer",
        [SIM_NEXT_STARTED] = "next-started",
        [SIM_STALE_ANSWER] = "stale-answer",
        [SIM_LEAST_PUBLISHED] = "least-published",
        [SIM_OWN_EVIDENCE] = "own-evidence",
        [SIM_SKIP_COMMIT] = "skip-commit",
        [SIM_NO_FENCE] = "no-fence",
        [SIM_STALE_MESSAGE] = "stale-message",
    };
    return defect < SIM_DEFECTS ? names[defect] : "unknown";
}
