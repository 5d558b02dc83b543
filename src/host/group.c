/* SPDX-License-Identifier: Apache-2.0 */
/* Groups as user threads see them: requests to the agent, waiting for what it decides. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/log.h"
#include "ctl/agent.h"
#include "host/internal.h"

/*
 * User threads write requests under the group's lock and post its command; the control
 * thread takes them, feeds the agent, and writes what came out. `turn` changes with every
 * change of state and is what user threads sleep on.
 *
 *     register -> ATTACHING (first view) -> connected -> STARTED -> leave, abort -> LEFT
 *         \________________\___________________________\_____ FAILED (still to leave)
 *
 * A joiner stays REGISTERED until it is admitted, which is its START.
 * The agent forgets the key with LEFT; a group is freed only after that.
 */
enum group_state { GROUP_REGISTERING, GROUP_REGISTERED, GROUP_ATTACHING, GROUP_STARTED };

/* Longer than the agent's own deadline: only a defect makes this one strike. */
#define GROUP_SLACK_NS (5 * BASE_NS_PER_S)

struct link_request {
    struct base_list node;
    uint64_t rank_epoch;
    bool up;
};

struct proposal_request {
    struct base_list node;
    struct ctl_proposal proposal;
    bool fed;
    bool done;
    enum hdl_status status;
    char text[BASE_DETAIL_BYTES];
    uint64_t first;
};

struct host_group {
    struct host *host;
    struct base_list node; /* in host->groups; control thread */
    struct host_command command;
    struct host_group_hooks hooks;
    uint64_t key;
    char name[64];
    int64_t deadline_ns;
    bool join;

    pthread_mutex_t lock;
    uint32_t turn;
    bool posted;
    /* Requests. */
    const struct ctl_registration *registration; /* the caller waits: on its stack */
    bool want_attached;
    uint64_t attached_epoch;
    enum hdl_status attached_status;
    char attached_text[BASE_DETAIL_BYTES];
    bool want_leave, want_abort;
    bool want_finished;
    uint64_t finished_x;
    struct base_list links;
    struct base_list proposals;
    uint64_t next_proposal;
    /* State. */
    enum group_state state;
    bool entered; /* the agent knows the key */
    bool left;
    bool failed;
    enum hdl_status fail_status;
    char fail_text[BASE_DETAIL_BYTES];
    struct ctl_view *view;
    bool has_view;
    int64_t evidence_at_ns;
    uint64_t num_views;
    int64_t evidence_to_commit_ns;
};

static void lock(const struct host_group *group)
{
    (void)pthread_mutex_lock((pthread_mutex_t *)(uintptr_t)&group->lock);
}

static void unlock(const struct host_group *group)
{
    (void)pthread_mutex_unlock((pthread_mutex_t *)(uintptr_t)&group->lock);
}

static void changed(struct host_group *group)
{
    __atomic_add_fetch(&group->turn, 1, __ATOMIC_RELEASE);
    base_futex_wake(&group->turn, INT32_MAX, false);
}

/* Under lock: asks the control thread to look at the requests. */
static void post(struct host_group *group)
{
    if (group->posted)
        return;
    group->posted = true;
    host_command_post(group->host, &group->command);
}

/* Under lock, which is given up meanwhile. False when the deadline is over. */
static bool wait_change(struct host_group *group, int64_t deadline_ns)
{
    uint32_t turn = __atomic_load_n(&group->turn, __ATOMIC_ACQUIRE);
    unlock(group);
    int64_t now = base_now_ns();
    bool left = now < deadline_ns;
    if (left)
        (void)base_futex_wait(&group->turn, turn,
                              deadline_ns == BASE_FOREVER ? -1 : deadline_ns - now,
                              false);
    lock(group);
    return left;
}

/* ----------------------------------------------------------- on the control thread */

static struct host_group *find_group(struct host *host, uint64_t key)
{
    base_list_each(node, after, &host->groups)
    {
        struct host_group *group = base_container_of(node, struct host_group, node);
        if (group->key == key)
            return group;
    }
    return NULL;
}

static void fail_group(struct host_group *group, enum hdl_status status, const char *text)
{
    lock(group);
    bool first = !group->failed;
    bool tell = first && (group->state == GROUP_STARTED ||
                          (group->join && group->state == GROUP_REGISTERED));
    if (first) {
        group->failed = true;
        group->fail_status = status;
        (void)strncpy(group->fail_text, text ? text : "", sizeof(group->fail_text) - 1);
    }
    unlock(group);
    if (tell)
        group->hooks.fail(group->hooks.user, status, text ? text : "");
    changed(group);
}

static void mark_left(struct host_group *group)
{
    lock(group);
    group->left = true;
    base_list_remove(&group->node);
    unlock(group);
    changed(group);
}

void host_groups_fail(struct host *host, enum hdl_status status, const char *text)
{
    base_list_each(node, after, &host->groups)
    {
        struct host_group *group = base_container_of(node, struct host_group, node);
        fail_group(group, status, text);
        mark_left(group);
    }
}

static void on_attach(struct host_group *group, struct ctl_view *view)
{
    lock(group);
    bool first = !group->has_view && !group->join;
    if (first) {
        group->has_view = true;
        group->view = ctl_view_ref(view);
        group->state = GROUP_ATTACHING;
    }
    unlock(group);
    if (first) {
        changed(group);
        return;
    }
    if (group->hooks.attach) {
        group->hooks.attach(group->hooks.user, view);
        return;
    }
    struct host_later *later = host_later_add(group->host, HOST_LATER_AGENT_ATTACHED, 0);
    if (!later)
        return;
    later->key = group->key;
    later->epoch = view->epoch;
    later->status = HDL_ENOTSUP;
}

static void on_registered(struct host_group *group)
{
    lock(group);
    if (group->state == GROUP_REGISTERING)
        group->state = GROUP_REGISTERED;
    unlock(group);
    changed(group);
}

static void on_commit(struct host_group *group, struct ctl_view *view)
{
    lock(group);
    group->num_views++;
    if (group->evidence_at_ns) {
        group->evidence_to_commit_ns =
            base_env_now(group->host->env) - group->evidence_at_ns;
        group->evidence_at_ns = 0;
    }
    unlock(group);
    group->hooks.commit(group->hooks.user, view);
}

static void on_start(struct host_group *group, struct ctl_view *view)
{
    bool newer =
        view && (group->join || (group->view && view->epoch != group->view->epoch));
    if (newer)
        group->hooks.commit(group->hooks.user, view);
    lock(group);
    group->state = GROUP_STARTED;
    group->num_views++;
    unlock(group);
    changed(group);
}

/* Of the loss that a ballot is about: own evidence just before it, or the ballot itself.
 */
static int64_t first_sign(const struct host *host)
{
    int64_t now = base_env_now(host->env);
    return now - host->evidence_ns < BASE_NS_PER_S ? host->evidence_ns : now;
}

/* The answer is fed after this step, with arrays that live as long as it waits. */
static void on_freeze(struct host_group *group, const struct ctl_prepare *prepare)
{
    struct host *host = group->host;
    size_t open_words = (CTL_OPEN_MAX * sizeof(struct ctl_open_op) + 7) / 8;
    struct host_later *later =
        host_later_add(host, HOST_LATER_AGENT_FROZEN, prepare->num_dead + open_words);
    if (!later)
        return;
    later->key = group->key;
    later->answer.ballot = prepare->ballot;
    later->answer.num_dead = prepare->num_dead;
    later->answer.published = later->arrays;
    later->answer.open =
        (struct ctl_open_op *)(void *)(later->arrays + prepare->num_dead);
    lock(group);
    if (prepare->num_dead && !group->evidence_at_ns)
        group->evidence_at_ns = first_sign(host);
    unlock(group);
    group->hooks.freeze(group->hooks.user, prepare, &later->answer);
}

static void on_proposed(struct host_group *group, const struct ctl_action *action)
{
    lock(group);
    base_list_each(node, after, &group->proposals)
    {
        struct proposal_request *request =
            base_container_of(node, struct proposal_request, node);
        if (request->proposal.id != action->proposal)
            continue;
        request->done = true;
        request->status = action->status;
        request->first = action->x;
        (void)strncpy(request->text, action->text ? action->text : "",
                      sizeof(request->text) - 1);
    }
    unlock(group);
    changed(group);
}

void host_group_on_action(struct host *host, struct ctl_action *action)
{
    struct host_group *group = find_group(host, action->key);
    if (!group) {
        base_log_debug(host->env, "action %d for unknown group key %" PRIu64,
                       (int)action->kind, action->key);
        return;
    }
    void *user = group->hooks.user;
    switch (action->kind) {
    case CTL_DO_ATTACH:
        on_attach(group, action->view);
        break;
    case CTL_DO_START:
        on_start(group, action->view);
        break;
    case CTL_DO_FREEZE:
        on_freeze(group, action->prepare);
        break;
    case CTL_DO_COMMIT:
        on_commit(group, action->view);
        break;
    case CTL_DO_CLOSED:
        if (group->hooks.closed)
            group->hooks.closed(user, action->slot, action->rank_epoch);
        break;
    case CTL_DO_WATCH_DONE:
        group->hooks.watch_done(user, action->x);
        break;
    case CTL_DO_FAIL:
        fail_group(group, action->status, action->text);
        break;
    case CTL_DO_PROPOSED:
        on_proposed(group, action);
        break;
    case CTL_DO_LEFT:
        mark_left(group);
        break;
    case CTL_DO_REGISTERED:
        on_registered(group);
        break;
    default:
        base_log_error(host->env, "agent asked for action %d", (int)action->kind);
    }
}

/* -------------------------------------------------------- requests, control thread */

static void feed(struct host_group *group, struct ctl_agent_event *event)
{
    event->key = group->key;
    (void)host_agent_feed(group->host, event);
}

static void take_registration(struct host_group *group)
{
    struct host *host = group->host;
    lock(group);
    const struct ctl_registration *registration = group->registration;
    if (registration) {
        group->key = ++host->next_key;
        group->entered = true;
        base_list_push_back(&host->groups, &group->node);
    }
    unlock(group);
    if (!registration)
        return;
    struct ctl_agent_event event = {
        .kind = CTL_AGENT_REGISTER, .key = group->key, .registration = registration};
    enum hdl_status status = host_agent_feed(host, &event);
    if (status) {
        fail_group(group, status, base_detail());
        mark_left(group);
    }
    lock(group);
    group->registration = NULL;
    unlock(group);
}

static void take_links(struct host_group *group)
{
    for (;;) {
        lock(group);
        struct base_list *node = base_list_pop_front(&group->links);
        unlock(group);
        if (!node)
            return;
        struct link_request *request = base_container_of(node, struct link_request, node);
        struct ctl_agent_event event = {
            .kind = CTL_AGENT_LINK, .rank_epoch = request->rank_epoch, .up = request->up};
        if (!group->left)
            feed(group, &event);
        base_free(group->host->env, request);
    }
}

static struct proposal_request *next_proposal(struct host_group *group)
{
    struct proposal_request *found = NULL;
    lock(group);
    base_list_each(node, after, &group->proposals)
    {
        struct proposal_request *request =
            base_container_of(node, struct proposal_request, node);
        if (!request->fed && !found)
            found = request;
    }
    if (found)
        found->fed = true;
    unlock(group);
    return found;
}

static void take_proposals(struct host_group *group)
{
    struct proposal_request *request;
    while (!group->left && (request = next_proposal(group)) != NULL) {
        struct ctl_agent_event event = {
            .kind = CTL_AGENT_PROPOSE, .key = group->key, .proposal = &request->proposal};
        enum hdl_status status = host_agent_feed(group->host, &event);
        if (status == HDL_OK)
            continue;
        struct ctl_action action = {.proposal = request->proposal.id,
                                    .status = status,
                                    .text = (char *)(uintptr_t)base_detail()};
        on_proposed(group, &action);
    }
}

static void run_command(struct host *host, struct host_command *command)
{
    (void)host;
    struct host_group *group = base_container_of(command, struct host_group, command);
    take_registration(group);
    lock(group);
    group->posted = false;
    bool attached = group->want_attached, finished = group->want_finished;
    bool leave = group->want_leave, abort = group->want_abort;
    group->want_attached = group->want_finished = false;
    group->want_leave = group->want_abort = false;
    struct ctl_agent_event attached_event = {.kind = CTL_AGENT_ATTACHED,
                                             .epoch = group->attached_epoch,
                                             .status = group->attached_status,
                                             .text = group->attached_text};
    struct ctl_agent_event finished_event = {.kind = CTL_AGENT_FINISHED,
                                             .x = group->finished_x};
    unlock(group);
    if (attached && !group->left)
        feed(group, &attached_event);
    if (finished && !group->left)
        feed(group, &finished_event);
    take_links(group);
    take_proposals(group);
    if (leave && !group->left)
        feed(group, &(struct ctl_agent_event){.kind = CTL_AGENT_LEAVE});
    if (abort && !group->left)
        feed(group, &(struct ctl_agent_event){.kind = CTL_AGENT_ABORT});
    /* With the agent gone nobody answers any more. */
    if (!group->host->agent && !group->left) {
        fail_group(group, HDL_ECOORD, "the control thread has given up");
        mark_left(group);
    }
    changed(group);
}

/* ------------------------------------------------------------------- on user threads */

static void free_group(struct host_group *group)
{
    struct base_env *env = group->host->env;
    base_list_each(node, after, &group->links)
        base_free(env, base_container_of(node, struct link_request, node));
    ctl_view_unref(group->view);
    (void)pthread_mutex_destroy(&group->lock);
    base_free(env, group);
}

static struct host_group *new_group(struct host *host, const struct host_group_opts *opts)
{
    struct host_group *group = base_alloc(host->env, 1, sizeof(*group));
    if (!group)
        return NULL;
    group->host = host;
    group->hooks = opts->hooks;
    group->join = opts->join;
    group->command.run = run_command;
    (void)strncpy(group->name, opts->name, sizeof(group->name) - 1);
    group->deadline_ns = base_deadline_ns(base_now_ns(), opts->timeout_ns);
    (void)pthread_mutex_init(&group->lock, NULL);
    base_list_init(&group->node);
    base_list_init(&group->links);
    base_list_init(&group->proposals);
    return group;
}

/* Under lock: the status of a failed group, as this thread's detail. */
static enum hdl_status take_failure(struct host_group *group)
{
    return base_fail(group->fail_status, "%s", group->fail_text);
}

/* Under lock, until the agent has forgotten the group. */
static void wait_left(struct host_group *group, int64_t deadline_ns)
{
    while (!group->left && wait_change(group, deadline_ns)) {
    }
}

static bool wait_state(struct host_group *group, enum group_state state)
{
    int64_t deadline_ns = base_deadline_ns(group->deadline_ns, GROUP_SLACK_NS);
    while (!group->failed && group->state < state)
        if (!wait_change(group, deadline_ns))
            return false;
    return true;
}

static uint32_t *copy_ranks(struct host *host, const struct host_group_opts *opts)
{
    uint32_t *ranks = base_alloc(host->env, opts->num_founders, sizeof(*ranks));
    for (uint32_t i = 0; ranks && i < opts->num_founders; i++)
        ranks[i] = opts->ranks ? (uint32_t)opts->ranks[i] : i;
    return ranks;
}

/* A process has one slot of a group: a second one would be waited for in vain. */
static enum hdl_status check_ranks(const struct host *host,
                                   const struct host_group_opts *opts)
{
    for (uint32_t i = 0; i < opts->num_founders; i++) {
        if (opts->ranks[i] < 0 || opts->ranks[i] >= host->num_ranks)
            return base_fail(HDL_EINVAL,
                             "group %s: slot %u names rank %d, the job has %d",
                             opts->name, i, opts->ranks[i], host->num_ranks);
        for (uint32_t j = 0; j < i; j++)
            if (opts->ranks[j] == opts->ranks[i])
                return base_fail(HDL_EINVAL,
                                 "group %s: slots %u and %u both name rank %d",
                                 opts->name, j, i, opts->ranks[i]);
    }
    return HDL_OK;
}

static enum hdl_status check_opts(const struct host *host,
                                  const struct host_group_opts *opts)
{
    if (!opts->name || strlen(opts->name) >= sizeof(((struct host_group *)0)->name))
        return base_fail(HDL_EINVAL, "group name missing or longer than 63 bytes");
    /* The log and the dump have the name in their lines. */
    for (size_t i = 0; opts->name[i]; i++)
        if ((unsigned char)opts->name[i] < ' ' || opts->name[i] == 0x7f)
            return base_fail(HDL_EINVAL, "group name has byte %#x at %zu",
                             (unsigned)(unsigned char)opts->name[i], i);
    if (opts->num_founders == 0 || opts->num_founders > opts->capacity)
        return base_fail(HDL_EINVAL, "group %s: %u founders, capacity %u", opts->name,
                         opts->num_founders, opts->capacity);
    return opts->ranks ? check_ranks(host, opts) : HDL_OK;
}

enum hdl_status host_group_register(struct host *host, const struct host_group_opts *opts,
                                    struct host_group **out, struct ctl_view **view)
{
    enum hdl_status status = host_check(host);
    if (status == HDL_OK)
        status = check_opts(host, opts);
    if (status)
        return status;
    struct host_group *group = new_group(host, opts);
    uint32_t *ranks = group ? copy_ranks(host, opts) : NULL;
    if (!ranks) {
        if (group)
            free_group(group);
        return HDL_ENOMEM;
    }
    struct ctl_registration registration = {.name = group->name,
                                            .capacity = opts->capacity,
                                            .slot = opts->rank,
                                            .num_founders = opts->num_founders,
                                            .ranks = ranks,
                                            .num_ranks = opts->num_founders,
                                            .join = opts->join,
                                            .found_only = opts->found_only,
                                            .auto_deactivate = opts->auto_deactivate,
                                            .auto_sync = opts->auto_sync,
                                            .timeout_ns = opts->timeout_ns,
                                            .params = opts->params,
                                            .num_params = opts->num_params,
                                            .endpoint = opts->blob,
                                            .endpoint_size = opts->blob_bytes};
    lock(group);
    group->registration = &registration;
    post(group);
    /* The control thread takes the registration at once, whatever comes of it. */
    while (group->registration)
        (void)wait_change(group, BASE_FOREVER);
    if (!wait_state(group, opts->join ? GROUP_REGISTERED : GROUP_ATTACHING))
        status =
            base_fail(HDL_ETIMEDOUT, "group %s: the agent did not answer", opts->name);
    else if (group->failed)
        status = take_failure(group);
    struct ctl_view *first = group->view;
    unlock(group);
    base_free(host->env, ranks);
    if (status) {
        host_group_close(group);
        return status;
    }
    *out = group;
    *view = first;
    return HDL_OK;
}

/* Under lock. */
static void post_attached(struct host_group *group, uint64_t epoch,
                          enum hdl_status status, const char *text)
{
    group->want_attached = true;
    group->attached_epoch = epoch;
    group->attached_status = status;
    (void)strncpy(group->attached_text, text ? text : "",
                  sizeof(group->attached_text) - 1);
    post(group);
}

enum hdl_status host_group_connected(struct host_group *group, enum hdl_status status,
                                     const char *text)
{
    enum hdl_status result = HDL_OK;
    lock(group);
    post_attached(group, group->view->epoch, status, text);
    if (!wait_state(group, GROUP_STARTED))
        result =
            base_fail(HDL_ETIMEDOUT, "group %s: the agent did not answer", group->name);
    else if (group->state < GROUP_STARTED)
        result = take_failure(group);
    unlock(group);
    return result;
}

void host_group_attached(struct host_group *group, uint64_t epoch, enum hdl_status status,
                         const char *text)
{
    lock(group);
    post_attached(group, epoch, status, text);
    unlock(group);
}

void host_group_finished(struct host_group *group, uint64_t x)
{
    lock(group);
    group->want_finished = true;
    group->finished_x = x;
    post(group);
    unlock(group);
}

void host_group_link(struct host_group *group, uint64_t rank_epoch, bool up)
{
    struct link_request *request = base_alloc(group->host->env, 1, sizeof(*request));
    if (!request)
        return; /* the link breaks again, or stays down: it will be told then */
    request->rank_epoch = rank_epoch;
    request->up = up;
    lock(group);
    base_list_push_back(&group->links, &request->node);
    post(group);
    unlock(group);
}

enum hdl_status host_group_propose(struct host_group *group, int kind,
                                   const uint32_t *slots, uint32_t num_slots,
                                   int64_t timeout_ns, uint64_t *first)
{
    struct proposal_request request = {.proposal = {.kind = (enum ctl_proposal_kind)kind,
                                                    .num_slots = num_slots,
                                                    .slots = slots,
                                                    .timeout_ns = timeout_ns}};
    lock(group);
    request.proposal.id = ++group->next_proposal;
    base_list_push_back(&group->proposals, &request.node);
    post(group);
    /* The agent keeps the deadline; the request lies on this stack until it answered. */
    while (!request.done && !group->left && !group->failed)
        (void)wait_change(group, BASE_FOREVER);
    base_list_remove(&request.node);
    enum hdl_status status = HDL_OK;
    if (!request.done)
        status = group->failed ? take_failure(group)
                               : base_fail(HDL_EABORTED, "group %s is over", group->name);
    else if (request.status)
        status = base_fail(request.status, "%s", request.text);
    unlock(group);
    if (status == HDL_OK && first)
        *first = request.first;
    return status;
}

void host_group_leave(struct host_group *group, int64_t timeout_ns)
{
    if (host_check(group->host))
        return;
    lock(group);
    if (group->entered && !group->left) {
        group->want_leave = true;
        post(group);
        wait_left(group, base_deadline_ns(base_now_ns(), timeout_ns));
    }
    unlock(group);
}

void host_group_abort(struct host_group *group)
{
    if (host_check(group->host))
        return;
    lock(group);
    if (!group->left) {
        group->want_abort = true;
        post(group);
    }
    unlock(group);
}

void host_group_close(struct host_group *group)
{
    if (!group || host_check(group->host))
        return;
    lock(group);
    if (group->entered && !group->left) {
        group->want_abort = true;
        post(group);
    }
    while ((group->entered && !group->left) || group->posted)
        (void)wait_change(group, BASE_FOREVER);
    unlock(group);
    host_barrier(group->host);
    free_group(group);
}

void host_group_stats(const struct host_group *group, struct host_group_stats *stats)
{
    const struct host *host = group->host;
    memset(stats, 0, sizeof(*stats));
    lock(group);
    stats->views = group->num_views;
    stats->evidence_to_commit_ns = group->evidence_to_commit_ns;
    unlock(group);
    stats->reconnects = atomic_load(&host->num_reconnects);
    stats->evidence_exit = atomic_load(&host->num_exits);
    stats->evidence_closed = atomic_load(&host->num_closes);
    stats->evidence_silence =
        atomic_load(&host->num_silences) + atomic_load(&host->num_silent_ranks);
    stats->refused = atomic_load(&host->num_refused);
}
