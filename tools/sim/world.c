/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated world: processes, connections, virtual time; carries out the actions. */
#include "tools/sim/world.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/coordinator_state.h"

void sim_fail(struct sim_world *w, const char *format, ...)
{
    if (w->failed)
        return;
    w->failed = true;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(w->result->text, sizeof(w->result->text), format, args);
    va_end(args);
    sim_trace(w, "FAILED: %s", w->result->text);
}

void sim_trace(struct sim_world *w, const char *format, ...)
{
    if (!w->options.trace)
        return;
    (void)fprintf(w->options.trace, "%10.6f  ", (double)w->now / 1e9);
    va_list args;
    va_start(args, format);
    (void)vfprintf(w->options.trace, format, args);
    va_end(args);
    (void)fputc('\n', w->options.trace);
}

int64_t sim_delay(struct sim_world *w)
{
    int64_t typical = w->options.link_ns;
    int64_t delay =
        typical / 2 + (int64_t)base_splitmix_below(&w->random, (uint64_t)typical);
    if ((w->options.faults & SIM_REORDER) && base_splitmix_below(&w->random, 4) == 0)
        delay *= 4;
    if ((w->options.faults & SIM_DELAY) && base_splitmix_below(&w->random, 50) == 0)
        delay *= 100;
    return delay;
}

struct sim_process *sim_by_epoch(struct sim_world *w, uint64_t rank_epoch)
{
    uint32_t rank = ctl_rank_epoch_rank(rank_epoch);
    if (rank < w->num_ranks && w->by_rank[rank] != UINT32_MAX) {
        struct sim_process *p = w->processes[w->by_rank[rank]];
        if (p->plane->rank_epoch == rank_epoch)
            return p;
    }
    for (uint32_t i = w->num_processes; i > 0; i--) {
        struct sim_process *p = w->processes[i - 1];
        if (p->plane->rank_epoch == rank_epoch)
            return p;
    }
    return NULL;
}

/* ------------------------------------------------------------------------ connections */

static struct sim_conn *get_conn(struct sim_world *w, uint64_t id)
{
    return id > 0 && id <= w->num_conns ? &w->conns[id - 1] : NULL;
}

static void to_coord(struct sim_world *w, struct sim_conn *conn, enum sim_event_kind kind,
                     struct ctl_bytes *bytes)
{
    int64_t time = w->now + sim_delay(w);
    int64_t cut = w->processes[conn->process]->cut_up;
    if (time < cut)
        time = cut;
    if (time <= conn->up_time)
        time = conn->up_time + 1;
    conn->up_time = time;
    sim_push(w, time,
             &(struct sim_event){
                 .kind = kind, .conn = conn->id, .bytes = ctl_bytes_ref(bytes)});
}

static void to_agent(struct sim_world *w, struct sim_conn *conn, enum sim_event_kind kind,
                     struct ctl_bytes *bytes)
{
    int64_t time = w->now + sim_delay(w);
    int64_t cut = w->processes[conn->process]->cut_down;
    if (time < cut)
        time = cut;
    if (time <= conn->down_time)
        time = conn->down_time + 1;
    conn->down_time = time;
    sim_push(w, time,
             &(struct sim_event){.kind = kind,
                                 .process = conn->process,
                                 .conn = conn->id,
                                 .bytes = ctl_bytes_ref(bytes)});
}

static void agent_closes(struct sim_world *w, struct sim_process *p)
{
    struct sim_conn *conn = get_conn(w, p->conn);
    p->conn = 0;
    if (!conn || !conn->agent_open)
        return;
    conn->agent_open = false;
    if (conn->coord_open)
        to_coord(w, conn, EV_COORD_CLOSED, NULL);
}

static void connect_succeeds(struct sim_world *w, struct sim_process *p)
{
    if (w->num_conns == w->cap_conns) {
        uint32_t capacity = w->cap_conns ? 2 * w->cap_conns : 16;
        void *conns = realloc(w->conns, capacity * sizeof(*w->conns));
        if (!conns) {
            sim_fail(w, "out of memory");
            return;
        }
        w->conns = conns;
        w->cap_conns = capacity;
    }
    struct sim_conn *conn = &w->conns[w->num_conns++];
    *conn = (struct sim_conn){
        .id = w->num_conns, .process = p->index, .agent_open = true, .coord_open = true};
    p->conn = conn->id;
    to_coord(w, conn, EV_COORD_OPENED, NULL);
    sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_CONNECTED});
}

/* ---------------------------------------------------------------- actions, both sides */

/* The fault point before (or after) each message: its sender ends there. */
static void kill_sender(struct sim_world *w, struct sim_process *p)
{
    if (p)
        sim_kill(w, p);
    else if (w->options.standalone)
        sim_restart_coordinator(w, w->options.link_ns * 20);
    else
        sim_kill(w, w->processes[w->by_rank[0]]);
}

/* Counts the message of a process, or of the coordinator (NULL); false if it is not sent
 * any more. */
static bool may_send(struct sim_world *w, struct sim_process *p, bool *last)
{
    const struct sim_options *options = &w->options;
    bool struck = ++w->result->messages == options->kill_at_message;
    *last = struck && options->kill_after_message;
    if (!struck || *last)
        return true;
    kill_sender(w, p);
    return false;
}

static void coord_do(struct sim_world *w, const struct ctl_action *action)
{
    struct sim_conn *conn = get_conn(w, action->conn);
    bool last = false;
    switch (action->kind) {
    case CTL_DO_SEND:
        if (may_send(w, NULL, &last) && conn && conn->coord_open)
            to_agent(w, conn, EV_MESSAGE, action->bytes);
        if (last)
            kill_sender(w, NULL);
        break;
    case CTL_DO_CLOSE:
        if (!conn || !conn->coord_open)
            break;
        conn->coord_open = false;
        to_agent(w, conn, EV_DISCONNECTED, NULL);
        break;
    case CTL_DO_LOG:
        sim_trace(w, "coordinator: %s", action->text);
        break;
    default:
        break;
    }
}

/* Groups begin shortly before the tags of their attempts begin again. */
static void age_groups(struct sim_world *w)
{
    enum { BALLOTS_LEFT = 3 };
    base_list_each(node, after, &w->coordinator->group_list)
    {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (group->num_ballots == 0)
            group->num_ballots = UINT16_MAX - BALLOTS_LEFT;
    }
}

static void coord(struct sim_world *w, const struct ctl_coordinator_event *event)
{
    if (!w->coordinator)
        return;
    struct ctl_actions actions = {.env = &w->env};
    if (ctl_coordinator_step(w->coordinator, event, w->now, &actions) != HDL_OK)
        sim_fail(w, "the coordinator failed");
    for (size_t i = 0; i < actions.count && w->coordinator; i++)
        coord_do(w, &actions.items[i]);
    ctl_actions_free(&actions);
    if (!w->coordinator)
        return;
    age_groups(w);
    sim_check_coordinator(w);
    int64_t deadline = ctl_coordinator_deadline(w->coordinator);
    if (deadline == INT64_MAX ||
        (w->coord_tick_at > w->now && w->coord_tick_at <= deadline))
        return;
    w->coord_tick_at = deadline;
    sim_push(w, deadline, &(struct sim_event){.kind = EV_COORD_TICK});
}

static void watch(struct sim_world *w, struct sim_process *p, uint64_t rank_epoch)
{
    if (p->num_watched == p->cap_watched) {
        uint32_t capacity = p->cap_watched ? 2 * p->cap_watched : 8;
        void *watched = realloc(p->watched, capacity * sizeof(uint64_t));
        if (!watched) {
            sim_fail(w, "out of memory");
            return;
        }
        p->watched = watched;
        p->cap_watched = capacity;
    }
    p->watched[p->num_watched++] = rank_epoch;
    const struct sim_process *other = NULL;
    for (uint32_t i = 0; i < w->num_processes && !other; i++) {
        if (w->processes[i]->rank_epoch == rank_epoch)
            other = w->processes[i];
    }
    if (other && !other->alive && !other->left)
        sim_push(
            w, w->now + sim_delay(w),
            &(struct sim_event){.kind = EV_EXITED, .process = p->index, .x = rank_epoch});
}

static void unwatch(struct sim_process *p, uint64_t rank_epoch)
{
    for (uint32_t i = 0; i < p->num_watched; i++) {
        if (p->watched[i] == rank_epoch)
            p->watched[i] = p->watched[--p->num_watched];
    }
}

static void group_over(struct sim_world *w, struct sim_process *p,
                       const struct ctl_action *action)
{
    p->plane->over = true;
    p->plane->why = action->status;
    p->plane->over_at = w->now;
    w->group->broken |= !p->plane->running;
    if (action->status == HDL_EFENCED)
        w->result->deaths++;
    sim_trace(w, "process %u (rank %u) is out of the group: %d %s", p->index, p->job_rank,
              action->status, action->text);
    bool expected = action->status == HDL_EFENCED || action->status == HDL_ECOORD ||
                    action->status == HDL_EPEER || p->joiner ||
                    (action->status == HDL_ETIMEDOUT && w->result->deaths > 0);
    if (!expected)
        sim_fail(w, "process %u: status %d: %s", p->index, action->status, action->text);
}

/* Whether there is a group that it has not left. */
static bool is_anywhere(const struct sim_world *w, const struct sim_process *p)
{
    for (uint32_t g = 0; g < w->options.groups; g++) {
        if (p->planes[g].member && !p->planes[g].left)
            return true;
    }
    return false;
}

static void agent_group_do(struct sim_world *w, struct sim_process *p,
                           const struct ctl_action *action)
{
    sim_select(w, (uint32_t)action->key - 1);
    switch (action->kind) {
    case CTL_DO_ATTACH:
        sim_push(w, w->now + sim_delay(w),
                 &(struct sim_event){
                     .kind = EV_ATTACHED, .process = p->index, .x = action->view->epoch});
        break;
    case CTL_DO_START:
        sim_plane_start(w, p, action->view);
        break;
    case CTL_DO_FREEZE:
        sim_plane_freeze(w, p, action->prepare);
        break;
    case CTL_DO_COMMIT:
        sim_plane_commit(w, p, action->view);
        break;
    case CTL_DO_WATCH_DONE:
        sim_plane_watch(w, p, action->x);
        break;
    case CTL_DO_FAIL:
        group_over(w, p, action);
        break;
    case CTL_DO_PROPOSED:
        sim_proposed(w, p, action);
        break;
    case CTL_DO_REGISTERED:
        p->plane->rank_epoch = action->rank_epoch;
        if (p->joiner)
            sim_push(w, w->now + sim_delay(w),
                     &(struct sim_event){.kind = EV_JOIN, .process = p->index});
        break;
    case CTL_DO_LEFT:
        p->plane->left = true;
        p->plane->over = true;
        sim_trace(w, "process %u (rank %u) has left group %u", p->index, p->job_rank,
                  w->group->index);
        if (!is_anywhere(w, p))
            sim_push(w, w->now + sim_delay(w),
                     &(struct sim_event){.kind = EV_GOODBYE, .process = p->index});
        break;
    default:
        break;
    }
}

/* Only because another process of its rank lives, or did when it was asked. */
static void refused(struct sim_world *w, struct sim_process *p, const char *text)
{
    sim_trace(w, "process %u was refused: %s", p->index, text);
    if (strstr(text, "newer process"))
        return;
    if (!p->contended || !strstr(text, "in use by a live process")) {
        sim_fail(w, "process %u was refused: %s", p->index, text);
        return;
    }
    agent_closes(w, p);
    p->alive = false;
    p->left = true;
    for (uint32_t i = 0; i < w->num_processes; i++)
        if (w->processes[i]->alive && w->processes[i]->job_rank == p->job_rank)
            w->by_rank[p->job_rank] = i;
}

static void agent_do(struct sim_world *w, struct sim_process *p,
                     const struct ctl_action *action)
{
    struct sim_conn *conn = get_conn(w, p->conn);
    int64_t cut = p->cut_up > p->cut_down ? p->cut_up : p->cut_down;
    bool last = false;
    switch (action->kind) {
    case CTL_DO_SEND:
        if (may_send(w, p, &last) && conn && conn->agent_open)
            to_coord(w, conn, EV_COORD_MESSAGE, action->bytes);
        if (last)
            kill_sender(w, p);
        break;
    case CTL_DO_CONNECT:
        agent_closes(w, p);
        sim_push(w, (w->now < cut ? cut : w->now) + sim_delay(w),
                 &(struct sim_event){.kind = EV_CONNECT, .process = p->index});
        break;
    case CTL_DO_ADMITTED:
        p->rank_epoch = action->rank_epoch;
        break;
    case CTL_DO_REFUSED:
        refused(w, p, action->text);
        break;
    case CTL_DO_GOODBYE:
        sim_trace(w, "process %u ends", p->index);
        agent_closes(w, p);
        p->alive = false;
        p->left = true;
        break;
    case CTL_DO_WATCH:
        watch(w, p, action->rank_epoch);
        break;
    case CTL_DO_UNWATCH:
        unwatch(p, action->rank_epoch);
        break;
    case CTL_DO_COORDINATOR_LOST:
        sim_trace(w, "process %u has lost the coordinator", p->index);
        break;
    case CTL_DO_LOG:
        sim_trace(w, "agent of process %u: %s", p->index, action->text);
        break;
    default:
        agent_group_do(w, p, action);
        break;
    }
}

void sim_agent(struct sim_world *w, struct sim_process *p,
               const struct ctl_agent_event *event)
{
    struct ctl_actions actions = {.env = &w->env};
    uint32_t group = w->group->index;
    if (ctl_agent_step(p->agent, event, w->now, &actions) != HDL_OK)
        sim_fail(w, "the agent of process %u failed: %s", p->index, base_detail());
    for (size_t i = 0; i < actions.count && p->alive; i++)
        agent_do(w, p, &actions.items[i]);
    ctl_actions_free(&actions);
    sim_select(w, group);
    sim_check_immutable(w, p);
    int64_t deadline = ctl_agent_deadline(p->agent);
    if (deadline == INT64_MAX || (p->tick_at > w->now && p->tick_at <= deadline))
        return;
    p->tick_at = deadline;
    sim_push(w, deadline, &(struct sim_event){.kind = EV_TICK, .process = p->index});
}

/* -------------------------------------------------------------------------- processes */

struct sim_process *sim_spawn(struct sim_world *w, uint32_t job_rank, bool joiner)
{
    if (w->num_processes == w->cap_processes) {
        uint32_t capacity = w->cap_processes ? 2 * w->cap_processes : 16;
        void *processes = realloc(w->processes, capacity * sizeof(*w->processes));
        if (!processes) {
            sim_fail(w, "out of memory");
            return NULL;
        }
        w->processes = processes;
        w->cap_processes = capacity;
    }
    struct sim_process *p = calloc(1, sizeof(*p));
    if (!p) {
        sim_fail(w, "out of memory");
        return NULL;
    }
    p->index = w->num_processes;
    p->job_rank = job_rank;
    p->joiner = joiner;
    p->alive = true;
    p->plane = &p->planes[w->group->index];
    p->slowness = base_splitmix_below(&w->random, 4) == 0 ? 12 : 1;
    struct ctl_agent_options options = {.job_rank = job_rank,
                                        .incarnation = base_splitmix_next(&w->random) | 1,
                                        .host_id =
                                            1 + job_rank / w->options.ranks_per_host,
                                        .pid = (int32_t)p->index + 1000,
                                        .socket_name = "sim",
                                        .standalone = w->options.standalone};
    for (uint32_t i = 0; i < w->num_processes; i++)
        if (w->processes[i]->alive && w->processes[i]->job_rank == job_rank)
            w->processes[i]->contended = p->contended = true;
    w->processes[w->num_processes++] = p;
    w->by_rank[job_rank] = p->index;
    if (ctl_agent_create(&w->env, &options, w->now, &p->agent) != HDL_OK) {
        sim_fail(w, "out of memory");
        return NULL;
    }
    sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_TICK});
    uint32_t group = w->group->index;
    for (uint32_t g = 0; g < w->options.groups; g++) {
        sim_select(w, g);
        p->plane->slot = w->group->slot_of[job_rank];
        p->plane->member = p->plane->slot != UINT32_MAX;
        p->plane->over = p->plane->left = !p->plane->member;
        if (!sim_plane_init(w, p)) {
            sim_fail(w, "out of memory");
            break;
        }
        if (p->plane->member)
            sim_register(w, p);
    }
    sim_select(w, group);
    return p;
}

void sim_kill_coordinator(struct sim_world *w)
{
    if (!w->coordinator)
        return;
    sim_trace(w, "the coordinator is killed");
    uint32_t group = w->group->index;
    for (uint32_t g = 0; g < w->options.groups; g++) {
        sim_select(w, g);
        for (uint32_t i = 0; i < w->num_processes; i++) {
            struct sim_process *p = w->processes[i];
            p->plane->condemned |= p->plane->rank_epoch != 0 && !sim_counts(w, p);
        }
    }
    sim_select(w, group);
    ctl_coordinator_destroy(w->coordinator);
    w->coordinator = NULL;
    w->coord_died_at = w->now;
    w->coord_stopped_until = 0;
    w->coord_tick_at = 0;
    for (uint32_t i = 0; i < w->num_conns; i++) {
        struct sim_conn *conn = &w->conns[i];
        if (!conn->coord_open)
            continue;
        conn->coord_open = false;
        if (conn->agent_open)
            to_agent(w, conn, EV_DISCONNECTED, NULL);
    }
}

void sim_kill(struct sim_world *w, struct sim_process *p)
{
    if (!p->alive)
        return;
    sim_trace(w, "process %u of rank %u is killed (ready %llu, published %llu)", p->index,
              p->job_rank, (unsigned long long)p->plane->ready,
              (unsigned long long)p->plane->published);
    p->alive = false;
    w->result->deaths++;
    for (uint32_t g = 0; g < w->options.groups; g++) {
        const struct sim_plane *plane = &p->planes[g];
        if (!plane->running || plane->over)
            continue;
        w->groups[g].death_time[plane->slot] = w->now;
        w->groups[g].dead_epoch[plane->slot] = plane->rank_epoch;
    }
    agent_closes(w, p);
    if (!w->options.standalone && p->job_rank == 0)
        sim_kill_coordinator(w);
    for (uint32_t i = 0; i < w->num_processes; i++) {
        struct sim_process *other = w->processes[i];
        if (!other->alive)
            continue;
        for (uint32_t k = 0; k < other->num_watched; k++) {
            if (other->watched[k] == p->rank_epoch)
                sim_push(w, w->now + sim_delay(w),
                         &(struct sim_event){
                             .kind = EV_EXITED, .process = i, .x = p->rank_epoch});
        }
    }
}

/* ---------------------------------------------------------------------------- events */

static void user_event(struct sim_world *w, struct sim_process *p,
                       const struct sim_event *event)
{
    switch (event->kind) {
    case EV_JOIN:
        sim_join(w, p);
        break;
    case EV_ADMIT:
        sim_propose(w, p, CTL_PROPOSE_ACTIVATE, (uint32_t)event->x);
        break;
    case EV_REMOVE:
        sim_propose(w, p, CTL_PROPOSE_DEACTIVATE, (uint32_t)event->x);
        break;
    case EV_LEAVE:
        sim_leave(w, p);
        break;
    case EV_GOODBYE:
        sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_GOODBYE});
        break;
    case EV_USER:
        sim_plane_issue(w, p);
        break;
    default:
        break;
    }
}

static void process_event(struct sim_world *w, struct sim_process *p,
                          const struct sim_event *event)
{
    struct sim_conn *conn = get_conn(w, event->conn);
    switch (event->kind) {
    case EV_CONNECT:
        if (w->coordinator)
            connect_succeeds(w, p);
        else
            sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_CONNECT_FAILED});
        break;
    case EV_DISCONNECTED:
        if (conn && conn->agent_open && p->conn == conn->id) {
            conn->agent_open = false;
            p->conn = 0;
            sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_DISCONNECTED});
        }
        break;
    case EV_MESSAGE:
        if (conn && conn->agent_open && p->conn == conn->id)
            sim_agent(w, p,
                      &(struct ctl_agent_event){.kind = CTL_AGENT_MESSAGE,
                                                .data = event->bytes->data,
                                                .size = event->bytes->size});
        break;
    case EV_TICK:
        if (event->time >= p->tick_at || p->tick_at <= w->now)
            sim_agent(w, p, &(struct ctl_agent_event){.kind = CTL_AGENT_TICK});
        break;
    case EV_EXITED:
        sim_agent(
            w, p,
            &(struct ctl_agent_event){.kind = CTL_AGENT_EXITED, .rank_epoch = event->x});
        break;
    case EV_LINK:
        sim_agent(w, p,
                  &(struct ctl_agent_event){.kind = CTL_AGENT_LINK,
                                            .key = sim_key(w),
                                            .rank_epoch = event->x,
                                            .up = event->conn != 0});
        break;
    case EV_ATTACHED:
        sim_agent(w, p,
                  &(struct ctl_agent_event){.kind = CTL_AGENT_ATTACHED,
                                            .key = sim_key(w),
                                            .epoch = event->x,
                                            .text = ""});
        break;
    case EV_PLANE:
        sim_plane_step(w, p);
        break;
    case EV_PUT:
        sim_plane_put(w, p, &event->put);
        break;
    default:
        user_event(w, p, event);
        break;
    }
}

static void coord_event(struct sim_world *w, const struct sim_event *event)
{
    struct sim_conn *conn = get_conn(w, event->conn);
    switch (event->kind) {
    case EV_COORD_TICK:
        if (w->coord_tick_at <= w->now)
            coord(w, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_TICK});
        break;
    case EV_COORD_OPENED:
        if (conn->coord_open)
            coord(w, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_OPENED,
                                                     .conn = event->conn});
        break;
    case EV_COORD_CLOSED:
        if (!conn->coord_open)
            break;
        conn->coord_open = false;
        coord(w, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_CLOSED,
                                                 .conn = event->conn});
        break;
    case EV_COORD_MESSAGE:
        if (conn->coord_open)
            coord(w, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                                     .conn = event->conn,
                                                     .data = event->bytes->data,
                                                     .size = event->bytes->size});
        break;
    default:
        break;
    }
}

static bool start_coordinator(struct sim_world *w, bool again)
{
    const struct sim_options *options = &w->options;
    struct ctl_coordinator_options coordinator = {
        .num_ranks = options->ranks,
        .dead_after_ns = options->dead_after_ns,
        .grace_ns = options->dead_after_ns / 4,
        .link_timeout_ns = options->dead_after_ns,
        .standalone = options->standalone,
        .restarted = again,
        .instance = base_splitmix_next(&w->random),
        .turn = (uint32_t)w->result->restarts,
        .host_id = 1};
    if (again)
        sim_trace(w, "the coordinator is started again");
    if (ctl_coordinator_create(&w->env, &coordinator, w->now, &w->coordinator) != HDL_OK)
        return false;
    coord(w, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_TICK});
    return true;
}

static void handle(struct sim_world *w, const struct sim_event *event)
{
    if (event->kind <= EV_COORD_TICK && w->now < w->coord_stopped_until) {
        struct sim_event later = *event;
        ctl_bytes_ref(later.bytes);
        sim_push_again(w, w->coord_stopped_until, &later);
    } else if (event->kind <= EV_COORD_TICK) {
        coord_event(w, event);
    } else if (event->kind == EV_FAULT) {
        sim_fault(w);
    } else if (event->kind == EV_RESTART) {
        start_coordinator(w, true);
    } else {
        struct sim_process *p = w->processes[event->process];
        if (!p->alive)
            return;
        sim_select(w, event->group);
        if (p->stopped && event->kind != EV_CONTINUE) {
            /* Waits, in its order, until the process runs again. */
            struct sim_event later = *event;
            ctl_bytes_ref(later.bytes);
            sim_push(w, p->continue_at, &later);
            return;
        }
        if (event->kind == EV_CONTINUE) {
            p->stopped = false;
            sim_trace(w, "process %u goes on", p->index);
        } else {
            process_event(w, p, event);
        }
    }
}

/* -------------------------------------------------------------------------------- run */

void sim_defaults(struct sim_options *options)
{
    *options = (struct sim_options){.ranks = 5,
                                    .ops = 6,
                                    .max_chunks = 3,
                                    .window = 3,
                                    .num_faults = 2,
                                    .dead_after_ns = SECOND / 5,
                                    .link_ns = 50000,
                                    .ranks_per_host = 2,
                                    .groups = 1,
                                    .rooted = true,
                                    .faults = SIM_KILL,
                                    .standalone = true};
}

static bool prepare(struct sim_world *w)
{
    const struct sim_options *options = &w->options;
    base_env_init(&w->env);
    w->env.log_level = options->trace ? BASE_LOG_INFO : -1;
    w->random = options->seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    w->num_ranks =
        options->capacity > options->ranks ? options->capacity : options->ranks;
    w->by_rank = calloc(w->num_ranks, sizeof(uint32_t));
    if (!w->by_rank || !sim_groups_make(w))
        return false;
    memset(w->by_rank, 0xff, w->num_ranks * sizeof(uint32_t));
    w->faults_left = options->num_faults;
    static const int64_t scales[4] = {1, 2, 8, 24};
    w->data_scale = scales[base_splitmix_below(&w->random, 4)];
    return start_coordinator(w, false);
}

static void dismantle(struct sim_world *w)
{
    struct sim_event event;
    while (sim_pop(w, &event))
        ctl_bytes_unref(event.bytes);
    for (uint32_t i = 0; i < w->num_processes; i++) {
        for (uint32_t g = 0; g < w->options.groups; g++)
            sim_plane_free(&w->processes[i]->planes[g]);
        ctl_agent_destroy(w->processes[i]->agent);
        free(w->processes[i]->watched);
        free(w->processes[i]);
    }
    ctl_coordinator_destroy(w->coordinator);
    free(w->processes);
    free(w->conns);
    free(w->queue.heap);
    free(w->by_rank);
    sim_groups_free(w);
}

static bool group_is_settled(const struct sim_world *w)
{
    for (uint32_t i = 0; i < w->num_processes; i++) {
        const struct sim_process *p = w->processes[i];
        if (!p->alive || p->plane->over || p->plane->left)
            continue;
        if (p->stopped || !p->plane->running || p->plane->frozen ||
            !sim_plane_finished(w, p) || p->plane->proposals > 0 || p->plane->joining ||
            p->plane->leaving)
            return false;
    }
    for (uint32_t s = 0; s < w->group->capacity && w->coordinator; s++) {
        if (w->group->death_time[s] != 0 && !sim_death_is_agreed(w, s))
            return false;
    }
    return true;
}

static bool is_settled(struct sim_world *w)
{
    bool settled = w->faults_left == 0 && w->now >= w->faults_end;
    for (uint32_t g = 0; g < w->options.groups && settled; g++) {
        sim_select(w, g);
        settled = group_is_settled(w);
    }
    return settled;
}

static bool anybody_counts(const struct sim_world *w)
{
    for (uint32_t i = 0; i < w->num_processes; i++) {
        if (sim_counts(w, w->processes[i]))
            return true;
    }
    return false;
}

static void check_ends(struct sim_world *w)
{
    for (uint32_t g = 0; g < w->options.groups && !w->failed; g++) {
        sim_select(w, g);
        if (w->coord_died_at != 0 && !w->coordinator)
            sim_check_lost(w);
        else if (anybody_counts(w))
            sim_check_end(w);
    }
}

static void loop(struct sim_world *w)
{
    struct sim_event event;
    uint64_t look = w->options.ranks > 8 ? w->options.ranks : 8;
    int64_t limit = 20 * w->options.dead_after_ns + 5 * SECOND;
    while (!w->failed && sim_pop(w, &event)) {
        w->now = event.time;
        w->result->events++;
        uint64_t count = w->result->events;
        if (w->options.fault_at_event != 0 && count == w->options.fault_at_event)
            sim_fault_at(w, w->options.faults, w->options.fault_rank);
        if (w->options.second_at_event != 0 && count == w->options.second_at_event)
            sim_fault_at(w, w->options.second_faults, w->options.second_rank);
        handle(w, &event);
        ctl_bytes_unref(event.bytes);
        if (w->now > w->faults_end + limit)
            break;
        if (w->result->events % look == 0 && is_settled(w))
            break;
    }
    check_ends(w);
}

void sim_plan_faults(struct sim_world *w)
{
    const struct sim_options *options = &w->options;
    if (w->faults_planned || options->fault_at_event != 0)
        return;
    w->faults_planned = true;
    uint64_t spread = (uint64_t)(options->link_ns * (4 + options->ops));
    if (options->faults & (SIM_REORDER | SIM_DELAY))
        spread *= 2;
    for (uint32_t i = 0; i < options->num_faults; i++) {
        int64_t at = w->now + (int64_t)base_splitmix_below(&w->random, spread);
        if (at > w->faults_end)
            w->faults_end = at;
        sim_push(w, at, &(struct sim_event){.kind = EV_FAULT});
    }
}

bool sim_run(const struct sim_options *options, struct sim_result *result)
{
    memset(result, 0, sizeof(*result));
    struct sim_world world = {.options = *options, .result = result};
    struct sim_world *w = &world;
    if (prepare(w)) {
        for (uint32_t i = 0; i < options->ranks; i++)
            (void)sim_spawn(w, i, false);
        if (base_splitmix_below(&w->random, 8) == 0)
            sim_plan_faults(w); /* from the first moment on, into the creation */
        loop(w);
    } else {
        sim_fail(w, "out of memory");
    }
    dismantle(w);
    result->virtual_ns = w->now;
    result->ok = !w->failed;
    return result->ok;
}
