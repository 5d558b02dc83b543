/* SPDX-License-Identifier: Apache-2.0 */
/* What the control thread answers for a group and does to it, while its data threads do
 * nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "harness.h"

enum { RANKS = 3, SLOTS = 4 };

static struct harness harness;
static struct hdl_group *group; /* of rank 0 */

static void open_group(void)
{
    harness_open(&harness, RANKS, RANKS, SLOTS, 4096);
    group = harness.ranks[0].group;
    group_engine_lock(group->engine); /* no view is taken over */
}

static void close_group(void)
{
    group_engine_unlock(group->engine);
    harness_close(&harness);
}

/* A copy of the newest view, to be changed and committed. */
static struct ctl_view *next_view(void)
{
    const struct ctl_view *newest = atomic_load(&group->view)->ctl;
    struct ctl_view *view = ctl_view_new(&harness.env, RANKS, 1);
    CHECK(view);
    for (uint32_t r = 0; r < RANKS; r++)
        view->slots[r] = newest->slots[r];
    view->epoch = ++harness.epoch;
    view->attempts[0] = (struct ctl_attempt){.from = CTL_X_FOREVER, .epoch = view->epoch};
    return view;
}

static void commit(struct ctl_view *view)
{
    ctl_view_count(view);
    group_commit(group, view);
    ctl_view_unref(view);
}

static struct ctl_answer freeze(uint64_t *published)
{
    static struct ctl_open_op open[CTL_OPEN_MAX];
    static const uint32_t dead = 2;
    struct ctl_prepare prepare = {.ballot = harness.epoch + 1, .dead = &dead};
    struct ctl_answer answer = {.published = published, .open = open};
    prepare.num_dead = published ? 1 : 0;
    group_freeze(group, &prepare, &answer);
    CHECK(group_frozen(group) && answer.ballot == prepare.ballot);
    return answer;
}

static uint64_t ready(void)
{
    return group_ready_x(group, atomic_load(&group->ready));
}

/* A commit ends the freeze. What it changes starts again in messaged groups, also for a
 * rank that held all of it; in mapped ones what was ready stays. */
static void test_ready_falls(void **state)
{
    struct group_path path = group_path_mapped;
    (void)state;
    open_group();
    for (int messaged = 0; messaged < 2; messaged++) {
        const struct group_path *own = group->path;
        path.messaged = messaged;
        group->path = &path;
        atomic_store(&group->next, 6);
        uint64_t x = GROUP_X(5, 3 + (uint64_t)messaged), from = GROUP_X(5, 2);
        CHECK(group_ready_raise(group, group_ready_begin(group), x));
        CHECK(freeze(NULL).ready == x);
        CHECK(!group_ready_raise(group, group_ready_begin(group), x + 1));
        struct ctl_view *view = next_view();
        view->attempts[0].from = from;
        commit(view);
        CHECK(!group_frozen(group));
        CHECK(ready() == (messaged ? from - 1 : x));
        view = next_view(); /* which changes nothing */
        (void)freeze(NULL);
        commit(view);
        CHECK(ready() == (messaged ? from - 1 : x));
        group->path = own;
    }
    close_group();
}

/* Who is let in again, and has not begun yet, answers as one that is fresh. */
static void test_a_new_interval(void **state)
{
    (void)state;
    open_group();
    struct ctl_view *view = next_view();
    view->slots[0].first = GROUP_X(7, 0);
    commit(view);
    struct ctl_answer answer = freeze(NULL);
    CHECK(answer.next == 7);
    CHECK(answer.ready == GROUP_X_END(6) && answer.done == GROUP_X_END(6));
    close_group();
}

/* What a dead rank had published is what was found first, until a commit. What it has
 * written over cannot be read here any more. */
static void test_what_the_dead_published(void **state)
{
    (void)state;
    uint64_t published;
    for (int over = 0; over < 2; over++) {
        open_group();
        struct group_slot *slots = group->peer[2].slots;
        atomic_store(&slots[group_slot_of(group, 1, 0)].seq, GROUP_X(1, 0));
        if (over) /* by chunk 0 of an operation that uses the slot of the second one */
            atomic_store(&slots[group_slot_of(group, 1, 0)].seq, GROUP_X(1 + SLOTS, 0));
        (void)freeze(&published);
        uint64_t found = over ? GROUP_X_END(0) : GROUP_X(1, 0);
        CHECK(published == found);
        atomic_store(&slots[group_slot_of(group, 2, 0)].seq, GROUP_X(2, 0));
        (void)freeze(&published);
        CHECK(published == found);
        commit(next_view());
        (void)freeze(&published);
        CHECK(published == (over ? found : GROUP_X(2, 0)));
        close_group();
    }
}

static enum hdl_member_state member_state(int32_t rank)
{
    struct hdl_member member = {.size = sizeof(member)};
    CHECK(hdl_group_member(group, rank, &member) == HDL_OK);
    return member.member;
}

/* Who has become a member is no candidate any more, also when it is removed again. */
static void test_no_candidate_any_more(void **state)
{
    (void)state;
    open_group();
    struct ctl_view *view = next_view();
    view->slots[2].active = false;
    view->slots[2].last = GROUP_X_END(0);
    commit(view);
    CHECK(member_state(2) == HDL_MEMBER_INACTIVE);
    atomic_store(&group->ready_epoch[2], ctl_rank_epoch(2, 2));
    CHECK(member_state(2) == HDL_MEMBER_READY);
    for (int active = 1; active >= 0; active--) {
        view = next_view();
        view->slots[2].active = active;
        view->slots[2].last = active ? CTL_X_FOREVER : GROUP_X_END(0);
        commit(view);
        CHECK(member_state(2) == (active ? HDL_MEMBER_ACTIVE : HDL_MEMBER_INACTIVE));
    }
    close_group();
}

/* Callers see a removal or an admission from its operation on; a loss at once, and the
 * own admission. */
static void test_when_changes_show(void **state)
{
    enum { REMOVED, LOST, OWN, NUM_CHANGES };
    (void)state;
    for (int change = 0; change < NUM_CHANGES; change++) {
        open_group();
        struct ctl_view *view = next_view();
        view->slots[1].active = false;
        view->slots[1].last = GROUP_X_END(8);
        if (change == LOST) {
            view->slots[2].active = false;
            view->slots[2].absent = true;
            view->slots[2].last = GROUP_X_END(3);
        }
        if (change == OWN)
            view->slots[0].first = GROUP_X(5, 0);
        commit(view);
        CHECK(atomic_load(&group->view)->visible_from == (change == REMOVED ? 9 : 0));
        close_group();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ready_falls),
        cmocka_unit_test(test_a_new_interval),
        cmocka_unit_test(test_what_the_dead_published),
        cmocka_unit_test(test_no_candidate_any_more),
        cmocka_unit_test(test_when_changes_show),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
