/* SPDX-License-Identifier: Apache-2.0 */
/* last(d) and the first operation that lacks data, from hand-made answers. */
#include "unit.h"

#include "ctl/boundary.h"

struct case_answer {
    struct ctl_answer answer;
    uint64_t published[2];
    struct ctl_open_op open[4];
};

static void fill(struct case_answer *one, uint64_t ready, uint64_t published,
                 bool messaged)
{
    one->published[0] = published;
    one->answer = (struct ctl_answer){.ready = ready,
                                      .done = ready,
                                      .next = ctl_x_op(ready) + 2,
                                      .num_dead = 1,
                                      .published = one->published,
                                      .open = one->open,
                                      .messaged = messaged};
}

static void add_open(struct case_answer *one, uint64_t op, uint32_t chunks, bool messaged)
{
    one->open[one->answer.num_open++] = (struct ctl_open_op){op, chunks, messaged};
}

static uint64_t last_of(struct case_answer *answers, uint32_t count)
{
    const struct ctl_answer *items[4];
    for (uint32_t i = 0; i < count; i++) {
        ctl_boundary_normalise(&answers[i].answer, CTL_X_FOREVER);
        items[i] = &answers[i].answer;
    }
    struct ctl_answers all = {items, count};
    return ctl_boundary_last(&all, 0);
}

static void test_mapped_takes_the_most_published(void **state)
{
    struct case_answer answers[3] = {0};
    fill(&answers[0], ctl_x(4, 0), ctl_x(4, 1), false);
    fill(&answers[1], ctl_x(4, 1), ctl_x(5, 2), false);
    fill(&answers[2], ctl_x(4, 0), ctl_x(4, 1), false);
    assert_true(last_of(answers, 3) == ctl_x(5, 2));
}

static void test_messaged_takes_the_least_ready(void **state)
{
    struct case_answer answers[3] = {0};
    fill(&answers[0], ctl_x(4, 0), ctl_x(6, 1), true);
    fill(&answers[1], ctl_x(4, 1), ctl_x(6, 2), true);
    fill(&answers[2], ctl_x(3, 7), ctl_x(6, 1), true);
    assert_true(last_of(answers, 3) == ctl_x(3, 7));
}

/* Operation 5 is messaged between mapped ones: nothing beyond it is decided. */
static void test_both_kinds_stop_at_the_first_undecided(void **state)
{
    struct case_answer answers[2] = {0};
    for (int i = 0; i < 2; i++) {
        fill(&answers[i], ctl_x(4, 0), ctl_x(6, 0), false);
        add_open(&answers[i], 4, 2, false);
        add_open(&answers[i], 5, 1, true);
        add_open(&answers[i], 6, 1, false);
    }
    assert_true(last_of(answers, 2) == ctl_x_end(4));
    answers[0].answer.ready = answers[1].answer.ready = ctl_x_end(5);
    assert_true(last_of(answers, 2) == ctl_x_end(6));
}

static void test_whole_operations_are_the_same_position(void **state)
{
    struct case_answer one = {0};
    fill(&one, ctl_x(4, 2), ctl_x(4, 2), false);
    add_open(&one, 4, 3, false);
    ctl_boundary_normalise(&one.answer, CTL_X_FOREVER);
    assert_true(one.answer.ready == ctl_x_end(4));
    assert_true(one.published[0] == ctl_x_end(4));
}

static void test_an_ended_rank_holds_nobody_up(void **state)
{
    struct case_answer one = {0};
    fill(&one, ctl_x_end(4), 0, true);
    ctl_boundary_normalise(&one.answer, ctl_x_end(4));
    assert_true(one.answer.ready == CTL_X_FOREVER);
    fill(&one, ctl_x(4, 0), 0, true);
    ctl_boundary_normalise(&one.answer, ctl_x_end(4));
    assert_true(one.answer.ready == ctl_x(4, 0));
}

static void test_first_lacking(void **state)
{
    struct case_answer one = {0};
    fill(&one, ctl_x(4, 0), ctl_x(4, 0), false);
    add_open(&one, 4, 3, false);
    const struct ctl_answer *items[1] = {&one.answer};
    struct ctl_answers all = {items, 1};
    assert_true(ctl_boundary_first_lacking(&all, ctl_x(4, 0)) == 4);
    assert_true(ctl_boundary_first_lacking(&all, ctl_x(4, 2)) == 5);
    assert_true(ctl_boundary_first_lacking(&all, ctl_x_end(4)) == 5);
    assert_true(ctl_boundary_first_lacking(&all, ctl_x_end(7)) == 8);
}

static void test_nobody_answered(void **state)
{
    struct ctl_answers none = {NULL, 0};
    assert_true(ctl_boundary_ready(&none) == 0);
    assert_true(ctl_boundary_next(&none) == 0);
    assert_true(ctl_boundary_last(&none, 0) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mapped_takes_the_most_published),
        cmocka_unit_test(test_messaged_takes_the_least_ready),
        cmocka_unit_test(test_both_kinds_stop_at_the_first_undecided),
        cmocka_unit_test(test_whole_operations_are_the_same_position),
        cmocka_unit_test(test_an_ended_rank_holds_nobody_up),
        cmocka_unit_test(test_first_lacking),
        cmocka_unit_test(test_nobody_answered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
