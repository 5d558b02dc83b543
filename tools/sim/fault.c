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
        alive += w->processes[i]->alive && !w->processes[i]->plane.over;
    return alive;
}

static void stop(struct sim_world *w, struct sim_process *p)
{
    if (p->stopped)
        return;
    int64_t length = (int64_t)base_splitmix_below(
        &w->random, (uint64_t)(2 * w->options.dead_after_ns));
    if (base_splitmix_below(&w->random, 2) == 0)
        length /= 50;
    sim_trace(w, "process %u of rank %u stops for %.3f ms", p->index, p->job_rank,
              (double)length / 1e6);
    p->stopped = true;
    p->continue_at = w->now + length;
    if (p->continue_at > w->faults_end)
        w->faults_end = p->continue_at;
    sim_push(w, p->continue_at,
             &(struct sim_event){.kind = EV_CONTINUE, .process = p->index});
}

/* The connection to the coordinator is held up, or broken as well. */
static void cut(struct sim_world *w, struct sim_process *p)
{
    int64_t length = (int64_t)base_splitmix_below(
        &w->random, (uint64_t)(2 * w->options.dead_after_ns));
    if (base_splitmix_below(&w->random, 2) == 0)
        length /= 20;
    bool broken = base_splitmix_below(&w->random, 2) == 0;
    sim_trace(w, "the connection of process %u is %s for %.3f ms", p->index,
              broken ? "broken" : "held up", (double)length / 1e6);
    p->cut_until = w->now + length;
    if (p->cut_until > w->faults_end)
        w->faults_end = p->cut_until;
    if (!broken || p->conn == 0)
        return;
    struct sim_conn *conn = &w->conns[p->conn - 1];
    sim_push(w, w->now + sim_delay(w),
             &(struct sim_event){
                 .kind = EV_DISCONNECTED, .process = p->index, .conn = conn->id});
    sim_push(w, w->now + sim_delay(w),
             &(struct sim_event){.kind = EV_COORD_CLOSED, .conn = conn->id});
}

void sim_fault(struct sim_world *w)
{
    if (w->faults_left > 0)
        w->faults_left--;
    struct sim_process *p = w->options.fault_at_event != 0
                                ? w->processes[w->by_rank[w->options.fault_rank]]
                                : pick_process(w);
    if (!p)
        return;
    enum sim_fault kinds[8];
    uint32_t count = 0;
    for (unsigned bit = 0; bit < 8; bit++) {
        unsigned kind = 1u << bit;
        if ((w->options.faults & kind) && kind != SIM_DELAY && kind != SIM_REORDER)
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
        cut(w, p);
        break;
    default:
        break;
    }
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
    };
    return defect < SIM_DEFECTS ? names[defect] : "unknown";
}
