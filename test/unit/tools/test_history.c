/* SPDX-License-Identifier: Apache-2.0 */
/* What the history of views says about results. */
#include "unit.h"

#include "ctl/view.h"
#include "heddle.h"
#include "tools/crew/history.h"

static struct crew_history history;
static char text[320];

static bool tell(uint32_t slot, uint64_t registration, uint64_t epoch, uint64_t first,
                 uint64_t last, uint64_t reported)
{
    struct crew_record record = {
        .what = CREW_SLOT,
        .slot = {.epoch = epoch,
                 .rank_epoch = ctl_rank_epoch(slot, (uint32_t)registration),
                 .first = first,
                 .last = last,
                 .reported = reported,
                 .slot = slot}};
    return crew_history_add(&history, &record, text, sizeof(text));
}

static bool fits(uint64_t number, uint32_t ranks, uint64_t failed)
{
    struct crew_record record = {
        .what = CREW_OP,
        .status = failed ? HDL_INCOMPLETE : HDL_OK,
        .op = {.number = number, .kind = CREW_ALLREDUCE_4K, .failed = failed, .runs = 1}};
    record.op.run[0] = (struct crew_run){256, ranks};
    return crew_history_fits(&history, &record, text, sizeof(text));
}

static void found(void)
{
    history = (struct crew_history){.ranks = 4};
    for (uint32_t s = 0; s < 4; s++)
        assert_true(tell(s, 1, 1, 0, CTL_X_FOREVER, 0));
}

/* Of two that die together, one had published an operation that a survivor calls only
 * after both losses: it has the data of the one and reports the other. */
static void test_two_deaths(void **state)
{
    (void)state;
    found();
    assert_true(tell(1, 1, 2, 0, ctl_x_end(515), 516));
    assert_true(tell(3, 1, 2, 0, ctl_x_end(516), 517));
    assert_true(fits(515, 0xf, 0));
    assert_true(fits(516, 0xd, 0x2));
    assert_false(fits(516, 0x5, 0xa));
    assert_false(fits(516, 0xd, 0));
    assert_string_equal(text,
                        "operation 516, allreduce 4 KiB: rank 0 has HDL_OK, data of "
                        "ranks 0,2,3, at its end 0,2,3, failed none; by the views: "
                        "data of 0,2,3, at its end 0,2,3 (perhaps none), failed 1");
    assert_true(fits(517, 0x5, 0x8));
    assert_false(fits(517, 0x5, 0xa));
    assert_true(fits(518, 0x5, 0));
}

static void test_removal_and_return(void **state)
{
    (void)state;
    found();
    assert_true(tell(2, 1, 2, 0, ctl_x_end(10), 0));
    assert_true(tell(2, 1, 3, ctl_x(20, 0), CTL_X_FOREVER, 0));
    assert_true(fits(10, 0xf, 0));
    assert_true(fits(11, 0xb, 0));
    assert_false(fits(11, 0xf, 0));
    assert_false(fits(19, 0xf, 0));
    assert_true(fits(20, 0xf, 0));
    assert_false(fits(20, 0xb, 0));
}

/* A loss is reported until the next holder begins. */
static void test_replacement(void **state)
{
    (void)state;
    found();
    assert_true(tell(0, 1, 2, 0, ctl_x_end(5), 9));
    assert_true(tell(0, 2, 3, ctl_x(8, 0), CTL_X_FOREVER, 0));
    assert_true(fits(7, 0xe, 0x1));
    assert_true(fits(8, 0xf, 0));
    assert_false(fits(8, 0xe, 0x1));
}

/* A joiner that went and came back between two looks of everybody: where its first
 * interval ended is not known, and does not matter behind the begin of the second, which
 * a rank may have told before. */
static void test_end_not_told(void **state)
{
    (void)state;
    found();
    assert_true(tell(1, 1, 2, 0, ctl_x_end(5), 0));
    assert_true(tell(1, 1, 5, ctl_x(30, 0), CTL_X_FOREVER, 0));
    assert_true(tell(1, 1, 3, ctl_x(20, 0), CTL_X_FOREVER, 0));
    assert_true(fits(19, 0xd, 0));
    assert_false(fits(19, 0xf, 0));
    assert_true(fits(20, 0xf, 0));
    assert_true(fits(29, 0xd, 0));
    assert_false(fits(29, 0x9, 0));
    assert_true(fits(30, 0xf, 0));
    assert_false(fits(30, 0xd, 0));
    assert_true(tell(1, 1, 6, ctl_x(30, 0), ctl_x_end(40), 41));
    assert_true(fits(41, 0xd, 0x2));
    assert_true(fits(42, 0xd, 0));
}

/* Two views with the same number differ, or an interval grows again. */
static void test_contradictions(void **state)
{
    (void)state;
    found();
    assert_true(tell(1, 1, 2, 0, ctl_x_end(5), 6));
    assert_true(tell(1, 1, 2, 0, ctl_x_end(5), 6));
    assert_false(tell(1, 1, 2, 0, ctl_x_end(6), 6));
    assert_false(tell(1, 1, 3, 0, ctl_x_end(7), 8));
    assert_true(tell(1, 1, 1, 0, CTL_X_FOREVER, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_deaths),     cmocka_unit_test(test_removal_and_return),
        cmocka_unit_test(test_replacement),    cmocka_unit_test(test_end_not_told),
        cmocka_unit_test(test_contradictions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
