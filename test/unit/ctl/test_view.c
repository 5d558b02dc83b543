/* SPDX-License-Identifier: Apache-2.0 */
/* Views: applying changes, attempts, who takes part, what is reported. */
#include "unit.h"

#include "base/env.h"
#include "ctl/msg.h"

static struct ctl_view *founded(struct base_env *env, uint32_t capacity)
{
    struct ctl_slot_change slots[8] = {0};
    struct ctl_attempt attempt = {ctl_x(1, 0), 5};
    for (uint32_t i = 0; i < capacity; i++) {
        slots[i].index = i;
        slots[i].slot = (struct ctl_slot){.rank_epoch = ctl_rank_epoch(i, 1),
                                          .first = ctl_x(1, 0),
                                          .last = CTL_X_FOREVER,
                                          .active = true};
        slots[i].has_endpoint = true;
        slots[i].endpoint = "blob";
        slots[i].endpoint_size = 4;
    }
    struct ctl_change change = {.capacity = capacity,
                                .num_attempts = 1,
                                .attempts = &attempt,
                                .num_slots = capacity,
                                .slots = slots};
    return ctl_view_apply(env, NULL, 9, 5, &change);
}

static void test_a_change_keeps_the_rest(void **state)
{
    struct base_env env;
    base_env_init(&env);
    struct ctl_view *first = founded(&env, 3);
    assert_non_null(first);
    assert_int_equal(first->num_active, 3);
    struct ctl_attempt attempts[2] = {{ctl_x(1, 0), 5}, {ctl_x(4, 1), 8}};
    struct ctl_slot_change dead = {.index = 1, .slot = first->slots[1]};
    dead.slot.endpoint = NULL;
    dead.slot.last = ctl_x(4, 0);
    dead.slot.absent = true;
    dead.slot.reported = 5;
    struct ctl_change change = {.base = 5,
                                .settled = ctl_x(4, 0),
                                .capacity = 3,
                                .num_attempts = 2,
                                .attempts = attempts,
                                .num_slots = 1,
                                .slots = &dead};
    struct ctl_view *second = ctl_view_apply(&env, first, 9, 8, &change);
    assert_non_null(second);
    assert_int_equal(second->num_absent, 1);
    assert_int_equal(second->slots[1].endpoint->size, 4);
    assert_true(second->slots[2].rank_epoch == ctl_rank_epoch(2, 1));
    assert_false(first->slots[1].absent);
    assert_true(ctl_slot_takes_part(&second->slots[1], ctl_x(4, 0)));
    assert_false(ctl_slot_takes_part(&second->slots[1], ctl_x(4, 1)));
    assert_true(ctl_slot_reports(&second->slots[1], 5));
    assert_false(ctl_slot_reports(&second->slots[1], 6));
    assert_true(ctl_view_attempt(second, ctl_x(4, 0)) == 5);
    assert_true(ctl_view_attempt(second, ctl_x(4, 1)) == 8);
    assert_true(ctl_view_attempt(second, 0) == 0);
    assert_true(ctl_view_changed_from(second) == ctl_x(4, 1));
    ctl_view_unref(first);
    ctl_view_unref(second);
}

static void test_changes_that_do_not_fit(void **state)
{
    struct base_env env;
    base_env_init(&env);
    struct ctl_view *view = founded(&env, 2);
    struct ctl_slot_change slot = {.index = 2};
    struct ctl_change change = {.base = 5, .capacity = 2, .num_slots = 1, .slots = &slot};
    assert_null(ctl_view_apply(&env, view, 9, 8, &change));
    slot.index = 1;
    change.base = 4;
    assert_null(ctl_view_apply(&env, view, 9, 8, &change));
    assert_null(ctl_view_apply(&env, NULL, 9, 8, &change));
    change.base = 5;
    change.capacity = 3;
    assert_null(ctl_view_apply(&env, view, 9, 8, &change));
    ctl_view_unref(view);
}

static void test_reports_of_the_former_holder(void **state)
{
    struct ctl_slot slot = {
        .rank_epoch = 1, .first = ctl_x(7, 0), .reported = 9, .reported_before = 4};
    slot.before_from = 3;
    assert_true(ctl_slot_reports(&slot, 4));
    assert_false(ctl_slot_reports(&slot, 2));
    assert_false(ctl_slot_reports(&slot, 5));
    assert_true(ctl_slot_reports(&slot, 7));
    assert_false(ctl_slot_reports(&slot, 10));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_change_keeps_the_rest),
        cmocka_unit_test(test_changes_that_do_not_fit),
        cmocka_unit_test(test_reports_of_the_former_holder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
