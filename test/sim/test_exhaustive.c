/* SPDX-License-Identifier: Apache-2.0 */
/* 3 ranks, 3 operations: the loss of each rank after every single event of the schedule.
 */
#include "unit.h"

#include "tools/sim/sim.h"

static uint64_t length_of(const struct sim_options *options)
{
    struct sim_options quiet = *options;
    struct sim_result result;
    quiet.faults = 0;
    quiet.num_faults = 0;
    assert_true(sim_run(&quiet, &result));
    return result.events;
}

static void lose_everywhere(struct sim_options *options)
{
    struct sim_result result;
    uint64_t length = length_of(options);
    for (uint64_t at = 1; at <= length; at++) {
        for (uint32_t rank = 0; rank < options->ranks; rank++) {
            options->fault_at_event = at;
            options->fault_rank = rank;
            if (!sim_run(options, &result))
                fail_msg("fault %x of rank %u at event %llu, seed %llu: %s",
                         options->faults, rank, (unsigned long long)at,
                         (unsigned long long)options->seed, result.text);
        }
    }
}

static void search(unsigned faults, uint64_t seeds)
{
    for (int messaged = 0; messaged < 2; messaged++) {
        for (uint64_t seed = 1; seed <= seeds; seed++) {
            struct sim_options options;
            sim_defaults(&options);
            options.ranks = 3;
            options.ops = 3;
            options.max_chunks = 2;
            options.num_faults = 1;
            options.faults = faults;
            options.messaged = messaged != 0;
            options.capacity = faults & SIM_JOIN ? 4 : 0;
            options.seed = seed;
            lose_everywhere(&options);
        }
    }
}

static void test_kill_at_every_step(void **state)
{
    search(SIM_KILL, 6);
}

/* The coordinator lives in rank 0: its loss at every step ends in HDL_ECOORD on all. */
static void test_coordinator_rank_at_every_step(void **state)
{
    for (int messaged = 0; messaged < 2; messaged++) {
        for (uint64_t seed = 1; seed <= 4; seed++) {
            struct sim_options options;
            sim_defaults(&options);
            options.ranks = 3;
            options.ops = 3;
            options.num_faults = 1;
            options.faults = SIM_KILL;
            options.standalone = false;
            options.messaged = messaged != 0;
            options.seed = seed;
            lose_everywhere(&options);
        }
    }
}

static void test_stop_at_every_step(void **state)
{
    search(SIM_STOP, 3);
}

static void test_cut_at_every_step(void **state)
{
    search(SIM_CUT, 3);
}

static void test_join_at_every_step(void **state)
{
    search(SIM_JOIN, 3);
}

static void test_restart_at_every_step(void **state)
{
    search(SIM_RESTART, 3);
}

static void test_removal_at_every_step(void **state)
{
    search(SIM_LEAVE, 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_at_every_step),
        cmocka_unit_test(test_coordinator_rank_at_every_step),
        cmocka_unit_test(test_stop_at_every_step),
        cmocka_unit_test(test_cut_at_every_step),
        cmocka_unit_test(test_join_at_every_step),
        cmocka_unit_test(test_restart_at_every_step),
        cmocka_unit_test(test_removal_at_every_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
